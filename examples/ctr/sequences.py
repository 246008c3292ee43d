"""A prepared store with histories, as models of sequences read it: lists as padded matrices, the newest clicks kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gba_hvd.batch import Bag, Batch
from gba_hvd.data import ClickLog
from gba_hvd.data.behaviour import PADDING
from gba_hvd.errors import BadInput

# Field -> its table.
FIELDS = {
    "user": "user", "candidate": "item", "candidate_category": "category", "history": "item",
    "history_category": "category",
}  # fmt: skip
_HOW = (
    "gba-hvd data prepare ... --categorical user,candidate,candidate_category --multi history --multi history_category "
    "--table item=history,candidate --table category=history_category,candidate_category"
)


def _lists_of(log: ClickLog) -> list[Any]:
    ids = log.take(np.arange(1)).ids
    return [ids["history"], ids["history_category"]]


class SequenceLog:
    """A `ClickLog` whose lists come as int64 [B, L], padded with 0 at the end; the last `max_history` values of each.

    Values that are missing or not in train have id 0 as well, so they are no clicks. Raises BadInput for a store with
    other fields or tables.
    """

    def __init__(self, log: ClickLog, max_history: int) -> None:
        if log.features != FIELDS or any(not isinstance(one, Bag) for one in _lists_of(log)):
            found = ", ".join(f"{name} (table {table})" for name, table in sorted(log.features.items()))
            raise BadInput(f"{log.description['path']}: models of sequences read other fields than {found}: {_HOW}")
        self.tables, self.n_dense, self.description = log.tables, log.n_dense, log.description
        self.vocabulary_digests, self.dense_scaling = log.vocabulary_digests, log.dense_scaling
        self._log, self._max = log, max_history

    def __len__(self) -> int:
        return len(self._log)

    def take(self, rows: np.ndarray) -> Batch:
        batch: Any = self._log.take(rows)
        ids = {name: self._padded(one) if isinstance(one, Bag) else one for name, one in batch.ids.items()}
        return Batch(ids, batch.dense, batch.label)

    def _padded(self, bag: Bag) -> Tensor:
        begin = bag.offsets.numpy()
        end = np.append(begin[1:], len(bag.values))
        n = np.minimum(end - begin, self._max)
        column = np.arange(max(1, int(n.max(initial=0))))
        at = np.minimum((end - n)[:, None] + column, max(0, len(bag.values) - 1))
        values = bag.values.numpy()[at] if len(bag.values) else np.zeros(at.shape, dtype=np.int64)
        return torch.from_numpy(np.where(column < n[:, None], values, PADDING))
