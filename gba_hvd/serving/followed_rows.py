"""The rows of a model that follows a job: in memory, as the job's checkpoints have them, replaced update by update.

An update is staged beside the rows while requests look them up, and applied while none does.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from recovery.errors import Damaged
from recovery.hashed_ids import newest_rows, shared_rows_of
from recovery.rows import KEY, NO_KEY, USES, Schema, Table


class FollowedRows:
    """A `frozen_rows.RowReader` of one table, as large as the job's. Requests and `Change.apply` exclude each other."""

    def __init__(self, table: Table, n_shards: int) -> None:
        self._dim, self._n_rows = table.columns[0].width, table.n_rows
        self._weights = np.empty((table.n_rows, self._dim), np.float32)
        self._n_shared, self._n_shards, self._hashes = n_shards * table.shared_rows, n_shards, table.shared_hashes
        self._n_own = table.n_rows - self._n_shared
        self._keys = np.full(table.n_rows if table.is_keyed else 0, NO_KEY, np.int64)
        self._used = np.zeros(len(self._keys), np.uint32)  # last, by step
        self._index = (np.empty(0, np.int64), np.empty(0, np.int64))  # keys, ascending, and the row of each

    def gather(self, keys: np.ndarray, out: np.ndarray) -> None:
        if not self._n_shared:
            np.take(self._weights, keys, axis=0, out=out)
            return
        found, at = self._find(keys)
        rows, *more = self._n_own + shared_rows_of(keys, self._n_shared, self._n_shards, self._hashes)
        rows[found] = self._index[1][at[found]]
        np.take(self._weights, rows, axis=0, out=out)
        for shared in more:
            out[~found] += self._weights[shared[~found]]

    def has(self, keys: np.ndarray) -> np.ndarray:
        return self._find(keys)[0] if self._n_shared else np.ones(len(keys), np.bool_)

    def keys(self) -> np.ndarray:
        return self._index[0] if self._n_shared else np.arange(self._n_rows)

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(which keys have a row, bool [n]; where they are in the index, int64 [n])"""
        there = self._index[0]
        if not len(there):
            return np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.int64)
        at = np.minimum(np.searchsorted(there, keys), len(there) - 1)
        return there[at] == keys, at


class Change:
    """Rows of one table that an update replaces. Staged by `add` and `settle`; nothing is changed before `apply`."""

    def __init__(self, target: FollowedRows, table: Table) -> None:
        self._target, self._dim, self._is_keyed = target, table.columns[0].width, table.is_keyed
        self._pieces: list[tuple[np.ndarray, np.ndarray]] = []
        self._keys, self._used, self._index = target._keys, target._used, target._index
        self.n_rows = 0

    def add(self, rows: np.ndarray, records: np.ndarray) -> None:
        """Of a row that comes again, the later record counts. rows: int64 [n]; records: float32 [n, width]"""
        self.n_rows += len(rows)
        self._put(rows, records[:, : self._dim])
        if self._is_keyed:
            if self._keys is self._target._keys:
                self._keys, self._used = self._keys.copy(), self._used.copy()
            exact = np.ascontiguousarray(records[:, -KEY.width - USES.width :])
            self._keys[rows] = exact[:, : KEY.width].copy().view(np.int64)[:, 0]
            self._used[rows] = exact[:, KEY.width :].copy().view(np.uint32)[:, 1]

    def _put(self, rows: np.ndarray, weights: np.ndarray) -> None:
        self._pieces.append((rows, weights.copy()))  # (without the slots of the optimizer)

    def settle(self) -> None:
        """All records have come: find the row of each key."""
        if self._keys is not self._target._keys:
            mine = np.flatnonzero(self._keys[: self._target._n_own] != NO_KEY)
            self._index = newest_rows(self._keys[mine], self._used[mine], mine)

    def apply(self) -> None:
        for rows, weights in self._pieces:
            self._target._weights[rows] = weights
        self._target._keys, self._target._used, self._target._index = self._keys, self._used, self._index


class FirstChange(Change):
    """All rows of a table that nothing has looked up yet: they are written at once."""

    def __init__(self, target: FollowedRows, table: Table) -> None:
        super().__init__(target, table)
        self._name, self._there = table.name, np.zeros(table.n_rows, np.bool_)

    def _put(self, rows: np.ndarray, weights: np.ndarray) -> None:
        self._target._weights[rows] = weights
        self._there[rows] = True

    def settle(self) -> None:
        if not self._there.all():
            raise Damaged(f"{int((~self._there).sum())} rows of table {self._name!r} were never saved")
        super().settle()


def staged(
    schema: Schema, rows: dict[str, FollowedRows] | None, saved: Iterable[tuple[int, np.ndarray, np.ndarray]]
) -> tuple[dict[str, FollowedRows], list[Change]]:
    """(the rows of each table, what is to be applied to them).

    rows: of the state before; None: `saved` is all rows, for new ones. saved: as of `inspect.saved_rows`
    """
    make = Change if rows is not None else FirstChange
    rows = rows or {table.name: FollowedRows(table, schema.n_shards) for table in schema.tables}
    changes = [make(rows[table.name], table) for table in schema.tables]
    for number, at, records in saved:
        changes[number].add(at, records)
    for change in changes:
        change.settle()
    return rows, changes
