"""What `gba-hvd doctor` checks."""
