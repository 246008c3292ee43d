"""What `gba-hvd run` starts, and what it needs of this machine."""
