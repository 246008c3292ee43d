"""What one server owns: shards, a piece of the dense part, and the pushes that wait for their step."""
