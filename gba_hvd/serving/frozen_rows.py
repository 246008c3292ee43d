"""The rows of a saved model, for lookups: in memory, mapped, or in their store. It is the memory of `EmbeddingTables`.

In memory all shards of a table are read and verified when the model is opened. Mapped, a shard is opened when a row of
it is first looked up, its size is checked, and the page cache of the machine holds what is used. Of rows that stay in
their store, blocks are read (`remote_rows`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch

from gba_hvd.embedding.row_gradients import distinct
from gba_hvd.errors import BadInput
from gba_hvd.serving.block_cache import BlockCache
from gba_hvd.serving.compact_rows import PACKED, Float32Rows
from gba_hvd.serving.direct_rows import Buckets, DirectRows
from gba_hvd.serving.manifest import RowShards, StoredTable
from gba_hvd.serving.remote_rows import Plan, RemoteRows, fetch_together
from gba_hvd.serving.row_shards import initial_rows, key_buckets, shard_arrays
from gba_hvd.serving.stored_bytes import get_verified
from gba_hvd.shm.layout import Group, Layout
from recovery.errors import Damaged, StoreError
from recovery.hashed_ids import ids_of, shared_rows_of
from recovery.storage.store import Store

_READERS = 4


class RowReader(Protocol):
    """The rows of one table by key: those of a hashed table as of `recovery.hashed_ids`, else the ids themselves."""

    def gather(self, keys: np.ndarray, out: np.ndarray) -> None:
        """out[i] = the weights of keys[i]. keys: int64 [n]; out: float32 [n, dim]"""

    def has(self, keys: np.ndarray) -> np.ndarray:
        """bool [n]: which keys have a row of their own."""

    def keys(self) -> np.ndarray:
        """int64 [n]: those keys."""


class FrozenRows:
    """What `EmbeddingTables.memory` is in a model that is not trained. readers: by table. cache: of their blocks"""

    def __init__(self, layout: Layout, readers: Mapping[str, RowReader], cache: BlockCache | None = None) -> None:
        self._layout, self._readers, self._cache = layout, readers, cache
        self._direct = {group: _direct(layout, group, readers) for group in layout.groups}

    def gather(self, keys: np.ndarray, group: Group, offset: int, out: np.ndarray) -> None:
        """As `ShardMemory.gather`, of weights only; keys may repeat."""
        if offset:
            raise BadInput("a saved model has the weights of its rows, no slots of an optimizer")
        direct = self._direct[group]
        if direct is not None:
            direct.gather(keys, out)
            return
        keys, index, _ = distinct(keys)
        rows = np.empty((len(keys), group.dim), np.float32)
        self._gather_distinct(keys, group, rows)
        np.take(rows, index, axis=0, out=out, mode="clip")  # (other modes buffer `out`)

    @property
    def is_remote(self) -> bool:
        """Lookups wait for a store: `fetch` those of a request at once."""
        return self._cache is not None

    def fetch(self, wanted: Sequence[tuple[Group, np.ndarray]]) -> None:
        """Read what lookups of these keys (int64 [n], they may repeat) will need, together."""
        assert self._cache is not None
        parts = [part for group, keys in wanted for part in self._by_table(distinct(keys)[0], group)]
        fetch_together(self._cache, [cast(StoredRows, self._readers[name]).plan(keys) for name, _, keys in parts])

    def _gather_distinct(self, keys: np.ndarray, group: Group, out: np.ndarray) -> None:
        parts = list(self._by_table(keys, group))
        if self._cache is not None and len(parts) > 1:
            self.fetch([(group, keys)])
        for name, mine, own in parts:
            rows = np.empty((len(mine), group.dim), np.float32)
            self._readers[name].gather(own, rows)
            out[mine] = rows

    def _by_table(self, keys: np.ndarray, group: Group) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """(table, which of the keys are its own, these keys as its reader takes them) of each that has some."""
        if group.hashed is not None:
            yield group.tables[0].name, np.arange(len(keys)), keys
            return
        starts = np.array(group.first) * self._layout.n_shards
        owner = np.searchsorted(starts, keys, side="right") - 1
        for number, table in enumerate(group.tables):
            mine = np.flatnonzero(owner == number)
            if len(mine):
                yield table.name, mine, keys[mine] - starts[number]

    def vocabulary(self, group: Group) -> FrozenVocabulary | None:
        return None if group.hashed is None else FrozenVocabulary(self._readers[group.tables[0].name])

    def ready(self) -> list[int]:
        """All shards are here."""
        return list(range(self._layout.n_shards))


def _direct(layout: Layout, group: Group, readers: Mapping[str, RowReader]) -> DirectRows | None:
    """None where a table of the group is hashed, or has rows that are not stored."""
    buckets = [getattr(readers.get(table.name), "buckets", None) for table in group.tables]
    if group.hashed is not None or any(one is None for one in buckets):
        return None
    return DirectRows([first * layout.n_shards for first in group.first], cast(Any, buckets), group.dim)


class FrozenVocabulary:
    """Which ids of a hashed table have a row of their own."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader

    def has(self, keys: np.ndarray) -> np.ndarray:
        return self._reader.has(keys)

    def ids(self, shards: list[int]) -> np.ndarray:
        return np.sort(ids_of(self._reader.keys()))


