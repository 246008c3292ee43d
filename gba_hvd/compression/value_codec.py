"""In how many bits values travel: as they are, in half precision, as int8 or as one of three levels, with a scale for
each chunk of them.

Values beyond half precision's range are sent as its largest number. What has a residual keeps the difference there,
as any rounding error. NaN and infinity never become numbers: of rows and values that have diverged the receiver sees
that they have.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from gba_hvd.compression import kernels
from gba_hvd.errors import BadInput
from recovery.registry import Registry

CHUNK = 128  # values that share a scale: 3 % more bytes, and no tensor waits long behind a larger one


class ValueCoder(Protocol):
    """float32 values in fewer bytes.

    A class that a distribution registers in `gba_hvd.compressors` is constructed without arguments and keeps no state.
    What decodes to another value than was encoded waits in the residual, except of rows that a server lends. `decode`
    is given bytes of the right number and any content: they may come from a wire. NaN and infinity never decode to
    numbers, so that a receiver sees that the sender has diverged.

    chunk: so many consecutive values belong together (rows of a table: one row), and may share a scale
    """

    def n_bytes(self, n: int, chunk: int) -> int:
        """Bytes that n encoded values take."""

    def encode(self, values: np.ndarray, chunk: int) -> bytes:
        """float32 [n] -> n_bytes(n, chunk) bytes."""

    def decode(self, data: np.ndarray, n: int, chunk: int) -> np.ndarray:
        """uint8 [n_bytes(n, chunk)] -> float32 [n]. Raises ValueError for bytes that `encode` never makes."""


class Whole:
    """float32 as it is."""

    def n_bytes(self, n: int, chunk: int) -> int:
        return 4 * n

    def encode(self, values: np.ndarray, chunk: int) -> bytes:
        return values.tobytes()

    def decode(self, data: np.ndarray, n: int, chunk: int) -> np.ndarray:
        return np.array(data).view(np.float32)


class Fp16:
    """Half precision."""

    kind = torch.float16

    def n_bytes(self, n: int, chunk: int) -> int:
        return 2 * n

    def encode(self, values: np.ndarray, chunk: int) -> bytes:
        return to_half(torch.from_numpy(values), self.kind).view(torch.int16).numpy().tobytes()

    def decode(self, data: np.ndarray, n: int, chunk: int) -> np.ndarray:
        half = torch.from_numpy(np.array(data).view(np.int16)).view(self.kind)
        widened: np.ndarray = half.to(torch.float32).numpy()
        return widened


class Bf16:
    """float32 without its last 16 bits, rounded."""

    def n_bytes(self, n: int, chunk: int) -> int:
        return 2 * n

    def encode(self, values: np.ndarray, chunk: int) -> bytes:
        codes = np.empty(len(values), np.uint16)
        kernels.to_bf16(values, codes)
        return codes.tobytes()

    def decode(self, data: np.ndarray, n: int, chunk: int) -> np.ndarray:
        out = np.empty(n, np.float32)
        kernels.from_bf16(np.array(data).view(np.uint16), out)
        return out


class Int8:
    """One byte, and a float32 scale for each chunk. A chunk decodes to NaN if one of it is not finite."""

    def n_bytes(self, n: int, chunk: int) -> int:
        return n + 4 * -(-n // chunk)

    def encode(self, values: np.ndarray, chunk: int) -> bytes:
        codes, scales = np.empty(len(values), np.int8), np.empty(-(-len(values) // chunk), np.float32)
        kernels.to_int8(values, chunk, scales, codes)
        return scales.tobytes() + codes.tobytes()

    def decode(self, data: np.ndarray, n: int, chunk: int) -> np.ndarray:
        n_chunks, out = -(-n // chunk), np.empty(n, np.float32)
        scales = np.array(data[: 4 * n_chunks]).view(np.float32)
        kernels.from_int8(np.array(data[4 * n_chunks :]).view(np.int8), chunk, scales, out)
        return out


class Ternary:
    """One of three levels, five in a byte, and a scale of one byte for each chunk; for rows only."""

    def n_bytes(self, n: int, chunk: int) -> int:
        return -(-n // chunk) + -(-n // 5)

    def encode(self, values: np.ndarray, chunk: int) -> bytes:
        scales, packed = np.empty(-(-len(values) // chunk), np.uint8), np.zeros(-(-len(values) // 5), np.uint8)
        kernels.to_ternary(values, chunk, scales, packed)
        return scales.tobytes() + packed.tobytes()

    def decode(self, data: np.ndarray, n: int, chunk: int) -> np.ndarray:
        n_chunks, out = -(-n // chunk), np.empty(n, np.float32)
        kernels.from_ternary(np.array(data[n_chunks:]), chunk, np.array(data[:n_chunks]), out)
        return out


# In the order of the numbers that messages give them.
_OWN: dict[str, type[ValueCoder]] = {"none": Whole, "fp16": Fp16, "bf16": Bf16, "int8": Int8, "ternary": Ternary}
CODERS = tuple(_OWN)
_REGISTRY: Registry[ValueCoder] = Registry("gba_hvd.compressors", "compressor", ValueCoder, _OWN, arguments=())


def names() -> tuple[str, ...]:
    """The coders that users may ask for."""
    return tuple(name for name in _REGISTRY.names() if name != "ternary")


def coder(kind: str) -> ValueCoder:
    """The coder of that name, ours or registered. Raises BadInput as `Registry.get` does."""
    return _REGISTRY.get(kind)()


def encode(values: np.ndarray, kind: str, chunk: int = CHUNK) -> bytes:
    """values: float32 or float64 [n]; for all kinds but "none" float32. Raises BadInput.

    chunk: int8, ternary: how many values share a scale; all of them decode to NaN if one is not finite.
    """
    if kind == "none":
        return values.tobytes()
    if values.dtype != np.float32:
        raise BadInput(f"{kind} takes float32 values, got {values.dtype}")
    encoded = coder(kind).encode(values, chunk)
    if len(encoded) != (expected := n_bytes(kind, len(values), values.dtype, chunk)):
        raise BadInput(f"compressor {kind!r}: encode made {len(encoded)} bytes of {len(values)} values, not {expected}")
    return encoded


def decode(data: np.ndarray, kind: str, n: int, dtype: np.dtype, chunk: int = CHUNK) -> np.ndarray:
    """uint8 [n_bytes(kind, n, dtype)] -> [n] of dtype. Raises ValueError for bytes that no values encode to."""
    if kind == "none":
        return np.array(data).view(dtype)
    values = coder(kind).decode(data, n, chunk)
    if values.shape != (n,) or values.dtype != np.float32:
        raise BadInput(f"compressor {kind!r}: decode made {values.dtype} {list(values.shape)}, not float32 [{n}]")
    return values.astype(dtype, copy=False)


def n_bytes(kind: str, n: int, dtype: np.dtype, chunk: int = CHUNK) -> int:
    """Bytes of n encoded values."""
    return n * dtype.itemsize if kind == "none" else coder(kind).n_bytes(n, chunk)


def to_half(values: torch.Tensor, kind: torch.dtype, n_added: int = 1) -> torch.Tensor:
    """Rounded to half precision; so that the sum of n_added such tensors cannot leave its range. Infinity stays."""
    most = torch.finfo(kind).max / n_added
    least, largest = torch.aminmax(values) if values.numel() else (0, 0)
    if -most <= least and largest <= most:  # as usual; not so if there is a NaN
        return values.to(kind)
    return torch.where(values.isinf(), values, values.clamp(-most, most)).to(kind)
