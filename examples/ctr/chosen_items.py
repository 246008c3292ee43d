"""A click log as two towers read it: the samples in which an item was chosen, and all items, each once.

A sample's other fields are of the user and the moment; negatives come from the batch, so samples with label 0 are left
out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gba_hvd.batch import Bag, Batch
from gba_hvd.data import ClickLog
from gba_hvd.data.click_log import check_range

ITEM = "item"  # the field; row 0 of its table stands for items that are not in train
_BLOCK = 1 << 16

Rows = npt.NDArray[np.int64]


class ChosenItems:
    """The samples with label 1 of a log with a field `item`. tables, n_dense, description: as those of `ClickLog`."""

    def __init__(self, log: ClickLog) -> None:
        self._log = log
        blocks = [np.arange(at, min(at + _BLOCK, len(log))) for at in range(0, len(log), _BLOCK)]
        chosen = [block[log.take(block).label.numpy() == 1] for block in blocks]
        self._rows: Rows = np.concatenate([np.empty(0, np.int64), *chosen])
        self.tables, self.n_dense = log.tables, log.n_dense
        self.vocabulary_digests, self.dense_scaling = log.vocabulary_digests, log.dense_scaling
        self.description = {**log.description, "samples": len(self._rows), "kind": "chosen items of a click log"}

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, rows: Rows) -> Batch:
        """The samples at `rows` (int64 [n], any order). Raises `IndexError` for a row outside the log."""
        check_range(rows, len(self))
        return self._log.take(self._rows[rows])

    @property
    def n_items(self) -> int:
        return self.tables[ITEM] - 1

    def items(self) -> Catalogue:
        """All items of train, each once."""
        return Catalogue(self.n_items)

    def popularity(self) -> npt.NDArray[np.float64]:
        """float64 [n_items + 1]: the share of the samples that chose each item."""
        ids = self.take(np.arange(len(self))).ids[ITEM]
        assert isinstance(ids, Tensor)
        counts = np.bincount(ids.numpy(), minlength=self.n_items + 1)
        return np.asarray(counts / max(1, len(self)))


class Catalogue:
    """Sample i is item i + 1, in a `Batch` with ids item [n]."""

    def __init__(self, n_items: int) -> None:
        self._n = n_items

    def __len__(self) -> int:
        return self._n

    def take(self, rows: Rows) -> Batch:
        """The items at `rows` (int64 [n], any order); labels are 0."""
        check_range(rows, self._n)
        ids: dict[str, Tensor | Bag] = {ITEM: torch.from_numpy(np.asarray(rows, dtype=np.int64) + 1)}
        return Batch(ids, torch.empty(len(rows), 0), torch.zeros(len(rows)))