class StoredRows:
    """A `RowReader` of the shards of one table.

    mapped: from a folder; cache: read when they are wanted; without both read into memory now, as dtype
    """

    def __init__(
        self, store: Store, table: StoredTable, mapped: Path | None = None, dtype: str = "float32",
        cache: BlockCache | None = None,
    ) -> None:  # fmt: skip
        def part(shards: RowShards) -> _InMemory | _Mapped | RemoteRows:
            if cache is not None:
                return RemoteRows(cache, table, shards)
            if mapped is not None:
                return _Mapped(table, shards, mapped)
            return _InMemory(store, table, shards, dtype)

        self._table, self._rows = table, part(table.rows)
        self._shared = None if table.shared is None else part(table.shared)

    @property
    def buckets(self) -> Buckets | None:
        """All rows, for `DirectRows`; None where some are not stored, not float32, or have keys of their own."""
        if isinstance(self._rows, RemoteRows):
            return None
        per = self._table.rows.rows_per_bucket
        return self._rows.buckets if self._table.rows.is_complete and per and not per & (per - 1) else None

    def gather(self, keys: np.ndarray, out: np.ndarray) -> None:
        missing = np.flatnonzero(~self._rows.find(keys, out))
        if not len(missing):
            return
        absent, rows = keys[missing], np.empty((len(missing), self._table.dim), np.float32)
        if self._shared is not None:
            assert self._table.shared is not None
            self._sum_shared(self._shared, self._table.shared.n_keys, absent, rows)
        elif self._table.initial is not None:
            rows[:] = initial_rows(self._table.initial, absent, self._table.dim)
        else:
            raise Damaged(f"table {self._table.name!r}: its manifest names no shard for row {absent[0]}")
        out[missing] = rows

    def _sum_shared(self, part: _InMemory | _Mapped | RemoteRows, n: int, keys: np.ndarray, out: np.ndarray) -> None:
        """out: float32 [n, dim], the sums of the shared rows of keys. n: shared rows"""
        table = self._table
        first, *more = shared_rows_of(keys, n, table.shared_in, table.shared_hashes)
        there = part.find(first, out).all()
        for shared in more:
            row = np.empty_like(out)
            there &= part.find(shared, row).all()
            out += row
        if not there:
            raise Damaged(f"table {table.name!r}: its manifest names no shard for some shared rows")

    def plan(self, keys: np.ndarray) -> Plan:
        """What a lookup of distinct keys reads, of rows that stay in their store."""
        assert isinstance(self._rows, RemoteRows)
        if self._rows.has_keys:
            yield self._rows.key_blocks(keys)
        blocks, found = self._rows.row_blocks(keys)
        if isinstance(self._shared, RemoteRows):
            table = self._table
            assert table.shared is not None
            shared = shared_rows_of(keys[~found], table.shared.n_keys, table.shared_in, table.shared_hashes)
            blocks = np.append(blocks, self._shared.row_blocks(shared.reshape(-1))[0])
        yield blocks

    def has(self, keys: np.ndarray) -> np.ndarray:
        return self._rows.find(keys, None)

    def keys(self) -> np.ndarray:
        return self._rows.keys()


