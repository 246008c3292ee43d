"""Two towers: a user vector, of the user and the mean of the clicks (or the moment) through an MLP, an item vector, and
their product.

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

OF_USER, OF_ITEM = ("user", "history", "history_category"), ("candidate", "candidate_category")  # of a behaviour log


class YoutubeDNN(nn.Module):
    """The features of `tables` are pooled, [B, dim].

    of_user: those that the user tower gets, side by side. of_item: those whose sum is the item's vector; the first one
    says which item it is
    log_q: float32 [rows of the item's table], the logarithm of each item's share of the clicks that are trained on
    """

    log_q: Tensor

    def __init__(
        self,
        tables: gba_hvd.EmbeddingTables,
        log_q: Tensor,
        *,
        of_user: Sequence[str] = OF_USER,
        of_item: Sequence[str] = OF_ITEM,
        hidden: Sequence[int] = (128, 64),
        temperature: float = 1.0,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tables, self.temperature = tables, temperature
        self.of_user, self.of_item = tuple(of_user), tuple(of_item)
        dim = tables.layout.tables[0].dim
        self.user_tower = mlp(len(self.of_user) * dim, hidden, batch_norm=batch_norm, dropout=dropout)
        self.out = nn.Linear(hidden[-1], dim)
        self.register_buffer("log_q", log_q, persistent=False)

    def users(self, batch: Batch) -> Tensor:
        """User vectors [B, dim]."""
        return self._users(self._rows(batch, self.of_user))

    def items(self, batch: Batch) -> Tensor:
        """Item vectors [B, dim]."""
        return self._items(self._rows(batch, self.of_item))

    def item_ids(self, batch: Batch) -> Tensor:
        """int64 [B]"""
        ids = batch.ids[self.of_item[0]]
        assert isinstance(ids, Tensor)
        return ids

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """User vectors and the vectors of the items that they chose, [B, dim] each."""
        rows = self.tables(batch.ids)
        return self._users(rows), self._items(rows)

    def loss(self, batch: Batch) -> Tensor:
        """Softmax loss of each user's next click among those of the micro-batch."""
        users, items = self(batch)
        clicked, loss_of = self.item_ids(batch), gba_hvd.in_batch_softmax
        log_q = self.log_q[clicked]
        loss: Tensor = loss_of(users, items, item_ids=clicked, log_q=log_q, temperature=self.temperature)
        return loss

    def _rows(self, batch: Batch, names: Sequence[str]) -> Mapping[str, Tensor]:
        rows: dict[str, Tensor] = self.tables({name: batch.ids[name] for name in names})
        return rows

    def _users(self, rows: Mapping[str, Tensor]) -> Tensor:
        joined = torch.cat([rows[name] for name in self.of_user], dim=1)
        vectors: Tensor = self.out(self.user_tower(joined))
        return vectors

    def _items(self, rows: Mapping[str, Tensor]) -> Tensor:
        vectors = rows[self.of_item[0]]
        for name in self.of_item[1:]:
            vectors = vectors + rows[name]
        return vectors
