"""A small click model with real tables for simulated workers: the model and samples of the emulated benchmarks.

Dense parameters and rows take the way of a real worker: rows are read in shard memory as they are, gradients come from
the same backward pass and are merged by the same code.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import gba_hvd
from gba_hvd.embedding.row_gradients import RowGrad, merge
from gba_hvd.embedding.row_optimizers import RowOptimizer
from gba_hvd.shm.shard_memory import ShardMemory

from ..bench.harness import small_ctr
from .tasks import no_rows

_N_MEASURED = 10_000  # held-out samples that the loss is of


class ClickTask:
    """folder: as `small_ctr.write` left it, with at least `samples` of them."""

    def __init__(self, folder: Path, samples: int, micro_batch: int) -> None:
        self.row_optimizer: RowOptimizer = gba_hvd.Adagrad(lr=small_ctr.LEARNING_RATE, eps=small_ctr.EPS)
        self._train, self._held_out = small_ctr.Samples.train(folder, samples), small_ctr.Samples.held_out(folder)
        self._micro_batch = micro_batch
        torch.manual_seed(1)
        tables = {name: (rows, small_ctr.DIM) for name, rows in small_ctr.TABLES.items()}
        self._tables = gba_hvd.EmbeddingTables(tables, self.row_optimizer, init_std=small_ctr.INIT_STD)
        self._tower = small_ctr.Tower()
        self._parameters = list(self._tower.parameters())
        self.layout = self._tables.layout
        self.start = np.concatenate([p.detach().numpy().ravel() for p in self._parameters])

    def use(self, memory: ShardMemory) -> None:
        self._tables.memory = memory

    def gradient(self, values: np.ndarray, micro: int) -> tuple[np.ndarray, list[RowGrad]]:
        self._put(values)
        ids, dense, label = self._train.micro(micro, self._micro_batch)
        for p in self._parameters:
            p.grad = None
        binary_cross_entropy_with_logits(self._logits(ids, dense), label).backward()
        parts = self._tables.take_gradients()
        nothing = no_rows(self.layout)
        rows = [merge([(part, 1.0) for part in own]) if own else none for own, none in zip(parts, nothing, strict=True)]
        grads = [
            np.zeros(p.numel(), np.float32) if p.grad is None else p.grad.numpy().ravel() for p in self._parameters
        ]
        return np.concatenate(grads), rows

    def measure(self, values: np.ndarray) -> float:
        self._put(values)
        ids, dense, label = self._held_out.tensors(np.arange(min(_N_MEASURED, len(self._held_out))))
        with torch.no_grad():
            return float(binary_cross_entropy_with_logits(self._logits(ids, dense), label))

    def evaluate(self, values: np.ndarray) -> dict[str, float]:
        self._put(values)
        n, loss = len(self._held_out), 0.0
        for at in range(0, n, _N_MEASURED):
            ids, dense, label = self._held_out.tensors(np.arange(at, min(at + _N_MEASURED, n)))
            with torch.no_grad():
                loss += float(binary_cross_entropy_with_logits(self._logits(ids, dense), label, reduction="sum"))
        return {"auc": small_ctr.auc(self._logits, self._held_out), "log_loss": loss / n}

    def _logits(self, ids: Tensor, dense: Tensor) -> Tensor:
        logits: Tensor = self._tower(dense, self._tables.stacked(dict(zip(small_ctr.FIELDS, ids, strict=True))))
        if not torch.is_grad_enabled():
            self._tables.drop_gradients()
        return logits

    def _put(self, values: np.ndarray) -> None:
        at, copied = 0, torch.from_numpy(values.copy())
        with torch.no_grad():
            for p in self._parameters:
                p.copy_(copied[at : at + p.numel()].view_as(p))
                at += p.numel()
