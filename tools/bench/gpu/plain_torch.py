"""Plain torch: all tables on the GPU, an `nn.EmbeddingBag(sparse=True)` each; torch's Adagrad for all parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ..harness import dlrm
from .clicks import Clicks
from .training import Setting, Training, adagrad


class Model(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(setting.n_rows, setting.dim, mode="sum", sparse=True, device=setting.device)
            for _ in range(dlrm.N_TABLES)
        )
        for weight in self.tables.parameters():
            nn.init.uniform_(weight, -setting.spread, setting.spread)
        self.dense = setting.dense()

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """ids: int64 [26, B * bag], dense: float32 [B, 13] -> logits [B]"""
        columns = ids.view(dlrm.N_TABLES, len(dense), -1)
        rows = torch.stack([table(column) for table, column in zip(self.tables, columns, strict=True)], dim=1)
        logits: Tensor = self.dense(dense, rows, [])
        return logits


def training(setting: Setting, clicks: Clicks) -> Training:
    model = Model(setting)
    # Groups of their own: beside sparse gradients torch would update the dense parameters one by one as well.
    optimizer = adagrad(model.dense, model.tables)
    numbers = iter(range(len(clicks)))

    def step() -> Tensor:
        i = next(numbers)
        ids, dense, label = (
            part[i].to(setting.device, non_blocking=True) for part in (clicks.ids, clicks.dense, clicks.label)
        )
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(ids, dense), label)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(step, lambda: 0)
