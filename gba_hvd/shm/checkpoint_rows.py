"""A host's shard memory, as `recovery` sees rows: every record's words, weights and slots, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gba_hvd.errors import ShardMemoryError
from gba_hvd.shm.layout import Group, Layout, SampledSpec
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.shm.vocabulary import Vocabulary
from recovery.errors import BadInput
from recovery.rows import FILTER, KEY, USES, Column, RowView, Schema, Table
from recovery.selection.sampled_accesses import SampledAccesses, n_words


def schema_of(layout: Layout) -> Schema:
    """The tables with a column for the weights and one for each slot, in the order of a record.

    Hashed tables are keyed ones.
    """
    return Schema(
        tuple(
            Table(
                table.name,
                table.n_rows,
                (
                    Column("weights", table.dim),
                    *(Column(s.name, 1 if s.per_row else table.dim) for s in layout.slots_of(table)),
                    *(() if table.hashed is None else (*(FILTER,) * table.hashed.has_filter, KEY, USES)),
                ),
                *(() if table.hashed is None else (table.hashed.fallback, table.hashed.fallback_hashes)),
            )
            for table in layout.tables
        ),
        layout.n_shards,
    )


class ShardRows:
    """A `recovery.rows.RowSource`. mine: the shards meant, asked for whenever it matters; by default all that are
    ready.

    filling: no process uses these shards yet; otherwise one that leaves this host while it is read raises
    ShardMemoryError.
    left: who wrote them is gone, so a step that was begun and not finished never will be: the rows are as they are.
    """

    def __init__(
        self, memory: ShardMemory, mine: Callable[[], Sequence[int]] | None = None, filling: bool = False
    ) -> None:
        self.schema = schema_of(memory.layout)
        self._memory, self._mine, self._filling = memory, mine or memory.ready, filling
        self.left = False

    def shards(self) -> list[int]:
        return list(self._mine())

    def slab(self, table: int, shard: int) -> RowView:
        layout, spec = self._memory.layout, self._memory.layout.tables[table]
        number, key = layout.place_of_table[spec.name]
        group = layout.groups[number]
        n = self.schema.tables[table].rows_in(shard, layout.n_shards)
        start = shard * layout.region_words + group.at + key // layout.n_shards * group.record
        records = self._memory.flat[start : start + n * group.record].reshape(n, group.record)
        counts = self._memory.words[start : start + n * group.record].reshape(n, group.record)[:, -1]
        if (vocabulary := self._memory.vocabulary(group)) is None:
            return RowView((records[:, :-1],), counts)
        keys, uses = vocabulary.keys(shard)[:, None].view(np.float32), vocabulary.uses(shard).view(np.float32)
        counters = (vocabulary.filter_words(shard)[:, None],) * vocabulary.spec.has_filter
        return RowView((records[:, :-1], *counters, keys, uses), counts)

    def clear(self, table: int, shard: int) -> None:
        vocabulary, _ = self._vocabulary(table)
        vocabulary.clear(shard)

    def insert(self, table: int, shard: int, records: np.ndarray) -> tuple[int, int]:
        vocabulary, group = self._vocabulary(table)
        about, layout = self.schema.tables[table], self._memory.layout
        uses = np.ascontiguousarray(records[:, -USES.width :]).view(np.uint32)
        rows, without = vocabulary.insert(shard, about.keys(records), uses)
        if without and not vocabulary.spec.evict:
            entries, n_shards = vocabulary.spec.entries, layout.n_shards
            enough = max(2 * entries, (entries + without) * 3 // 2)
            raise BadInput(
                f"table {about.name!r}: {without} ids of the checkpoint find no room in shard {shard}, which has "
                f"{entries} rows for ids, and the table evicts nothing: raise capacity (now {entries * n_shards:,} in "
                f"{n_shards} shards) to {enough * n_shards:,} or more, or set evict"
            )
        there = rows >= 0
        starts = shard * layout.region_words + group.at + rows[there] * group.record
        self._memory.flat[starts[:, None] + np.arange(group.record - 1)] = records[there, : group.record - 1]
        return int(np.count_nonzero(there)), without

    def insert_filter(self, table: int, shard: int, words: np.ndarray) -> None:
        self._vocabulary(table)[0].insert_filter(shard, words)

    def settle(self, table: int, shard: int) -> None:
        self._vocabulary(table)[0].settle(shard)

    def _vocabulary(self, table: int) -> tuple[Vocabulary, Group]:
        layout = self._memory.layout
        group = layout.groups[layout.place_of_table[layout.tables[table].name][0]]
        found = self._memory.vocabulary(group)
        assert found is not None
        return found, group

    def sampled_accesses(
        self, capacities: Sequence[int], period: int, rng: np.random.Generator | None = None
    ) -> dict[tuple[int, int], SampledAccesses]:
        """See `recovery.selection.sampled_accesses`. The writer, who applies gradients, draws by the step's number."""
        layout = self._memory.layout
        if layout.sampled != SampledSpec(tuple(capacities), period):
            raise ShardMemoryError(
                f"the shard memory was made for the lists {layout.sampled}, saves need {tuple(capacities)} rows of a "
                f"shard and every {period}. access: the CheckpointCallback must be registered before the first sync"
            )
        found = {}
        for number, at in layout.lists_at.items():
            n_rows, capacity = layout.rows_per_shard(number), capacities[number]
            for shard in self.shards():
                start = shard * layout.region_words + at
                words = self._memory.words[start : start + n_words(n_rows, capacity)]
                mine = self.schema.tables[number].rows_in(shard, layout.n_shards)
                found[number, shard] = SampledAccesses(words, mine, capacity, period)
        return found

    def step_marks(self, shard: int) -> tuple[int, int]:
        steps = self._memory.steps_of(shard)
        if not self._filling and not self._memory.has(shard):  # read last: the copies before are complete
            raise ShardMemoryError(f"shard {shard} has left this host meanwhile")
        return (steps[1], steps[1]) if self.left else steps
