"""Rows with their weights in 8 or 4 bits: a lowest value and a scale for each row, and codes between.

Only weights are quantised: a slot such as Adagrad's sum is divided by, so that a small one among large ones must keep
its digits. Whether to quantise at all, and what becomes of the bytes, is decided in `row_codec`.
"""

from __future__ import annotations

import numpy as np


def quantised_bytes(weights: int, width: int, bits: int) -> int:
    """Bytes of one quantised row."""
    return 8 + -(-weights * bits // 8) + 4 * (width - weights)


def quantise(records: np.ndarray, weights: int, bits: int) -> tuple[tuple[memoryview, ...], float] | None:
    """Asymmetric, per row: code = round((x - lowest) / scale), lowest and scale from the row's own range.

    Returns (lowest values and scales, float32 [n] each, codes, slots; the largest error of a weight, absolute). As in
    Check-N-Run (NSDI 2022). None when a weight or a row's range is not finite.
    """
    values = records[:, :weights]
    lowest, highest = values.min(axis=1), values.max(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = (highest - lowest) / np.float32(2**bits - 1)
    if not np.isfinite(scale).all():  # NaN and infinity go through min and max into the scale
        return None
    divisor = np.where(scale > 0, scale, np.float32(1))[:, None]
    codes = np.rint((values - lowest[:, None]) / divisor).clip(0, 2**bits - 1).astype(np.uint8)
    error = values - (lowest[:, None] + codes * scale[:, None])
    if bits == 4:
        codes = np.pad(codes, ((0, 0), (0, weights % 2)))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    pieces = (bytes_of(lowest), bytes_of(scale), bytes_of(codes), bytes_of(records[:, weights:]))
    return pieces, float(np.abs(error).max())


def dequantise(raw: memoryview, n: int, weights: int, width: int, bits: int) -> np.ndarray:
    """The inverse: float32 [n, width]. raw: exactly the bytes of n rows."""
    code_bytes = -(-weights * bits // 8)
    lowest = np.frombuffer(raw, np.float32, n)
    scale = np.frombuffer(raw, np.float32, n, offset=4 * n)
    codes = np.frombuffer(raw, np.uint8, n * code_bytes, offset=8 * n).reshape(n, code_bytes)
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(n, 2 * code_bytes)[:, :weights]
    records = np.empty((n, width), np.float32)
    np.multiply(codes, scale[:, None], out=records[:, :weights])
    records[:, :weights] += lowest[:, None]
    if width > weights:
        slots = np.frombuffer(raw, np.float32, n * (width - weights), offset=(8 + code_bytes) * n)
        records[:, weights:] = slots.reshape(n, width - weights)
    return records


def bytes_of(array: np.ndarray) -> memoryview:
    """A contiguous array is not copied."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
