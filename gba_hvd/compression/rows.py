"""Rows between hosts and their gradients, in few bytes: what is asked for, what comes, what goes back.

    ask      the keys of distinct rows, ascending, as variable-length differences
    lend     the owner sends the rows; with a threshold only elements with |x| at or above it, one threshold for all
             tables of a dimension, found every `refresh_every` answers. The others arrive as 0
    return   the gradients of exactly those elements, in the same order: neither keys nor places travel again

This is DCT-MP (arXiv 2010.08899) for rows instead of pooled embeddings: what travels between our hosts are distinct
rows, each once a step. The mask is the same both ways, nothing is fed back: an element that was not sent was 0 for the
asker, and its gradient is none. Value coders apply to both ways; int8 has a scale for each row when all of it is sent.

Pure: no Horovod and no sockets. Both sides keep what they asked for and lent until the gradients are back.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gba_hvd.compression import kernels, message, places, values
from gba_hvd.compression.message import BadMessage
from gba_hvd.compression.selection import Thresholds
from gba_hvd.compression.spec import Spec
from gba_hvd.gradients import RowGrad

_BACK = struct.Struct("<BxxxIII")  # kind of places, bytes of them, rows, bytes of values


@dataclass(frozen=True)
class Lent:
    """Rows that one side has lent the other: the same on both.

    keys:   int64 [n], ascending
    dim:    of the rows
    places: int32 [k], which of the n * dim elements travelled; None: all
    """

    keys: np.ndarray
    dim: int
    places: np.ndarray | None

    @property
    def n_elements(self) -> int:
        return len(self.keys) * self.dim if self.places is None else len(self.places)


def write_keys(keys: np.ndarray) -> bytes:
    """int64 [n], ascending and distinct."""
    out = np.empty(10 * len(keys), np.uint8)
    return out[: kernels.write_varints(keys, out)].tobytes()


def read_keys(data: Any, limit: int) -> np.ndarray:
    """int64 [n], ascending, distinct, each below limit. Raises BadMessage otherwise."""
    data = np.frombuffer(data, np.uint8).copy()
    keys = np.empty(n_keys(data), np.int64)
    if kernels.read_varints(data, limit, keys) != len(keys):
        raise BadMessage(f"{len(data)} bytes of row keys are no ascending keys below {limit}")
    return keys


def n_keys(data: Any) -> int:
    """How many keys `read_keys` would find."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) < 128))


