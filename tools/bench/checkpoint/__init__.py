"""`gba-hvd bench checkpoint`."""
