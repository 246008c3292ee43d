"""Plain torch: all tables on the GPU, an `nn.EmbeddingBag(sparse=True)` each; torch's Adagrad for all parameters.

`merged`: one for all tables, so that a step has one lookup, one sort of the ids and one update instead of 26.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..harness import dlrm
from .clicks import Clicks
from .training import Setting, Training, adagrad, plain_step


class Model(nn.Module):
    def __init__(self, setting: Setting, *, merged: bool = False) -> None:
        super().__init__()
        n_tables, n_rows = dlrm.N_TABLES, setting.n_rows
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(n, setting.dim, mode="sum", sparse=True, device=setting.device)
            for n in ([n_tables * n_rows] if merged else [n_rows] * n_tables)
        )
        first_rows = torch.arange(n_tables, device=setting.device).view(-1, 1, 1) * n_rows
        self.first_rows = first_rows if merged else None
        for weight in self.tables.parameters():
            nn.init.uniform_(weight, -setting.spread, setting.spread)
        self.dense = setting.dense()

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """ids: int64 [26, B * bag], dense: float32 [B, 13] -> logits [B]"""
        n, columns = len(dense), ids.view(dlrm.N_TABLES, len(dense), -1)
        if self.first_rows is not None:
            rows = self.tables[0]((columns + self.first_rows).flatten(0, 1)).view(len(columns), n, -1).transpose(0, 1)
        else:
            rows = torch.stack([table(column) for table, column in zip(self.tables, columns, strict=True)], dim=1)
        logits: Tensor = self.dense(dense, rows, [])
        return logits


def training(setting: Setting, clicks: Clicks, *, merged: bool = False) -> Training:
    model = Model(setting, merged=merged)
    # Groups of their own: beside sparse gradients torch would update the dense parameters one by one as well.
    optimizer = adagrad(model.dense, model.tables)
    return Training(plain_step(setting, clicks, optimizer, model), lambda: {"host_bytes": 0})
