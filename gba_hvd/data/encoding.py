"""Values to ids, numbers to floats.

What has to be learnt from data (vocabularies, means) is learnt by the classes named `...Fit`, which see rows of the
train split only: `prepare` passes them nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gba_hvd.data.checked_rows import CheckedRows, Values
from gba_hvd.data.hashing import UInt64, hash_strings
from gba_hvd.data.recipe import MAX_ROWS, Hashed, Identity, Numeric, Recipe, Vocabulary
from gba_hvd.data.store import EncodedRows
from gba_hvd.errors import BadInput

Ids = npt.NDArray[np.int32]
_MERGE_ABOVE = 1 << 18


class Encoder(Protocol):
    """Values of one field to ids in 0 .. rows-1."""

    @property
    def rows(self) -> int: ...

    def encode(self, values: Values) -> Ids: ...


class HashEncoder:
    """Id 0 for a missing value, else 1 + hash mod (rows - 1)."""

    def __init__(self, encoding: Hashed) -> None:
        self.rows = encoding.rows

    def encode(self, values: Values) -> Ids:
        ids = (hash_strings(values.flat) % np.uint64(self.rows - 1)).astype(np.int32)
        ids += 1
        ids[pc.equal(pc.binary_length(values.flat), 0).to_numpy(zero_copy_only=False)] = 0
        return ids


class IdentityEncoder:
    def __init__(self, encoding: Identity) -> None:
        self.rows = encoding.rows

    def encode(self, values: Values) -> Ids:
        assert isinstance(values.flat, np.ndarray)
        return values.flat.astype(np.int32)


class VocabularyEncoder:
    """Ids by position in the vocabulary, from 1; id 0 for all else.

    values: large_string [n]  id i is values[i - 1]
    counts: int64 [n]         how often each was in the train split; None: not known here
    """

    def __init__(self, values: pa.Array, counts: npt.NDArray[np.int64] | None = None) -> None:
        self.values, self.counts = values, counts
        self.rows = len(values) + 1

    @cached_property
    def _index(self) -> _HashIndex:
        return _HashIndex(self.values)

    def drop_index(self) -> None:
        self.__dict__.pop("_index", None)

    def encode(self, values: Values) -> Ids:
        return self._index.find(values.flat) + 1


class _HashIndex:
    """Position of a string in an array of distinct strings, -1 if absent; about two memory reads at any size.

    The sorted 64-bit hashes are cut by their highest bits into about as many ranges as there are keys; a look-up starts
    at its range and walks. Two keys never share a hash (another seed is taken). A string that is *not* a key is taken
    for one with probability n / 2**64.
    """

    def __init__(self, keys: pa.Array) -> None:
        n = len(keys)
        self._seed = 0
        hashes = hash_strings(keys, self._seed)
        while len(np.unique(hashes)) < n:
            self._seed += 1
            hashes = hash_strings(keys, self._seed)
        order = np.argsort(hashes)
        end = np.array([2**64 - 1], dtype=np.uint64)  # stops every walk
        self._hashes: UInt64 = np.concatenate([hashes[order], end])
        self._positions = np.append(order, -1).astype(np.int32)
        bits = max(1, n.bit_length())
        self._shift = np.uint64(64 - bits)
        ranges = np.arange(2**bits, dtype=np.uint64) << self._shift
        self._range_start = np.searchsorted(self._hashes[:-1], ranges)

    def find(self, strings: pa.Array) -> Ids:
        wanted = hash_strings(strings, self._seed)
        at = self._range_start[wanted >> self._shift]
        walking = np.flatnonzero(self._hashes[at] < wanted)
        while walking.size:
            at[walking] += 1
            walking = walking[self._hashes[at[walking]] < wanted[walking]]
        return np.where(self._hashes[at] == wanted, self._positions[at], np.int32(-1))


class VocabularyFit:
    """Counts the values of one table. Memory grows with the distinct values, not with the rows."""

    def __init__(self, table: str, encoding: Vocabulary) -> None:
        self._name, self._min_count = table, encoding.min_count
        self._counted: list[pa.Table] = []
        self._pending = 0

    def add(self, values: Values) -> None:
        counted = pc.value_counts(values.flat)
        strings = counted.field("values").cast(pa.large_string())
        self._counted.append(pa.table({"value": strings, "count": counted.field("counts")}))
        self._pending += len(counted)
        if self._pending > max(_MERGE_ABOVE, self._counted[0].num_rows):
            self._merge()

    def _merge(self) -> None:
        grouped = pa.concat_tables(self._counted).group_by("value", use_threads=False).aggregate([("count", "sum")])
        self._counted = [grouped.rename_columns({"count_sum": "count"}).select(["value", "count"])]
        self._pending = 0

    def finish(self) -> tuple[VocabularyEncoder, int]:
        """The encoder, and how many distinct values the train split had (rare ones included)."""
        if not self._counted:
            return VocabularyEncoder(pa.array([], pa.large_string()), np.empty(0, dtype=np.int64)), 0
        self._merge()
        table = self._counted[0]
        table = table.filter(pc.greater(pc.binary_length(table["value"]), 0))
        n_distinct = table.num_rows
        table = table.filter(pc.greater_equal(table["count"], self._min_count))
        if table.num_rows >= MAX_ROWS:
            raise BadInput(f"table {self._name!r}: {table.num_rows} values, ids are 31 bits: raise its minimum count")
        # By value too, so that equal counts give the same ids on every machine.
        table = table.sort_by([("count", "descending"), ("value", "ascending")]).combine_chunks()
        values = pa.concat_arrays(table["value"].chunks) if table.num_rows else pa.array([], pa.large_string())
        return VocabularyEncoder(values, table["count"].to_numpy()), n_distinct


class Scaler:
    """One numeric column to float32: transform, then (x - mean) / std where that was fitted.

    missing_becomes: what a missing value is encoded as: 0, of a fitted column the mean. None: as the value 0 is, which
    datasets and models have that were made when means counted missing values as 0
    """

    def __init__(
        self, column: Numeric, mean: float = 0.0, std: float = 1.0, missing_becomes: float | None = 0.0
    ) -> None:
        self.column, self.mean, self.std = column, mean, std
        self.missing_becomes = missing_becomes
        if missing_becomes is None:
            self.missing_becomes = float(self._scaled(np.zeros(1))[0])

    def transform(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.log1p(np.maximum(values, 0.0)) if self.column.transform == "log" else values

    def encode(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        return np.where(np.isnan(values), np.float32(self.missing_becomes), self._scaled(values))

    def _scaled(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        return ((self.transform(values) - self.mean) / self.std).astype(np.float32)

    def to_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std, "missing_becomes": self.missing_becomes}


class ScalerFit:
    """Mean and standard deviation of the values that are there, merged block by block (Chan, Golub, LeVeque 1979):
    exact for large counts."""

    def __init__(self, column: Numeric) -> None:
        self._scaler = Scaler(column)
        self._n, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        x = self._scaler.transform(values[~np.isnan(values)])
        if not len(x):
            return
        n, mean = len(x), float(x.mean())
        delta, total = mean - self._mean, self._n + n
        self._squares += float(((x - mean) ** 2).sum()) + delta**2 * self._n * n / total
        self._mean += delta * n / total
        self._n = total

    def finish(self) -> Scaler:
        std = math.sqrt(self._squares / self._n) if self._n else 0.0
        # A constant column stays constant (0) instead of becoming infinite.
        return Scaler(self._scaler.column, self._mean, std if std > 1e-12 * max(1.0, abs(self._mean)) else 1.0)


def encoder_of(encoding: Hashed | Identity) -> Encoder:
    """The encoder of a table that needs no data."""
    return HashEncoder(encoding) if isinstance(encoding, Hashed) else IdentityEncoder(encoding)


@dataclass(frozen=True)
class Encoders:
    """What turns checked rows into stored rows, by table; `distinct` counts the values a vocabulary saw."""

    tables: dict[str, Encoder]
    numeric: dict[str, Scaler]
    distinct: dict[str, int]

    def encode(self, rows: CheckedRows, recipe: Recipe) -> EncodedRows:
        n = len(rows)
        ids = {c.name: self.tables[c.of_table].encode(rows.categorical[c.name]) for c in recipe.categorical}
        single = [ids[c.name] for c in recipe.categorical if not c.multi_valued]
        bags = [(_lengths(rows, c.name), ids[c.name]) for c in recipe.categorical if c.multi_valued]
        dense = [self.numeric[x.name].encode(rows.numeric[x.name]) for x in recipe.numeric]
        return EncodedRows(
            rows.label,
            np.stack(single, axis=1) if single else np.empty((n, 0), dtype=np.int32),
            np.stack(dense, axis=1) if dense else np.empty((n, 0), dtype=np.float32),
            tuple(bags),
        )


def _lengths(rows: CheckedRows, name: str) -> npt.NDArray[np.int64]:
    lengths = rows.categorical[name].lengths
    assert lengths is not None
    return lengths
