"""DeepFM: a linear term, all pairwise interactions and an MLP, on the same embeddings.

Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017 (arXiv 1703.04247).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ctr.mlp import mlp
from gba_hvd import EmbeddingTables
from gba_hvd.batch import Batch


class DeepFM(nn.Module):
    """Each table has dim + 1 columns: the embedding, and the field's weight in the linear term as the last one.

    `tables` have F features of the same width; numeric fields join the linear term and the MLP.
    """

    def __init__(
        self,
        tables: EmbeddingTables,
        *,
        n_dense: int = 0,
        hidden: Sequence[int] = (400, 400, 400),
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tables = tables
        self.dim = tables.layout.tables[0].dim - 1
        self.bias = nn.Parameter(torch.zeros(()))
        self.dense_weight = nn.Parameter(torch.zeros(n_dense)) if n_dense else None
        self.deep = mlp(len(tables.features) * self.dim + n_dense, hidden, batch_norm=batch_norm, dropout=dropout)
        self.out = nn.Linear(hidden[-1], 1, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B]."""
        rows = self.tables.stacked(batch.ids)  # [B, F, dim + 1]
        embedded = rows[..., : self.dim]
        linear = rows[..., self.dim].sum(1) + self.bias
        deep_input = embedded.flatten(1)
        if self.dense_weight is not None:
            linear = linear + batch.dense @ self.dense_weight
            deep_input = torch.cat([deep_input, batch.dense], dim=1)
        # sum over pairs <v_i, v_j> = half of (square of the sum - sum of the squares)
        pairwise = 0.5 * (embedded.sum(1).square() - embedded.square().sum(1)).sum(1)
        deep: Tensor = self.out(self.deep(deep_input)).squeeze(1)
        return linear + pairwise + deep
