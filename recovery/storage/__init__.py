"""Where checkpoints are: the interface of a store, its kinds, retries."""
