"""Bytes: rows, quantised values, manifests."""
