"""Checkpoints of a job: when they are due, what became of them, and resuming from them."""
