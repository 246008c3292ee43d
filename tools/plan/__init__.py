"""What `gba-hvd plan` is made of: measured costs, and a picture."""
