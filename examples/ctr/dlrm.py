"""DLRM: numeric fields through a bottom MLP, interactions of all pairs of vectors, a top MLP.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", arXiv 1906.00091.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ctr.mlp import mlp
from gba_hvd import EmbeddingTables
from gba_hvd.batch import Batch


class DLRM(nn.Module):
    """`tables` have F features of one dimension. Without numeric fields there is no bottom MLP.

    interaction: what the top MLP gets: "dot", the products of all pairs and the bottom output; "cat", the vectors
    """

    def __init__(
        self,
        tables: EmbeddingTables,
        *,
        n_dense: int = 0,
        bottom: Sequence[int] = (64, 32),
        hidden: Sequence[int] = (400, 400, 400),
        interaction: Literal["dot", "cat"] = "dot",
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if interaction not in ("dot", "cat"):
            raise ValueError(f'interaction must be "dot" or "cat", got {interaction!r}')
        self.tables = tables
        n_fields, dim = len(tables.features), tables.layout.tables[0].dim
        self.interaction = interaction
        self.bottom = mlp(n_dense, (*bottom, dim), batch_norm=batch_norm) if n_dense else None
        n_vectors = n_fields + (self.bottom is not None)
        n_pairs = n_vectors * (n_vectors - 1) // 2
        n_top = n_vectors * dim if interaction == "cat" else n_pairs + (dim if self.bottom is not None else 0)
        first, second = torch.triu_indices(n_vectors, n_vectors, offset=1)
        self.register_buffer("pairs", first * n_vectors + second, persistent=False)
        self.top = mlp(n_top, hidden, batch_norm=batch_norm, dropout=dropout)
        self.out = nn.Linear(hidden[-1], 1)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B]."""
        vectors = self.tables.stacked(batch.ids)  # [B, F, dim]
        bottom = self.bottom(batch.dense) if self.bottom is not None else None
        if bottom is not None:
            vectors = torch.cat([bottom.unsqueeze(1), vectors], dim=1)
        if self.interaction == "cat":
            top_input = vectors.flatten(1)
        else:
            products = vectors @ vectors.transpose(1, 2)  # [B, vectors, vectors], symmetric
            top_input = products.flatten(1).index_select(1, self.get_buffer("pairs"))
            if bottom is not None:
                top_input = torch.cat([bottom, top_input], dim=1)
        logits: Tensor = self.out(self.top(top_input)).squeeze(1)
        return logits
