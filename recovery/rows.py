"""The words of this package: what a table is, where its rows lie in memory, and who has them.

A table is cut in S shards: row r is in shard r mod S, at place r div S. A row is saved and restored as one record: its
weights, then its optimizer slots, column after column.

In a *keyed* table rows belong to keys, signed 64-bit numbers: a key is in shard key mod S, at a place that a column
says. Some rows at the end of each shard belong to no key; keys without a row share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from recovery.errors import BadInput
from recovery.hashed_ids import HASHES


@dataclass(frozen=True)
class Column:
    """Some float32 numbers that every row of a table has: its weights, or one slot of its optimizer.

    exact: other bits in the place of these numbers, such as a key; they come after those that are numbers
    """

    name: str
    width: int
    exact: bool = False


KEY = Column("key", 2, exact=True)
"""Of a keyed table: the key that the row belongs to, int64."""
USES = Column("uses", 2, exact=True)
"""Of a keyed table: how often the key was used, and when last, uint32 each; the newer of two rows of a key counts."""
FILTER = Column("filter", 1, exact=True)
"""Of a keyed table that admits keys by their lookups: bits that belong to a place, and to no key; before KEY."""
NO_KEY = -(2**63)


@dataclass(frozen=True)
class Table:
    """One table: name, number of rows, and columns (the weights first).

    shared_rows: of a keyed table, the rows of each shard that belong to no key; 0: it is not keyed. Its columns end
    with KEY and USES, where keys are counted before they have a row with FILTER, KEY and USES
    shared_hashes: how many of the shared rows a key without a row is the sum of, see `recovery.hashed_ids`
    """

    name: str
    n_rows: int
    columns: tuple[Column, ...]
    shared_rows: int = 0
    shared_hashes: int = 1

    def __post_init__(self) -> None:
        if self.n_rows < 1 or not self.columns or any(column.width < 1 for column in self.columns):
            raise BadInput(f"table {self.name!r} needs rows and columns, got {self.n_rows} rows, {self.columns}")
        if self.shared_rows < 0 or bool(self.shared_rows) != (self.columns[-2:] == (KEY, USES)):
            raise BadInput(f"table {self.name!r}: {self.shared_rows} shared rows with {self.columns}")
        if self.shared_hashes not in HASHES or self.shared_rows % self.shared_hashes:
            raise BadInput(f"table {self.name!r}: {self.shared_hashes} hashes with {self.shared_rows} shared rows")

    @property
    def width(self) -> int:
        """float32 numbers of a record."""
        return sum(column.width for column in self.columns)

    @property
    def record_bytes(self) -> int:
        return 4 * self.width

    @property
    def is_keyed(self) -> bool:
        return self.shared_rows > 0

    @property
    def has_filter(self) -> bool:
        return FILTER in self.columns

    def filter_of(self, records: np.ndarray) -> np.ndarray:
        """float32 [n], of records [n, width] of a table with a filter."""
        at = self.width - USES.width - KEY.width - FILTER.width
        return records[:, at]

    def records_of(self, was: Table, records: np.ndarray) -> np.ndarray:
        """float32 [n, width] of records of `was`, which may lack a filter or have one more; of zeros where it lacks."""
        if was.has_filter == self.has_filter:
            return records
        tail = KEY.width + USES.width
        numbers = records[:, : was.width - tail - FILTER.width * was.has_filter]
        empty = np.zeros((len(records), FILTER.width * self.has_filter), np.float32)
        return np.concatenate([numbers, empty, records[:, -tail:]], axis=1)

    def keys(self, records: np.ndarray) -> np.ndarray:
        """int64 [n], of records [n, width] of a keyed table."""
        found: np.ndarray = np.ascontiguousarray(records[:, -KEY.width - USES.width : -USES.width]).view(np.int64)
        return found[:, 0]

    def rows_in(self, shard: int, n_shards: int) -> int:
        """How many rows a shard has."""
        return len(range(shard, self.n_rows, n_shards))


@dataclass(frozen=True)
class Schema:
    """All tables of a model, and in how many shards they are cut."""

    tables: tuple[Table, ...]
    n_shards: int

    @property
    def n_rows(self) -> int:
        return sum(table.n_rows for table in self.tables)

    @property
    def n_bytes(self) -> int:
        """Bytes of all records."""
        return sum(table.n_rows * table.record_bytes for table in self.tables)


@dataclass(frozen=True)
class RowView:
    """The rows of one table in one shard, where they lie in memory. Views: writing to them writes the model.

    columns: float32 [n, width_i] each, together the table's columns in order; one array may hold several columns.
        They may be strided.
    counts:  uint32 [n]  how often each row was accessed in training so far, modulo 2^32; counted by its writer when the
        gradient is applied. A writer that does not know how many accesses a gradient sums over counts it as one
    """

    columns: tuple[np.ndarray, ...]
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)


class RowSource(Protocol):
    """The rows of some shards, in memory.

    A step on a shard is: begun = k, change rows and counts, finished = k, in this order. So a reader that finds begun
    equal to finished, copies, and finds begun unchanged, has rows of one step.
    """

    schema: Schema

    def shards(self) -> Sequence[int]:
        """The shards that are here completely."""

    def slab(self, table: int, shard: int) -> RowView:
        """By the table's number in the schema."""

    def step_marks(self, shard: int) -> tuple[int, int]:
        """(finished, begun), read in this order: the last steps finished and begun on a shard."""


