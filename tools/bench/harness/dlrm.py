"""Facebook's DLRM at its Kaggle size: its numbers, and what its dense part consists of."""

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


def mlp(widths: tuple[int, ...], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))
