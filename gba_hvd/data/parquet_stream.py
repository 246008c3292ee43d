"""`ParquetStream`: Parquet files at any fsspec URL, read as the training comes to them.

The footers are read once, so the number of samples and the row group of each are known. A row group is what is read,
decoded and kept; `row_group_order` sees to it that neighbouring micro-batches need the same ones.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from gba_hvd.batch import Bag, Batch
from gba_hvd.data.click_log import check_range
from gba_hvd.data.row_group_order import RowGroupOrder
from gba_hvd.errors import BadInput
from gba_hvd.shm.layout import digest


@dataclass(frozen=True)
class _File:
    """url: as it is opened. metadata: its footer. groups: samples of each row group, without those that have none."""

    url: str
    metadata: pq.FileMetaData
    groups: tuple[int, ...]


@dataclass(frozen=True)
class _Group:
    """A decoded row group of n samples.

    ids:   by table int64 [n], or (values int64 [v], starts int64 [n + 1]) of a column of lists
    dense: float32 [n, n_dense]; label: float32 [n] or [n, n_labels]
    """

    ids: dict[str, np.ndarray | tuple[np.ndarray, np.ndarray]]
    dense: np.ndarray
    label: np.ndarray


class ParquetStream:
    """Samples in Parquet files that need not fit this machine: a dataset for `gba_hvd.batches` and `evaluate`.

        train = ParquetStream("s3://bucket/clicks/*.parquet", ids=["user", "item"], dense=["price"], label="click")
        for batch in gba_hvd.batches(train, state, num_workers=2):

    urls: of files, as fsspec has them, or one with `*`; the samples are numbered in this order
    ids: columns of whole numbers, each for the table of that name (or {table: column}); lists give a `Bag`
    dense: columns of numbers, for `Batch.dense`, float32 [B, n_dense]
    label: a column, for `Batch.label`, float32 [B]; or several, then float32 [B, n_labels]
    window: row groups whose samples are shuffled together
    cached_groups: decoded row groups that are kept, by each process that reads; left out: 2 x window
    storage_options: of the file system, as fsspec takes them

    Every worker (and reader process) reads each row group that its micro-batches touch: with W of them about W times
    the bytes of the files are read in an epoch. Reads the footer of every file at once. Raises BadInput for a file that
    cannot be opened or is no Parquet, for columns that are missing or of another type, and, when it is read, for a
    value that is missing; `IndexError` for a sample outside.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        ids: Sequence[str] | Mapping[str, str],
        dense: Sequence[str] = (),
        label: str | Sequence[str] = "label",
        window: int = 4,
        cached_groups: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._ids = dict(ids) if isinstance(ids, Mapping) else {_name(one, "ids"): one for one in ids}
        self._dense = tuple(_name(one, "dense") for one in dense)
        self._labels = (label,) if isinstance(label, str) else tuple(label)
        self._one_label = isinstance(label, str)
        if isinstance(ids, str) or isinstance(dense, str) or not self._ids or not self._labels:
            raise BadInput(
                f"ParquetStream: ids and dense are lists of columns, and at least one column of ids and a label are "
                f"needed; got ids={ids!r}, dense={dense!r}, label={label!r}"
            )
        self._window, self._n_kept = window, 2 * window if cached_groups is None else cached_groups
        if window < 1 or self._n_kept < 1:
            raise BadInput(
                f"ParquetStream: window and cached_groups must be 1 or more, got {window} and {cached_groups}"
            )
        self._options = dict(storage_options or {})
        found = [urls] if isinstance(urls, str) else list(urls)
        self._files = tuple(self._opened(url) for one in found for url in self._expanded(one))
        self._index = [(file, group) for file in self._files for group, n in enumerate(file.groups) if n]
        self._sizes = np.array([file.groups[group] for file, group in self._index], dtype=np.int64)
        if not len(self._sizes):
            raise BadInput(f"ParquetStream: {', '.join(map(str, found)) or 'no url'}: there are no samples")
        self._ends = np.cumsum(self._sizes)
        self._kept: OrderedDict[int, _Group] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_lock", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _kept=OrderedDict(), _lock=threading.Lock())

    def order(self, seed: int, epoch: int) -> RowGroupOrder:
        """The order in which `batches` hands out the samples of an epoch, if they are shuffled."""
        return RowGroupOrder(self._sizes, seed, epoch, self._window)

    @property
    def order_digest(self) -> int:
        """A number, int64, that is another one where the row groups or the window are others."""
        return digest({"sizes": self._sizes.tolist(), "window": self._window})

    def take(self, rows: np.ndarray) -> Batch:
        """The samples `rows` (int64 [n], any order) as a batch."""
        rows = np.asarray(rows, dtype=np.int64)
        check_range(rows, len(self))
        group_of = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(group_of, kind="stable")
        present, first = np.unique(group_of[order], return_index=True)
        parts = []
        for number, at in zip(present.tolist(), np.split(order, first[1:]), strict=True):
            inside = rows[at] - (self._ends[number] - self._sizes[number])
            parts.append((self._group(number), inside))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        label = np.concatenate([group.label[inside] for group, inside in parts])[back]
        dense = np.concatenate([group.dense[inside] for group, inside in parts])[back]
        ids = {table: _joined([(group.ids[table], inside) for group, inside in parts], back) for table in self._ids}
        return Batch(ids, torch.from_numpy(dense), torch.from_numpy(label))

    # --- row groups --------------------------------------------------------------------------------------------------

    def _group(self, number: int) -> _Group:
        """Decoded; the one that was used longest ago gives way."""
        with self._lock:
            if number not in self._kept:
                self._kept[number] = self._decoded(*self._index[number])
                while len(self._kept) > self._n_kept:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(number)
            return self._kept[number]

    def _decoded(self, file: _File, group: int) -> _Group:
        columns = list(dict.fromkeys([*self._ids.values(), *self._dense, *self._labels]))
        with fsspec.open(file.url, **self._options) as opened:
            table = pq.ParquetFile(opened, metadata=file.metadata).read_row_group(group, columns, use_threads=False)
        where = f"{file.url}, row group {group}"
        ids = {name: _ids(table[column], f"{where}, column {column!r}") for name, column in self._ids.items()}
        dense = [_floats(table[column], f"{where}, column {column!r}") for column in self._dense]
        labels = [_floats(table[column], f"{where}, column {column!r}") for column in self._labels]
        stacked = np.stack(dense, axis=1) if dense else np.empty((table.num_rows, 0), dtype=np.float32)
        return _Group(ids, stacked, labels[0] if self._one_label else np.stack(labels, axis=1))

    # --- files -------------------------------------------------------------------------------------------------------

    def _expanded(self, url: str) -> list[str]:
        if "*" not in url:
            return [url]
        fs, path = fsspec.core.url_to_fs(url, **self._options)
        found = sorted(fs.unstrip_protocol(one) for one in fs.glob(path))
        if not found:
            raise BadInput(f"ParquetStream: no file matches {url}")
        return found

    def _opened(self, url: str) -> _File:
        try:
            with fsspec.open(url, **self._options) as opened:
                file = pq.ParquetFile(opened)
                metadata, schema = file.metadata, file.schema_arrow
        except (OSError, pa.ArrowInvalid, ImportError, ValueError) as error:
            raise BadInput(
                f"ParquetStream: {url} cannot be read as Parquet: {type(error).__name__}: {error}"
            ) from error
        for column in self._ids.values():
            kind = _type_of(schema, column, url)
            inner = kind.value_type if _is_list(kind) else kind
            if not pa.types.is_integer(inner):
                raise BadInput(
                    f"ParquetStream: {url}: column {column!r} has {kind}, and ids are whole numbers (or lists of them) "
                    "below the rows of their table. gba-hvd data prepare makes ids of strings, by vocabulary or hash"
                )
        for column in (*self._dense, *self._labels):
            kind = _type_of(schema, column, url)
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
                raise BadInput(f"ParquetStream: {url}: column {column!r} has {kind}, expected numbers")
        return _File(url, metadata, tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)))


