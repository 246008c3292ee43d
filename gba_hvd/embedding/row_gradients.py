"""Gradients on their way: row gradients merged per distinct row, dense ones in one buffer. No communication here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gba_hvd import kernels

ROW_AVERAGES = {
    "global": "the sum over a step's micro-batches, divided by all of them",
    "contributors": "divided by those that contain the row, gradients dropped as stale included",
    "kept_contributors": "divided by those that contain the row and are not dropped",
}


@dataclass(frozen=True)
class RowGrad:
    """Gradient of some rows of one group of tables.

    keys:     int64   [n]       distinct (see `shm.layout` for what a key is), in order of first appearance
    values:   float32 [n, dim]
    accesses: uint32  [n]       lookups of each row that the gradient sums over, at least 1; None: not counted
    """

    keys: np.ndarray
    values: np.ndarray
    accesses: np.ndarray | None = None

    @classmethod
    def none(cls, width: int, counted: bool = False) -> RowGrad:
        """A gradient of no row."""
        accesses = np.empty(0, np.uint32) if counted else None
        return cls(np.empty(0, np.int64), np.empty((0, width), np.float32), accesses)

    def select(self, chosen: np.ndarray) -> RowGrad:
        """Some of the rows: bool [n], or positions."""
        accesses = None if self.accesses is None else self.accesses[chosen]
        return RowGrad(self.keys[chosen], self.values[chosen], accesses)

    def non_finite(self) -> int | None:
        """The key of a row whose gradient is NaN or infinite."""
        import torch  # sums in parallel; here, since the command line reads `ROW_AVERAGES`

        if np.isfinite(float(torch.from_numpy(self.values).sum())):
            return None
        bad = np.flatnonzero(~np.isfinite(self.values).all(axis=1))
        return int(self.keys[bad[0]]) if len(bad) else None


def hash_slots(n: int) -> np.ndarray:
    """Scratch for `kernels.number_distinct` over n keys."""
    return np.full(1 << max(4, (2 * n - 1).bit_length()), -1, dtype=np.int32)


def distinct_parts(keys: np.ndarray, ends: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(distinct keys [d], number of each key's distinct one int32 [n]), in order of first appearance.

    ends: where each part of the keys ends; no two parts have a key in common, as those of different tables
    """
    longest = int(np.diff(ends, prepend=0).max(initial=0))
    found, number = np.empty_like(keys), np.empty(len(keys), dtype=np.int32)
    count = kernels.number_distinct_parts(keys, np.array(ends, np.int64), hash_slots(longest), found, number)
    return found[:count], number


def distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(distinct keys [d], number of each key's distinct one int32 [n], the hash slots)."""
    slots, found, number = hash_slots(len(keys)), np.empty_like(keys), np.empty(len(keys), dtype=np.int32)
    count = kernels.number_distinct(keys, slots, found, number)
    return found[:count], number, slots


def distinct_by_owner(
    keys: np.ndarray, owner: np.ndarray, n_owners: int, ascending: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(distinct keys [d], where those of each owner begin int64 [n_owners + 1], the hash slots).

    owner: int32 [S], of each shard; keys of shards with owner -1 are left out
    ascending: those of one owner, as unsigned numbers; otherwise they are in order of first appearance
    """
    keys = np.require(keys, np.int64, ("C", "A", "W"))
    start, grouped = np.empty(n_owners + 1, np.int64), np.empty_like(keys)
    grouped = grouped[: kernels.keys_by_owner(keys, len(owner), owner, start, grouped)]
    if ascending:
        for i in range(n_owners):
            grouped[start[i] : start[i + 1]].view(np.uint64).sort()
    slots, found = hash_slots(len(grouped)), np.empty_like(grouped)
    kernels.find_distinct_parts(grouped, start, slots, found)
    return found[: start[-1]], start, slots


def merge(parts: Sequence[tuple[RowGrad, float]]) -> RowGrad:
    """Weighted sum of row gradients, one entry per distinct row. Accesses are added up without weights."""
    if len(parts) == 1 and parts[0][1] == 1.0:
        return parts[0][0]
    return _merged(parts)


def merge_repeated(grad: RowGrad) -> RowGrad:
    """One entry per distinct row of a gradient whose keys repeat."""
    return _merged([(grad, 1.0)])


def _merged(parts: Sequence[tuple[RowGrad, float]]) -> RowGrad:
    keys, number, _ = distinct(np.concatenate([part.keys for part, _ in parts]))
    first, n = parts[0][0].values, len(parts[0][0].keys)
    if n and number[n - 1] < n - 1:  # a key comes twice in it
        n = 0
    values = np.empty((len(keys), first.shape[1]), dtype=np.float32)
    np.multiply(first[:n], np.float32(parts[0][1]), out=values[:n])
    values[n:], at = 0, 0
    for i, (part, weight) in enumerate(parts):
        if i > 0 or n == 0:
            kernels.add_rows(part.values, number[at : at + len(part.keys)], np.float32(weight), values)
        at += len(part.keys)
    return RowGrad(keys, values, _accesses([part for part, _ in parts], number, len(keys)))


def _accesses(parts: Sequence[RowGrad | PickedRows], number: np.ndarray, n_rows: int) -> np.ndarray | None:
    """Sums for n_rows distinct rows; number: int [n], of each row of each gradient its distinct one."""
    counted = [part.accesses for part in parts if part.accesses is not None]
    if len(counted) < len(parts):
        return None
    return np.bincount(number, weights=np.concatenate(counted), minlength=n_rows).astype(np.uint32)


@dataclass(frozen=True)
class PickedRows:
    """Some rows of a gradient, which are not copied. rows: int32 [n], distinct positions in it"""

    grad: RowGrad
    rows: np.ndarray

    @property
    def keys(self) -> np.ndarray:
        """int64 [n]"""
        keys: np.ndarray = self.grad.keys[self.rows]
        return keys

    @property
    def accesses(self) -> np.ndarray | None:
        """uint32 [n]; None: not counted"""
        return None if self.grad.accesses is None else self.grad.accesses[self.rows]


@dataclass(frozen=True)
class RowSum:
    """Two gradients that are not added up yet: a pass over the rows of a step is spared where one follows anyway.

    keys, accesses: as in `RowGrad`; first, second: float32 [rows, dim]
    terms: int32 [n, 2], of each key its row in both; -1: it has none there
    """

    keys: np.ndarray
    first: np.ndarray
    second: np.ndarray
    terms: np.ndarray
    accesses: np.ndarray | None = None

    @classmethod
    def of(cls, first: RowGrad | PickedRows, second: RowGrad | PickedRows) -> RowSum | None:
        """None where a key comes twice in one of them."""
        parts = [_picked(first), _picked(second)]
        keys, number, _ = distinct(np.concatenate([part.keys for part in parts]))
        terms = np.full((len(keys), 2), -1, np.int32)
        numbers = np.split(number, [len(parts[0].rows)])
        if not all(kernels.fill_terms(numbers[i], part.rows, i, terms) for i, part in enumerate(parts)):
            return None
        values, more = (part.grad.values for part in parts)
        return cls(keys, values, more, terms, _accesses(parts, number, len(keys)))

    def added_up(self) -> RowGrad:
        values = np.empty((len(self.keys), self.first.shape[1]), np.float32)
        kernels.add_terms(self.first, self.second, self.terms, values.reshape(-1))
        return RowGrad(self.keys, values, self.accesses)


def _picked(grad: RowGrad | PickedRows) -> PickedRows:
    return grad if isinstance(grad, PickedRows) else PickedRows(grad, np.arange(len(grad.keys), dtype=np.int32))


def add_in_order(parts: Sequence[RowGrad | PickedRows]) -> RowGrad | RowSum:
    """The sum of one gradient or several, rounded as `merge` rounds it; the last addition may wait."""
    if len(parts) > 1:
        before = parts[0] if len(parts) == 2 else merge([(copied(part), 1.0) for part in parts[:-1]])
        if (found := RowSum.of(before, parts[-1])) is not None:
            return found
    return merge([(copied(part), 1.0) for part in parts])


def copied(grad: RowGrad | PickedRows) -> RowGrad:
    """The rows by themselves."""
    return grad.grad.select(grad.rows) if isinstance(grad, PickedRows) else grad


@dataclass(frozen=True)
class Packed:
    """One message of row gradients for each owner of shards, before it is written.

    words: int64 [owners], float32 words of each message. A message is, for each group of tables: the number of rows
    (int64), their keys (int64), their values (float32), and their accesses (uint32) where they are counted.
    Owners that are not written to get none: their rows are those of `picked`.
    """

    words: np.ndarray
    _grads: Sequence[RowGrad]
    _starts: Sequence[np.ndarray]
    _orders: Sequence[np.ndarray]
    _written: np.ndarray

    @classmethod
    def of(
        cls, grads: Sequence[RowGrad], owner: np.ndarray, n_owners: int, written: Sequence[int] | None = None
    ) -> Packed:
        """owner: int32 [S], of each shard; written: the owners that get a message, in ascending order, or all."""
        starts, orders, words = [], [], np.zeros(n_owners, dtype=np.int64)
        for grad in grads:
            start, order = np.empty(n_owners + 1, dtype=np.int64), np.empty(len(grad.keys), dtype=np.int32)
            kernels.order_by_owner(grad.keys, len(owner), owner, start, order)
            words += 2 + np.diff(start) * (2 + grad.values.shape[1] + (grad.accesses is not None))
            starts.append(start)
            orders.append(order)
        to = np.arange(n_owners) if written is None else np.array(written, dtype=np.int64)
        words *= np.isin(np.arange(n_owners), to)
        return cls(words, grads, starts, orders, to)

    def picked(self, rank: int) -> list[PickedRows]:
        """Per group of tables, the rows of one owner. They are those of the gradients that this was made of."""
        return [
            PickedRows(grad, order[start[rank] : start[rank + 1]])
            for grad, start, order in zip(self._grads, self._starts, self._orders, strict=True)
        ]

    def of_owner(self, rank: int) -> list[RowGrad]:
        """Per group of tables, the rows of one owner by themselves; the gradient itself where all are."""
        return [one.grad if len(one.rows) == len(one.grad.keys) else copied(one) for one in self.picked(rank)]

    def message(self, rank: int) -> np.ndarray:
        """The message of one owner, float32 [words of it]."""
        message = np.empty(int(self.words[rank]), np.float32)
        self._write_one(rank, message)
        return message

    def write(self, message: np.ndarray) -> None:
        """All messages, in the order of the owners. message: float32 [sum of words]"""
        at = 0
        for rank in self._written.tolist():
            words = int(self.words[rank])
            self._write_one(rank, message[at : at + words])
            at += words

    def _write_one(self, rank: int, message: np.ndarray) -> None:
        at = 0
        for one in self.picked(rank):
            grad, n, dim = one.grad, len(one.rows), one.grad.values.shape[1]
            message[at : at + 2].view(np.int64)[0] = n
            keys = message[at + 2 : at + 2 + 2 * n].view(np.int64)
            values = message[at + 2 + 2 * n : at + 2 + (2 + dim) * n].reshape(n, dim)
            if n == len(grad.keys):  # (all of them, in their order)
                keys[:], values[:] = grad.keys, grad.values
            else:
                kernels.take_rows(grad.keys, grad.values, one.rows, keys, values)
            at += 2 + (2 + dim) * n
            if grad.accesses is not None:
                message[at : at + n].view(np.uint32)[:] = grad.accesses[one.rows]
                at += n


def pack_by_owner(grads: Sequence[RowGrad], owner: np.ndarray, n_owners: int) -> tuple[np.ndarray, np.ndarray]:
    """`Packed` messages, float32 words in the order of the owners, and how many words each has, int64 [n_owners]."""
    packed = Packed.of(grads, owner, n_owners)
    message = np.empty(int(packed.words.sum()), dtype=np.float32)
    packed.write(message)
    return message, packed.words


def unpack(message: np.ndarray, dims: Sequence[int], counted: bool = False) -> list[RowGrad]:
    """The row gradients of one message, views into it. counted: with their accesses."""
    grads, at = [], 0
    for dim in dims:
        n = int(message[at : at + 2].view(np.int64)[0])
        keys = message[at + 2 : at + 2 + 2 * n].view(np.int64)
        values = message[at + 2 + 2 * n : at + 2 + (2 + dim) * n].reshape(n, dim)
        at += 2 + (2 + dim) * n
        accesses = message[at : at + n].view(np.uint32) if counted else None
        at += n if counted else 0
        grads.append(RowGrad(keys, values, accesses))
    return grads


def with_contributors(grad: RowGrad, weight: float = 1.0, counts: RowGrad | None = None) -> RowGrad:
    """The gradient times its weight, with one more column: summed, it counts the micro-batches with the row.

    counts: where the gradient is of several micro-batches, how many of them contain each row: ascending keys, and one
    column. Default: 1.
    """
    count = np.ones((len(grad.keys), 1), dtype=np.float32)
    if counts is not None and len(grad.keys):
        count = counts.values[np.searchsorted(counts.keys, grad.keys)]
    values = grad.values if weight == 1.0 else grad.values * np.float32(weight)
    return replace(grad, values=np.hstack([values, count]))


def merge_contributors(parts: Sequence[tuple[RowGrad, float]], dropped: Sequence[RowGrad] = ()) -> RowGrad:
    """As `merge`, of gradients whose last column counts contributors: weights apply to all other columns only.

    dropped: gradients that add to the counts of the rows of `parts`, and nothing else: not to their accesses either.
    """
    keys, number, _ = distinct(np.concatenate([grad.keys for grad in (*(grad for grad, _ in parts), *dropped)]))
    values = np.zeros((len(keys), parts[0][0].values.shape[1]), dtype=np.float32)
    at = 0
    for grad, weight in parts:
        scaled = grad.values
        if weight != 1.0:
            scaled = scaled * np.float32(weight)
            scaled[:, -1] = grad.values[:, -1]
        kernels.add_rows(scaled, number[at : at + len(grad.keys)], np.float32(1), values)
        at += len(grad.keys)
    n_touched = int(number[:at].max(initial=-1)) + 1  # numbered in order of first appearance, `parts` first
    accesses = _accesses([grad for grad, _ in parts], number[:at], n_touched)
    for grad in dropped:
        values[number[at : at + len(grad.keys)], -1] += grad.values[:, -1]
        at += len(grad.keys)
    return RowGrad(keys[:n_touched], values[:n_touched], accesses)


def average_over_contributors(grad: RowGrad) -> RowGrad:
    """Divide each row by its number of contributors, its last column."""
    return replace(grad, values=np.ascontiguousarray(grad.values[:, :-1] / grad.values[:, -1:]))


def with_access_column(grad: RowGrad) -> RowGrad:
    """The accesses as the last column of the values, where there are some: compressors carry such columns exactly."""
    if grad.accesses is None:
        return grad
    return RowGrad(grad.keys, np.hstack([grad.values, grad.accesses[:, None].astype(np.float32)]))


def without_access_column(grad: RowGrad) -> RowGrad:
    """The inverse of `with_access_column`, of what has the column. float32 is exact up to 2^24 accesses a step."""
    accesses = np.clip(grad.values[:, -1], 0, 1 << 24).astype(np.uint32)
    return RowGrad(grad.keys, np.ascontiguousarray(grad.values[:, :-1]), accesses)
