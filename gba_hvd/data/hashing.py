"""Stable 64-bit hashes of integers and strings, over whole arrays.

They decide bucket ids, random splits and synthetic samples, so they must never change: no `hash()`, no process seed,
the same on every machine. Integers go through the finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable
Pseudorandom Number Generators, 2014); strings are folded into it eight bytes at a time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gba_hvd.data.list_columns import flattened, is_list
from gba_hvd.errors import BadInput

UInt64 = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_WORD = 8
_LOW_BYTES = np.array([(1 << (8 * n)) - 1 for n in range(_WORD + 1)], dtype=np.uint64)  # mask of the n lowest bytes


def mix64_(x: UInt64) -> UInt64:
    """splitmix64's finaliser, in place; returns its argument."""
    x ^= x >> np.uint64(30)
    x *= _MIX_1
    x ^= x >> np.uint64(27)
    x *= _MIX_2
    x ^= x >> np.uint64(31)
    return x


def stream_key(*numbers: int) -> int:
    """One 64-bit key from some integers: names a stream of random numbers."""
    key = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        key += np.uint64(GOLDEN)
        key ^= np.uint64(number & (2**64 - 1))
        mix64_(key)
    return int(key[0])


def hash_integers(numbers: npt.NDArray[Any], key: int) -> UInt64:
    """uint64 [n]: number i of stream `key` is splitmix64 at counter `numbers[i]`."""
    x = numbers.astype(np.uint64)
    x *= np.uint64(GOLDEN)
    x += np.uint64(key)
    return mix64_(x)


def unit_interval(hashes: UInt64) -> npt.NDArray[np.float64]:
    """float64 in [0, 1), from the 53 highest bits."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def standard_normal(hashes: UInt64) -> npt.NDArray[np.float64]:
    """float64, mean 0, variance 1: a sum of four 16-bit uniforms, near enough to normal and needs no logarithm."""
    mask = np.uint64(0xFFFF)
    total = (hashes & mask).astype(np.float64)
    for shift in (16, 32, 48):
        total += (hashes >> np.uint64(shift)) & mask
    total -= 2.0 * 65535.0
    total *= 3.0**0.5 / 65535.0
    return total


def is_text(kind: pa.DataType) -> bool:
    """Whether it is one of strings: string, large_string, or a dictionary of them, as categories are written."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def hash_strings(strings: pa.Array | pa.ChunkedArray, key: int = 0) -> npt.NDArray[Any]:
    """uint64 [n] of strings (see `is_text`), by the bytes of the UTF-8 text.

    Of lists of strings, or of such lists, [n] objects: of each list its hashes, uint64 [its length]; of a list that is
    null none.

    Raises BadInput for values of another type, and for a null: "" is a text and has a hash, a missing value has none.
    """
    if not isinstance(strings, (pa.Array, pa.ChunkedArray)):
        raise BadInput(
            f"hash_strings: expected a pyarrow array of strings, got {type(strings).__name__}: make it one with "
            "pyarrow.array(...)"
        )
    if not is_text(_innermost(strings.type)):
        raise BadInput(
            f"hash_strings: expected strings, or lists of them, got {strings.type}; whole numbers are ids as they are"
        )
    if is_list(strings.type):
        return _hash_lists(strings, key)
    return _hash_texts(strings, key)


def _innermost(kind: pa.DataType) -> pa.DataType:
    return _innermost(kind.value_type) if is_list(kind) else kind


def _hash_lists(lists: pa.Array | pa.ChunkedArray, key: int) -> npt.NDArray[np.object_]:
    found = np.empty(len(lists), dtype=object)
    at = 0
    for chunk in lists.chunks if isinstance(lists, pa.ChunkedArray) else [lists]:
        values, starts = flattened(chunk)
        hashes = hash_strings(values, key)
        for first, last in pairwise(starts.tolist()):
            found[at] = hashes[first:last]
            at += 1
    return found


def _hash_texts(strings: pa.Array | pa.ChunkedArray, key: int) -> UInt64:
    if strings.null_count:
        raise BadInput(
            f"hash_strings: {strings.null_count} of {len(strings)} strings are null, and a missing value has no hash. "
            "Fill them in first, for example with strings.fill_null('')"
        )
    if isinstance(strings, pa.ChunkedArray):
        return np.concatenate([np.empty(0, dtype=np.uint64), *(_hash_texts(chunk, key) for chunk in strings.chunks)])
    if pa.types.is_dictionary(strings.type):
        strings = strings.dictionary_decode()
    n = len(strings)
    offset_type = np.int64 if pa.types.is_large_string(strings.type) else np.int32
    _, offset_buffer, text = strings.buffers()
    if n == 0:
        return np.empty(0, dtype=np.uint64)
    offsets = np.frombuffer(offset_buffer, dtype=offset_type)[strings.offset : strings.offset + n + 1].astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    padded = np.zeros(last - first + _WORD, dtype=np.uint8)
    if last > first:
        padded[: last - first] = np.frombuffer(text, dtype=np.uint8)[first:last]
    # Every position as the start of a little-endian word, overlapping.
    words = np.ndarray((len(padded) - _WORD + 1,), dtype="<u8", buffer=padded.data, strides=(1,))

    lengths = np.diff(offsets)
    starts = offsets[:-1] - first
    hashes = hash_integers(lengths, stream_key(key))
    hashes ^= words[starts] & _LOW_BYTES[np.minimum(lengths, _WORD)]
    mix64_(hashes)
    position = _WORD
    longer = np.flatnonzero(lengths > position)
    while longer.size:
        rest = np.minimum(lengths[longer] - position, _WORD)
        folded = hashes[longer] + np.uint64(GOLDEN)
        folded ^= words[starts[longer] + position] & _LOW_BYTES[rest]
        hashes[longer] = mix64_(folded)
        position += _WORD
        longer = longer[lengths[longer] > position]
    return hashes
