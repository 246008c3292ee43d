"""Blocks of a saved model's shards, read from their store when a request needs them and kept in a bounded memory.

Missing blocks of a request are read together, by a few threads; neighbours in a shard by one read. Each is verified
before anyone sees it. A request holds its blocks until it is done, also those that the cache drops meanwhile.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import xxhash

from gba_hvd.serving.block_index import BlocksOf, n_blocks
from gba_hvd.serving.direct_rows import word_of
from gba_hvd.serving.manifest import Shard
from gba_hvd.serving.stored_bytes import sha256_of
from recovery.errors import Damaged, NotFound
from recovery.storage.store import Store, read

READERS = 16
_MOST_AT_ONCE = 1 << 20  # bytes of one read of several blocks


@dataclass(frozen=True)
class CachedShard:
    """A shard cut in blocks. first: the number of its first block, of all of the cache; unit: bytes of a block"""

    shard: Shard
    blocks: BlocksOf | None
    first: int
    unit: int

    @property
    def n_blocks(self) -> int:
        return n_blocks(self.shard.n_bytes, self.unit)


@dataclass(frozen=True)
class Held:
    """Blocks of a request, which stay what and where they are as long as this lives.

    words: int64 [n], where each begins in `direct_rows.all_memory`; blocks: uint8 arrays
    """

    words: np.ndarray
    blocks: Sequence[np.ndarray]


@dataclass(frozen=True)
class _Block:
    data: np.ndarray
    word: int


class BlockCache:
    """At most n_bytes of blocks, those used last; and those that running requests hold. Thread-safe.

    Shards are added before the first block is asked for. block_bytes: 0: a shard is one block.
    """

    def __init__(self, store: Store, n_bytes: int, index: dict[str, BlocksOf], block_bytes: int) -> None:
        self._store, self._room, self._index, self._block_bytes = store, n_bytes, index, block_bytes
        self.n_bytes = n_bytes
        self._shards: list[CachedShard] = []
        self._n_blocks = 0
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._coming: dict[int, Future[dict[int, _Block]]] = {}
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._firsts: list[int] = []

    def add(self, shard: Shard) -> CachedShard:
        blocks = self._index.get(shard.name)
        one = CachedShard(shard, blocks, self._n_blocks, shard.n_bytes if blocks is None else self._block_bytes)
        self._shards.append(one)
        self._firsts.append(one.first)
        self._n_blocks += one.n_blocks
        return one

    def get(self, numbers: np.ndarray) -> Held:
        """Blocks by their numbers (int64 [n], distinct and ascending).

        Raises Damaged where one is gone or not what was saved, StoreError where the store fails.
        """
        wanted = numbers.tolist()
        with self._lock:
            found = {number: block for number in wanted if (block := self._used(number)) is not None}
            missing = [number for number in wanted if number not in found]
            if not missing:
                return _held([found[number] for number in wanted])
            coming = {self._coming[number] for number in missing if number in self._coming}
            fresh = self._runs([number for number in missing if number not in self._coming])
            mine = [self._ask(some) for some in fresh]
        reads = [*coming, *mine]
        wait(reads)  # also after an error: the next request must not join a read that fails later
        for future in reads:
            found |= future.result()
        return _held([found[number] for number in wanted])

    def sizes(self, numbers: np.ndarray) -> int:
        """Bytes of blocks, the last of a shard counted as a whole one."""
        return sum(self._shards[self._number_of_shard(number)].unit for number in numbers.tolist())

    def _used(self, number: int) -> _Block | None:
        block = self._blocks.get(number)
        if block is not None:
            self._blocks.move_to_end(number)
        return block

    def _runs(self, numbers: Sequence[int]) -> Iterable[list[int]]:
        """Blocks side by side in one shard, of at most _MOST_AT_ONCE bytes."""
        for number, some in groupby(numbers, self._number_of_shard):
            shard, run = self._shards[number], list[int]()
            for block in some:
                if run and (block != run[-1] + 1 or (len(run) + 1) * shard.unit > _MOST_AT_ONCE):
                    yield run
                    run = []
                run.append(block)
            yield run

    def _number_of_shard(self, block: int) -> int:
        return bisect_right(self._firsts, block) - 1

    def _ask(self, run: list[int]) -> Future[dict[int, _Block]]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS, "remote-rows")
        future = self._pool.submit(self._read, run)
        self._coming |= dict.fromkeys(run, future)
        return future

    def _read(self, run: list[int]) -> dict[int, _Block]:
        try:
            shard = self._shards[self._number_of_shard(run[0])]
            found = self._verified(shard, run)
        except BaseException:
            with self._lock:
                for number in run:
                    del self._coming[number]
            raise
        with self._lock:
            for number, block in found.items():
                del self._coming[number]
                self._blocks[number] = block
                self._room -= block.data.nbytes
            while self._room < 0:
                self._room += self._blocks.popitem(last=False)[1].data.nbytes
        return found

    def _verified(self, one: CachedShard, run: list[int]) -> dict[int, _Block]:
        name, unit, first = one.shard.name, one.unit, run[0] - one.first
        start = first * unit
        wanted = min(len(run) * unit, one.shard.n_bytes - start)
        try:
            data = read(self._store, name, start, wanted)
        except NotFound as error:
            raise Damaged(
                f"{self._store.url}: {name} is gone: the model, or this version of it, was deleted since it was opened"
            ) from error
        if len(data) != wanted:
            raise Damaged(
                f"{self._store.url}: {name} is truncated or overwritten: bytes {start:,} to {start + wanted:,} were "
                f"asked for, {len(data):,} came"
            )
        found = {}
        for at, number in enumerate(run):
            part = data[at * unit : (at + 1) * unit]
            if one.blocks is None:
                is_right = sha256_of([part]) == one.shard.sha256
            else:
                is_right = xxhash.xxh3_64_intdigest(part) == int(one.blocks.checksums[first + at])
            if not is_right:
                at_byte = start + at * unit
                raise Damaged(
                    f"{self._store.url}: {name} is not what was saved: bytes {at_byte:,} to {at_byte + len(part):,} "
                    "have another checksum"
                )
            block = np.array(np.frombuffer(part, np.uint8))  # its own memory, aligned for the keys in it
            found[number] = _Block(block, word_of(block))
        return found


def _held(blocks: list[_Block]) -> Held:
    return Held(np.array([one.word for one in blocks], np.int64), [one.data for one in blocks])
