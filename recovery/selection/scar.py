"""SCAR: the rows whose values changed most, in L2, since they were last saved."""

from __future__ import annotations

import numpy as np

from recovery.rows import KEY, RowIndices, RowSource
from recovery.selection.importance import l2_change


class Scar:
    """Keeps a copy of all rows as they were last saved; zeros where they never were."""

    def __init__(self, rows: RowSource) -> None:
        self._rows = rows
        self._kept: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}

    @classmethod
    def extra_bytes(cls, n_rows: int, record_bytes: int) -> int:
        return n_rows * record_bytes

    def importance(self, table: int, shard: int, rows: slice) -> np.ndarray:
        far = np.zeros(rows.stop - rows.start, np.float32)
        columns, about = self._rows.slab(table, shard).columns, self._rows.schema.tables[table]
        left = sum(column.width for column in about.columns if not column.exact)
        for now, kept in zip(columns, self._copies(table, shard), strict=True):
            if left:
                far += l2_change(now[rows], kept[rows])
                left -= now.shape[1]
            elif now.shape[1] == KEY.width:  # another key's row now
                far[(now[rows].view(np.uint32) != kept[rows].view(np.uint32)).any(axis=1)] = np.inf
                break
        return far

    def saved(self, table: int, shard: int, indices: RowIndices, records: np.ndarray, counts: np.ndarray) -> None:
        at = 0
        for kept in self._copies(table, shard):
            kept[indices] = records[:, at : at + kept.shape[1]]
            at += kept.shape[1]

    def restored(self, table: int, shard: int) -> None:
        columns = self._rows.slab(table, shard).columns
        for kept, column in zip(self._copies(table, shard), columns, strict=True):
            kept[:] = column

    def _copies(self, table: int, shard: int) -> tuple[np.ndarray, ...]:
        if (table, shard) not in self._kept:
            columns = self._rows.slab(table, shard).columns
            self._kept[table, shard] = tuple(np.zeros(column.shape, np.float32) for column in columns)
        return self._kept[table, shard]
