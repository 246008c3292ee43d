"""Rows of a saved model in fewer bits: read into memory as int8 or bfloat16, and looked up as float32 again.

The files stay as they are. The largest error of a value, with max the largest magnitude in its row:

    int8       max / 254     a scale for each row, max / 127; dim + 4 bytes a row
    bfloat16   max / 256     of a value v itself |v| / 256: 8 bits of precision, rounded; 2 dim bytes a row
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from gba_hvd.serving.manifest import RowShards, StoredTable
from gba_hvd.serving.row_shards import shard_arrays
from gba_hvd.serving.stored_bytes import get_verified
from recovery.errors import Damaged
from recovery.storage.store import Store

_READERS = 4


class Int8Rows:
    """An array of rows, which come and go as float32 [m, dim]. One that is not finite has no scale: ValueError."""

    def __init__(self, n_rows: int, dim: int) -> None:
        self._codes, self._scales = np.empty((n_rows, dim), np.int8), np.empty(n_rows, np.float32)

    def put(self, here: slice, rows: np.ndarray) -> None:
        scales = np.abs(rows).max(axis=1) / np.float32(127)
        if not np.isfinite(scales).all():
            raise ValueError("a row that is not finite")
        self._codes[here] = np.rint(rows / np.where(scales > 0, scales, np.float32(1))[:, None])
        self._scales[here] = scales

    def take(self, at: np.ndarray) -> np.ndarray:
        rows: np.ndarray = self._codes[at] * self._scales[at][:, None]
        return rows


class Bfloat16Rows:
    """The same."""

    def __init__(self, n_rows: int, dim: int) -> None:
        self._rows = torch.empty(n_rows, dim, dtype=torch.bfloat16)

    def put(self, here: slice, rows: np.ndarray) -> None:
        self._rows[here] = torch.tensor(rows)

    def take(self, at: np.ndarray) -> np.ndarray:
        rows: np.ndarray = self._rows[torch.from_numpy(at)].float().numpy()
        return rows


PACKED: dict[str, type[Int8Rows | Bfloat16Rows]] = {"int8": Int8Rows, "bfloat16": Bfloat16Rows}


class CompactRows:
    """The rows of all shards of a table, in the order of their keys, which are left out where no row is missing.

    Raises Damaged where a shard is not what was saved.
    """

    def __init__(self, store: Store, table: StoredTable, part: RowShards, dtype: str) -> None:
        ends = np.cumsum([0, *(shard.n_rows for shard in part.shards)])
        self._n = int(ends[-1])
        self._packed = PACKED[dtype](self._n, table.dim)
        self._keys = None if part.is_complete else np.empty(self._n, np.int64)

        def read(number: int) -> None:
            shard, here = part.shards[number], slice(int(ends[number]), int(ends[number + 1]))
            keys, rows = shard_arrays(get_verified(store, shard.name, shard.n_bytes, shard.sha256), shard, table, part)
            try:
                self._packed.put(here, rows)
            except ValueError as error:
                raise Damaged(f"table {table.name!r}: {shard.name} has {error}: open the model in float32") from error
            if self._keys is not None:
                self._keys[here] = keys

        with ThreadPoolExecutor(_READERS, "load-model") as pool:
            list(pool.map(read, range(len(part.shards))))

    def find(self, keys: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """Write the rows that are there into `out`; which are, bool [n]."""
        at, found = keys, np.ones(len(keys), np.bool_)
        if self._keys is not None:
            at = np.minimum(np.searchsorted(self._keys, keys), max(0, self._n - 1))
            found = self._keys[at] == keys if self._n else np.zeros(len(keys), np.bool_)
        if out is not None:
            out[found] = self._packed.take(at[found])
        return found

    def keys(self) -> np.ndarray:
        return np.arange(self._n) if self._keys is None else self._keys