class _InMemory:
    """All shards in one array, in the order of their keys, which are left out where no row is missing."""

    def __init__(self, store: Store, table: StoredTable, part: RowShards, dtype: str) -> None:
        ends = np.cumsum([0, *(shard.n_rows for shard in part.shards)])
        self._n = int(ends[-1])
        self._rows = PACKED[dtype](self._n, table.dim)
        self._keys = None if part.is_complete else np.empty(self._n, np.int64)

        def read(number: int) -> None:
            shard, here = part.shards[number], slice(int(ends[number]), int(ends[number + 1]))
            keys, rows = shard_arrays(get_verified(store, shard), shard, table, part)
            try:
                self._rows.put(here, rows)
            except ValueError as error:
                raise Damaged(f"table {table.name!r}: {shard.name} has {error}: open the model in float32") from error
            if self._keys is not None:
                self._keys[here] = keys

        with ThreadPoolExecutor(_READERS, "load-model") as pool:
            list(pool.map(read, range(len(part.shards))))

    @property
    def buckets(self) -> Buckets | None:
        """None of rows that are not float32."""
        rows = self._rows
        return Buckets(self._n, self._n, lambda bucket: rows.array) if isinstance(rows, Float32Rows) else None

    def find(self, keys: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """Write the rows that are there into `out`; which are, bool [n]."""
        if self._keys is None:
            if out is not None:
                self._rows.take(keys, out)
            return np.ones(len(keys), np.bool_)
        if not self._n:
            return np.zeros(len(keys), np.bool_)
        at = np.minimum(np.searchsorted(self._keys, keys), self._n - 1)
        found: np.ndarray = self._keys[at] == keys
        if out is not None:
            rows = np.empty((np.count_nonzero(found), out.shape[1]), np.float32)
            self._rows.take(at[found], rows)
            out[found] = rows
        return found

    def keys(self) -> np.ndarray:
        return np.arange(self._n) if self._keys is None else self._keys


class _Mapped:
    """Shards as mapped files, opened when a row of theirs is first looked up."""

    def __init__(self, table: StoredTable, part: RowShards, mapped: Path) -> None:
        self._table, self._part, self._folder = table, part, mapped
        self._shards = {shard.bucket: shard for shard in part.shards}
        self._open: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()

    @property
    def buckets(self) -> Buckets:
        return Buckets(self._part.n_keys, self._part.rows_per_bucket, lambda bucket: self._opened(bucket)[1])

    def find(self, keys: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        part = self._part
        buckets = keys // part.rows_per_bucket if part.rows_per_bucket else key_buckets(keys, part.bucket_bits)
        found = np.zeros(len(keys), np.bool_)
        order = np.argsort(buckets, kind="stable")
        distinct, starts = np.unique(buckets[order], return_index=True)
        for bucket, mine in zip(distinct.tolist(), np.split(order, starts[1:]), strict=True):
            if bucket not in self._shards:
                continue
            there, rows = self._opened(bucket)
            at = np.minimum(np.searchsorted(there, keys[mine]), len(there) - 1)
            hit = there[at] == keys[mine]
            found[mine] = hit
            if out is not None:
                out[mine[hit]] = rows[at[hit]]
        return found

    def keys(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int64), *(self._opened(bucket)[0] for bucket in self._shards)])

    def _opened(self, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            if bucket not in self._open:
                shard = self._shards[bucket]
                path = self._folder / shard.name
                try:
                    n_bytes = path.stat().st_size
                    if n_bytes != shard.n_bytes:
                        raise Damaged(
                            f"{path} is truncated or overwritten: {n_bytes} bytes, {shard.n_bytes} were saved"
                        )
                    # Not np.memmap, which keeps a file descriptor of each shard, and a table has up to 1,024.
                    data = torch.from_file(str(path), shared=False, size=n_bytes, dtype=torch.uint8).numpy()
                except FileNotFoundError as error:
                    raise Damaged(f"{path} is gone") from error
                except (OSError, RuntimeError) as error:
                    raise StoreError(f"{path} cannot be mapped: {error}") from error
                self._open[bucket] = shard_arrays(data.data, shard, self._table, self._part)
            return self._open[bucket]
