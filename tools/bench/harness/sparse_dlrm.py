"""The DLRM of `bench allreduce` with tables as torch has them, for peers that do without ours: sparse gradients.

Every worker holds all tables. Imports torch and nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import dlrm


class DLRM(nn.Module):
    """One sparse table per field; `merged`: one table for all fields, so that two allgathers do for 52."""

    def __init__(self, *, merged: bool = False) -> None:
        super().__init__()
        n = dlrm.N_TABLES
        sizes = [n * dlrm.N_ROWS] if merged else [dlrm.N_ROWS] * n
        self.tables = nn.ModuleList(nn.Embedding(size, dlrm.DIM, sparse=True) for size in sizes)
        for weight in self.tables.parameters():
            nn.init.uniform_(weight, -(dlrm.N_ROWS**-0.5), dlrm.N_ROWS**-0.5)
        self.first_row = (torch.arange(n) * dlrm.N_ROWS).unsqueeze(1) if merged else None
        self.dense = dlrm.DenseDLRM()

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """ids: int64 [26, B], dense: float32 [B, 13] -> logits [B]"""
        if self.first_row is not None:
            rows = self.tables[0]((ids + self.first_row).T)
        else:
            rows = torch.stack([table(column) for table, column in zip(self.tables, ids, strict=True)], dim=1)
        logits: Tensor = self.dense(dense, rows)
        return logits
