"""DCN-v2: layers that multiply the input with itself once more each, beside or below an MLP.

Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021 (arXiv 2008.13535), equation 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ctr.mlp import mlp
from gba_hvd import EmbeddingTables
from gba_hvd.batch import Batch


class CrossNet(nn.Module):
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l with full-rank W_l; [B, n] -> [B, n]."""

    def __init__(self, n_inputs: int, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n_inputs, n_inputs) for _ in range(n_layers))

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x


class DCNv2(nn.Module):
    """`tables` have F features of one dimension; numeric fields are appended to the embeddings.

    structure: "parallel", cross and MLP side by side, joined at the end; "stacked", the MLP on top of the cross
    """

    def __init__(
        self,
        tables: EmbeddingTables,
        *,
        n_dense: int = 0,
        cross_layers: int = 3,
        hidden: Sequence[int] = (400, 400, 400),
        structure: Literal["parallel", "stacked"] = "parallel",
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if structure not in ("parallel", "stacked"):
            raise ValueError(f'structure must be "parallel" or "stacked", got {structure!r}')
        self.tables = tables
        self.structure = structure
        n_inputs = len(tables.features) * tables.layout.tables[0].dim + n_dense
        self.cross = CrossNet(n_inputs, cross_layers)
        self.deep = mlp(n_inputs, hidden, batch_norm=batch_norm, dropout=dropout)
        self.out = nn.Linear(hidden[-1] + (n_inputs if structure == "parallel" else 0), 1)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B]."""
        x = torch.cat([self.tables.stacked(batch.ids).flatten(1), batch.dense], dim=1)
        crossed = self.cross(x)
        if self.structure == "parallel":
            joined = torch.cat([crossed, self.deep(x)], dim=1)
        else:
            joined = self.deep(crossed)
        logits: Tensor = self.out(joined).squeeze(1)
        return logits
