"""Cuts the rows of a table in shards and writes those that the store has not.

A shard has the rows of a fixed set of keys, its bucket, in every version; so a version of which few rows have changed
shares the shards of all other buckets. Trained float32 numbers compress by 5 to 7 % (`recovery.format`), and
what is compressed cannot be mapped: rows are stored as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gba_hvd import kernels
from gba_hvd.errors import BadInput
from gba_hvd.serving.block_index import BLOCK_BYTES, index_of
from gba_hvd.serving.manifest import ALIGNMENT, Initial, RowShards, Shard, StoredBlocks, StoredTable
from gba_hvd.serving.stored_bytes import put_file, put_missing, sha256_of
from recovery.storage.store import Store

_LEAST_SHARD_BYTES, _MOST_SHARDS = 16 << 10, 1024
_BLOCK_BYTES = 256 << 20
_WRITERS = 4


class TableRows(Protocol):
    """The rows of one table, wherever they are.

    n_rows: of a numbered table; 0: it is hashed. capacity: of a hashed one, ids that may have a row of their own.
    initial: of rows that were never trained, where it is known. shared_hashes, shared_in: as of `StoredTable`
    """

    name: str
    dim: int
    n_rows: int
    capacity: int
    initial: Initial | None
    shared_hashes: int
    shared_in: int

    def numbered(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, dim], of a numbered table."""

    def keys(self) -> np.ndarray:
        """int64 [n], ascending, of a hashed table: those with a row of their own."""

    def of_keys(self, keys: np.ndarray) -> np.ndarray:
        """float32 [n, dim], of some of them."""

    def shared(self) -> np.ndarray:
        """float32 [n, dim], of a hashed table."""


@dataclass
class Written:
    """Of one version. n_shards, n_bytes: that the store had not before; n_rows: stored in all shards."""

    n_shards: int = 0
    n_bytes: int = 0
    n_rows: int = 0


