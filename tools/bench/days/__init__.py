"""`gba-hvd bench quality-days`."""
