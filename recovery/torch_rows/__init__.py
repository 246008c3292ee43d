"""Any PyTorch model: its large tensors as tables of rows."""
