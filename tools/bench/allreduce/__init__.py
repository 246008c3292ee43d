"""`gba-hvd bench allreduce`: from models whose dense layers take the time to those whose embeddings do."""
