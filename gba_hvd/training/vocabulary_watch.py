"""How the vocabularies of hashed tables fare, every few seconds and at the end of an epoch: for gauges, for `gba-hvd
status`, and a table that is full.

What a host knows is of its own shards. Ids are spread over all shards alike, so shares are those of the job; counts are
of this host.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.shm.vocabulary import VocabularyStats

_EVERY_S = 5.0
_STEP_S = 2.0  # for so long a step is awaited that neighbours are still applying
_WHY = {
    None: "it evicts nothing",
    "ttl": "all ids in reach were looked up within evict_after_steps",
    "lfu": "all rows in reach were given away in the same step, for which the table is small",
}


class VocabularyWatch:
    """Of one worker."""

    def __init__(self, tables: EmbeddingTables) -> None:
        self._tables = tables
        self._looked_s = -_EVERY_S
        self._before: dict[str, VocabularyStats] = {}
        self._shares: dict[str, float] = {}

    def look(self, as_of: int | None = None) -> dict[str, dict[str, float]]:
        """By hashed table, what there is to report; nothing before the next few seconds are over.

        as_of: now, in any case, and as after this step
        size, capacity, admitted, evicted, no_room, lookups, missed, filled: see `VocabularyStats`; missed_share: of the
        lookups since the report before, those of ids without a row
        """
        memory, layout, at_s = self._tables.memory, self._tables.layout, time.monotonic()
        if memory is None or (at_s - self._looked_s < _EVERY_S and as_of is None):
            return {}
        self._looked_s, shards = at_s, memory.ready()
        by_group = {group.tables[0].name: memory.vocabulary(group) for group in layout.groups}
        hashed = {name: vocabulary for name, vocabulary in by_group.items() if vocabulary is not None}
        if hashed and as_of is not None:
            with contextlib.suppress(TimeoutError):  # a writer that died is found out by the next step
                memory.wait_finished(np.array(shards, dtype=np.int64), as_of, _STEP_S)
        return {name: self._reported(name, vocabulary.stats(shards)) for name, vocabulary in hashed.items()}

    def _reported(self, name: str, stats: VocabularyStats) -> dict[str, Any]:
        before = self._before.get(name)
        self._before[name] = stats
        new = before is None or stats.lookups < before.lookups  # shards have gone to another host
        lookups, missed = (0, 0) if new or before is None else (before.lookups, before.missed)
        if stats.lookups > lookups or name not in self._shares:  # else the share before is the newest
            self._shares[name] = round((stats.missed - missed) / max(1, stats.lookups - lookups), 6)
        return {**asdict(stats), "missed_share": self._shares[name]}

    def full(self) -> Iterator[tuple[str, str]]:
        """(table, in words) of tables that turned ids away for lack of room, in what `look` found last."""
        for name, stats in self._before.items():
            if not stats.no_room:
                continue
            table, spec = self._tables.tables[name], self._tables.tables[name].hashed_spec(self._tables.config.n_shards)
            why, share = _WHY[table.evict], stats.missed / max(1, stats.lookups)
            assert table.capacity is not None and spec is not None
            n_shards, n_rows = self._tables.config.n_shards, spec.entries * self._tables.config.n_shards
            rounded = f" ({n_rows:,} rows: a multiple of 16 in each of {n_shards} shards)"
            evict = "" if table.evict else ', or have it evict (evict="lfu")'
            text = (
                f"table {name!r} has {stats.size:,} ids in {stats.capacity:,} rows of this host, and new ids found no "
                f"room: {why}. They keep the shared rows, and are counted (no_room): so far {share:.1%} of "
                f"{stats.lookups:,} lookups had no row of their own. Raise "
                f"its capacity, which is {table.capacity:,}{rounded if n_rows != table.capacity else ''}, to "
                f"{2 * n_rows:,} and more until that share is small; a restart from a checkpoint may{evict}"
            )
            yield name, text


def in_words(found: dict[str, dict[str, Any]]) -> str:
    return "; ".join(
        f"{name}: {one['size']:,} of {one['capacity']:,} ids, {one['missed_share']:.1%} of lookups without a row"
        for name, one in found.items()
    )
