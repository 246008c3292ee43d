"""Some elements of a flat tensor as bytes, and back. Comes from a wire, so everything is checked before it is used.

    head     the lengths of all that follows
    plain    the small tensors, as they are
    indices  which elements, see `index_codec`
    values   their values, see `value_codec`; of a registered coder its name comes first, behind a byte with its length

A message says what it is; `read` is given what it should be and refuses all else, so that it writes nothing outside.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from gba_hvd.compression import index_codec, kernels, value_codec
from gba_hvd.compression.value_codec import CODERS
from gba_hvd.errors import BadInput, GbaError

_HEAD = struct.Struct("<4sBBBxQQQQQI")
_MAGIC = b"gbc1"
MOST_ELEMENTS = 2**31 - 1
_BY_NAME = 255  # in the place of a coder's number


class BadMessage(GbaError):
    """Bytes that are no compressed gradient, or not the one expected. Nothing of it was used."""


@dataclass(frozen=True)
class Elements:
    """What a message holds.

    n:      elements of the tensor it is about
    indices: int32 [k], ascending, below n; None: all of them
    values: [k]
    plain:  [m], tensors that are sent as they are
    """

    n: int
    indices: np.ndarray | None
    values: np.ndarray
    plain: np.ndarray

    def whole(self) -> np.ndarray:
        """[n], 0 where nothing was sent; what is returned may be `values`."""
        if self.indices is None:
            return self.values
        out = np.zeros(self.n, self.values.dtype)
        self.add_to(out)
        return out

    def add_to(self, out: np.ndarray, start: int = 0, stop: int | None = None) -> None:
        """out += the elements start to stop of the tensor, in place."""
        stop = self.n if stop is None else stop
        if self.indices is None:
            out += self.values[start:stop]
            return
        lo, hi = np.searchsorted(self.indices, [start, stop])
        kernels.add_at(out, self.indices[lo:hi], start, self.values[lo:hi])


def write(
    where: np.ndarray | None, what: np.ndarray, n: int, coder: str, plain: np.ndarray, chunk: int = value_codec.CHUNK,
    sees: bool = True,
) -> tuple[bytes, np.ndarray]:  # fmt: skip
    """A message, and the values as its reader will see them.

    where: int32 [k] ascending, None: all n. what: [k], float32 or float64. plain: [m] of the same dtype.
    chunk: int8, ternary: how many values share a scale. sees: False where what the reader will see is not needed
    """
    assert n <= MOST_ELEMENTS
    kind, at = (index_codec.ALL, b"") if where is None else index_codec.encode(where, n)
    coded, seen = value_codec.encode(what, coder, chunk), what
    if sees and coder != "none":
        seen = value_codec.decode(np.frombuffer(coded, np.uint8), coder, len(what), what.dtype, chunk)
    number = CODERS.index(coder) if coder in CODERS else _BY_NAME
    if number == _BY_NAME:
        coded = bytes([len(coder)]) + coder.encode() + coded
    head = _HEAD.pack(_MAGIC, what.dtype.itemsize, kind, number, n, len(plain), len(what), len(at), len(coded), chunk)
    return b"".join((head, plain.tobytes(), at, coded)), seen


def read(data: Any, n: int, n_plain: int, dtype: Any = np.float32) -> Elements:
    """What `write` wrote about a tensor of n elements, with n_plain numbers beside it.

    Raises BadMessage for anything else. Values may be infinite or NaN if the sender's were: that is not decided here.
    """
    data, dtype = np.frombuffer(data, np.uint8), np.dtype(dtype)
    if len(data) < _HEAD.size:
        raise BadMessage(f"a compressed gradient has a head of {_HEAD.size} bytes, {len(data)} came")
    magic, itemsize, kind, number, of, m, k, n_at, n_coded, chunk = _HEAD.unpack(data[: _HEAD.size].tobytes())
    if magic != _MAGIC or kind not in index_codec.KINDS or not (number < len(CODERS) or number == _BY_NAME):
        raise BadMessage(f"no compressed gradient of this version: it begins with {magic!r}, {kind}, {number}")
    if itemsize != dtype.itemsize or of != n or m != n_plain:
        raise BadMessage(
            f"expected a gradient of {n} elements and {n_plain} plain ones, {dtype.itemsize} bytes each; "
            f"{of}, {m} and {itemsize} came: do all workers train the same model?"
        )
    expected = _HEAD.size + m * itemsize + n_at + n_coded
    if len(data) != expected:
        raise BadMessage(f"a compressed gradient of {expected} bytes was announced, {len(data)} came")
    a, b = _HEAD.size + m * itemsize, len(data) - n_coded
    coder, coded = _named(data[b:]) if number == _BY_NAME else (CODERS[number], data[b:])
    if k > n or chunk < 1 or len(coded) != value_codec.n_bytes(coder, k, dtype, chunk):
        raise BadMessage(f"{len(coded)} bytes of values are not {k} of {n} elements ({coder})")
    where: np.ndarray | str | None = None
    if kind != index_codec.ALL or k != n or n_at:
        where = index_codec.decode(data[a:b], kind, n, k)
    if isinstance(where, str):
        raise BadMessage(f"the indices of {k} of {n} elements ({index_codec.KINDS[kind]}): {where}")
    plain = np.array(data[_HEAD.size : a]).view(dtype)
    try:
        return Elements(n, where, value_codec.decode(coded, coder, k, dtype, chunk), plain)
    except ValueError as error:
        raise BadMessage(f"values in {coder}: {error}") from error


def _named(data: np.ndarray) -> tuple[str, np.ndarray]:
    """A registered coder's name, which is installed here, and what it encoded. Raises BadMessage."""
    n = int(data[0]) if len(data) else 0
    name = data[1 : 1 + n].tobytes().decode(errors="replace")
    try:
        value_codec.coder(name)
    except BadInput as error:
        raise BadMessage(f"{error}; compressors are installed on every host") from error
    return name, data[1 + n :]