class RowCoder:
    """One worker's or server's thresholds, one for each group of tables. density: share of elements sent last."""

    def __init__(self, spec: Spec, dims: Sequence[int]) -> None:
        self.spec, self._dims = spec, list(dims)
        self._thresholds = Thresholds(spec, len(self._dims))

    @property
    def density(self) -> list[float]:
        return self._thresholds.density

    def lend(self, group: int, keys: np.ndarray, rows: np.ndarray) -> tuple[bytes, Lent]:
        """keys: int64 [n], ascending; rows: float32 [n, dim]. A message for `borrow`, and what it lends."""
        flat, dim = rows.reshape(-1), rows.shape[1]
        where, what = None, flat
        if self.spec.selector and len(flat):
            thresholds = self._thresholds
            if thresholds.is_due(group):
                thresholds.find(group, flat)
            where = np.flatnonzero(np.abs(flat) >= np.float32(thresholds.least(group))).astype(np.int32)
            what = flat[where]
            thresholds.sent(group, len(where), len(flat))
        sent, _ = message.write(where, what, len(flat), self.spec.values, flat[:0], self._chunk(dim))
        return sent, Lent(keys, dim, where)

    def borrow(self, data: Any, keys: np.ndarray, dim: int) -> tuple[np.ndarray, Lent]:
        """rows float32 [n, dim] as they came for these keys, and what was lent. Raises BadMessage."""
        got = message.read(data, len(keys) * dim, 0)
        rows = np.zeros(len(keys) * dim, np.float32)
        got.add_to(rows)
        return rows.reshape(-1, dim), Lent(keys, dim, got.places)

    def give_back(self, lent: Lent, grad: RowGrad) -> bytes:
        """The gradients of rows that were lent; those without one stay out. Rows of other owners are not looked at.

        Columns beyond the row's dimension (a row's number of contributors) travel as they are.
        """
        order = np.argsort(grad.keys, kind="stable")
        at = np.searchsorted(grad.keys, lent.keys, sorter=order)
        at = np.minimum(at, max(0, len(order) - 1))
        here = grad.keys[order[at]] == lent.keys if len(order) else np.zeros(len(lent.keys), bool)
        present = np.flatnonzero(here).astype(np.int32)
        whole = grad.values[order[at[present]]] if len(present) else grad.values[:0]
        flat = np.zeros((len(lent.keys), lent.dim), np.float32)
        flat[present] = whole[:, : lent.dim]
        chosen = flat.reshape(-1) if lent.places is None else flat.reshape(-1)[lent.places]
        more = np.ascontiguousarray(whole[:, lent.dim :]).reshape(-1)
        kind, where = places.encode(present, len(lent.keys))
        sent, _ = message.write(None, chosen, len(chosen), self.spec.values, more, self._chunk(lent.dim))
        return _BACK.pack(kind, len(where), len(present), len(sent)) + where + sent

    def take_back(self, data: Any, lent: Lent, extra: int = 0) -> RowGrad:
        """What `give_back` wrote. extra: columns beyond the dimension. Raises BadMessage."""
        data = np.frombuffer(data, np.uint8)
        if len(data) < _BACK.size:
            raise BadMessage(f"gradients of rows have a head of {_BACK.size} bytes, {len(data)} came")
        kind, n_where, n_rows, n_sent = _BACK.unpack(data[: _BACK.size].tobytes())
        if kind not in places.KINDS or n_rows > len(lent.keys) or len(data) != _BACK.size + n_where + n_sent:
            raise BadMessage(f"gradients of {n_rows} of {len(lent.keys)} rows: {len(data)} bytes came")
        present = places.decode(data[_BACK.size : _BACK.size + n_where], kind, len(lent.keys), n_rows)
        if isinstance(present, str):
            raise BadMessage(f"gradients of {n_rows} of {len(lent.keys)} rows: {present}")
        got = message.read(data[_BACK.size + n_where :], lent.n_elements, n_rows * extra)
        if got.places is not None:
            raise BadMessage("gradients of rows come for all elements that were lent")
        flat = np.zeros(len(lent.keys) * lent.dim, np.float32)
        flat[slice(None) if lent.places is None else lent.places] = got.values
        rows = flat.reshape(-1, lent.dim)[present]
        return RowGrad(lent.keys[present], np.ascontiguousarray(np.hstack([rows, got.plain.reshape(n_rows, extra)])))

    def _chunk(self, dim: int) -> int:
        return values.CHUNK if self.spec.selector else dim


def sections(parts: Sequence[bytes]) -> bytes:
    """Several messages as one, a multiple of 4 bytes long."""
    whole = b"".join((np.array([len(part) for part in parts], np.uint32).tobytes(), *parts))
    return whole + bytes(-len(whole) % 4)


def split(data: Any, n: int) -> list[np.ndarray]:
    """What `sections` put together. Raises BadMessage."""
    data = np.frombuffer(data, np.uint8)
    if len(data) < 4 * n:
        raise BadMessage(f"{n} messages in one have a head of {4 * n} bytes, {len(data)} came")
    sizes = np.array(data[: 4 * n]).view(np.uint32).astype(np.int64)
    ends = 4 * n + np.cumsum(sizes)
    if n and not ends[-1] <= len(data) <= ends[-1] + 3:
        raise BadMessage(f"{n} messages of together {ends[-1]} bytes were announced, {len(data)} came")
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]
