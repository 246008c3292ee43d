"""First values of the rows of tables that do not start from the job's `init_std`: other deviations, functions, files.

What is recorded here is written where a shard is first filled, by the process that fills it. A checkpoint that a job
resumes from is read after that, and wins. The rows of ids of a hashed table start when the ids are admitted
(`shm.vocabulary`); here its function is only tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from gba_hvd.embedding.features import Table
from gba_hvd.embedding.lookups import hint_of_strings
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.extras import extra
from gba_hvd.shm.init_functions import checked_values, copied, initial_values
from gba_hvd.shm.layout import NO_KEY, ids_of, keys_of_ids
from recovery.redaction import redacted

_CHUNK = 1 << 16
_PROBED = 16
_ENDINGS = (".npy", ".npz", ".parquet")


class AssignedRows:
    """Values of some rows of one table: in memory, or in a file that is read when they are needed.

    ids: int64 [n], distinct; values: float32 [n, dim]
    """

    def __init__(self, table: str, shape: Table, ids: np.ndarray, values: np.ndarray, url: str = "") -> None:
        self._table, self._shape, self._url = table, shape, url
        self._ids, self._values = ids, values
        self._by_shard: tuple[int, np.ndarray, np.ndarray] | None = None  # n_shards, their order, where each starts

    @classmethod
    def of(cls, table: str, shape: Table, ids: Any, values: Any) -> AssignedRows:
        return cls(table, shape, *checked_rows(table, shape, ids, values))

    @classmethod
    def of_file(cls, table: str, shape: Table, url: str) -> AssignedRows:
        """Raises BadInput for a file of an unknown kind, and one that is not there."""
        if not url.endswith(_ENDINGS):
            raise BadInput(f"table {table!r}: rows are read from files {', '.join(_ENDINGS)}, got {redacted(url)}")
        import fsspec  # slow to import, and few jobs assign rows from files

        system, path = fsspec.core.url_to_fs(url)
        if not system.exists(path):
            raise BadInput(f"table {table!r}: there is no file {redacted(url)}")
        return cls(table, shape, np.empty(0, np.int64), np.empty((0, shape.dim), np.float32), url)

    def digest(self) -> int:
        """Signed 64 bits, of ids and values."""
        ids, values = self.read()
        found = xxhash.xxh3_64(ids.data)
        found.update(values.data)
        return int(np.uint64(found.intdigest()).view(np.int64))

    def of_shard(self, shard: int, n_shards: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [k], values float32 [k, dim]) of a shard's rows."""
        ids, values = self.read()
        if self._by_shard is None or self._by_shard[0] != n_shards:
            shards = (keys_of_ids(ids) if self._shape.keys else ids) % n_shards
            order = np.argsort(shards, kind="stable")
            self._by_shard = n_shards, order, np.searchsorted(shards[order], np.arange(n_shards + 1))
        _, order, start = self._by_shard
        mine = order[start[shard] : start[shard + 1]]
        return ids[mine], values[mine]

    def release(self) -> None:
        """Free what can be read or computed again."""
        self._by_shard = None
        if self._url:
            self._ids, self._values = self._ids[:0], self._values[:0]

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        if self._url and not len(self._ids):
            self._ids, self._values = checked_rows(self._table, self._shape, *_rows_of_file(self._table, self._url))
        return self._ids, self._values


