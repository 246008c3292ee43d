"""Ours, as a user would write it: tables in host memory, a model that is moved to the GPU, one worker without Horovod.

GBA_HVD_DEVICE_ROWS in the environment decides who reads and writes the rows, the CPU or the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import gba_hvd
from gba_hvd.embedding.row_optimizers import RowOptimizer

from ..harness import dlrm
from .clicks import Clicks
from .training import Setting, Training, adagrad

FIELDS = [f"c{i}" for i in range(dlrm.N_TABLES)]
RULES: dict[str, Callable[..., RowOptimizer]] = {"adagrad": gba_hvd.Adagrad, "row_adagrad": gba_hvd.RowAdagrad}


class InTurn:
    """A dataset that answers with the prepared batches in turn, whichever samples are asked for."""

    def __init__(self, clicks: Clicks) -> None:
        self._clicks, self._given = clicks, 0

    def __len__(self) -> int:
        return self._clicks.label.numel()

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        clicks, i = self._clicks, self._given
        self._given += 1
        ids = clicks.ids[i] if clicks.bag == 1 else clicks.ids[i].view(dlrm.N_TABLES, clicks.batch, clicks.bag)
        return gba_hvd.Batch(dict(zip(FIELDS, ids, strict=True)), clicks.dense[i], clicks.label[i])


class Model(nn.Module):
    def __init__(self, setting: Setting, tables: gba_hvd.EmbeddingTables) -> None:
        super().__init__()
        self.tables, self.dense = tables, setting.dense()

    def forward(self, batch: gba_hvd.Batch, dense: Tensor) -> Tensor:
        """dense: batch.dense on the model's device -> logits [B]"""
        logits: Tensor = self.dense(dense, self.tables.stacked(batch.ids).to(dense.device, non_blocking=True), [])
        return logits


class Watch(gba_hvd.Callback):
    """What the job reports about who reads the rows.

    hit_share: of rows looked up, those found among the hot ones; None: it was not reported
    """

    def __init__(self) -> None:
        self.said: list[str] = []
        self.hit_share: float | None = None

    def on_event(self, event: gba_hvd.Event) -> None:
        if event.kind == "device_rows":
            self.said.append(event.message)

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.hit_share = metrics.get("hot_rows_hit_share", self.hit_share)


def training(setting: Setting, clicks: Clicks, *, hot_rows: int | str = 0) -> Training:
    """hot_rows: of which the tables keep a copy on the GPU."""
    tables = gba_hvd.EmbeddingTables(
        {name: gba_hvd.Table(setting.n_rows, setting.dim, init=setting.spread / 3**0.5) for name in FIELDS},
        optimizer=RULES[setting.rule](lr=dlrm.LEARNING_RATE, eps=dlrm.EPS),
        hot_rows=hot_rows,
    )
    model = Model(setting, tables).to(setting.device)
    optimizer = gba_hvd.DistributedOptimizer(
        adagrad(model), tables, global_batch=clicks.batch, micro_batch=clicks.batch
    )
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    watch = Watch()
    state.register_callbacks([watch])
    given = gba_hvd.batches(InTurn(clicks), state)

    def step() -> Tensor:
        batch = next(given)
        dense, label = (part.to(setting.device, non_blocking=True) for part in (batch.dense, batch.label))
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(batch, dense), label)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def finish() -> dict[str, Any]:
        assert next(given, None) is None, "batches are left"  # the end of an epoch comes with its figures
        assert tables.memory is not None
        return {"host_bytes": int(tables.memory.flat.nbytes), "said": watch.said, "hit_share": watch.hit_share}

    return Training(step, finish)
