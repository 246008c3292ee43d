"""`gba-hvd bench recovery`."""
