"""`gba-hvd bench membership`."""
