"""DIN: the clicks of a history are weighted by how they match the candidate, then summed.

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018 (arXiv 1706.06978). The weights are not
normalised, so that their sum keeps how strong an interest is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from gba_hvd import EmbeddingTables
from gba_hvd.batch import Batch
from gba_hvd.data.behaviour import PADDING

Activation = Literal["dice", "prelu"]


class Dice(nn.Module):
    """p x + (1 - p) alpha x with p = sigmoid of x, normalised over the micro-batch as batch norm does; [n, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.normalise = nn.BatchNorm1d(width, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.normalise(x))
        return p * x + (1 - p) * self.alpha * x


_ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {"dice": Dice, "prelu": nn.PReLU}


def layers(n_inputs: int, hidden: Sequence[int], activation: Activation, dropout: float = 0.0) -> nn.Sequential:
    """Linear and activation for each width in `hidden`, then Linear to one value; [n, n_inputs] -> [n, 1]."""
    modules: list[nn.Module] = []
    for width, following in pairwise((n_inputs, *hidden)):
        modules += [nn.Linear(width, following), _ACTIVATIONS[activation](following)]
        modules += [nn.Dropout(dropout)] if dropout > 0 else []
    return nn.Sequential(*modules, nn.Linear((n_inputs, *hidden)[-1], 1))


class ActivationUnit(nn.Module):
    """The weight of each click of a history: an MLP of click, candidate, their difference and their product.

    It is computed for clicks only, so that padding has no part in the statistics of Dice either. A program computes it
    for padding as well, and leaves that out.
    """

    def __init__(self, width: int, hidden: Sequence[int], activation: Activation) -> None:
        super().__init__()
        self.layers = layers(4 * width, hidden, activation)

    def forward(self, history: Tensor, candidate: Tensor, clicked: Tensor) -> Tensor:
        """history [B, L, width], candidate [B, width], clicked bool [B, L] -> weights [B, L], 0 for padding."""
        match = candidate.unsqueeze(1).expand_as(history)
        if torch.compiler.is_exporting() and not self.training:  # sizes that depend on values cannot be traced
            weights = self._of(history.flatten(0, 1), match.flatten(0, 1)).reshape(clicked.shape)
            return weights.masked_fill(~clicked, 0.0)
        weights = history.new_zeros(clicked.shape)
        weights[clicked] = self._of(history[clicked], match[clicked])
        return weights

    def _of(self, click: Tensor, match: Tensor) -> Tensor:
        """Both [n, width] -> weights [n]."""
        found: Tensor = self.layers(torch.cat([click, match, click - match, click * match], dim=1))
        return found.squeeze(1)


class DIN(nn.Module):
    """`tables` have features user and candidate, candidate_category [B, dim], history, history_category [B, L, dim].

    attention: widths of the activation unit; hidden: of the layers above
    """

    def __init__(
        self,
        tables: EmbeddingTables,
        *,
        hidden: Sequence[int] = (200, 80),
        attention: Sequence[int] = (36,),
        activation: Activation = "dice",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f'activation must be "dice" or "prelu", got {activation!r}')
        self.tables = tables
        dim = tables.layout.tables[0].dim
        self.unit = ActivationUnit(2 * dim, attention, activation)
        self.top = layers(dim + 3 * 2 * dim, hidden, activation, dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B]."""
        rows = self.tables(batch.ids)
        history = torch.cat([rows["history"], rows["history_category"]], dim=2)  # [B, L, 2 dim]
        candidate = torch.cat([rows["candidate"], rows["candidate_category"]], dim=1)
        clicked = clicks_of(batch).to(history.device)
        interest = (self.unit(history, candidate, clicked).unsqueeze(2) * history).sum(1)
        logits: Tensor = self.top(torch.cat([rows["user"], interest, candidate, interest * candidate], dim=1))
        return logits.squeeze(1)


def clicks_of(batch: Batch) -> Tensor:
    """bool [B, L]: which positions of the history are clicks, not padding."""
    history = batch.ids["history"]
    assert isinstance(history, Tensor)
    return history != PADDING
