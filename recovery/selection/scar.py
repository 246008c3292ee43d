"""SCAR: the rows whose weights changed most, in L2, since they were last saved.

Optimizer slots do not count, as published: a row whose slots alone changed is not worth saving.
"""

from __future__ import annotations

import numpy as np

from recovery.rows import RowIndices, RowSource
from recovery.selection.importance import l2_change


class Scar:
    """Keeps a copy of all weights as they were last saved; zeros where they never were."""

    def __init__(self, rows: RowSource) -> None:
        self._rows = rows
        self._saved: dict[tuple[int, int], np.ndarray] = {}

    @classmethod
    def extra_bytes(cls, n_rows: int, record_bytes: int) -> int:
        """At most: of rows without optimizer slots. See `importance.extra_bytes`."""
        return n_rows * record_bytes

    def importance(self, table: int, shard: int, rows: slice) -> np.ndarray:
        return l2_change(self._weights(table, shard)[rows], self._copy(table, shard)[rows])

    def saved(self, table: int, shard: int, indices: RowIndices, records: np.ndarray, counts: np.ndarray) -> None:
        copy = self._copy(table, shard)
        copy[indices] = records[:, : copy.shape[1]]

    def restored(self, table: int, shard: int) -> None:
        self._copy(table, shard)[:] = self._weights(table, shard)

    def _weights(self, table: int, shard: int) -> np.ndarray:
        """float32 [n, width]: a view; one array of the slab may hold the weights and slots."""
        width = self._rows.schema.tables[table].columns[0].width
        return self._rows.slab(table, shard).columns[0][:, :width]

    def _copy(self, table: int, shard: int) -> np.ndarray:
        if (table, shard) not in self._saved:
            self._saved[table, shard] = np.zeros(self._weights(table, shard).shape, np.float32)
        return self._saved[table, shard]
