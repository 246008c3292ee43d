"""Rows of a saved model in memory: as float32, or in fewer bits, as int8 or bfloat16; looked up as float32 again.

The files stay as they are. The largest error of a value, with max the largest magnitude in its row:

    int8       max / 254     a scale for each row, max / 127; dim + 4 bytes a row
    bfloat16   max / 256     of a value v itself |v| / 256: 8 bits of precision, rounded; 2 dim bytes a row
"""

from __future__ import annotations

import numpy as np
import torch

from gba_hvd.serving.manifest import ALIGNMENT


class Float32Rows:
    """An array of rows, which come and go as float32 [m, dim]; `take` writes those at `at` int64 [m] into `out`."""

    def __init__(self, n_rows: int, dim: int) -> None:
        """From a cache line on, so that a row is in as few of them as possible."""
        memory = np.empty(n_rows * dim + ALIGNMENT // 4, np.float32)
        skip = -memory.ctypes.data % ALIGNMENT // 4
        self.array = memory[skip : skip + n_rows * dim].reshape(n_rows, dim)

    def put(self, here: slice, rows: np.ndarray) -> None:
        self.array[here] = rows

    def take(self, at: np.ndarray, out: np.ndarray) -> None:
        np.take(self.array, at, axis=0, out=out)


class Int8Rows:
    """The same. A row that is not finite has no scale: ValueError."""

    def __init__(self, n_rows: int, dim: int) -> None:
        self._codes, self._scales = np.empty((n_rows, dim), np.int8), np.empty(n_rows, np.float32)

    def put(self, here: slice, rows: np.ndarray) -> None:
        scales = np.abs(rows).max(axis=1) / np.float32(127)
        if not np.isfinite(scales).all():
            raise ValueError("a row that is not finite")
        self._codes[here] = np.rint(rows / np.where(scales > 0, scales, np.float32(1))[:, None])
        self._scales[here] = scales

    def take(self, at: np.ndarray, out: np.ndarray) -> None:
        np.multiply(self._codes[at], self._scales[at][:, None], out=out)


class Bfloat16Rows:
    """The same."""

    def __init__(self, n_rows: int, dim: int) -> None:
        self._rows = torch.empty(n_rows, dim, dtype=torch.bfloat16)

    def put(self, here: slice, rows: np.ndarray) -> None:
        self._rows[here] = torch.tensor(rows)

    def take(self, at: np.ndarray, out: np.ndarray) -> None:
        out[:] = self._rows[torch.from_numpy(at)].float().numpy()


PACKED: dict[str, type[Float32Rows | Int8Rows | Bfloat16Rows]] = {
    "float32": Float32Rows, "int8": Int8Rows, "bfloat16": Bfloat16Rows,
}  # fmt: skip
