"""SCAR: the rows whose weights changed most, in L2, since they were last saved.

Optimizer slots do not count, as published: a row whose slots alone changed is not worth saving.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recovery.rows import KEY, USES, RowIndices, RowSource, Table
from recovery.selection.importance import l2_change


class Scar:
    """Keeps a copy of all weights, and keys of keyed tables, as they were last saved; zeros where they never were."""

    def __init__(self, rows: RowSource) -> None:
        self._rows = rows
        self._copies: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}

    def importance(self, table: int, shard: int, rows: slice) -> np.ndarray:
        """Squared distances; infinite where another key has the row now."""
        (weights, *keys), (weights_then, *keys_then) = self._now(table, shard), self._copy(table, shard)
        far = l2_change(weights[rows], weights_then[rows])
        for now, then in zip(keys, keys_then, strict=True):
            far[(now[rows].view(np.uint32) != then[rows].view(np.uint32)).any(axis=1)] = np.inf
        return far

    def saved(self, table: int, shard: int, indices: RowIndices, records: np.ndarray, counts: np.ndarray) -> None:
        about = self._rows.schema.tables[table]
        for copy, now in zip(self._copy(table, shard), _compared((records,), about), strict=True):
            copy[indices] = now

    def restored(self, table: int, shard: int) -> None:
        for copy, now in zip(self._copy(table, shard), self._now(table, shard), strict=True):
            copy[:] = now

    def _now(self, table: int, shard: int) -> tuple[np.ndarray, ...]:
        return _compared(self._rows.slab(table, shard).columns, self._rows.schema.tables[table])

    def _copy(self, table: int, shard: int) -> tuple[np.ndarray, ...]:
        if (table, shard) not in self._copies:
            self._copies[table, shard] = tuple(np.zeros(now.shape, np.float32) for now in self._now(table, shard))
        return self._copies[table, shard]


def _compared(arrays: Sequence[np.ndarray], table: Table) -> tuple[np.ndarray, ...]:
    """The weights, and of a keyed table the keys: views, float32 [n, width] each. arrays: see `RowView.columns`."""
    weights = _column(arrays, 0, table.columns[0].width)
    if not table.is_keyed:
        return (weights,)
    return weights, _column(arrays, table.width - USES.width - KEY.width, KEY.width)


def _column(arrays: Sequence[np.ndarray], at: int, width: int) -> np.ndarray:
    """The column that begins `at` numbers into the record."""
    for array in arrays:
        if at < array.shape[1]:
            return array[:, at : at + width]
        at -= array.shape[1]
    raise AssertionError("a record has all columns of its table")
