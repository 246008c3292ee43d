"""Embedding tables as users see them: lookups, their gradients, and the optimizers of rows."""
