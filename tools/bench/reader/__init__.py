"""`gba-hvd bench reader`: command starts jobs of two workers; worker is their script."""
