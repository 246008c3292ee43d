"""`gba-hvd bench gpu`: one GPU trains a DLRM whose tables stand in several places."""
