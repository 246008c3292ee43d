"""Saving in a process of its own."""
