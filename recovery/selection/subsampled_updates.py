"""CPR-SSU: the rows worth saving, out of a sub-sampled stream of updates, without a counter per row.

Every `period`-th update is looked at; its row goes to a list of at most `capacity` rows, in place of a random one when
the list is full. Rows updated often and lately are in it with the greatest chance.
"""

from __future__ import annotations

import numpy as np

from recovery.errors import BadInput


class SubSampled:
    """The list of one table's shard. Not thread-safe: the tracker that owns it serialises access.

    capacity: r * n_rows, the most rows that one save takes. Memory: 4 bytes for each, and one bit for each row of the
    shard that says whether it is in the list.
    """

    def __init__(self, n_rows: int, capacity: int, *, rng: np.random.Generator, period: int = 2) -> None:
        if not 0 < capacity <= n_rows < 2**32 or period < 1:
            raise BadInput(f"needs 0 < capacity <= n_rows < 2^32 and period >= 1, got {capacity}, {n_rows}, {period}")
        self._rows = np.empty(capacity, np.uint32)
        self._n = 0
        self._listed = np.zeros(-(-n_rows // 8), np.uint8)
        self._period, self._skip = period, period - 1
        self._rng = rng

    def __len__(self) -> int:
        return self._n

    def add(self, rows: np.ndarray) -> None:
        """Updates, in order. rows: integers [n], places in the shard; may repeat."""
        looked_at = rows[self._skip :: self._period]
        self._skip = (self._skip - len(rows)) % self._period
        new, first = np.unique(looked_at[~self._is_listed(looked_at)], return_index=True)
        new = new[np.argsort(first)]
        room = min(len(self._rows) - self._n, len(new))
        self._rows[self._n : self._n + room] = new[:room]
        self._n += room
        if room < len(new):
            self._mark(new[:room], True)
            self._replace(new[room:])
        else:
            self._mark(new, True)

    def take(self) -> np.ndarray:
        """The rows to save: int64, ascending. The list is empty afterwards."""
        taken = np.sort(self._rows[: self._n].astype(np.int64))
        self._n = 0
        self._listed[:] = 0
        return taken

    def _replace(self, new: np.ndarray) -> None:
        slots = self._rng.integers(len(self._rows), size=len(new))
        evicted = self._rows[slots]
        self._rows[slots] = new  # where a slot was drawn twice the later row stays, as if they had come one by one
        self._mark(evicted, False)
        self._mark(self._rows[slots], True)

    def _is_listed(self, rows: np.ndarray) -> np.ndarray:
        bits: np.ndarray = self._listed[rows >> 3] >> (rows & 7).astype(np.uint8)
        return (bits & 1).astype(bool)

    def _mark(self, rows: np.ndarray, listed: bool) -> None:
        bits = np.left_shift(1, rows & 7).astype(np.uint8)
        if listed:
            np.bitwise_or.at(self._listed, rows >> 3, bits)
        else:
            np.bitwise_and.at(self._listed, rows >> 3, ~bits)
