"""Gradients of a global step: the dense buffer, clipping by norm, the loss scale of mixed precision."""
