"""`gba-hvd bench ps`."""
