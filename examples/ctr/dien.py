"""DIEN: a GRU extracts interests from a history, one with an attentional update gate follows the relevant ones.

Zhou et al., "Deep Interest Evolution Network for Click-Through Rate Prediction", AAAI 2019 (arXiv 1809.03672): GRU,
auxiliary loss, attention and AUGRU (a GRU whose update gate is scaled by the attention).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from ctr.din import clicks_of
from ctr.mlp import mlp
from gba_hvd import EmbeddingTables
from gba_hvd.batch import Batch


class AUGRU(nn.Module):
    """A GRU whose update gate is multiplied by the attention: what is not of interest does not change its state."""

    def __init__(self, n_inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.of_input = nn.Linear(n_inputs, 3 * width)
        self.of_state = nn.Linear(width, 3 * width, bias=False)

    def forward(self, inputs: Tensor, attention: Tensor) -> Tensor:
        """inputs [B, L, n_inputs], attention [B, L], 0 for padding -> the last state [B, width]."""
        state = inputs.new_zeros(inputs.shape[0], self.width)
        for part, weight in zip(self.of_input(inputs).unbind(1), attention.unbind(1), strict=True):
            update, reset, proposed = part.chunk(3, dim=1)
            update_s, reset_s, proposed_s = self.of_state(state).chunk(3, dim=1)
            update = weight.unsqueeze(1) * torch.sigmoid(update + update_s)
            proposed = torch.tanh(proposed + torch.sigmoid(reset + reset_s) * proposed_s)
            state = (1 - update) * state + update * proposed
        return state


class DIEN(nn.Module):
    """`tables` have the features of `DIN`, and for the auxiliary loss negative, negative_category [B, L, dim].

    auxiliary: weight of the auxiliary loss; 0 switches it off, and no negatives are needed
    """

    def __init__(
        self,
        tables: EmbeddingTables,
        *,
        hidden: Sequence[int] = (200, 80),
        auxiliary: float = 1.0,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tables, self.auxiliary = tables, auxiliary
        dim = tables.layout.tables[0].dim
        width = 2 * dim  # of a click: its item and its category
        self.extraction = nn.GRU(width, width, batch_first=True)
        self.match = nn.Linear(width, width, bias=False)
        self.evolution = AUGRU(width, width)
        self.top = mlp(dim + 2 * width, hidden, batch_norm=batch_norm, dropout=dropout)
        self.out = nn.Linear(hidden[-1], 1)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B]."""
        return self._pass(batch, self._rows(batch, "user", "history", "candidate"))[0]

    def loss(self, batch: Batch) -> Tensor:
        """Log loss of the label, plus `auxiliary` times the auxiliary loss."""
        rows = self._rows(batch, "user", "history", "candidate", *(["negative"] if self.auxiliary else []))
        logits, interests = self._pass(batch, rows)
        loss = binary_cross_entropy_with_logits(logits, batch.label)
        if self.auxiliary:
            clicked = clicks_of(batch).to(interests.device)
            loss = loss + self.auxiliary * auxiliary_loss(interests, rows["history"], rows["negative"], clicked)
        return loss

    def _rows(self, batch: Batch, *names: str) -> dict[str, Tensor]:
        """Embeddings of some features, of an item beside its category."""
        wanted = [one for name in names for one in (name, f"{name}_category") if one in batch.ids]
        rows = self.tables({name: batch.ids[name] for name in wanted})
        return {name: torch.cat([rows[one] for one in (name, f"{name}_category") if one in rows], -1) for name in names}

    def _pass(self, batch: Batch, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits [B] and the interests at each click [B, L, 2 dim]."""
        interests = self.extraction(rows["history"])[0]
        scores = (self.match(interests) @ rows["candidate"].unsqueeze(2)).squeeze(2)
        attention = masked_softmax(scores, clicks_of(batch).to(scores.device))
        evolved = self.evolution(interests, attention)
        logits: Tensor = self.out(self.top(torch.cat([rows["user"], evolved, rows["candidate"]], dim=1)))
        return logits.squeeze(1), interests


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the positions of `mask` (bool [B, L]), 0 elsewhere; rows without any are 0."""
    weights = torch.softmax(scores.masked_fill(~mask, torch.finfo(scores.dtype).min), dim=1)
    return weights * mask


def auxiliary_loss(interests: Tensor, history: Tensor, negative: Tensor, clicked: Tensor) -> Tensor:
    """Log loss of the next click (1) and of a negative (0) by products with the interest; the mean over next clicks.

    interests, history, negative [B, L, width], clicked bool [B, L]; 0 when no history has a second click
    """
    has_next = clicked[:, 1:]
    before = interests[:, :-1][has_next]
    real = logsigmoid((before * history[:, 1:][has_next]).sum(1))
    other = logsigmoid(-(before * negative[:, 1:][has_next]).sum(1))
    return -(real + other).sum() / max(1, len(before))
