"""Rows between hosts and their gradients, in few bytes: what is asked for, what comes, what goes back.

    ask      the keys of distinct rows, ascending, as variable-length differences
    lend     the owner sends the rows. A value coder rounds them; with a selector each element comes as one of three
             levels, with a scale for each row: a model needs something of every element
    return   gradients in the same order, without keys. With a selector those elements with |u| at or above a threshold,
             one for all tables of a dimension; what is not sent waits for the row's next gradient (`row_residuals`)

DCT-MP is another rule: see `activation_codec`.

Pure: no Horovod and no sockets. In allreduce mode both sides keep which rows were lent until the gradients are back.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gba_hvd.compression import index_codec, kernels, sparse_message, value_codec
from gba_hvd.compression.bypass import BypassDecision
from gba_hvd.compression.row_residuals import RowResiduals
from gba_hvd.compression.sparse_message import BadMessage
from gba_hvd.compression.spec import Spec
from gba_hvd.compression.thresholds import Thresholds
from gba_hvd.embedding.row_gradients import RowGrad

_BACK = struct.Struct("<BxxxIII")  # kind of indices, bytes of them, rows, bytes of values


def ascending(keys: np.ndarray) -> np.ndarray:
    """int64 [n] in the order that keys are written in: as unsigned numbers, for those of hashed tables may be
    negative."""
    return np.sort(keys.view(np.uint64)).view(np.int64)


def in_order(grad: RowGrad) -> RowGrad:
    """The rows of a gradient with their keys `ascending`; itself if they are."""
    order = np.empty(len(grad.keys), np.int32)
    is_sorted = kernels.sort_keys(np.require(grad.keys, requirements=("C", "A", "W")), order)
    return grad if is_sorted else grad.select(order)


def write_keys(keys: np.ndarray) -> bytes:
    """int64 [n], distinct and `ascending`."""
    out = np.empty(10 * len(keys), np.uint8)
    return out[: kernels.write_varints(keys, out)].tobytes()


def read_keys(data: Any, limit: int) -> np.ndarray:
    """int64 [n], `ascending`, distinct, each below limit as an unsigned number. Raises BadMessage otherwise."""
    data = np.frombuffer(data, np.uint8).copy()
    keys = np.empty(n_keys(data), np.int64)
    if limit < 1 or kernels.read_varints(data, np.uint64(limit - 1), keys) != len(keys):
        raise BadMessage(f"{len(data)} bytes of row keys are no ascending keys below {limit}")
    return keys


def n_keys(data: Any) -> int:
    """How many keys `read_keys` would find."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) < 128))


def encode_rows(rows: np.ndarray, spec: Spec) -> bytes:
    """A message for `decode_rows`. rows: float32 [n, dim]"""
    flat, coder = rows.reshape(-1), "ternary" if spec.selects else spec.values
    return sparse_message.write(None, flat, len(flat), coder, flat[:0], rows.shape[1], sees=False)[0]


def decode_rows(data: Any, n: int, dim: int) -> np.ndarray:
    """float32 [n, dim] as they were received. Raises BadMessage."""
    return sparse_message.read(data, n * dim, 0).whole().reshape(n, dim)


