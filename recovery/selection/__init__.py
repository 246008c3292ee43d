"""Which rows: what changed, how much it matters, and what a policy takes of it."""
