"""Gradients on their way: row gradients merged per distinct row, dense ones in one buffer. No communication here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gba_hvd import kernels


@dataclass(frozen=True)
class RowGrad:
    """Gradient of some rows of one group of tables.

    keys:   int64   [n]       distinct (see `shm.layout` for what a key is), in order of first appearance
    values: float32 [n, dim]
    """

    keys: np.ndarray
    values: np.ndarray

    def non_finite(self) -> int | None:
        """The key of a row whose gradient is NaN or infinite."""
        if np.isfinite(float(torch.from_numpy(self.values).sum())):
            return None
        bad = np.flatnonzero(~np.isfinite(self.values).all(axis=1))
        return int(self.keys[bad[0]]) if len(bad) else None


def hash_slots(n: int) -> np.ndarray:
    """Scratch for `kernels.number_distinct` over n keys."""
    return np.full(1 << max(4, (2 * n - 1).bit_length()), -1, dtype=np.int32)


def distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(distinct keys [d], number of each key's distinct one int32 [n], the hash slots)."""
    slots, found, number = hash_slots(len(keys)), np.empty_like(keys), np.empty(len(keys), dtype=np.int32)
    count = kernels.number_distinct(keys, slots, found, number)
    return found[:count], number, slots


def merge(parts: Sequence[tuple[RowGrad, float]]) -> RowGrad:
    """Weighted sum of row gradients, one entry per distinct row."""
    if len(parts) == 1 and parts[0][1] == 1.0:
        return parts[0][0]
    keys, number, _ = distinct(np.concatenate([part.keys for part, _ in parts]))
    values = np.zeros((len(keys), parts[0][0].values.shape[1]), dtype=np.float32)
    at = 0
    for part, weight in parts:
        kernels.add_rows(part.values, number[at : at + len(part.keys)], np.float32(weight), values)
        at += len(part.keys)
    return RowGrad(keys, values)


def pack_by_owner(grads: Sequence[RowGrad], owner: np.ndarray, n_owners: int) -> tuple[np.ndarray, np.ndarray]:
    """One message for each owner of shards.

    Returns the float32 words of all messages in owner order, and the number of words of each, int64 [n_owners].

    A message is, for each group of tables: the number of rows (int64), their keys (int64), their values (float32).
    """
    starts, orders = [], []
    for grad in grads:
        start, order = np.empty(n_owners + 1, dtype=np.int64), np.empty(len(grad.keys), dtype=np.int32)
        kernels.order_by_owner(grad.keys, len(owner), owner, start, order)
        starts.append(start)
        orders.append(order)
    words = np.zeros(n_owners, dtype=np.int64)
    for grad, start in zip(grads, starts, strict=True):
        words += 2 + np.diff(start) * (2 + grad.values.shape[1])
    message = np.empty(int(words.sum()), dtype=np.float32)
    at = 0
    for rank in range(n_owners):
        for grad, start, order in zip(grads, starts, orders, strict=True):
            picked, dim = order[start[rank] : start[rank + 1]], grad.values.shape[1]
            n = len(picked)
            message[at : at + 2].view(np.int64)[0] = n
            keys = message[at + 2 : at + 2 + 2 * n].view(np.int64)
            values = message[at + 2 + 2 * n : at + 2 + (2 + dim) * n].reshape(n, dim)
            kernels.take_rows(grad.keys, grad.values, picked, keys, values)
            at += 2 + (2 + dim) * n
    return message, words


def unpack(message: np.ndarray, dims: Sequence[int]) -> list[RowGrad]:
    """The row gradients of one message, views into it."""
    grads, at = [], 0
    for dim in dims:
        n = int(message[at : at + 2].view(np.int64)[0])
        keys = message[at + 2 : at + 2 + 2 * n].view(np.int64)
        grads.append(RowGrad(keys, message[at + 2 + 2 * n : at + 2 + (2 + dim) * n].reshape(n, dim)))
        at += 2 + (2 + dim) * n
    return grads


def with_contributors(grad: RowGrad) -> RowGrad:
    """The gradient with one more column, 1: summed, it counts the micro-batches that contain the row."""
    ones = np.ones((len(grad.keys), 1), dtype=np.float32)
    return RowGrad(grad.keys, np.hstack([grad.values, ones]))


def average_over_contributors(grad: RowGrad) -> RowGrad:
    """Divide each row by the sum of its contributors' weights, its last column."""
    return RowGrad(grad.keys, np.ascontiguousarray(grad.values[:, :-1] / grad.values[:, -1:]))