class RowCoder:
    """One worker's way of writing gradients of rows, and of what it did not send of them. Not thread-safe.

    density: by group of tables, the share of gradient elements that was sent last
    decisions: whether to compress rows, since the last report
    """

    def __init__(self, spec: Spec, dims: Sequence[int]) -> None:
        self.spec, self._dims = spec, list(dims)
        self._thresholds = Thresholds(spec, len(self._dims))
        self._residuals = RowResiduals(dims)
        self._selected = np.zeros((len(self._dims), 2), np.int64)  # since `begin`: elements sent, of so many
        self.decisions: list[BypassDecision] = []

    @property
    def density(self) -> list[float]:
        return self._thresholds.density

    @property
    def has_residuals(self) -> bool:
        """Something of gradients has waited."""
        return not self._residuals.is_empty

    @property
    def lost(self) -> float:
        """Sum of |gradient| that was not sent and could not be stored."""
        return self._residuals.lost

    def has_residuals_for(self, shards: np.ndarray) -> bool:
        """Something waits for rows of these shards, bool [S]: it does where a shard returned to its host."""
        return self._residuals.wait_for(shards)

    def received(self, group: int, n: int, of: int) -> None:
        """dct_mp: so many elements of the activations came, which are those whose gradients are sent."""
        if of:
            self._thresholds.sent(group, n, of)

    def begin(self) -> None:
        """A step, or a push: `write` or `whole` follow, then `settle` if it is decided."""
        self._residuals.begin()
        self._count_selected()

    def write(self, group: int, grad: RowGrad) -> bytes:
        """Gradients for `read`. Columns beyond the row's dimension (a row's number of contributors) travel as they are.

        grad: int64 keys [n], distinct; float32 [n, dim + more]
        """
        dim = self._dims[group]
        more = np.ascontiguousarray(grad.values[:, dim:]).reshape(-1)
        rows = np.ascontiguousarray(grad.values[:, :dim])
        n = rows.size
        if not self.spec.selects or not n:
            return sparse_message.write(
                None, rows.reshape(-1), n, self.spec.values, more, self._chunk(dim), sees=False
            )[0]
        wanted = self._residuals.plus(group, grad.keys, rows)
        if not np.isfinite(wanted.sum(dtype=np.float64)):  # as it is: who gets it is to see it
            self._residuals.lose(group, grad.keys)
            return sparse_message.write(None, rows.reshape(-1), n, "none", more)[0]
        flat = wanted.reshape(-1)
        thresholds = self._thresholds
        if thresholds.is_due(group):
            thresholds.find(group, flat)
        sizes = np.abs(flat)
        where = np.flatnonzero((sizes >= np.float32(thresholds.least(group))) & (sizes > 0)).astype(np.int32)
        self._selected[group] += len(where), n
        sent, seen = sparse_message.write(where, flat[where], n, self.spec.values, more, self._chunk(dim))
        flat[where] -= seen
        self._residuals.keep(group, grad.keys, wanted)
        return sent

    def whole(self, grads: Sequence[RowGrad], shards: np.ndarray | None = None) -> list[RowGrad]:
        """Gradients by group that go as they are, with what waited for their rows. Between `begin` and `settle`.

        shards: bool [S], only rows of these go as they are; the others are left alone
        """
        if self._residuals.is_empty:
            return list(grads)
        return [self._with_residual(group, grad, shards) for group, grad in enumerate(grads)]

    def settle(self) -> None:
        self._residuals.settle()
        self._count_selected()

    def give_back(self, group: int, lent: np.ndarray, grad: RowGrad) -> bytes:
        """The gradients of rows that were lent (int64 keys, ascending); those without one stay out.

        Rows of other owners are not looked at.
        """
        present, values = gradients_of(lent, grad)
        return write_present(present, len(lent), self.write(group, RowGrad(lent[present], values)))

    def clear(self) -> None:
        """This worker was left behind: what waits is lost, and counted."""
        self._residuals.clear()

    def _count_selected(self) -> None:
        """Once for each step, however many receivers it had: thresholds age by steps."""
        for group, (n, of) in enumerate(self._selected.tolist()):
            if of:
                self._thresholds.sent(group, n, of)
        self._selected[:] = 0

    def _with_residual(self, group: int, grad: RowGrad, shards: np.ndarray | None) -> RowGrad:
        at: Any = slice(None)
        if shards is not None:
            at = np.flatnonzero(shards[grad.keys % len(shards)])
            if not len(at):
                return grad
        dim, values = self._dims[group], grad.values.copy()
        values[at, :dim] = self._residuals.taken(group, grad.keys[at], values[at, :dim])
        return replace(grad, values=values)

    def _chunk(self, dim: int) -> int:
        return value_codec.CHUNK if self.spec.selects else dim


def read(data: Any, keys: np.ndarray, dim: int, extra: int) -> RowGrad:
    """What `RowCoder.write` wrote about these rows (int64 [n]). extra: columns beyond dim. Raises BadMessage."""
    n = len(keys)
    got = sparse_message.read(data, n * dim, n * extra)
    if not extra:
        return RowGrad(keys, got.whole().reshape(n, dim))
    values = np.hstack([got.whole().reshape(n, dim), got.plain.reshape(n, extra)])
    return RowGrad(keys, np.ascontiguousarray(values))


def decode_row_gradients(data: Any, lent: np.ndarray, dim: int, extra: int = 0) -> RowGrad:
    """What `RowCoder.give_back` wrote. extra: columns beyond the dimension. Raises BadMessage."""
    present, sent = read_present(data, len(lent), "rows")
    return read(sent, lent[present], dim, extra)


def gradients_of(lent: np.ndarray, grad: RowGrad) -> tuple[np.ndarray, np.ndarray]:
    """(which of these keys, int64 [n], have a gradient: int32 [k], their gradients: [k, dim]). Others stay out."""
    order = np.argsort(grad.keys, kind="stable")
    at = np.minimum(np.searchsorted(grad.keys, lent, sorter=order), max(0, len(order) - 1))
    here = grad.keys[order[at]] == lent if len(order) else np.zeros(len(lent), bool)
    present = np.flatnonzero(here).astype(np.int32)
    return present, grad.values[order[at[present]]] if len(present) else grad.values[:0]


def write_present(present: np.ndarray, n_lent: int, sent: bytes) -> bytes:
    """A message of gradients: of which of the things that were lent, and their values."""
    kind, where = index_codec.encode(present, n_lent)
    return _BACK.pack(kind, len(where), len(present), len(sent)) + where + sent


def read_present(data: Any, n_lent: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Which of the things that were lent have gradients, and these as bytes. Raises BadMessage."""
    data = np.frombuffer(data, np.uint8)
    if len(data) < _BACK.size:
        raise BadMessage(f"gradients of {what} have a head of {_BACK.size} bytes, {len(data)} came")
    kind, n_where, n, n_sent = _BACK.unpack(data[: _BACK.size].tobytes())
    if kind not in index_codec.KINDS or n > n_lent or len(data) != _BACK.size + n_where + n_sent:
        raise BadMessage(f"gradients of {n} of {n_lent} {what}: {len(data)} bytes came")
    present = index_codec.decode(data[_BACK.size : _BACK.size + n_where], kind, n_lent, n)
    if isinstance(present, str):
        raise BadMessage(f"gradients of {n} of {n_lent} {what}: {present}")
    return present, data[_BACK.size + n_where :]


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
