"""`gba-hvd bench allreduce`."""
