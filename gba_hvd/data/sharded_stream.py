"""`ShardedStream`: samples that can only be read in sequence, cut in shards, of unknown number.

    shards in an order by seed and epoch -> segments of some shards -> counted -> a `Segment`, which has a length

A segment is a dataset as others are: its shards are its groups of samples (`row_group_order`), each read to its end by
the worker of its lane. Who counts what, and when, is in DESIGN.md, section "Streams".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from gba_hvd import kernels
from gba_hvd.data.group_cache import GroupCache
from gba_hvd.data.row_group_order import RowGroupOrder
from gba_hvd.epoch import SEGMENTS, EpochPlan
from gba_hvd.errors import BadInput
from gba_hvd.reading.datasets import Block, ShardList
from gba_hvd.reading.slow_reads import reading
from gba_hvd.shm.layout import digest, table_seed
from recovery.redaction import redacted

_OF_A_LANE = 4  # shards in a segment, where nothing else is asked for
_COUNTED = -1  # the lane, for the cache, of shards that are read to be counted


class ShardedStream:
    """Samples in shards that are read from their beginning to their end: a dataset for `gba_hvd.batches`.

        def read(shard):
            for line in gzip.open(shard, "rt"):
                yield json.loads(line)

        train = ShardedStream(sorted(glob("clicks/*.jsonl.gz")), read)
        for batch in gba_hvd.batches(train, state, collate_fn=to_batch):

    shards: their names, in which files, URLs or keys are distinct
    read: the samples of one shard, e.g. a torch `IterableDataset` over it; the same ones each time it is called.
    `collate_fn` of `batches` makes a batch of some samples; left out, torch's `default_collate`
    count: how many samples a shard has, where that can be found faster than by reading it. Left out: a shard is read to
    count it, and kept where that worker trains it (allreduce mode without reader processes); else it is read twice
    segment: shards of a segment, whose samples are counted together and shuffled among each other; left out: 4 x M,
    M being the micro-batches of a step
    window: shards of a lane whose samples are shuffled together; left out: 1

    The samples of two windows of each of its lanes and one more shard are in a worker's memory, and without `count`
    those of its shards of two segments. `evaluate` needs a dataset of known length.

    Raises BadInput for settings that cannot be used, and, when it is read, for a shard that has another number of
    samples than was counted.
    """

    def __init__(
        self,
        shards: Sequence[str],
        read: Callable[[str], Iterable[Any]],
        *,
        count: Callable[[str], int] | None = None,
        segment: int | None = None,
        window: int | None = None,
    ) -> None:
        self._shards = [shards] if isinstance(shards, str) else list(shards)
        bad = next((one for one in self._shards if not isinstance(one, str)), None)
        if not self._shards or bad is not None:
            raise BadInput(f"ShardedStream: shards are names of one or more shards, got {bad or shards!r}")
        if len(set(self._shards)) < len(self._shards):
            twice = next(one for one in self._shards if self._shards.count(one) > 1)
            raise BadInput(f"ShardedStream: shard {twice!r} is there twice; a sample is trained once in an epoch")
        for name, function in (("read", read), ("count", count)):
            if function is not None and not callable(function):
                raise BadInput(f"ShardedStream: {name} is a function of the name of a shard, got {function!r}")
        for name, number in (("segment", segment), ("window", window)):
            if number is not None and number < 1:
                raise BadInput(f"ShardedStream: {name} must be 1 or more, got {number}")
        self._read, self._count, self._size, self._window = read, count, segment, window
        self._counts: dict[int, int] = {}  # by shard: of this process
        self._kept: set[int] = set()  # shards that this process counts, and trains then
        self._samples = GroupCache(self._decoded)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_samples"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._samples = GroupCache(self._decoded)

    @property
    def source_names(self) -> list[str]:
        """The names of all shards, without secrets."""
        return [redacted(name) for name in self._shards]

    def shard_list(self, n_micro: int) -> ShardList:
        """Of an epoch, with so many micro-batches in a step. Raises BadInput when there are too many segments."""
        found = ShardList(len(self._shards), self._in_segment(n_micro), digest({"shards": self._shards}))
        if found.n_segments > SEGMENTS:
            n = found.n_segments
            raise BadInput(f"ShardedStream: {n:,} segments, at most {SEGMENTS:,} are possible: raise segment")
        return found

    def segment(self, number: int, seed: int, epoch: int, n_micro: int, shuffle: bool) -> Segment:
        """One of an epoch, from 0; not counted yet."""
        shards, size = np.arange(len(self._shards)), self._in_segment(n_micro)
        if shuffle:
            kernels.shuffled(len(shards), 0, np.uint64(table_seed(seed, f"shards of epoch {epoch}")), shards)
        return Segment(self, shards[number * size : (number + 1) * size].tolist(), number, n_micro)

    def end_reading(self) -> None:
        """Nothing is read ahead any more."""
        self._samples.close()

    def _in_segment(self, n_micro: int) -> int:
        return self._size or _OF_A_LANE * n_micro

    def _counted(self, shard: int) -> int:
        if shard not in self._counts:
            name = self._shards[shard]
            if self._count is None and shard in self._kept:
                n = len(self._samples.get(shard))
            else:
                with _named("count" if self._count else "read", name):
                    n = self._count(name) if self._count else sum(1 for _ in self._read(name))
            if not isinstance(n, int | np.integer) or n < 0:
                raise BadInput(
                    f"ShardedStream: count({self._shards[shard]!r}) is a number of samples, 0 or more, got {n!r}"
                )
            self._counts[shard] = int(n)
        return self._counts[shard]

    def _decoded(self, shard: int) -> list[Any]:
        with _named("read", self._shards[shard]):
            return list(self._read(self._shards[shard]))


@contextlib.contextmanager
def _named(function: str, shard: str) -> Iterator[None]:
    try:
        with reading(lambda: f"shard {redacted(shard)}"):
            yield
    except Exception as error:  # of any kind: it is the user's function
        raise BadInput(
            f"ShardedStream: {function}({shard!r}) failed: {type(error).__name__}: {error}. Mend the shard, or leave "
            "out in `read` what is bad in it, each time the same"
        ) from error


class Segment:
    """Some shards of a stream; once `counted` was called a dataset of their samples, one shard after the other.

    shards: their numbers in the stream, in the order of the epoch
    """

    def __init__(self, stream: ShardedStream, shards: Sequence[int], number: int, n_micro: int) -> None:
        self.shards, self.number = list(shards), number
        self._stream, self._n_micro = stream, n_micro
        self._sizes = np.zeros(len(shards), dtype=np.int64)
        self._ends = np.cumsum(self._sizes)

    def count(self, at: int) -> int:
        """How many samples one of its shards has, in this process."""
        return self._stream._counted(self.shards[at])

    def rank_of(self, at: int, size: int, together: int = 1) -> int:
        """The rank of so many workers that has the lane of a shard, in allreduce mode."""
        return at % self._n_micro // together % size

    def count_ahead(self, rank: int, size: int, together: int = 1) -> None:
        """Read what this rank will count, where counting is reading, and keep it to be trained. Returns at once."""
        stream = self._stream
        if stream._count is None:
            lanes = [self.rank_of(at, size, together) for at in range(len(self.shards))]
            mine = [one for one, its in zip(self.shards, lanes, strict=True) if its == rank]
            unknown = tuple(shard for shard in mine if shard not in stream._counts)
            stream._kept.update(unknown)
            stream._samples.announce(Block(_COUNTED - self.number % 2, self.number, unknown), None)

    def counted(self, sizes: Sequence[int]) -> None:
        """How many samples each of its shards has, as all workers have agreed."""
        self._sizes = np.array(sizes, dtype=np.int64)
        self._ends = np.cumsum(self._sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """The samples of these numbers, in this order."""
        wanted = np.asarray(numbers, dtype=np.int64)
        at = np.searchsorted(self._ends, wanted, side="right")
        inside = wanted - (self._ends - self._sizes)[at]
        shards = {one: self._samples_of(one) for one in np.unique(at).tolist()}
        return [shards[one][number] for one, number in zip(at.tolist(), inside.tolist(), strict=True)]

    def __getitem__(self, number: int) -> Any:
        (sample,) = self.__getitems__([number])
        return sample

    def _samples_of(self, at: int) -> list[Any]:
        samples, expected = self._stream._samples.get(self.shards[at]), int(self._sizes[at])
        if len(samples) != expected:
            raise BadInput(
                f"ShardedStream: shard {self._stream._shards[self.shards[at]]!r} has {len(samples)} samples, and "
                f"{expected} were counted: read() has to give the same samples each time, and count() their number"
            )
        return samples

    @property
    def source_names(self) -> list[str]:
        return self._stream.source_names

    def order(self, seed: int, epoch: int, plan: EpochPlan) -> RowGroupOrder:
        return RowGroupOrder(self._sizes, seed, epoch, plan, self._stream._window or 1, shuffle_groups=False)

    @property
    def n_groups(self) -> int:
        return int(np.count_nonzero(self._sizes))

    @property
    def order_digest(self) -> int:
        names = [self._stream._shards[shard] for shard in self.shards]
        return digest({"shards": names, "sizes": self._sizes.tolist(), "window": self._stream._window})

    def will_read(self, now: Block, after: Block | None) -> None:
        def of_stream(block: Block) -> Block:
            groups = tuple(self.shards[group] for group in block.groups)
            return Block(block.lane, block.window, groups)

        self._stream._samples.announce(of_stream(now), None if after is None else of_stream(after))

    def end_reading(self) -> None:
        self._stream._samples.release()
