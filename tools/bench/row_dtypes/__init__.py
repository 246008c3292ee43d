"""AUC of a saved model with rows of less than four bytes a value."""
