"""In how many bits values travel: as they are, in half precision, as int8 or as one of three levels, with a scale for
each chunk of them.

Values beyond half precision's range are sent as its largest number. What has a residual keeps the rest of them there,
as any rounding error. NaN and infinity never become numbers: of rows and values that have diverged the receiver sees
that they have.
"""

from __future__ import annotations

import numpy as np
import torch

from gba_hvd.compression import kernels
from gba_hvd.compression.spec import VALUES
from gba_hvd.errors import BadInput

CHUNK = 128  # values that share a scale: 3 % more bytes, and no tensor waits long behind a larger one
CODERS = (*VALUES, "ternary")  # by the number that a message gives; the last one is for rows only
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def encode(values: np.ndarray, kind: str, chunk: int = CHUNK) -> bytes:
    """values: float32 or float64 [n]; for all kinds but "none" float32.

    chunk: int8, ternary: how many values share a scale; all of them decode to NaN if one is not finite.
    """
    if kind == "none":
        return values.tobytes()
    if values.dtype != np.float32:
        raise BadInput(f"{kind} takes float32 values, got {values.dtype}")
    if kind == "ternary":
        scales, packed = np.empty(-(-len(values) // chunk), np.uint8), np.zeros(-(-len(values) // 5), np.uint8)
        kernels.to_ternary(values, chunk, scales, packed)
        return scales.tobytes() + packed.tobytes()
    if kind == "int8":
        codes, scales = np.empty(len(values), np.int8), np.empty(-(-len(values) // chunk), np.float32)
        kernels.to_int8(values, chunk, scales, codes)
        return scales.tobytes() + codes.tobytes()
    return to_half(torch.from_numpy(values), _HALF[kind]).view(torch.int16).numpy().tobytes()


def decode(data: np.ndarray, kind: str, n: int, dtype: np.dtype, chunk: int = CHUNK) -> np.ndarray:
    """uint8 [n_bytes(kind, n, dtype)] -> [n] of dtype."""
    if kind == "none":
        return np.array(data).view(dtype)
    n_chunks = -(-n // chunk)
    if kind == "ternary":
        out = np.empty(n, np.float32)
        kernels.from_ternary(np.array(data[n_chunks:]), chunk, np.array(data[:n_chunks]), out)
        return out.astype(dtype, copy=False)
    if kind == "int8":
        scales = np.array(data[: 4 * n_chunks]).view(np.float32)
        out = np.empty(n, np.float32)
        kernels.from_int8(np.array(data[4 * n_chunks :]).view(np.int8), chunk, scales, out)
        return out.astype(dtype, copy=False)
    half = torch.from_numpy(np.array(data).view(np.int16)).view(_HALF[kind])
    widened: np.ndarray = half.to(torch.float32).numpy()
    return widened.astype(dtype, copy=False)


def n_bytes(kind: str, n: int, dtype: np.dtype, chunk: int = CHUNK) -> int:
    """Bytes of n encoded values."""
    if kind == "ternary":
        return -(-n // chunk) + -(-n // 5)
    if kind == "int8":
        return n + 4 * -(-n // chunk)
    return n * (dtype.itemsize if kind == "none" else 2)


def to_half(values: torch.Tensor, kind: torch.dtype, n_added: int = 1) -> torch.Tensor:
    """Rounded to half precision; so that the sum of n_added such tensors cannot leave its range. Infinity stays."""
    most = torch.finfo(kind).max / n_added
    return torch.where(values.isinf(), values, values.clamp(-most, most)).to(kind)
