"""Rows of a saved model that stay in their store: blocks are read when a lookup needs them (`block_cache`).

A key is found by its shard, then, where the shard has keys, by the block of keys that the index names and a search in
it, then in the block of its row. What is read for keys and rows of all tables of a request is read together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gba_hvd.serving.block_cache import BlockCache
from gba_hvd.serving.block_index import n_key_blocks
from gba_hvd.serving.direct_rows import all_memory
from gba_hvd.serving.manifest import RowShards, StoredTable
from gba_hvd.serving.row_shards import key_buckets

# The memory of this process, of which blocks are parts.
_WORDS = all_memory()
_LONGS = _WORDS.view(np.int64)
_HELD_BYTES = 64 << 20  # of blocks that one lookup holds at once

Plan = Iterator[np.ndarray]
"""Of the lookups in one table: the blocks they need; then those they need once these were read; and so on."""


class RemoteRows:
    """The rows of one part of a table. dim: float32 columns of a row"""

    def __init__(self, cache: BlockCache, table: StoredTable, part: RowShards) -> None:
        self._cache, self._part, self._dim = cache, part, table.dim
        shards = [cache.add(shard) for shard in part.shards]

        def numbers(of: Callable[[int], int]) -> np.ndarray:
            return np.array([of(i) for i in range(len(shards))], np.int64)

        self._bucket = numbers(lambda i: shards[i].shard.bucket)
        self._n_rows = numbers(lambda i: shards[i].shard.n_rows)
        self._rows_at = numbers(lambda i: shards[i].shard.rows_at)
        self._first, self._unit = numbers(lambda i: shards[i].first), numbers(lambda i: shards[i].unit)
        self._n_key_blocks = numbers(lambda i: n_key_blocks(shards[i].shard, shards[i].unit))
        self._key_block_at = np.cumsum(np.append(0, self._n_key_blocks))  # in _first_keys
        known = [np.empty(0, np.int64)]
        for one in shards:  # (a shard of one block: any key of it is in that block)
            least = np.full(n_key_blocks(one.shard, one.unit), np.iinfo(np.int64).min)
            known.append(least if one.blocks is None else one.blocks.first_keys)
        self._first_keys = np.concatenate(known)
        per_row = 2 + 4 * self._dim // int(self._unit.min(initial=1 << 30))  # blocks, at most
        self._step = max(1, _HELD_BYTES // (per_row * int(self._unit.max(initial=1))))

    @property
    def has_keys(self) -> bool:
        """Some rows are found by keys that are stored beside them."""
        return bool(self._n_key_blocks.any())

    def find(self, keys: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """Write the rows that are there into `out`; which are, bool [n]."""
        found = np.zeros(len(keys), np.bool_)
        for start in range(0, len(keys), self._step):
            here = slice(start, start + self._step)
            shard, row, found[here] = self._found_at(keys[here])
            if out is not None and found[here].any():
                hit = np.flatnonzero(found[here])
                out[start + hit] = self._rows(shard[hit], row[hit])
        return found

    def keys(self) -> np.ndarray:
        found = [np.empty(0, np.int64)]
        for i, (n, first) in enumerate(zip(self._n_rows.tolist(), self._first.tolist(), strict=True)):
            if self._n_key_blocks[i]:
                held = self._cache.get(np.arange(first, first + self._n_key_blocks[i]))
                found.append(np.concatenate(held.blocks)[: 8 * n].view("<i8"))
            else:
                start = int(self._bucket[i]) * self._part.rows_per_bucket
                found.append(np.arange(start, start + n))
        return np.concatenate(found)

    def key_blocks(self, keys: np.ndarray) -> np.ndarray:
        """The blocks that say where keys are; none for a shard whose rows are numbered. Distinct, ascending."""
        shard = self._shards_of(keys)
        some = np.flatnonzero((shard >= 0) & (self._n_key_blocks[shard] > 0)) if len(self._bucket) else shard[:0]
        shard = shard[some]
        return np.unique(self._first[shard] + self._key_blocks(keys[some], shard))

    def row_blocks(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the blocks of the rows that are there, which keys have one: bool [n])"""
        shard, row, found = self._found_at(keys)
        shard, row = shard[found], row[found]
        block, _, cut = self._blocks_of(shard, row)
        return np.unique(np.append(block, self._all_blocks_of(shard[cut], row[cut])[0])), found

    def _shards_of(self, keys: np.ndarray) -> np.ndarray:
        """int64 [n]: numbers of shards; -1: no shard has the key."""
        part = self._part
        buckets = keys // part.rows_per_bucket if part.rows_per_bucket else key_buckets(keys, part.bucket_bits)
        if not len(self._bucket):
            return np.full(len(keys), -1)
        at = np.minimum(np.searchsorted(self._bucket, buckets), len(self._bucket) - 1)
        return np.where(self._bucket[at] == buckets, at, -1)

    def _key_blocks(self, keys: np.ndarray, shard: np.ndarray) -> np.ndarray:
        """int64 [n]: of each key, the block of its shard that has it if any has."""
        low, high = self._key_block_at[shard], self._key_block_at[shard + 1]
        at = _last_not_above(lambda some: self._first_keys[some], low, high, keys)
        found: np.ndarray = np.maximum(at, low) - low
        return found

    def _found_at(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(shard, row within it, whether it has one) of each key: int64, int64, bool [n]"""
        shard = self._shards_of(keys)
        row, found = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.bool_)
        if not len(self._bucket):
            return shard, row, found
        is_numbered = (shard >= 0) & (self._n_key_blocks[shard] == 0)
        row[is_numbered] = keys[is_numbered] - self._bucket[shard[is_numbered]] * self._part.rows_per_bucket
        found[is_numbered] = row[is_numbered] < self._n_rows[shard[is_numbered]]
        some = np.flatnonzero((shard >= 0) & ~is_numbered)
        if len(some):
            row[some], found[some] = self._search(keys[some], shard[some])
        return shard, row, found

    def _search(self, keys: np.ndarray, shard: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row within the shard, whether the key is there), of shards that have keys."""
        block = self._key_blocks(keys, shard)
        numbers, index = np.unique(self._first[shard] + block, return_inverse=True)
        held = self._cache.get(numbers)
        per_block = self._unit[shard] // 8
        low = held.words[index] // 2
        high = low + np.minimum(self._n_rows[shard] - block * per_block, per_block)
        at = np.maximum(_last_not_above(lambda some: np.take(_LONGS, some), low, high, keys), low)
        is_there: np.ndarray = np.take(_LONGS, at) == keys
        return block * per_block + at - low, is_there

    def _blocks_of(self, shard: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(block of the first number of each row: int64 [n]; its place in the block, in words of 4 bytes: int64 [n];
        which rows continue in the next block: int64 [m])"""
        block, within = np.divmod(self._rows_at[shard] // 4 + row * self._dim, self._unit[shard] // 4)
        return block + self._first[shard], within, np.flatnonzero(within + self._dim > self._unit[shard] // 4)

    def _all_blocks_of(self, shard: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(block of each number of rows, its place in it), both int64 [n, dim]"""
        words = (self._rows_at[shard] // 4 + row * self._dim)[:, None] + np.arange(self._dim)
        block, within = np.divmod(words, (self._unit[shard] // 4)[:, None])
        return block + self._first[shard][:, None], within

    def _rows(self, shard: np.ndarray, row: np.ndarray) -> np.ndarray:
        """float32 [n, dim]"""
        block, within, cut = self._blocks_of(shard, row)
        blocks, places = self._all_blocks_of(shard[cut], row[cut])
        numbers = np.unique(np.concatenate([block, blocks.reshape(-1)]))
        held = self._cache.get(numbers)
        at = held.words[np.searchsorted(numbers, block)] + within
        words = at[:, None] + np.arange(self._dim)
        words[cut] = held.words[np.searchsorted(numbers, blocks)] + places
        rows: np.ndarray = np.take(_WORDS, words)  # (`held` lives until then)
        return rows


def fetch_together(cache: BlockCache, plans: Sequence[Plan]) -> None:
    """Read what the lookups of a request in several tables need, all tables at once, unless the cache is too small."""
    while wanted := [blocks for plan in plans if (blocks := next(plan, None)) is not None]:
        numbers = np.unique(np.concatenate(wanted))
        if cache.sizes(numbers) > cache.n_bytes:
            return
        cache.get(numbers)


def _last_not_above(
    read: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """int64 [n]: of each key, the last place from low to high - 1 whose number is not above it; low - 1: all are."""
    start, low = low, low - 1
    while (open_ := high - low > 1).any():
        middle = np.where(open_, (low + high) // 2, start)
        is_low = open_ & (read(middle) <= keys)
        low = np.where(is_low, middle, low)
        high = np.where(open_ & ~is_low, middle, high)
    return low
