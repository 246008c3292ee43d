"""Where the elements stand that are sent: gaps of one or two bytes, or a bit for each element, whichever is shorter.

At one element in a hundred a gap takes 1.1 bytes; its entropy is 1.0.
"""

from __future__ import annotations

import numpy as np

from gba_hvd.compression import kernels

ALL, GAPS8, GAPS16, BITS = range(4)
KINDS = {ALL: "all", GAPS8: "gaps of one byte", GAPS16: "gaps of two bytes", BITS: "bits"}
_WRONG = {1: "they leave the tensors", 2: "there are more than announced", 3: "there are fewer than announced"}


def encode(places: np.ndarray, n: int) -> tuple[int, bytes]:
    """places: int32 [k], ascending, below n. Returns (kind, bytes)."""
    if len(places) == n:
        return ALL, b""
    sizes = {
        GAPS8: int(kernels.count_gaps(places, 255)),
        GAPS16: 2 * int(kernels.count_gaps(places, 65535)),
        BITS: -(-n // 8),
    }
    kind = min(sizes, key=lambda k: sizes[k])
    out = np.empty(sizes[kind], np.uint8)
    if kind == BITS:
        kernels.write_bits(places, out)
    else:
        kernels.write_gaps(places, out if kind == GAPS8 else out.view(np.uint16))
    return kind, out.tobytes()


def decode(data: np.ndarray, kind: int, n: int, count: int) -> np.ndarray | str:
    """int32 [count], ascending, each below n; or a sentence that says what is wrong with the bytes (uint8)."""
    if kind == ALL:
        return np.arange(n, dtype=np.int32) if count == n and not len(data) else _WRONG[3]
    places = np.empty(count, np.int32)
    if kind == BITS:
        if len(data) != -(-n // 8):
            return f"{len(data)} bytes are no bit for each of {n} elements"
        wrong = kernels.read_bits(np.array(data), n, places)
    elif kind == GAPS8:
        wrong = kernels.read_gaps(np.array(data), n, places)
    elif len(data) % 2:
        return f"{len(data)} bytes are no gaps of two bytes"
    else:
        wrong = kernels.read_gaps(np.array(data).view(np.uint16), n, places)
    return _WRONG[wrong] if wrong else places
