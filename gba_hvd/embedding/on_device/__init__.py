"""Rows of the host's memory that a GPU reads, pools and updates by itself."""
