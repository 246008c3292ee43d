"""When to save, and what kind: costs, failures, CPR's closed forms, and plans made of them."""
