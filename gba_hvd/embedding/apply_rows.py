"""A step's row gradients, applied to the shards that this process writes: the same in every mode.

Gradients come by key. In a hashed table keys become rows here: those without a row of their own are sums of shared
ones, each of which gets their gradient, added up over the keys that share it. What the step's lookups do to the
vocabulary comes last: an id that is admitted has its row from the next step on.
"""

from __future__ import annotations

import numpy as np

from gba_hvd.embedding.accesses import count_accesses
from gba_hvd.embedding.row_gradients import RowGrad, RowSum, merge_repeated
from gba_hvd.embedding.row_optimizers import RowOptimizer, TableOptimizers, update_
from gba_hvd.shm.layout import Group
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.shm.vocabulary import Vocabulary


def by_row(memory: ShardMemory, group: Group, grad: RowGrad) -> RowGrad:
    """The gradient of rows that the optimizers get. grad: by key, of shards that are here"""
    vocabulary = memory.vocabulary(group)
    return grad if vocabulary is None else _by_row(vocabulary, grad, vocabulary.rows(grad.keys))


def _by_row(vocabulary: Vocabulary, grad: RowGrad, rows: np.ndarray) -> RowGrad:
    """rows: int64 [n], of the gradient's keys, as of `Vocabulary.rows`"""
    found = RowGrad(rows, grad.values, grad.accesses)
    is_shared = rows >= vocabulary.n_own_rows
    if not is_shared.any():
        return found
    own, shared = found.select(~is_shared), merge_repeated(_of_shared(vocabulary, grad.select(is_shared)))
    accesses = None
    if own.accesses is not None and shared.accesses is not None:
        accesses = np.concatenate([own.accesses, shared.accesses])
    return RowGrad(np.concatenate([own.keys, shared.keys]), np.concatenate([own.values, shared.values]), accesses)


def _of_shared(vocabulary: Vocabulary, grad: RowGrad) -> RowGrad:
    """The gradient of each row that keys without one share, as often as they do. grad: of such keys"""
    rows = vocabulary.shared_rows(grad.keys)
    accesses = None if grad.accesses is None else np.tile(grad.accesses, len(rows))
    return RowGrad(rows.reshape(-1), np.tile(grad.values, (len(rows), 1)), accesses)


def apply_rows(
    memory: ShardMemory,
    optimizer: RowOptimizer | TableOptimizers,
    group: Group,
    grad: RowGrad | RowSum,
    shards: np.ndarray,
    *,
    scale: float,
    lr: float,
    number: int,
    step: int,
) -> None:
    """Between the marks of `step` on these shards, which all rows of the gradient are in.

    scale, lr: see `RowOptimizer.update_`; number: of this step among those that were not skipped
    """
    vocabulary = memory.vocabulary(group)
    if vocabulary is None:
        update_(optimizer, memory.flat, memory.layout, group, grad, scale, lr, number)
        count_accesses(memory, group, grad, step)
        return
    if isinstance(grad, RowSum):
        grad = grad.added_up()
    assert grad.accesses is not None  # tables with a hashed one count them
    found = vocabulary.rows(grad.keys)
    rows = _by_row(vocabulary, grad, found)
    optimizer.update_(memory.flat, memory.layout, group, rows, scale, lr, number)
    count_accesses(memory, group, rows, step)
    vocabulary.looked_up(grad.keys, found, grad.accesses, shards, step)


def write_rows(memory: ShardMemory, group: Group, keys: np.ndarray, values: np.ndarray, step: int) -> int:
    """Set rows between two steps; ids of a hashed table are admitted. Returns how many found no room in it.

    keys: int64 [n], distinct, of shards that this process writes; values: float32 [n, dim]
    """
    vocabulary, missing = memory.vocabulary(group), 0
    if vocabulary is not None and len(keys):
        vocabulary.admit(keys, step)
        has_row = vocabulary.has(keys)
        missing = int(np.count_nonzero(~has_row))
        keys, values = keys[has_row], values[has_row]
    starts = memory.record_starts(keys, group)
    memory.flat[starts.astype(np.int64)[:, None] + np.arange(group.dim)] = values
    memory.count_changed(starts, group)
    return missing
