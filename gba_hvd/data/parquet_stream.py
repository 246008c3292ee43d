"""`ParquetStream`: samples in Parquet files at any URL, decoded a row group at a time where they are needed.

The footers of all files say how many samples there are, so an epoch has a length, and micro-batches are leased, counted
and resumed as of any dataset. The order keeps the micro-batches of a lane in the same few row groups
(`row_group_order`); the groups of a lane are decoded ahead and kept while they are read (`group_cache`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch

from gba_hvd.batch import Batch
from gba_hvd.data.click_log import check_range
from gba_hvd.data.group_cache import GroupCache
from gba_hvd.data.parquet_columns import (
    Ids,
    check_ids,
    check_numbers,
    floats_of,
    ids_of,
    joined,
    label_of,
    refuse_nulls,
)
from gba_hvd.data.parquet_files import ParquetFile, open_all, read_group
from gba_hvd.data.row_group_order import RowGroupOrder
from gba_hvd.epoch import EpochPlan
from gba_hvd.errors import BadInput
from gba_hvd.reading.datasets import Block
from gba_hvd.shm.layout import digest
from recovery.redaction import redacted

_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class _Group:
    """A decoded row group of n samples.

    ids:   by feature int64 [n], or (values int64 [v], starts int64 [n + 1]) of a column of lists
    dense: float32 [n, n_dense]; label: float32 [n] or [n, n_labels]
    """

    ids: dict[str, Ids]
    dense: np.ndarray
    label: np.ndarray


class ParquetStream:
    """Samples in Parquet files that need not fit this machine: a dataset for `gba_hvd.batches` and `evaluate`.

        train = ParquetStream("s3://bucket/clicks/*.parquet", ids=["user", "item"], dense=["price"], label="click")
        for batch in gba_hvd.batches(train, state, num_workers=2):

    urls: of files, folders (all *.parquet in them) or patterns with `*`, `?` or `[ab]`, as fsspec has them; the samples
    are numbered in this order, those of a folder or pattern by name
    ids: columns of whole numbers, each for the feature of that name (or {feature: column}); lists give a `Bag`, a
    list that is null an empty one. An unsigned 64-bit number becomes the signed one of the same bits
    hashed: those columns of `ids` that have strings (or lists of them), for tables with keys="hash64": each becomes its
    hash, an int64 of all 64 bits, see `gba_hvd.data.hashing.hash_strings`
    dense: columns of numbers, for `Batch.dense`, float32 [B, n_dense]; the attribute `dense_names` has them, for
    `save_model(dense_names=)`
    missing_becomes: {column of `dense`: the number in place of its missing values, null or NaN}; the attribute of this
    name has it. Requests for the model need the same substitutes: `frame.fillna(train.missing_becomes)`
    label: a column of 0 and 1 (or of booleans), for `Batch.label`, float32 [B]; several, then float32 [B, n_labels]; or
    None, then [B, 0], for files of items that have none
    ratings: those columns of `label` that are any numbers: stars, counts, shares
    window: row groups of a lane whose samples are shuffled together, see `row_group_order`; left out: the windows of
    all lanes have 8 together, each at least 1
    cached_groups: decoded row groups that are kept, by each process that reads; left out: two windows of each lane that
    the process reads, and one more row group
    storage_options: of the file system, as fsspec takes them

    An epoch that is shuffled decodes each row group about once, over all workers and reader processes; without
    `shuffle` each of them decodes all. Reads the footers of all files at once.

    Raises BadInput for a file that cannot be opened or is no Parquet, for columns that are missing or of another type,
    and for a value that is missing or a label below 0 or above 1, where a footer says so; when it is read, for one that
    is missing or, in `dense`, not finite, a label that is not 0 or 1, a rating that float32 does not hold, and a file
    that has changed since it was opened; `IndexError` for a sample outside.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        ids: Sequence[str] | Mapping[str, str],
        hashed: Sequence[str] = (),
        dense: Sequence[str] = (),
        missing_becomes: Mapping[str, float] | None = None,
        label: str | Sequence[str] | None = "label",
        ratings: Sequence[str] = (),
        window: int | None = None,
        cached_groups: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._ids = dict(ids) if isinstance(ids, Mapping) else {_name(one, "ids"): one for one in ids}
        self.dense_names = tuple(_name(one, "dense") for one in dense)
        self._one_label = isinstance(label, str)
        self._labels = (label,) if isinstance(label, str) else tuple(label or ())
        if isinstance(ids, str) or isinstance(dense, str) or not self._ids or (label is not None and not self._labels):
            raise BadInput(
                f"ParquetStream: ids and dense are lists of columns, and at least one column of ids and a label are "
                f"needed (label=None for files that have none); got ids={ids!r}, dense={dense!r}, label={label!r}"
            )
        if isinstance(hashed, str) or not set(hashed) <= set(self._ids.values()):
            raise BadInput(
                f"ParquetStream: hashed is a list of columns that ids has too ({', '.join(self._ids.values())}), "
                f"got {hashed!r}"
            )
        self.missing_becomes = _substitutes(missing_becomes or {}, self.dense_names)
        self._ratings = _ratings(ratings, self._labels)
        for number in (window, cached_groups):
            if number is not None and number < 1:
                raise BadInput(
                    f"ParquetStream: window and cached_groups must be 1 or more, got {window} and {cached_groups}"
                )
        self._window, self._n_kept, self._options = window, cached_groups, dict(storage_options or {})
        found = [urls] if isinstance(urls, str) else [_name(url, "urls") for url in urls]
        self._files = tuple(open_all(found, self._options))
        for file in self._files:
            for column in self._ids.values():
                check_ids(file.schema, column, file.url, column in hashed)
                refuse_nulls(file, column, "ids")
            for column in self.dense_names:
                may_be_missing = column in self.missing_becomes
                check_numbers(file.schema, column, file.url, may_be_missing=may_be_missing)
                if not may_be_missing:
                    refuse_nulls(file, column, "dense")
            for column in self._labels:
                check_numbers(file.schema, column, file.url)
                refuse_nulls(file, column, "label")
            self._refuse_labels(file)
        self._index = [(file, group) for file in self._files for group, n in enumerate(file.group_sizes) if n]
        self._sizes = np.array([n for file in self._files for n in file.group_sizes if n], dtype=np.int64)
        if not len(self._sizes):
            raise BadInput(f"ParquetStream: {', '.join(found) or 'no url'}: there are no samples")
        self._ends = np.cumsum(self._sizes)
        self._groups = GroupCache(self._decoded, cached_groups)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_groups"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._groups = GroupCache(self._decoded, self._n_kept)

    def order(self, seed: int, epoch: int, plan: EpochPlan) -> RowGroupOrder:
        """The order in which `batches` hands out the samples of an epoch, if they are shuffled."""
        return RowGroupOrder(self._sizes, seed, epoch, plan, self._window)

    @property
    def n_groups(self) -> int:
        """Row groups that have samples."""
        return len(self._sizes)

    @property
    def source_names(self) -> list[str]:
        """The files, without secrets in their URLs."""
        return [redacted(file.url) for file in self._files]

    @property
    def order_digest(self) -> int:
        """A number, int64, another one where files, content, window or `missing_becomes` are others."""
        becomes = {"missing_becomes": sorted(self.missing_becomes.items())} if self.missing_becomes else {}
        return digest({"files": [file.digest for file in self._files], "window": self._window, **becomes})

    def will_read(self, now: Block, after: Block | None) -> None:
        """This process reads a lane: decode its row groups ahead. See `LanedDataset`."""
        self._groups.announce(now, after)

    def end_reading(self) -> None:
        """Decode no further ahead."""
        self._groups.close()

    def place_of(self, row: int) -> str:
        """The file, the row group and the row in it of a sample, in words."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        file, group = self._index[number]
        return f"{redacted(file.url)}, row group {group}, row {row - self._ends[number] + self._sizes[number]}"

    def take(self, rows: np.ndarray) -> Batch:
        """The samples `rows` (int64 [n], any order, at least one) as a batch."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            raise BadInput("ParquetStream.take: a batch has at least one sample, got no numbers of samples")
        check_range(rows, len(self))
        group_of = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(group_of, kind="stable")
        present, first = np.unique(group_of[order], return_index=True)
        parts = []
        for number, at in zip(present.tolist(), np.split(order, first[1:]), strict=True):
            inside = rows[at] - (self._ends[number] - self._sizes[number])
            parts.append((self._groups.get(number), inside))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        label = np.concatenate([group.label[inside] for group, inside in parts])[back]
        dense = np.concatenate([group.dense[inside] for group, inside in parts])[back]
        ids = {name: joined([(group.ids[name], inside) for group, inside in parts], back) for name in self._ids}
        return Batch(ids, torch.from_numpy(dense), torch.from_numpy(label))

    def _refuse_labels(self, file: ParquetFile) -> None:
        """Raises BadInput where the file's footer has a label that cannot be 0 or 1."""
        for column in self._labels:
            if column not in self._ratings and (group := file.first_outside(column, 0, 1)) is not None:
                labels = read_group(file, group, [column], self._options)[column]
                label_of(labels, _where(file, group, column), is_rating=False)

    def _decoded(self, number: int) -> _Group:
        file, group = self._index[number]
        columns = list(dict.fromkeys([*self._ids.values(), *self.dense_names, *self._labels]))
        table = read_group(file, group, columns, self._options)
        where = partial(_where, file, group)
        ids = {name: ids_of(table[column], where(column)) for name, column in self._ids.items()}
        substitutes = self.missing_becomes
        dense = [floats_of(table[column], where(column), substitutes.get(column)) for column in self.dense_names]
        labels = [label_of(table[column], where(column), column in self._ratings) for column in self._labels]
        nothing = np.empty((table.num_rows, 0), dtype=np.float32)
        label = labels[0] if self._one_label else np.stack(labels, axis=1) if labels else nothing
        return _Group(ids, np.stack(dense, axis=1) if dense else nothing, label)


def _where(file: ParquetFile, group: int, column: str) -> str:
    return f"{file.url}, row group {group}, column {column!r}"


def _substitutes(by_column: Mapping[str, float], dense: Sequence[str]) -> dict[str, float]:
    if unknown := [name for name in by_column if name not in dense]:
        raise BadInput(
            f"ParquetStream: missing_becomes is for columns of dense ({', '.join(dense) or 'none'}), got {unknown[0]!r}"
        )
    for name, value in by_column.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not abs(float(value)) <= _FLOAT32_MAX:
            raise BadInput(f"ParquetStream: missing_becomes[{name!r}] must be a finite number, got {value!r}")
    return {name: float(value) for name, value in by_column.items()}


def _ratings(names: Sequence[str], labels: Sequence[str]) -> frozenset[str]:
    if isinstance(names, str) or not set(names) <= set(labels):
        raise BadInput(
            f"ParquetStream: ratings is a list of columns that label has too ({', '.join(labels)}), got {names!r}"
        )
    return frozenset(names)


def _name(name: object, argument: str) -> str:
    if not isinstance(name, str):
        what = "URLs" if argument == "urls" else "names of columns"
        raise BadInput(f"ParquetStream: {argument} are {what}, got {name!r}")
    return name
