"""Which ids of a hashed table have a row of their own, in a host's shard memory; lookup, admission, eviction.

In each shard, beside the records, in this order (`shm.layout.VocabularyPlace`):

    stats    int64 [STATS]         what the shard counts of itself (`Stat`)
    keys     int64 [rows]          the key that each record belongs to; NO_KEY: none
    uses     uint32 [rows, 2]      lookups of the key, halved now and then; the step of the last one, plus 1
    filter   uint8 [rows, 4]       with admit_after > 1 or evict="lfu": lookups of keys without an entry, a count-min
                                   sketch of two hashes, halved four times as often

With evict="lfu" a key gets the entry of another one only if it was looked up more often (TinyLFU, Einziger et al.
2017). The filter forgets sooner and so counts less. So entries do not change hands between keys that are looked up
about as often: a row that does starts over, and what it had learned is lost.

Of a record that ids share, uses and filter are of no key. Those of a shard's first one have, as uint32, how far the
shard is in its ageing (`Stat.USED`, `SWEPT`, `COUNTED`): so they are saved and come back with the record.

A key is in one of two buckets of 16 entries; it never moves. Readers take no lock. One process writes a shard, within
a step, in this order:

    1. `Vocabulary.rows` of the step's keys, then the optimizer's pass over these rows
    2. entries are found for new keys; one that is evicted has its key cleared
    3. the records of new keys are initialised
    4. their keys are written, an aligned 8-byte store each

So a reader finds a key with a complete record, or does not find it; a reader that copies records looks at the keys
again afterwards. A kill leaves entries without a key: they are free, and the ids that had them were to be evicted. What
is admitted is decided from the step's keys in ascending order, the step's number and what the shard has: not by how
many workers there are, nor by when pushes arrive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from gba_hvd import kernels
from gba_hvd.errors import ShardMemoryError
from gba_hvd.shm import init_functions, vocabulary_kernels
from gba_hvd.shm.layout import NO_KEY, STATS, Group, Layout, ids_of, keys_of_ids, table_seed
from recovery.hashed_ids import shared_rows_of

_EVICT = {"": 0, "lfu": 1, "ttl": 2}
_HALVED_AFTER = 16  # lookups of keys without an entry, per entry: those of hot keys say nothing of who should go
_SAMPLED = 1 << 16  # counters of a filter that are looked at to see how full it is


class Stat(IntEnum):
    """Numbers that a shard's vocabulary counts: `vocabulary_kernels` has them by position."""

    SIZE = 0  # ids with an entry
    ADMITTED = 1  # since the shard was made, as the next three
    EVICTED = 2
    NO_ROOM = 3  # times that an id was not admitted because no entry was free
    LOOKUPS = 4
    MISSED = 5  # lookups of ids without an entry
    USED = 6  # lookups in the filter since the counts of entries were halved
    COUNTED = 7  # lookups in the filter since its counts were halved
    SWEPT = 8  # up to which entry evict="ttl" has looked


@dataclass(frozen=True)
class VocabularyStats:
    """Of the shards of one host, sums. filled: share of the filter's counters that are not 0."""

    size: int
    capacity: int
    admitted: int
    evicted: int
    no_room: int
    lookups: int
    missed: int
    filled: float


