"""What is in a store, what may expire, and who may write."""
