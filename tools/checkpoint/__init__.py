"""What `gba-hvd checkpoint` makes of a checkpoint: exports, and a report for the terminal."""
