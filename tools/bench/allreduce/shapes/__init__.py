"""`gba-hvd bench allreduce --shapes`: from models whose dense layers take the time to those whose embeddings do."""
