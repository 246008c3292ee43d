"""Latency and samples/s of saved models, beside torch, TorchRec and MLflow."""
