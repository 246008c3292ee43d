"""`gba-hvd bench compression`."""
