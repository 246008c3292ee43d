"""Where rows are applied: how often each was looked up, for checkpoints that save the rows that are used most.

The optimizer's pass counts one for each row of a step; here the other lookups of the step are counted and, for the
policy "ssu", sampled. Called between the marks of a step, so that a reader of rows finds counters and lists that belong
to them.
"""

from __future__ import annotations

import numpy as np

from gba_hvd import kernels
from gba_hvd.embedding.row_gradients import RowGrad, RowSum
from gba_hvd.shm.layout import Group, Layout
from gba_hvd.shm.shard_memory import ShardMemory

_ODD = 0x9E3779B97F4A7C15  # spreads numbers of steps over 64 bits


def count_accesses(memory: ShardMemory, group: Group, grad: RowGrad | RowSum, step: int) -> None:
    """Count the accesses to the rows of a gradient that was just applied, where accesses are counted."""
    if grad.accesses is None or not len(grad.keys):
        return
    layout = memory.layout
    repeated = np.flatnonzero(grad.accesses > 1)  # few, as a rule: a pass over all records would take as long as theirs
    starts = layout.record_starts(grad.keys[repeated], group)
    kernels.count_more(memory.words, starts, group.record, grad.accesses[repeated])
    if layout.sampled is not None:
        seed = np.uint64((layout.seed + step * _ODD) & (2**64 - 1))
        kernels.sample_accesses(
            memory.words, grad.keys, grad.accesses, layout.n_shards, layout.region_words, _lists(layout, group),
            layout.sampled.period, seed,
        )  # fmt: skip


def were_changed(memory: ShardMemory, table: str) -> bool:
    """Whether any row of a table changed since its shard was made, in the shards that are here."""
    layout = memory.layout
    number, key = layout.place_of_table[table]
    group = layout.groups[number]
    n_rows = -(-group.tables[[one.name for one in group.tables].index(table)].n_rows // layout.n_shards)
    for shard in memory.ready():
        start = shard * layout.region_words + group.at + key // layout.n_shards * group.record
        if memory.words[start : start + n_rows * group.record].reshape(n_rows, group.record)[:, -1].any():
            return True
    return False


def _lists(layout: Layout, group: Group) -> np.ndarray:
    """What `kernels.sample_accesses` knows of the group's tables, int64 [tables, 4]."""
    assert layout.sampled is not None
    rows = []
    for table, first in zip(group.tables, group.first, strict=True):
        number = layout.tables.index(table)
        capacity = layout.sampled.capacities[number]
        rows.append((first, layout.lists_at.get(number, 0), capacity, -(-layout.rows_per_shard(number) // 32)))
    return np.array(rows, np.int64)
