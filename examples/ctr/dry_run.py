"""One micro-batch through the model of a job, forward and backward, before anything is started (`--dry-run`).

The model and the batch are those of the job; no shard memory is made, so tables of any size can be tried.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gba_hvd
from ctr.build import build_model, build_tables, loss_of
from ctr.config import JobConfig
from ctr.datasets import Splits
from gba_hvd.embedding.row_gradients import distinct_parts
from gba_hvd.errors import BadInput


class TrialTables(gba_hvd.EmbeddingTables):
    """Checks ids as the real tables do, and hands out random rows that are kept nowhere."""

    def _fetch(
        self, group_number: int, wanted: np.ndarray, ends: list[int], by_sample: list[np.ndarray], train: bool
    ) -> tuple[Tensor, np.ndarray]:
        keys, index = distinct_parts(wanted, ends)
        rows = torch.randn(len(keys), self.layout.groups[group_number].dim).mul_(0.01)
        return rows.requires_grad_(train), index


def try_batch(config: JobConfig, splits: Splits) -> str:
    """Train on the first micro-batch of train; a sentence about it. Raises `BadInput` when the loss is not finite."""
    torch.manual_seed(config.seed)
    log = splits.train
    model = build_model(config, build_tables(config, log, TrialTables), log)
    batch: Any = log.take(np.arange(min(config.train.micro_batch, len(log)), dtype=np.int64))
    started = time.perf_counter()
    loss = loss_of(model, batch)
    loss.backward()
    seconds, value = time.perf_counter() - started, loss.item()
    if not math.isfinite(value):
        raise BadInput(
            f"the loss of the first {len(batch):,} samples is {value}: look at the numeric fields of the log"
        )
    n_values = sum(parameter.numel() for parameter in model.parameters())
    passes = f"{len(batch):,} samples, forward and backward in {seconds:.2f} s, loss {value:.4f}"
    return f"{passes}; {n_values:,} dense parameters"
