"""The click model of `small_ctr` with this package, as a user would write it, and the samples as data sets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

import gba_hvd

from . import small_ctr


class Model(nn.Module):
    def __init__(self, tables: gba_hvd.EmbeddingTables, hidden: Sequence[int] = small_ctr.HIDDEN) -> None:
        super().__init__()
        self.tables = tables
        self.tower = small_ctr.Tower(hidden)

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        logits: Tensor = self.tower(batch.dense, self.tables.stacked(batch.ids))
        return logits


def embedding_tables(seed: int = 0) -> gba_hvd.EmbeddingTables:
    return gba_hvd.EmbeddingTables(
        {name: (rows, small_ctr.DIM) for name, rows in small_ctr.TABLES.items()},
        optimizer=gba_hvd.Adagrad(lr=small_ctr.LEARNING_RATE, eps=small_ctr.EPS),
        init_std=small_ctr.INIT_STD,
        seed=seed,
    )


def model_and_optimizer(n_micro: int, micro_batch: int) -> tuple[Model, torch.optim.Optimizer]:
    """With a global batch of n_micro micro-batches."""
    torch.manual_seed(1)
    model = Model(embedding_tables())
    optimizer = gba_hvd.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=small_ctr.LEARNING_RATE, eps=small_ctr.EPS),
        model.tables,
        global_batch=n_micro * micro_batch,
        micro_batch=micro_batch,
    )
    return model, optimizer


class Log:
    """The samples of the files."""

    def __init__(self, samples: small_ctr.Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        return _batch(*self._samples.tensors(rows))


class Drawn:
    """Uniform samples, so that every part of the tables is in use; those of a micro-batch follow from its first row."""

    def __init__(self, n_samples: int, n_rows: Sequence[int]) -> None:
        """n_rows: of each table"""
        self._n, self._n_rows = n_samples, n_rows

    def __len__(self) -> int:
        return self._n

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        return _batch(*small_ctr.drawn(int(rows[0]), len(rows), self._n_rows))


def _batch(ids: Tensor, dense: Tensor, label: Tensor) -> gba_hvd.Batch:
    return gba_hvd.Batch(dict(zip(small_ctr.FIELDS, ids, strict=True)), dense, label)