class Vocabulary:
    """Of one hashed table, a group of `layout`. flat: float32, the host's memory. Owns nothing."""

    def __init__(self, flat: np.ndarray, layout: Layout, group: Group) -> None:
        assert group.hashed is not None and group.vocabulary is not None
        self._flat, self._layout, self._group = flat, layout, group
        self._longs, self._words, self._small = flat.view(np.int64), flat.view(np.uint32), flat.view(np.uint8)
        self.spec, place = group.hashed, group.vocabulary
        self._region = layout.region_words // 2
        self._stats_at, self._keys_at, self._uses_at = place.stats // 2, place.keys // 2, place.uses // 2
        self._filter_at = 4 * place.filter
        self._geometry = layout.n_shards, self._region
        std = layout.init_std if self.spec.std is None else self.spec.std
        self.n_own_rows = self.spec.entries * layout.n_shards  # rows below are those of ids, those above are shared
        self._n_shared = self.spec.fallback * layout.n_shards
        self._seed, self._std = np.uint64(table_seed(layout.seed, group.tables[0].name)), np.float32(std)

    # --- readers -----------------------------------------------------------------------------------------------------

    def rows(self, keys: np.ndarray) -> np.ndarray:
        """int64 [n], the row of each key (int64 [n]): its own, or the first of those that it shares with other keys."""
        return self._find(keys)[0]

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, int]:
        """(rows int64 [n], how many keys have none of their own)"""
        rows, spec = np.empty(len(keys), np.int64), self.spec
        n_missing = vocabulary_kernels.find_rows(
            self._longs, keys, *self._geometry, self._keys_at, spec.entries, spec.fallback // spec.fallback_hashes, rows
        )
        return rows, int(n_missing)

    def shared_rows(self, keys: np.ndarray) -> np.ndarray:
        """int64 [fallback_hashes, n]: the rows whose sum a key has that has none of its own."""
        hashes = self.spec.fallback_hashes
        return self.n_own_rows + shared_rows_of(keys, self._n_shared, self._layout.n_shards, hashes)

    def has(self, keys: np.ndarray) -> np.ndarray:
        """bool [n], whether keys have a row of their own."""
        found: np.ndarray = self.rows(keys) < self.n_own_rows
        return found

    def gather(self, keys: np.ndarray, offset: int, out: np.ndarray) -> None:
        """out[i] = the words of the record of keys[i] from `offset` on, also while another process writes the shard.

        Of a key without a row the sum of those that it shares.
        """
        rows, n_missing = self._find(keys)
        self._gather_rows(rows, offset, out)
        if n_missing and self.spec.fallback_hashes > 1:
            missing = np.flatnonzero(rows >= self.n_own_rows)
            for more in self.shared_rows(keys[missing])[1:]:
                out[missing] += self._gather_rows(more, offset, np.empty((len(missing), out.shape[1]), np.float32))
        moved = np.empty(len(keys), np.int64)
        n = vocabulary_kernels.find_moved(
            self._longs, keys, rows, *self._geometry, self._keys_at, self.spec.entries, moved
        )
        if n:
            again = np.empty((n, out.shape[1]), np.float32)
            self.gather(keys[moved[:n]], offset, again)
            out[moved[:n]] = again

    def _gather_rows(self, rows: np.ndarray, offset: int, out: np.ndarray) -> np.ndarray:
        kernels.gather_rows(self._flat, self._layout.record_starts(rows, self._group), offset, out)
        return out

    def keys(self, shard: int) -> np.ndarray:
        """int64 [rows], a view: the key of each record of a shard, or NO_KEY."""
        start = shard * self._region + self._keys_at
        return self._longs[start : start + self.spec.rows]

    def uses(self, shard: int) -> np.ndarray:
        """uint32 [rows, 2], a view."""
        start = 2 * (shard * self._region + self._uses_at)
        return self._words[start : start + 2 * self.spec.rows].reshape(self.spec.rows, 2)

    def filter_words(self, shard: int) -> np.ndarray:
        """float32 [rows], a view: of each record the four counters that are beside it."""
        start = shard * self._layout.region_words + self._filter_at // 4
        return self._flat[start : start + self.spec.rows * self.spec.has_filter]

    def shard_stats(self, shard: int) -> np.ndarray:
        """int64 [STATS], a view, by `Stat`."""
        start = shard * self._region + self._stats_at
        return self._longs[start : start + STATS]

    def ids(self, shards: list[int]) -> np.ndarray:
        """int64 [n], ascending: those with a row of their own in these shards."""
        found = [keys[keys != NO_KEY] for keys in map(self.keys, shards)]
        return np.sort(ids_of(np.concatenate([np.empty(0, np.int64), *found])))

    def stats(self, shards: list[int]) -> VocabularyStats:
        total, spec = np.zeros(STATS, np.int64), self.spec
        nonzero = looked_at = 0
        for shard in shards:
            total += self.shard_stats(shard)
            start = 4 * self._layout.region_words * shard + self._filter_at
            some = self._small[start : start + min(spec.n_counters, _SAMPLED)]
            nonzero, looked_at = nonzero + int(np.count_nonzero(some)), looked_at + len(some)
        return VocabularyStats(
            int(total[Stat.SIZE]), spec.entries * len(shards), int(total[Stat.ADMITTED]), int(total[Stat.EVICTED]),
            int(total[Stat.NO_ROOM]), int(total[Stat.LOOKUPS]), int(total[Stat.MISSED]), nonzero / max(1, looked_at),
        )  # fmt: skip

    # --- the writer of a shard ---------------------------------------------------------------------------------------

    def looked_up(
        self, keys: np.ndarray, rows: np.ndarray, accesses: np.ndarray, shards: np.ndarray, step: int
    ) -> None:
        """After a step was applied to these shards: count its lookups, admit and evict.

        keys: int64 [n], distinct, of these shards; rows: where they are; accesses: uint32 [n]
        """
        n_missing = vocabulary_kernels.note_lookups(
            self._longs, self._words, keys, rows, accesses, step, *self._geometry, self._stats_at, self._uses_at,
            self.spec.entries,
        )  # fmt: skip
        if n_missing:
            new = np.flatnonzero(rows >= self.n_own_rows)
            self._admit(keys[new], rows[new], accesses[new], step, self.spec.admit_after)
        self._age(shards, step)

    def admit(self, keys: np.ndarray, step: int) -> np.ndarray:
        """Rows for keys, not asking the filter: int64 [n], a fallback row where there is no room. keys: distinct"""
        self._admit(keys, self.rows(keys), np.ones(len(keys), np.uint32), step, 0)
        return self.rows(keys)

    def _admit(self, keys: np.ndarray, rows: np.ndarray, accesses: np.ndarray, step: int, admit_after: int) -> None:
        spec, order = self.spec, np.argsort(keys)
        keys, rows, accesses = keys[order], rows[order], accesses[order]
        new, entries = np.empty_like(keys), np.empty_like(keys)
        n = vocabulary_kernels.choose_entries(
            self._longs, self._words, self._small, keys, rows, accesses, step, *self._geometry, self._stats_at,
            self._keys_at, self._uses_at, self._filter_at, spec.entries, spec.n_counters, admit_after,
            _EVICT[spec.evict], spec.evict_after_steps, new, entries,
        )  # fmt: skip
        new, entries = new[:n], entries[:n]
        starts, ids = self._layout.record_starts(entries, self._group), ids_of(new)
        kernels.init_rows_at(self._flat, starts, ids, self._group.dim, self._seed, self._std)
        vocabulary_kernels.clear_slots_and_count(self._flat, self._words, starts, self._group.record, self._group.dim)
        if spec.init and n:
            self._write_weights(starts, self._computed(ids))
        # Last: a reader that finds a key finds a complete record.
        vocabulary_kernels.publish_keys(self._longs, new, entries, *self._geometry, self._stats_at, self._keys_at)

    def _computed(self, ids: np.ndarray) -> np.ndarray:
        function, name = init_functions.resolve(self.spec.init), self._group.tables[0].name
        return init_functions.initial_values(function, f"init of table {name!r}", ids, self._group.dim)

    def _write_weights(self, starts: np.ndarray, weights: np.ndarray) -> None:
        self._flat[starts.astype(np.int64)[:, None] + np.arange(self._group.dim)] = weights

    def _age(self, shards: np.ndarray, step: int) -> None:
        spec = self.spec
        vocabulary_kernels.age_entries(
            self._longs, self._words, self._small, shards.astype(np.int64), step, self._region, self._stats_at,
            self._keys_at, self._uses_at, self._filter_at, spec.entries, spec.n_counters, _EVICT[spec.evict],
            spec.evict_after_steps, _HALVED_AFTER * spec.entries, self._group.at, self._group.record,
        )  # fmt: skip

    # --- shards that no process reads yet ----------------------------------------------------------------------------

    def clear(self, shard: int) -> None:
        """No key has an entry, nor was counted; fallback rows get their initial values. Records are zeros."""
        group, layout, spec = self._group, self._layout, self.spec
        self.keys(shard)[:] = NO_KEY
        self.uses(shard)[:] = 0
        self.filter_words(shard)[:] = 0
        at = shard * layout.region_words + group.at + spec.entries * group.record
        seed = np.uint64(table_seed(layout.seed, f"{group.tables[0].name}: fallback"))
        kernels.init_rows(
            self._flat, at, group.record, self._n_shared, shard, layout.n_shards, group.dim, seed,
            np.float32(self._std / math.sqrt(spec.fallback_hashes)),
        )  # fmt: skip

    def fill(self, ids: np.ndarray, weights: np.ndarray, step: int) -> None:
        """Admit ids of a shard (int64 [n], distinct) with these weights, float32 [n, dim].

        Raises ShardMemoryError where there is no room for all.
        """
        rows = self.admit(keys_of_ids(ids), step)
        if (missing := np.count_nonzero(rows >= self.n_own_rows)) > 0:
            raise ShardMemoryError(
                f"table {self._group.tables[0].name!r}: {missing} of {len(ids)} assigned ids found no room among the "
                f"{self.spec.entries} entries of their shard: raise its capacity to a tenth more than there are ids"
            )
        self._write_weights(self._layout.record_starts(rows, self._group), weights)

    def insert(self, shard: int, keys: np.ndarray, uses: np.ndarray) -> tuple[np.ndarray, int]:
        """(places int64 [n] in the shard, -1: none; how many keys had to go) for keys out of a checkpoint.

        Nothing is evicted, and the keys that find no room count, in a table without `evict`.
        """
        found, spec = np.empty(len(keys), np.int64), self.spec
        dropped = vocabulary_kernels.insert_entries(
            self._longs, self._words, keys, np.ascontiguousarray(uses), shard, self._region, self._stats_at,
            self._keys_at, self._uses_at, spec.entries, int(bool(spec.evict)), found,
        )  # fmt: skip
        return found, int(dropped)

    def insert_filter(self, shard: int, words: np.ndarray) -> None:
        """Counters of a filter of another size: each id's are at least what they were.

        words: float32 [n], as of `filter_words` without those of shared records
        """
        now = self.filter_words(shard).view(np.uint8)[: self.spec.n_counters]
        vocabulary_kernels.resize_filter(np.ascontiguousarray(words).view(np.uint8), now)

    def settle(self, shard: int) -> int:
        """After rows came back: of an id with two entries the one used last stays, and ageing continues where it was.

        Returns how many entries went.
        """
        cleared = vocabulary_kernels.clear_doubles(
            self._longs, self._words, shard, *self._geometry, self._stats_at, self._keys_at, self._uses_at,
            self.spec.entries,
        )  # fmt: skip
        stats, entries = self.shard_stats(shard), self.spec.entries
        stats[Stat.USED], swept = map(int, self.uses(shard)[entries])
        stats[Stat.SWEPT] = swept if swept < entries else 0  # fewer entries are here than were saved
        if self.spec.has_filter:
            stats[Stat.COUNTED] = self.filter_words(shard)[entries:].view(np.uint32)[0]
        return int(cleared)
