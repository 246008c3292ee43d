"""The page that `gba-hvd report` writes."""
