"""Bags whose rows lie on other hosts: which owner pools what, and the bag that this worker pools from the answers.

An owner adds up a sample's rows and sends one sum, the activation. The worker sees it as one more row, under a key
above those of all rows; its gradient, that of the activation, is spread over the sample's rows by the owner. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gba_hvd import kernels
from gba_hvd.batch import Bag
from gba_hvd.embedding.row_gradients import RowGrad, merge, without_access_column

_ONES = np.empty(0, np.float32)


@dataclass(frozen=True)
class FieldBags:
    """A multi-valued feature of one micro-batch.

    ids: as the batch has them. keys: int64 [n], of its values without padding; offsets: int64 [B + 1]
    factors: float32 [n], what each row is multiplied by (its weight, over the sample's count for the mean); None: 1
    """

    feature: str
    ids: Tensor | Bag
    keys: np.ndarray
    offsets: np.ndarray
    factors: np.ndarray | None


@dataclass(frozen=True)
class BagLookups:
    """What some micro-batches look up, by group of tables.

    single: int64 [n], the keys of features whose rows are fetched one by one
    bags: (number of the micro-batch, a feature of which sums suffice)
    """

    single: list[np.ndarray]
    bags: list[list[tuple[int, FieldBags]]]


@dataclass(frozen=True)
class PooledBag:
    """A field's bag after the owners have pooled their parts: keys of rows and of activations, as in `FieldBags`."""

    field: FieldBags
    keys: np.ndarray
    offsets: np.ndarray
    factors: np.ndarray | None


@dataclass(frozen=True)
class PoolRequest:
    """The parts of m bags that one owner pools.

    distinct: int64 [d], ascending, the keys; number: int32 [n], which of them each value is; offsets: int64 [m + 1]
    factors:  float32 [n], or [0]: all 1
    micro:    int32 [m], ascending: the number of the micro-batch that each bag is of
    """

    distinct: np.ndarray
    number: np.ndarray
    offsets: np.ndarray
    factors: np.ndarray
    micro: np.ndarray

    @property
    def n_bags(self) -> int:
        return len(self.micro)

    @property
    def first_keys(self) -> np.ndarray:
        """int64 [m]: the key of each bag's first value; all of a bag are of one table."""
        found: np.ndarray = self.distinct[self.number[self.offsets[:-1]]]
        return found

    def pool(self, rows: np.ndarray) -> np.ndarray:
        """The activations float32 [m, dim]. rows: float32 [d, dim], of the distinct keys"""
        out = np.empty((self.n_bags, rows.shape[1]), np.float32)
        kernels.pool_rows(rows, self.number, self.offsets, self.factors, False, 0, out[:, None])
        return out

    def spread(self, bags: np.ndarray, grads: np.ndarray, extra: int, lookups: np.ndarray | None = None) -> RowGrad:
        """The gradients of the rows, of those of some activations.

        bags: int64 [k], ascending, which ones; grads: float32 [k, dim + extra]. An extra column (of contributors) is a
        number of the micro-batch: a row gets it once for each micro-batch, however many of its samples have the row.
        lookups: [k], of each activation: as often all values of its bag were looked up; None: not counted
        """
        dim = grads.shape[1] - extra
        of_bag = np.zeros((self.n_bags, grads.shape[1]), np.float32)
        of_bag[bags] = grads
        rows = np.zeros((len(self.distinct), dim), np.float32)
        of_rows = np.ascontiguousarray(of_bag[:, :dim])
        kernels.pool_rows_backward(of_rows[:, None], 0, self.number, self.offsets, self.factors, False, rows)
        here = np.zeros(self.n_bags, bool)
        here[bags] = True
        bag = np.repeat(np.arange(self.n_bags), np.diff(self.offsets))
        values = np.flatnonzero(here[bag])
        bag, number = bag[values], self.number[values]
        present = np.unique(number)
        once = np.unique(self.micro[bag].astype(np.int64) * max(1, len(self.distinct)) + number, return_index=True)[1]
        more = np.zeros((len(self.distinct), extra), np.float32)
        np.add.at(more, number[once], of_bag[bag[once], dim:])
        accesses = None
        if lookups is not None:
            times = np.zeros(self.n_bags)
            times[bags] = lookups
            accesses = np.bincount(number, weights=times[bag])[present].astype(np.uint32)
        return RowGrad(self.distinct[present], np.ascontiguousarray(np.hstack([rows, more])[present]), accesses)


NOTHING = PoolRequest(np.empty(0, np.int64), np.empty(0, np.int32), np.zeros(1, np.int64), _ONES, np.empty(0, np.int32))


@dataclass(frozen=True)
class Borrowed:
    """Rows and activations of one group that one owner sent, in the order of its message.

    keys: int64 [n], of rows, ascending, then of activations. indices: int32 [k], ascending: which elements of
    float32 [n, dim] were sent
    """

    keys: np.ndarray
    request: PoolRequest
    indices: np.ndarray

    @property
    def n_rows(self) -> int:
        return len(self.keys) - self.request.n_bags

    def spread(self, present: np.ndarray, grads: np.ndarray, extra: int, counted: bool = False) -> RowGrad:
        """The gradients of rows. present: int32 [k], ascending, which of the keys; grads: float32 [k, dim + extra]

        counted: one more column has the lookups of each row, or activation
        """
        n = int(np.searchsorted(present, self.n_rows))
        found = RowGrad(self.keys[present], np.ascontiguousarray(grads))
        if counted:
            found = without_access_column(found)
        single, of_bags = found.select(np.arange(n)), found.select(np.arange(n, len(present)))
        if n == len(present):
            return single
        pooled = self.request.spread(present[n:] - self.n_rows, of_bags.values, extra, of_bags.accesses)
        return merge([(single, 1.0), (pooled, 1.0)])


def split(
    fields: Sequence[tuple[int, FieldBags]], owner: np.ndarray, n_owners: int, first_key: int
) -> tuple[list[PooledBag], list[PoolRequest], list[np.ndarray]]:
    """What is left for this worker to pool, and for each owner what it pools and the keys of its activations.

    fields: with the numbers of their micro-batches, ascending. owner: int32 [S], who pools rows of each shard, -1: this
    worker. first_key: of activations, a multiple of S. An activation's key belongs to a shard of its owner.
    """
    n_shards = len(owner)
    shard_of = np.zeros(n_owners, np.int64)
    shard_of[owner[owner >= 0]] = np.flatnonzero(owner >= 0)
    counts = np.zeros(n_owners, np.int64)
    left: list[PooledBag] = []
    parts: list[list[tuple[np.ndarray, np.ndarray, np.ndarray | None, int]]] = [[] for _ in range(n_owners)]
    for micro, field in fields:
        n_samples = len(field.offsets) - 1
        sample = np.repeat(np.arange(n_samples), np.diff(field.offsets))
        mine = owner[field.keys % n_shards]
        keys, samples = [field.keys[mine < 0]], [sample[mine < 0]]
        factors = [] if field.factors is None else [field.factors[mine < 0]]
        for who in np.unique(mine[mine >= 0]).tolist():
            theirs = np.flatnonzero(mine == who)
            some, lengths = np.unique(sample[theirs], return_counts=True)
            parts[who].append((field.keys[theirs], lengths, _of(field.factors, theirs), micro))
            keys.append(first_key + (counts[who] + np.arange(len(some))) * n_shards + shard_of[who])
            samples.append(some)
            factors += [] if field.factors is None else [np.ones(len(some), np.float32)]
            counts[who] += len(some)
        order = np.argsort(np.concatenate(samples), kind="stable")
        lengths = np.bincount(np.concatenate(samples), minlength=n_samples)
        left.append(
            PooledBag(
                field,
                np.concatenate(keys)[order],
                np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                np.concatenate(factors)[order] if factors else None,
            )
        )
    activations = [first_key + np.arange(n) * n_shards + shard for n, shard in zip(counts, shard_of, strict=True)]
    return left, [_request(some) for some in parts], activations


def _request(parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray | None, int]]) -> PoolRequest:
    if not parts:
        return NOTHING
    distinct, number = np.unique(np.concatenate([keys for keys, _, _, _ in parts]), return_inverse=True)
    factors = _ONES
    if any(some is not None for _, _, some, _ in parts):
        factors = np.concatenate([np.ones(len(k), np.float32) if some is None else some for k, _, some, _ in parts])
    lengths = np.concatenate([lengths for _, lengths, _, _ in parts])
    micro = np.concatenate([np.full(len(lengths), micro, np.int32) for _, lengths, _, micro in parts])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return PoolRequest(distinct, number.astype(np.int32), offsets, factors, micro)


def _of(factors: np.ndarray | None, at: np.ndarray) -> np.ndarray | None:
    return None if factors is None else factors[at]
