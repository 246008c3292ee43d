"""Checkpoints of a job: when they are due, their outcome, and resuming from them."""