class ShardWriter:
    """Writes shards by several threads. only_trained: rows that are as they were initialised are not stored."""

    def __init__(
        self, store: Store, *, only_trained: bool, shard_bytes: int | None = None,
        on_bytes: Callable[[int], object] = lambda n: None,
    ) -> None:  # fmt: skip
        if shard_bytes is not None and shard_bytes < 4096:
            raise BadInput(f"shard_bytes must be at least 4096, got {shard_bytes}")
        self._store, self._only_trained, self._shard_bytes, self._on_bytes = store, only_trained, shard_bytes, on_bytes
        self._known = store.names("rows/")
        self._index: list[bytes] = []  # in the order of the shards
        self.written = Written()

    def table(self, rows: TableRows) -> StoredTable:
        """Write all shards of a table."""
        if rows.n_rows:
            initial = rows.initial if self._only_trained else None
            per = self._rows_per_bucket(rows.n_rows, rows.dim)
            shards = self._all(_numbered(rows, per, initial))
            part = RowShards(shards, rows_per_bucket=per, n_keys=rows.n_rows)
            return StoredTable(rows.name, rows.dim, "numbered", rows.n_rows, part, None, initial)
        keys, shared = rows.keys(), rows.shared()
        # By the capacity: the buckets of a vocabulary that grows stay what they are.
        bits = (rows.capacity // self._rows_per_bucket(rows.capacity, rows.dim)).bit_length()
        part = RowShards(self._all(_keyed(rows, keys, bits)), bucket_bits=bits)
        per = self._rows_per_bucket(len(shared), rows.dim)
        pieces = ((b, None, shared[b * per : (b + 1) * per]) for b in range(-(-len(shared) // per)))
        own = RowShards(self._all(pieces), rows_per_bucket=per, n_keys=len(shared))
        hashes = rows.shared_hashes, rows.shared_in
        return StoredTable(rows.name, rows.dim, "hash64", len(keys), part, own, None, *hashes)

    def put_index(self) -> StoredBlocks | None:
        """Write what verifies the blocks of all shards written so far; None: none is larger than a block."""
        if not any(self._index):
            return None
        return StoredBlocks(put_file(self._store, self._index, "blocks"), BLOCK_BYTES)

    def _rows_per_bucket(self, n_rows: int, dim: int) -> int:
        """A power of two, so that a table that grows keeps its buckets for long."""
        wanted = self._shard_bytes or max(_LEAST_SHARD_BYTES, 4 * dim * n_rows // _MOST_SHARDS)
        return 1 << (max(1, wanted // (4 * dim)) - 1).bit_length()

    def _all(self, pieces: Iterator[tuple[int, np.ndarray | None, np.ndarray]]) -> tuple[Shard, ...]:
        waiting: list[Future[tuple[Shard, bool, bytes]]] = []
        done: list[Shard] = []
        with ThreadPoolExecutor(_WRITERS, "save-model") as pool:
            for piece in pieces:
                waiting.append(pool.submit(self._put, *piece))
                if len(waiting) > 2 * _WRITERS:
                    done.append(self._count(*waiting.pop(0).result()))
            return tuple(done + [self._count(*one.result()) for one in waiting])

    def _count(self, shard: Shard, is_new: bool, index: bytes) -> Shard:
        self._index.append(index)
        self.written.n_rows += shard.n_rows
        self.written.n_shards += is_new
        self.written.n_bytes += shard.n_bytes * is_new
        self._on_bytes(shard.n_bytes)
        return shard

    def _put(self, bucket: int, keys: np.ndarray | None, rows: np.ndarray) -> tuple[Shard, bool, bytes]:
        pieces = [np.ascontiguousarray(rows, "<f4").data.cast("B")]
        if keys is not None:
            pieces.insert(0, np.ascontiguousarray(keys, "<i8").data.cast("B"))
            pieces.insert(1, memoryview(bytes(-8 * len(keys) % ALIGNMENT)))
        shard = Shard(bucket, len(rows), keys is not None, sum(map(len, pieces)), sha256_of(pieces))
        is_new = put_missing(self._store, shard.name, shard.sha256, pieces, self._known.get(shard.name))
        return shard, is_new, index_of(pieces, keys)


def _numbered(
    rows: TableRows, per: int, initial: Initial | None
) -> Iterator[tuple[int, np.ndarray | None, np.ndarray]]:
    """(bucket, keys where not all rows of it are stored, rows) of each bucket that has some."""
    block = max(1, _BLOCK_BYTES // (4 * rows.dim * per)) * per
    for first in range(0, rows.n_rows, block):
        values = rows.numbered(first, min(first + block, rows.n_rows))
        for at in range(0, len(values), per):
            some, keys = values[at : at + per], None
            if initial is not None:
                numbers = np.arange(first + at, first + at + len(some))
                trained = (some.view(np.uint32) != initial_rows(initial, numbers, rows.dim).view(np.uint32)).any(axis=1)
                if not trained.any():
                    continue
                if not trained.all():
                    keys, some = numbers[trained], some[trained]
            yield (first + at) // per, keys, some


def _keyed(rows: TableRows, keys: np.ndarray, bits: int) -> Iterator[tuple[int, np.ndarray | None, np.ndarray]]:
    """(bucket, its keys, rows) of each bucket that has some; the rows of many buckets are read at once."""
    buckets = key_buckets(keys, bits)
    distinct = np.unique(buckets)
    edges = np.append(np.searchsorted(buckets, distinct), len(keys))
    first, most = 0, _BLOCK_BYTES // (4 * rows.dim)
    while first < len(distinct):
        last = max(first + 1, int(np.searchsorted(edges, edges[first] + most, side="right")) - 1)
        start = edges[first]
        values = rows.of_keys(keys[start : edges[last]])
        for at in range(first, last):
            yield int(distinct[at]), keys[edges[at] : edges[at + 1]], values[edges[at] - start : edges[at + 1] - start]
        first = last


def key_buckets(keys: np.ndarray, bits: int) -> np.ndarray:
    """int64 [n]: the bucket of each key of a hashed table."""
    if not bits:
        return np.zeros(len(keys), np.int64)
    return (keys >> np.int64(64 - bits)) + (1 << (bits - 1))


def initial_rows(initial: Initial, rows: np.ndarray, dim: int) -> np.ndarray:
    """float32 [n, dim]: what rows (int64 [n]) are before they are trained, as the kernel of a job makes them."""
    out, seed, std = np.empty((len(rows), dim), np.float32), np.uint64(initial.seed), np.float32(initial.std)
    starts = np.arange(len(rows), dtype=np.uint64) * np.uint64(dim)
    kernels.init_rows_at(out.reshape(-1), starts, np.ascontiguousarray(rows, np.int64), dim, seed, std)
    return out


def shard_arrays(data: memoryview, shard: Shard, table: StoredTable, part: RowShards) -> tuple[np.ndarray, np.ndarray]:
    """(keys int64 [n], rows float32 [n, dim]) of a shard's bytes; views."""
    rows = np.frombuffer(data, "<f4", offset=shard.rows_at).reshape(shard.n_rows, table.dim)
    if shard.has_keys:
        return np.frombuffer(data, "<i8", shard.n_rows), rows
    first = shard.bucket * part.rows_per_bucket
    return np.arange(first, first + shard.n_rows), rows
