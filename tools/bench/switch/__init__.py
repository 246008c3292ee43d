"""`gba-hvd bench switch`."""
