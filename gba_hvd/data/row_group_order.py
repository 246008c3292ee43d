"""The order of an epoch's samples when they lie in row groups: groups in random order, samples shuffled in a window.

    row groups in a random order -> windows of some groups -> the samples of a window in a random order

Neighbouring micro-batches so need the same few row groups, and any micro-batch is still found by its index alone.
"""

from __future__ import annotations

import numpy as np

from gba_hvd import kernels
from gba_hvd.shm.layout import table_seed


class RowGroupOrder:
    """The sample at each position of one epoch.

    sizes: int64 [g], the samples of each row group; samples are numbered through all groups. window: groups in one
    """

    def __init__(self, sizes: np.ndarray, seed: int, epoch: int, window: int) -> None:
        self._seed, self._epoch, self._sizes = seed, epoch, sizes
        self._groups = np.empty(len(sizes), dtype=np.int64)
        kernels.shuffled(len(sizes), 0, self._key("row groups"), self._groups)
        self._first_sample = np.cumsum(sizes) - sizes  # of each group
        self._ends = np.cumsum(sizes[self._groups])  # where each group ends, in the order of the epoch
        last = np.minimum(np.arange(window, len(sizes) + window, window), len(sizes)) - 1
        self._window_ends = self._ends[last]

    def rows(self, first: int, count: int) -> np.ndarray:
        """int64 [count]: the samples at positions first, first + 1, ..."""
        positions, done = np.empty(count, dtype=np.int64), 0
        while done < count:
            window = int(np.searchsorted(self._window_ends, first + done, side="right"))
            begin = int(self._window_ends[window - 1]) if window else 0
            end = int(self._window_ends[window])
            part = positions[done : done + min(count - done, end - first - done)]
            kernels.shuffled(end - begin, first + done - begin, self._key(f"window {window}"), part)
            part += begin
            done += len(part)
        turn = np.searchsorted(self._ends, positions, side="right")
        group = self._groups[turn]
        rows: np.ndarray = self._first_sample[group] + positions - (self._ends[turn] - self._sizes[group])
        return rows

    def _key(self, what: str) -> np.uint64:
        return np.uint64(table_seed(self._seed, f"{what} of epoch {self._epoch}"))
