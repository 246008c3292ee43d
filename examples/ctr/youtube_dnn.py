"""Two towers: a user vector from the mean of the clicks through an MLP, an item vector, and their product.

Covington et al., "Deep Neural Networks for YouTube Recommendations", RecSys 2016 (candidate generation). The softmax is
over the items of the micro-batch, corrected by how often each occurs there (log Q): Yi et al., "Sampling-Bias-Corrected
Neural Modeling for Large Corpus Item Recommendations", RecSys 2019. Unlike the first paper's, an item's row is both in
the mean of a history and its vector, and a linear layer follows the last ReLU, as vectors of rows are not positive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import gba_hvd
from ctr.mlp import mlp
from gba_hvd.batch import Batch


class YoutubeDNN(nn.Module):
    """`tables` have features user, candidate, candidate_category and, as means, history, history_category: [B, dim].

    log_q: float32 [rows of "item"], the logarithm of each item's share of the clicks that are trained on
    """

    log_q: Tensor

    def __init__(
        self,
        tables: gba_hvd.EmbeddingTables,
        log_q: Tensor,
        *,
        hidden: Sequence[int] = (128, 64),
        temperature: float = 1.0,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tables, self.temperature = tables, temperature
        dim = tables.layout.tables[0].dim
        self.user_tower = mlp(3 * dim, hidden, batch_norm=batch_norm, dropout=dropout)
        self.out = nn.Linear(hidden[-1], dim)
        self.register_buffer("log_q", log_q, persistent=False)

    def users(self, batch: Batch) -> Tensor:
        """User vectors [B, dim]."""
        return self._users(self._rows(batch, "user", "history", "history_category"))

    def items(self, batch: Batch) -> Tensor:
        """Item vectors [B, dim] of the candidates."""
        return self._items(self._rows(batch, "candidate", "candidate_category"))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """User vectors and the vectors of the candidates, [B, dim] each."""
        rows = self.tables(batch.ids)
        return self._users(rows), self._items(rows)

    def loss(self, batch: Batch) -> Tensor:
        """Softmax loss of each user's next click among those of the micro-batch."""
        users, items = self(batch)
        clicked = batch.ids["candidate"]
        assert isinstance(clicked, Tensor)
        log_q, loss_of = self.log_q[clicked], gba_hvd.in_batch_softmax
        loss: Tensor = loss_of(users, items, item_ids=clicked, log_q=log_q, temperature=self.temperature)
        return loss

    def _rows(self, batch: Batch, *names: str) -> Mapping[str, Tensor]:
        rows: dict[str, Tensor] = self.tables({name: batch.ids[name] for name in names})
        return rows

    def _users(self, rows: Mapping[str, Tensor]) -> Tensor:
        joined = torch.cat([rows["user"], rows["history"], rows["history_category"]], dim=1)
        vectors: Tensor = self.out(self.user_tower(joined))
        return vectors

    def _items(self, rows: Mapping[str, Tensor]) -> Tensor:
        return rows["candidate"] + rows["candidate_category"]
