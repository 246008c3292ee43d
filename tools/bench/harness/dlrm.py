"""The model every peer trains: Facebook's DLRM at its Kaggle size.

Imports torch and nothing else, so that peers in other virtual environments share it. Where the rows come from, and who
sums the gradients, each peer decides.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

N_TABLES, N_ROWS, DIM, N_DENSE = 26, 200_000, 16, 13
BOTTOM, TOP = (N_DENSE, 512, 256, 64, DIM), (512, 256, 1)

# Adagrad, element by element, on rows and dense parameters alike: the one rule that torch (sparse gradients), fbgemm
# (EXACT_ADAGRAD) and we all have.
LEARNING_RATE, EPS = 0.01, 1e-8


class Interaction(nn.Module):
    """Dot products between all pairs of feature vectors (DLRM, Naumov et al. 2019, section 2.1.3)."""

    def __init__(self, n_vectors: int) -> None:
        super().__init__()
        row, column = torch.tril_indices(n_vectors, n_vectors, offset=-1)
        self.register_buffer("pairs", row * n_vectors + column, persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """float32 [B, n, dim] -> [B, n * (n - 1) / 2]"""
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return products.index_select(1, self.get_buffer("pairs"))


class DenseDLRM(nn.Module):
    """Bottom MLP, interaction, top MLP."""

    def __init__(self) -> None:
        super().__init__()
        n_pairs = (N_TABLES + 1) * N_TABLES // 2
        self.bottom = mlp(BOTTOM, last_relu=True)
        self.interaction = Interaction(N_TABLES + 1)
        self.top = mlp((n_pairs + DIM, *TOP), last_relu=False)

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """dense: [B, 13], rows: [B, 26, 16] -> logits [B]"""
        bottom = self.bottom(dense)
        pairs = self.interaction(torch.cat([bottom.unsqueeze(1), rows], dim=1))
        logits: Tensor = self.top(torch.cat([bottom, pairs], dim=1))
        return logits.squeeze(1)


def mlp(widths: tuple[int, ...], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class SparseDLRM(nn.Module):
    """With tables as torch has them, for peers that do without ours: sparse gradients, all tables on every worker.

    One table per field; `merged`: one table for all fields, so that two allgathers do for 52.
    """

    def __init__(self, *, merged: bool = False) -> None:
        super().__init__()
        n = N_TABLES
        sizes = [n * N_ROWS] if merged else [N_ROWS] * n
        self.tables = nn.ModuleList(nn.Embedding(size, DIM, sparse=True) for size in sizes)
        for weight in self.tables.parameters():
            nn.init.uniform_(weight, -(N_ROWS**-0.5), N_ROWS**-0.5)
        self.first_row = (torch.arange(n) * N_ROWS).unsqueeze(1) if merged else None
        self.dense = DenseDLRM()

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """ids: int64 [26, B], dense: float32 [B, 13] -> logits [B]"""
        if self.first_row is not None:
            rows = self.tables[0]((ids + self.first_row).T)
        else:
            rows = torch.stack([table(column) for table, column in zip(self.tables, ids, strict=True)], dim=1)
        logits: Tensor = self.dense(dense, rows)
        return logits
