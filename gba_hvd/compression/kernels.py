"""The passes over gradients that have to be fast, compiled by numba. See `gba_hvd.kernels`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gba_hvd.kernels import KernelFile

_BLOCK = 4096
_DIGIT_BITS = 11
_MOST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # 127 times it is still a number


_FILE = KernelFile(globals())
load = _FILE.load
_compiled = functools.partial(_FILE.add, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})


def _of_floats(signature: str) -> Sequence[str]:
    return [signature.replace("T", kind) for kind in ("float32", "float64")]


@_compiled(*_of_floats("int64(T[::1], T[::1], T, int64, T[::1], int32[::1], T[::1], float64[::1])"))
def add_and_select(
    grad: Any, residual: Any, least: Any, base: int, out: Any, indices: Any, values: Any, size: Any
) -> int:
    """out = grad + residual; elements with |out| >= least (and not 0) move to `values`, with their indices.

    indices: int32, room for len(grad); base is added to each. size[0]: the sum of |out| before the move.
    Returns how many elements were moved.
    """
    n, total = 0, 0.0
    for lo in range(0, len(grad), _BLOCK):
        hi = min(lo + _BLOCK, len(grad))
        for i in range(lo, hi):
            out[i] = grad[i] + residual[i]
        for i in range(lo, hi):
            x = out[i]
            a = abs(x)
            total += a
            if a >= least and a > 0:
                indices[n] = base + i
                values[n] = x
                out[i] = 0
                n += 1
    size[0] = total
    return n


@_compiled("float32(float32[::1], int64)")
def kth_largest(values: Any, k: int) -> Any:
    """The k-th largest |value|: a radix selection on the bits, which order as the numbers do. No NaN."""
    high = np.zeros(1 << 16, dtype=np.int64)
    bits = values.view(np.uint32)
    mask = np.uint32(0x7FFFFFFF)
    for i in range(len(bits)):
        high[(bits[i] & mask) >> np.uint32(16)] += 1
    left, at = k, (1 << 16) - 1
    while high[at] < left:
        left -= high[at]
        at -= 1
    low = np.zeros(1 << 16, dtype=np.int64)
    for i in range(len(bits)):
        b = bits[i] & mask
        if np.int64(b >> np.uint32(16)) == at:
            low[b & np.uint32(0xFFFF)] += 1
    below = (1 << 16) - 1
    while low[below] < left:
        left -= low[below]
        below -= 1
    found = np.empty(1, dtype=np.uint32)
    found[0] = np.uint32((at << 16) | below)
    return found.view(np.float32)[0]


# --- indices as gaps: a unit of all ones says "so many, and more follows" --------------------------------------------


@_compiled("int64(int32[::1], int64)")
def count_gaps(indices: Any, most: int) -> int:
    """Units that `write_gaps` takes."""
    n, last = len(indices), -1
    for i in range(len(indices)):
        n += (indices[i] - last - 1) // most
        last = indices[i]
    return n


@_compiled("void(int32[::1], int64, uint8[::1])", "void(int32[::1], int64, uint16[::1])")
def write_gaps(indices: Any, most: int, out: Any) -> None:
    """Ascending indices as the numbers of elements between them; gaps of `most` and more take several units."""
    at, last = 0, -1
    for i in range(len(indices)):
        gap = indices[i] - last - 1
        while gap >= most:
            out[at] = most
            at += 1
            gap -= most
        out[at] = gap
        at += 1
        last = indices[i]


@_compiled("int64(uint8[::1], int64, int64, int32[::1])", "int64(uint16[::1], int64, int64, int32[::1])")
def read_gaps(units: Any, most: int, n: int, indices: Any) -> int:
    """Fill indices from units; returns 0, or what is wrong: 1 beyond n, 2 too many indices, 3 too few."""
    found, at = 0, np.int64(-1)
    open_gap = False
    for i in range(len(units)):
        unit = np.int64(units[i])
        at += unit
        open_gap = unit == most
        if open_gap:
            if at >= n:
                return 1
            continue
        at += 1
        if at >= n:
            return 1
        if found == len(indices):
            return 2
        indices[found] = at
        found += 1
    return 3 if open_gap or found < len(indices) else 0


@_compiled("void(int32[::1], uint8[::1])")
def write_bits(indices: Any, out: Any) -> None:
    """A bit for each element, the lowest first."""
    out[:] = 0
    for i in range(len(indices)):
        out[indices[i] >> 3] |= np.uint8(1 << (indices[i] & 7))


@_compiled("int64(uint8[::1], int64, int32[::1])")
def read_bits(bits: Any, n: int, indices: Any) -> int:
    """As `read_gaps`."""
    found = 0
    for i in range(len(bits)):
        byte = bits[i]
        if byte == 0:
            continue
        for j in range(8):
            if byte & np.uint8(1 << j):
                at = 8 * i + j
                if at >= n:
                    return 1
                if found == len(indices):
                    return 2
                indices[found] = at
                found += 1
    return 3 if found < len(indices) else 0


# --- keys of rows, as differences of seven bits a byte ---------------------------------------------------------------


@_compiled("int64(int64[::1], uint8[::1])")
def write_varints(keys: Any, out: Any) -> int:
    """Distinct keys, ascending as unsigned numbers; out has 10 bytes for each. Returns the bytes written."""
    at, least = 0, np.uint64(0)
    for i in range(len(keys)):
        gap = np.uint64(keys[i]) - least
        least = np.uint64(keys[i]) + np.uint64(1)
        while gap >= np.uint64(128):
            out[at] = np.uint8((gap & np.uint64(127)) | np.uint64(128))
            gap >>= np.uint64(7)
            at += 1
        out[at] = np.uint8(gap)
        at += 1
    return at


@_compiled("int64(uint8[::1], uint64, int64[::1])")
def read_varints(data: Any, most: np.uint64, keys: Any) -> int:
    """Fill keys; returns how many, -1 when one is above `most` or the bytes end within one."""
    found, least, is_full = 0, np.uint64(0), False
    gap, shift = np.uint64(0), np.uint64(0)
    for i in range(len(data)):
        byte = np.uint64(data[i])
        if is_full or shift > np.uint64(63) or (shift == np.uint64(63) and byte > np.uint64(1)):
            return -1
        gap |= (byte & np.uint64(127)) << shift
        if byte >= np.uint64(128):
            shift += np.uint64(7)
            continue
        if gap > most - least:
            return -1
        least += gap
        keys[found] = np.int64(least)
        found += 1
        is_full = least == most
        least += np.uint64(1)
        gap, shift = np.uint64(0), np.uint64(0)
    return found if shift == 0 else -1


@_compiled("boolean(int64[::1], int32[::1])")
def sort_keys(keys: Any, order: Any) -> bool:
    """order = the positions of the keys, ascending as unsigned numbers, equal ones in their order (a radix sort).

    True: the keys are ascending as they are, and order was not written.
    """
    n, bits, differ, n_falls = len(keys), np.uint64(_DIGIT_BITS), np.uint64(0), 0
    for i in range(1, n):
        differ |= np.uint64(keys[i]) ^ np.uint64(keys[0])
        n_falls += 1 if np.uint64(keys[i]) < np.uint64(keys[i - 1]) else 0
    if n_falls == 0:
        return True
    here, there = np.empty(n, np.int32), np.empty(n, np.int32)
    for i in range(n):
        here[i] = i
    starts, mask = np.empty(1 << _DIGIT_BITS, np.int64), np.uint64((1 << _DIGIT_BITS) - 1)
    for shift in range(np.uint64(0), np.uint64(64), bits):
        if (differ >> shift) & mask == np.uint64(0):
            continue
        starts[:] = 0
        for i in range(n):
            starts[(np.uint64(keys[i]) >> shift) & mask] += 1
        total = 0
        for digit in range(len(starts)):
            total, starts[digit] = total + starts[digit], total
        for i in range(n):
            its = (np.uint64(keys[here[i]]) >> shift) & mask
            there[starts[its]] = here[i]
            starts[its] += 1
        here, there = there, here
    order[:] = here
    return False


# --- values ----------------------------------------------------------------------------------------------------------


@_compiled("void(float32[::1], uint16[::1])")
def to_bf16(values: Any, out: Any) -> None:
    """The upper half of each number, rounded to the nearest, of two to the even one. What is beyond the largest becomes
    that; infinity stays, and NaN is one.
    """
    bits = values.view(np.int32)
    for i in range(len(out)):  # (each result named int32: several at once)
        b = bits[i]
        size = np.int32(b & np.int32(0x7FFFFFFF))
        is_odd = np.int32(np.int32(size >> np.int32(16)) & np.int32(1))
        kept = min(np.int32(size + np.int32(0x7FFF) + is_odd), np.int32(0x7F7FFFFF))
        kept = kept if size < np.int32(0x7F800000) else size
        kept = np.int32(0x7FC00000) if size > np.int32(0x7F800000) else kept
        out[i] = np.uint16(np.int32(np.int32(b & np.int32(-0x80000000)) | kept) >> np.int32(16))


@_compiled("void(uint16[::1], float32[::1])")
def from_bf16(codes: Any, out: Any) -> None:
    bits = out.view(np.uint32)
    for i in range(len(codes)):
        bits[i] = np.uint32(codes[i]) << np.uint32(16)


@_compiled("void(float32[::1], int64, float32[::1], int8[::1])")
def to_int8(values: Any, chunk: int, scales: Any, out: Any) -> None:
    """out = values / scale, rounded, with a scale for each chunk that makes its largest 127.

    Scale NaN: something was not finite.
    """
    bits, found = values.view(np.uint32), np.zeros(1, np.uint32)
    for c in range(len(scales)):
        lo = c * chunk
        hi = min(lo + chunk, len(values))
        largest = np.uint32(0)
        for i in range(lo, hi):
            largest = max(largest, bits[i] & np.uint32(0x7FFFFFFF))  # bits order as the numbers do, NaN above them all
        if largest >= np.uint32(0x7F800000):
            scales[c] = np.float32(np.nan)
            out[lo:hi] = 0
            continue
        found[0] = largest
        scale = min(found.view(np.float32)[0] / np.float32(127), _MOST_SCALE)
        if scale == 0 or not np.isfinite(np.float32(1) / scale):
            scale = np.float32(0)  # so small that its reciprocal is none
        scales[c] = scale
        inverse = np.float32(0) if scale == 0 else np.float32(1) / scale
        for i in range(lo, hi):
            out[i] = np.int8(max(np.float32(-127), min(np.float32(127), np.rint(values[i] * inverse))))


@_compiled("void(int8[::1], int64, float32[::1], float32[::1])")
def from_int8(codes: Any, chunk: int, scales: Any, out: Any) -> None:
    for c in range(len(scales)):
        scale = scales[c]
        for i in range(c * chunk, min((c + 1) * chunk, len(codes))):
            out[i] = scale * np.float32(codes[i])


@_compiled("void(float32[::1], int64, uint8[::1], uint8[::1])")
def to_ternary(values: Any, chunk: int, scales: Any, out: Any) -> None:
    """Each value as -s, 0 or s, five to a byte, with an s for each chunk: 1.224 of its root mean square, the best for
    normal values, as a power of 2^(1/4). Scale 0: all are 0; 255: something was not finite. out: zeros.
    """
    for c in range(len(scales)):
        lo = c * chunk
        hi = min(lo + chunk, len(values))
        squares = 0.0
        for i in range(lo, hi):
            squares += np.float64(values[i]) * np.float64(values[i])
        scales[c] = 0
        if not np.isfinite(squares):
            scales[c] = 255
        elif squares > 0:
            level = 1.224 * np.sqrt(squares / (hi - lo))
            scales[c] = np.uint8(max(1.0, min(254.0, np.rint(4 * np.log2(level)) + 192)))
        least = 2.0 ** ((np.float64(scales[c]) - 192) / 4) / 2
        for i in range(lo, hi):
            digit = 1
            if scales[c] > 0 and abs(values[i]) > least:
                digit = 2 if values[i] > 0 else 0
            out[i // 5] += np.uint8(digit * 3 ** (i % 5))


@_compiled("void(uint8[::1], int64, uint8[::1], float32[::1])")
def from_ternary(codes: Any, chunk: int, scales: Any, out: Any) -> None:
    for c in range(len(scales)):
        level = np.float32(0)
        if scales[c] == 255:
            level = np.float32(np.nan)
        elif scales[c] > 0:
            level = np.float32(2.0 ** ((np.float64(scales[c]) - 192) / 4))
        for i in range(c * chunk, min((c + 1) * chunk, len(out))):
            digit = codes[i // 5] // 3 ** (i % 5) % 3
            out[i] = level * np.float32(digit - 1)


@_compiled(*_of_floats("void(T[::1], int32[::1], int64, T[::1])"))
def add_at(out: Any, indices: Any, base: int, values: Any) -> None:
    """out[indices - base] += values. The indices were checked where they were read."""
    for i in range(len(indices)):
        out[indices[i] - base] += values[i]