class KeyedRowSource(RowSource, Protocol):
    """A row source that has keyed tables. Called for shards that no other process uses yet."""

    def clear(self, table: int, shard: int) -> None:
        """No key has a row; shared rows are as they start."""

    def insert(self, table: int, shard: int, records: np.ndarray) -> tuple[int, int]:
        """Find rows for the keys of some records, which belong in this shard, and write them.

        Returns (how many were written, how many keys have no row for lack of room). Of a key that has a row, the one
        used last stays. Raises BadInput where no key may be left without one.
        """

    def insert_filter(self, table: int, shard: int, words: np.ndarray) -> None:
        """Of a table that has other rows than it was saved with: the filter that this shard had, in as many shards.

        words: float32 [n], by place, of the places that keys could have
        """

    def settle(self, table: int, shard: int) -> None:
        """All rows were written: of a key that has two, the one used last stays."""


# --- some rows of one table in one shard -----------------------------------------------------------------------------

RowIndices = slice | np.ndarray
"""slice(first, stop), both given, of consecutive rows; or int64 [n], ascending."""


def n_indices(indices: RowIndices) -> int:
    if isinstance(indices, slice):
        return int(indices.stop - indices.start)
    return len(indices)


def slice_indices(indices: RowIndices, start: int, stop: int) -> RowIndices:
    """The start-th to the (stop-1)-th of them."""
    if isinstance(indices, slice):
        return slice(indices.start + start, indices.start + stop)
    return indices[start:stop]


def copy_rows(slab: RowView, indices: RowIndices, records: np.ndarray, counts: np.ndarray) -> None:
    """From the slab into records, float32 [n, width], and counts, uint32 [n]; may be torn (`consistent_read`)."""
    at = 0
    for column in slab.columns:
        width = column.shape[1]
        source, target = _whole(column, records[:, at : at + width])
        target[:] = source[indices]
        at += width
    counts[:] = slab.counts[indices]


def write_rows(slab: RowView, indices: RowIndices, records: np.ndarray) -> None:
    """From records, float32 [n, width], into the slab. The counts stay: they count updates, this is none."""
    at = 0
    for column in slab.columns:
        width = column.shape[1]
        source, target = _whole(records[:, at : at + width], column)
        target[indices] = source
        at += width


def _whole(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Views [n] of float32 [n, w], with a row for an item: numpy copies them 1.5 times as fast, above all scattered."""
    width = arrays[0].shape[1]
    if width == 1 or any(array.strides[1] != array.itemsize for array in arrays):
        return arrays
    return tuple(array.view(np.dtype((np.void, 4 * width)))[:, 0] for array in arrays)


Choice = Callable[[int, int], RowIndices]


def everything(source: RowSource) -> Choice:
    """All rows of the row source."""
    schema = source.schema
    return lambda table, shard: slice(0, schema.tables[table].rows_in(shard, schema.n_shards))
