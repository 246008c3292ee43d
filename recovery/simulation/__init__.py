"""Checkpoints and failures on a virtual clock."""
