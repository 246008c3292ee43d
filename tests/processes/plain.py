"""What `workload` trains, in plain torch: one process, one step for each global batch, tables as `nn.Embedding`s."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gba_hvd.epoch import EpochOrder, EpochPlan

from .alone import job_alone
from .workload import DENSE_OPTIMIZERS, Model


class Embeddings(nn.Module):
    """In the place of `EmbeddingTables`."""

    def __init__(self, rows: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.of = nn.ModuleDict(
            {
                name: nn.Embedding.from_pretrained(torch.from_numpy(values), freeze=False)
                for name, values in rows.items()
            }
        )

    def forward(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.of[name](column) for name, column in ids.items()}


@dataclass(frozen=True)
class Plain:
    """arrays: as of `Training.arrays`, without slots. norms: of each step, before clipping; scaler: as it ended."""

    arrays: dict[str, np.ndarray]
    norms: list[float]
    skipped: int  # samples
    scaler: dict[str, Any]


def train_plain(folder: Path, plan: dict[str, Any]) -> Plain:
    """As `alone.train_alone`, from the same values. Rows are stepped by Adagrad."""
    with job_alone(folder, plan) as (training, _):
        training.state.sync()
        rows = {
            table.name: training.tables.rows(table.name, np.arange(table.n_rows))
            for table in training.tables.layout.tables
        }
        model, dataset = Model(Embeddings(rows)), training.dataset
        model.mlp.load_state_dict(training.model.mlp.state_dict())
        training.state.close()
    dense, tables = list(model.mlp.parameters()), list(model.tables.parameters())
    optimizers = [
        DENSE_OPTIMIZERS[plan.get("dense_optimizer", "Adam")](dense), torch.optim.Adagrad(tables, lr=0.05)
    ]  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in plan, **plan.get("scaler", {}))
    cut = EpochPlan(len(dataset), plan.get("global_batch", 96), plan.get("micro_batch", 16))
    norms, skipped = [], 0
    for epoch in range(plan.get("epochs", 2)):
        order = EpochOrder(len(dataset), 1, epoch)
        for step in range(cut.n_steps):
            n = cut.samples_of_step(step)
            batch = dataset.take(order.rows(step * cut.global_batch, n))
            for optimizer in optimizers:
                optimizer.zero_grad()
            overflows = any([epoch, micro] in plan.get("overflows", ()) for micro in cut.micro_of_step(step))
            loss = scaler.scale(nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label))
            (loss * float("inf") if overflows else loss).backward()
            skipped += n * overflows
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            gradients = [p.grad for p in (*dense, *tables) if p.grad is not None]
            norms.append(float(nn.utils.get_total_norm(gradients)))
            if plan.get("max_norm") is not None:
                nn.utils.clip_grad_norm_([*dense, *tables], plan["max_norm"])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    arrays = {f"dense.mlp.{name}": p.detach().numpy() for name, p in model.mlp.named_parameters()}
    arrays |= {f"{name}.weights": model.tables.of[name].weight.detach().numpy() for name in rows}
    return Plain(arrays, norms, skipped, scaler.state_dict())


def assert_trained_as(arrays: dict[str, np.ndarray], plain: Plain) -> None:
    """Equal up to the order of float additions."""
    assert set(plain.arrays) <= set(arrays)
    for name, value in plain.arrays.items():
        np.testing.assert_allclose(arrays[name], value, rtol=2e-3, atol=5e-5, err_msg=name)