def _name(column: object, argument: str) -> str:
    if not isinstance(column, str):
        raise BadInput(f"ParquetStream: {argument} are names of columns, got {column!r}")
    return column


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _type_of(schema: pa.Schema, column: str, url: str) -> pa.DataType:
    if column not in schema.names:
        raise BadInput(f"ParquetStream: {url} has no column {column!r}; it has {', '.join(schema.names)}")
    return schema.field(column).type


def _whole(column: pa.ChunkedArray, where: str) -> pa.Array:
    """One array, without nulls."""
    array = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    if array.null_count:
        raise BadInput(
            f"{where}: {array.null_count} of {len(array)} values are missing. Fill them in, or use gba-hvd data "
            "prepare, which has a substitute for them"
        )
    return array


def _ids(column: pa.ChunkedArray, where: str) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    if not _is_list(column.type):
        return _int64(_whole(column, where), where)
    array = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)  # null is empty
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return _int64(_whole(pa.chunked_array([array.flatten()]), where), where), starts


def _int64(array: pa.Array, where: str) -> np.ndarray:
    values: np.ndarray = array.to_numpy(zero_copy_only=False).astype(np.int64)
    if len(values) and values.min() < 0:
        raise BadInput(f"{where}: an id is {values.min()}, expected 0 or more")
    return values


def _floats(column: pa.ChunkedArray, where: str) -> np.ndarray:
    values: np.ndarray = _whole(column, where).to_numpy(zero_copy_only=False).astype(np.float32)
    return values


def _joined(parts: list[tuple[Any, np.ndarray]], back: np.ndarray) -> Tensor | Bag:
    """One table's ids of the samples `inside` each part, brought into the order `back`."""
    if not isinstance(parts[0][0], tuple):
        return torch.from_numpy(np.concatenate([values[inside] for values, inside in parts])[back])
    taken, lengths = [], []
    for (values, starts), inside in parts:
        n = starts[inside + 1] - starts[inside]
        taken.append(values[_spans(starts[inside], n)])
        lengths.append(n)
    n = np.concatenate(lengths)
    begin, n = (np.cumsum(n) - n)[back], n[back]
    values = np.concatenate(taken)[_spans(begin, n)]
    return Bag(torch.from_numpy(values), torch.from_numpy(np.cumsum(n) - n))


def _spans(begin: np.ndarray, n: np.ndarray) -> np.ndarray:
    """int64: begin[0], begin[0] + 1, ... n[0] of them, then those of begin[1], and so on."""
    spans: np.ndarray = np.arange(int(n.sum())) + np.repeat(begin - (np.cumsum(n) - n), n)
    return spans
