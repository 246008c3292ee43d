"""The kinds of datasets, and the one function that all of them are read by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from gba_hvd.epoch import EpochPlan
from gba_hvd.errors import BadInput
from gba_hvd.reading.settings import Collate
from gba_hvd.reading.slow_reads import reading

TakeRows = Callable[[np.ndarray], Any]


class Dataset(Protocol):
    """Samples that can be read by number."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> Any:
        """The samples `rows` (int64 [n], any order) as one batch with an `ids` mapping, e.g. a `gba_hvd.Batch`."""


class MapDataset(Protocol):
    """A map-style dataset of torch: a sample by its number; `__getitems__(numbers)`, if there is one, reads several."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Order(Protocol):
    """The sample at each position of one epoch."""

    def rows(self, first: int, count: int) -> np.ndarray:
        """int64 [count]: the samples at positions first, first + 1, ...; over an epoch, each sample once."""


class OrderedDataset(Protocol):
    """What a dataset has besides, where not every order can be read at the same cost."""

    @property
    def order_digest(self) -> int:
        """int64, not 0: another one where `order`, or the samples themselves, are others."""

    def order(self, seed: int, epoch: int, plan: EpochPlan) -> Order:
        """The order of an epoch that is shuffled, by these and the data only. plan: how it is cut in micro-batches."""


def source_names(dataset: object) -> Sequence[str]:
    """The files or shards that a dataset is read from, in their order; empty where it does not name them."""
    return tuple(getattr(dataset, "source_names", ()))


def place_of(dataset: object, row: int) -> str:
    """Where a sample is stored, in words, by `place_of(row)` of the dataset, or by its `files_of(rows)`; else empty."""
    if hasattr(dataset, "place_of"):
        return str(dataset.place_of(row))
    files_of = getattr(dataset, "files_of", None)
    return "" if files_of is None else str(files_of(np.array([row], dtype=np.int64)))


@dataclass(frozen=True)
class Block:
    """Groups of samples that are needed at once, by number, in a lane: the micro-batches i of one i mod M."""

    lane: int
    window: int
    groups: tuple[int, ...]


class LaneOrder(Order, Protocol):
    """An order in which each lane goes through blocks of groups, one after the other."""

    def block(self, micro: int) -> Block:
        """Where the first sample of a micro-batch lies."""

    def after(self, block: Block) -> Block | None:
        """The next one of the same lane."""


@runtime_checkable
class LanedDataset(Protocol):
    """A dataset that has to decode groups of samples, and can do it ahead. Its `order` gives a `LaneOrder`."""

    @property
    def n_groups(self) -> int: ...

    def will_read(self, now: Block, after: Block | None) -> None:
        """Before samples of `now` are read in this process, which may also read `after` later. Returns at once."""

    def end_reading(self) -> None:
        """Nothing that was announced is needed any more. Returns when nothing is decoded ahead."""


@dataclass(frozen=True)
class ShardList:
    """What the segments of an epoch are cut from: n_shards, `in_segment` of them in each segment but the last.

    shards: int64, not 0: another one where their names, or the order in which they were given, are others
    """

    n_shards: int
    in_segment: int
    shards: int

    @property
    def n_segments(self) -> int:
        return -(-self.n_shards // self.in_segment)


@runtime_checkable
class SegmentedDataset(Protocol):
    """A dataset whose samples are not counted: an epoch of it is a sequence of segments."""

    def shard_list(self, n_micro: int) -> ShardList:
        """Of an epoch, with so many micro-batches in a step."""

    def segment(self, number: int, seed: int, epoch: int, n_micro: int, shuffle: bool) -> UncountedSegment:
        """One of an epoch, from 0; by these and the data only."""

    def end_reading(self) -> None:
        """Nothing that was to be counted ahead is needed any more. Returns when nothing is read ahead."""


class UncountedSegment(OrderedDataset, MapDataset, Protocol):
    """A part of a `SegmentedDataset`: a dataset of known length once `counted` was called.

    shards: what has to be counted
    """

    shards: Sequence[Any]

    def count(self, at: int) -> int:
        """How many samples one of its shards has."""

    def rank_of(self, at: int, size: int, together: int = 1) -> int:
        """The rank of so many workers that best counts it, as it will train it: in allreduce mode."""

    def count_ahead(self, rank: int, size: int, together: int = 1) -> None:
        """This rank will count its shards of this segment, and read them in this process. Returns at once."""

    def counted(self, sizes: Sequence[int]) -> None:
        """How many samples each of its shards has, the same on all workers."""


def reads(dataset: Dataset | MapDataset, collate_fn: Collate | None = None) -> TakeRows:
    """A function from numbers of samples, int64 [n], to a batch: `take`, or `__getitem__` and `collate_fn`.

    A batch that takes long is logged, with the names of its files where the dataset has `files_of`; one that decodes
    groups of samples names what it decodes. Raises BadInput for a dataset that cannot be read by number, and for a
    `collate_fn` beside `take`.
    """
    take = _taker(dataset, collate_fn)
    if isinstance(dataset, LanedDataset):
        return take
    files_of, name = getattr(dataset, "files_of", None), type(dataset).__name__

    def take_noted(rows: np.ndarray) -> Any:
        def what() -> str:
            return f"{len(rows)} samples, from {rows[:1]}, of {name if files_of is None else files_of(rows)}"

        with reading(what):
            return take(rows)

    return take_noted


def _taker(dataset: Dataset | MapDataset, collate_fn: Collate | None) -> TakeRows:
    name, found = type(dataset).__name__, any(hasattr(dataset, one) for one in ("take", "__getitem__", "__getitems__"))
    if isinstance(dataset, SegmentedDataset):
        raise BadInput(
            f"how many samples a {name} has is not known, and only gba_hvd.batches can do without: evaluate a dataset "
            "of known length, such as a list of some of its samples"
        )
    if isinstance(dataset, DataLoader):
        raise BadInput(
            "a DataLoader cuts the batches of one process: pass its dataset, and its num_workers and collate_fn as "
            "arguments; the sizes of batches are global_batch and micro_batch of the optimizer"
        )
    if isinstance(dataset, IterableDataset) or not found or not hasattr(dataset, "__len__"):
        raise BadInput(
            f"{name} cannot be read by number: a dataset has __len__ and either take(rows) or __getitem__. "
            "Micro-batches are handed out by their numbers, to workers that come and go. For what is read in sequence: "
            "gba_hvd.data.ShardedStream(shards, read), ParquetStream, or gba-hvd data prepare"
        )
    take = getattr(dataset, "take", None)
    if take is not None:
        if collate_fn is not None:
            raise BadInput(
                f"collate_fn would not be called: {name}.take(rows) makes a whole batch. Leave collate_fn "
                "out, or wrap the dataset in one that has __getitem__ and no take"
            )
        return take  # type: ignore[no-any-return]
    several, one = getattr(dataset, "__getitems__", None), getattr(dataset, "__getitem__", None)
    collate = default_collate if collate_fn is None else collate_fn

    def take_samples(rows: np.ndarray) -> Any:
        numbers = rows.tolist()
        if several is not None:
            return collate(several(numbers))
        assert one is not None
        return collate([one(number) for number in numbers])

    return take_samples


def pinned(batch: Any) -> Any:
    """The batch with its tensors in pinned memory: tensors, mappings, tuples and lists, dataclasses of these.

    An object with a method `pin_memory` is asked for it; anything else stays as it is.
    """
    if isinstance(batch, Tensor):
        return batch.pin_memory()
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, Mapping):
        return {key: pinned(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(pinned, batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map(pinned, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: pinned(getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **fields)
    return batch
