"""One worker: the engine, what it refuses, and what runs at its steps."""
