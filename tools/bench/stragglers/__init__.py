"""`gba-hvd bench gba`."""
