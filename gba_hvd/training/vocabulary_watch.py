"""How the vocabularies of hashed tables fare, every few seconds: for gauges, for `gba-hvd status`, and a table that is
full.

What a host knows is of its own shards. Ids are spread over all shards alike, so shares are those of the job; counts are
of this host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.shm.vocabulary import VocabularyStats

_EVERY_S = 5.0
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

    def look(self, now: bool = False) -> dict[str, dict[str, float]]:
        """By hashed table, what there is to report; nothing before the next few seconds are over, unless `now`.

        size, capacity, admitted, evicted, no_room, lookups, missed, filled: see `VocabularyStats`; missed_share: of the
        lookups since the report before, those of ids without a row
        """
        memory, layout, at_s = self._tables.memory, self._tables.layout, time.monotonic()
        if memory is None or (at_s - self._looked_s < _EVERY_S and not now):
            return {}
        self._looked_s, found, shards = at_s, dict[str, dict[str, Any]](), memory.ready()
        for group in layout.groups:
            vocabulary, name = memory.vocabulary(group), group.tables[0].name
            if vocabulary is None:
                continue
            stats, before = vocabulary.stats(shards), self._before.get(name)
            self._before[name] = stats
            new = before is None or stats.lookups < before.lookups  # shards have gone to another host
            lookups, missed = (0, 0) if new or before is None else (before.lookups, before.missed)
            share = (stats.missed - missed) / max(1, stats.lookups - lookups)
            found[name] = {**asdict(stats), "missed_share": round(share, 6)}
        return found

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
