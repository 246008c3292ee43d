"""The companion process: its main loop, the mode that it serves, its last checkpoint."""
