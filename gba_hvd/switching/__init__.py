"""Changing the mode of a running job: when it pays, who requested it, and carrying it out."""