class InitialRows:
    """Where the rows of each table start. `shm.shard_memory.ShardMemory` asks for them, shard by shard.

    tables: by name; init_std: of tables that name no `init`
    """

    def __init__(self, tables: Mapping[str, Table], init_std: float) -> None:
        self._tables, self._init_std = tables, init_std
        self._assigned: dict[str, list[AssignedRows]] = {}
        self._probed: set[str] = set()

    def assign(self, rows: AssignedRows, table: str) -> None:
        self._assigned.setdefault(table, []).append(rows)

    def take_over(self, other: InitialRows) -> None:
        """What has been assigned to tables of `other`, which are among these."""
        for name, some in other._assigned.items():
            self._assigned.setdefault(name, []).extend(some)

    @property
    def assigned(self) -> list[str]:
        """The tables with assigned rows."""
        return list(self._assigned)

    @property
    def is_plain(self) -> bool:
        """Filling a shard runs no code and reads no file of the user's."""
        return not self._assigned and not any(callable(table.init) for table in self._tables.values())

    def digest(self) -> int:
        """Checksum of all assigned rows; signed 64 bits."""
        digests = [rows.digest() for some in self._assigned.values() for rows in some]
        return int(np.uint64(xxhash.xxh3_64_intdigest(np.array(digests, np.int64).tobytes())).view(np.int64))

    def release(self) -> None:
        for some in self._assigned.values():
            for rows in some:
                rows.release()

    def std(self, table: str) -> float | None:
        """The deviation of normally distributed rows; None: `rows` gives all."""
        init = self._tables[table].init
        if callable(init):
            return None
        return self._init_std if init is None else float(init)

    def rows(self, table: str, shard: int, n_shards: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids int64 [k], weights float32 [k, dim]) of a shard's rows, in parts; of a row that comes twice, the last.

        Raises BadInput for a function that returns something else, or depends on more than the ids.
        """
        about = self._tables[table]
        if callable(about.init):
            ids = np.arange(shard, about.n_rows, n_shards)  # (none of a hashed table)
            self._probe(table, ids_of(np.arange(_PROBED)) if about.keys else ids)
            for at in range(0, len(ids), _CHUNK):
                yield ids[at : at + _CHUNK], self._computed(table, ids[at : at + _CHUNK])
        if about.padding_idx is not None and not about.keys and about.padding_idx % n_shards == shard:
            yield np.array([about.padding_idx]), np.zeros((1, about.dim), np.float32)
        for rows in self._assigned.get(table, ()):
            some, values = rows.of_shard(shard, n_shards)
            for at in range(0, len(some), _CHUNK):
                yield some[at : at + _CHUNK], values[at : at + _CHUNK]

    def _computed(self, table: str, ids: np.ndarray) -> np.ndarray:
        about = self._tables[table]
        assert callable(about.init)
        return initial_values(about.init, f"init of table {table!r}", ids, about.dim)

    def _probe(self, table: str, ids: np.ndarray) -> None:
        """Once a table: the same ids, asked for again in another order, must have the same rows."""
        some = ids[:_PROBED]
        if table in self._probed or not len(some):
            return
        self._probed.add(table)
        try:
            is_pure = np.array_equal(self._computed(table, some), self._computed(table, some[::-1])[::-1])
        except Exception as error:
            if isinstance(error, BadInput) or not self._tables[table].keys:
                raise
            raise BadInput(
                f"init of table {table!r} raises {type(error).__name__}: {error}. It was asked for the rows of ids "
                f"{some[0]}, {some[1]} and more: give any int64 id a row, also those that your data does not have"
            ) from error
        if not is_pure:
            raise BadInput(
                f"init of table {table!r} must depend on the ids only: asked twice for the same ids, it returned other "
                "rows. Derive what is random from the id, such as np.random.default_rng(id)"
            )


def whole_ids(table: str, ids: Any) -> np.ndarray:
    """A copy, int64 of any shape. Raises BadInput for what is no array of whole numbers."""
    try:
        found = copied(ids)
    except ValueError as error:
        raise BadInput(f"table {table!r}: ids must be whole numbers [n], got lists of different lengths") from error
    if found.size and found.dtype.kind not in "iu":
        raise BadInput(
            f"table {table!r}: ids must be whole numbers [n], got {found.dtype} {list(found.shape)}"
            f"{hint_of_strings(ids)}"
        )
    return found.astype(np.int64)


def checked_rows(table: str, shape: Table, ids: Any, values: Any) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [n], float32 [n, dim]), copies. Raises BadInput."""
    found = whole_ids(table, ids)
    if found.ndim != 1:
        raise BadInput(f"table {table!r}: ids must be whole numbers [n], got {found.dtype} {list(found.shape)}")
    if shape.keys and (found == NO_KEY).any():
        raise BadInput(f"table {table!r}: id {NO_KEY} has no row")
    outside = np.flatnonzero((found < 0) | (found >= shape.n_rows))
    if len(outside) and not shape.keys:
        raise BadInput(
            f"table {table!r} has rows 0 to {shape.n_rows - 1}, got id {found[outside[0]]} at position {outside[0]} of "
            "the rows to assign"
        )
    if len(np.unique(found)) < len(found):
        raise BadInput(f"table {table!r}: some of the rows to assign come twice; give each id once")
    return found, checked_values(f"table {table!r}: rows to assign", values, len(found), shape.dim)


def _rows_of_file(table: str, url: str) -> tuple[Any, Any]:
    """ids and values, unchecked."""
    try:
        import fsspec

        with fsspec.open(url, "rb") as file:
            if url.endswith(".npy"):
                values = np.load(file, allow_pickle=False)
                return np.arange(len(values)), values
            if url.endswith(".npz"):
                with np.load(file, allow_pickle=False) as arrays:
                    values = arrays["values"]
                    return arrays.get("ids", np.arange(len(values))), values
            return _rows_of_parquet(file)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(
            f"table {table!r}: {redacted(url)} cannot be read: {error}. Expected .npy with float32 [n, dim] for rows 0 "
            "to n - 1, or .npz or .parquet with `values`, and `ids` int64 [n]"
        ) from error


def _rows_of_parquet(file: Any) -> tuple[Any, Any]:
    with extra("data", "pyarrow", "rows from a .parquet file need"):
        import pyarrow.parquet
    columns = pyarrow.parquet.read_table(file, columns=["ids", "values"])
    lists = columns["values"].combine_chunks()
    flat, n = lists.flatten().to_numpy(zero_copy_only=False), len(lists)
    return columns["ids"].to_numpy(), flat.reshape(n, len(flat) // max(1, n))


def not_assignable() -> GbaError:
    return GbaError(
        "tables.assign works before training, and in allreduce mode outside the loop over batches: in an asynchronous "
        "mode servers write the rows. Assign rows before state.sync() and the first batch"
    )
