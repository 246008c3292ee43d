"""What is trained: four models, from one whose dense layers take the time to one whose embeddings do.

A shape is its tables, the ids a sample has in each field, and the dense modules above the rows. Imports torch and numpy
only, so that all peers share it. Where the rows come from, and who sums the gradients, each peer decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..harness import dlrm


@dataclass(frozen=True)
class Field:
    """Ids of one table. ids: how many a sample has, from the first number to the second; histories are not pooled."""

    table: str
    ids: tuple[int, int] = (1, 1)
    is_history: bool = False


@dataclass(frozen=True)
class Shape:
    """tables: rows of each; dim: of all rows; batch: samples per worker and step; dense(): modules above the rows"""

    about: str
    tables: Mapping[str, int]
    fields: Mapping[str, Field]
    dim: int
    batch: int
    dense: Callable[[], nn.Module]

    @property
    def pooled(self) -> list[str]:
        """Fields that give a sample one row."""
        return [name for name, field in self.fields.items() if not field.is_history]

    @property
    def histories(self) -> list[str]:
        """Fields that give a sample a row for each id."""
        return [name for name, field in self.fields.items() if field.is_history]


class DenseDLRM(nn.Module):
    """Bottom MLP, interaction of all pairs, top MLP."""

    def __init__(self, n_fields: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        n_pairs = (n_fields + 1) * n_fields // 2
        self.bottom = dlrm.mlp(tuple(bottom), last_relu=True)
        self.interaction = dlrm.Interaction(n_fields + 1)
        self.top = dlrm.mlp((n_pairs + bottom[-1], *top), last_relu=False)

    def forward(self, dense: Tensor, rows: Tensor, histories: Sequence[Tensor] = ()) -> Tensor:
        """dense: [B, 13], rows: [B, F, dim] -> logits [B]"""
        bottom = self.bottom(dense)
        pairs = self.interaction(torch.cat([bottom.unsqueeze(1), rows], dim=1))
        logits: Tensor = self.top(torch.cat([bottom, pairs], dim=1))
        return logits.squeeze(1)


def dense_dlrm() -> DenseDLRM:
    """At its Kaggle size."""
    return DenseDLRM(dlrm.N_TABLES, dlrm.BOTTOM, dlrm.TOP)


class DenseDIN(nn.Module):
    """DIN (Zhou et al., KDD 2018): an MLP weights each click by click, candidate, their difference and product."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.unit = dlrm.mlp((4 * 2 * dim, 36, 1), last_relu=False)
        self.top = dlrm.mlp((dlrm.N_DENSE + dim + 3 * 2 * dim, 200, 80, 1), last_relu=False)

    def forward(self, dense: Tensor, rows: Tensor, histories: Sequence[Tensor]) -> Tensor:
        """rows: [B, 3, dim] of user, item and category; histories: two of [B, 50, dim], items and categories"""
        candidate = rows[:, 1:].flatten(1)
        history = torch.cat(list(histories), dim=2)
        match = candidate.unsqueeze(1).expand_as(history)
        weights = self.unit(torch.cat([history, match, history - match, history * match], dim=2))
        interest = (weights * history).sum(1)
        logits: Tensor = self.top(torch.cat([dense, rows[:, 0], interest, candidate, interest * candidate], dim=1))
        return logits.squeeze(1)


_DLRM_FIELDS = [f"c{i}" for i in range(dlrm.N_TABLES)]
_WIDE_FIELDS = [f"c{i}" for i in range(40)]
_WIDE_DIM, _HISTORY = 64, (50, 50)

_DLRM = Shape(
    "DLRM at its Kaggle size: 26 tables of 200,000 rows x 16, one id each",
    dict.fromkeys(_DLRM_FIELDS, dlrm.N_ROWS),
    {name: Field(name) for name in _DLRM_FIELDS},
    dlrm.DIM,
    2048,
    dense_dlrm,
)
SHAPES = {
    "dlrm": _DLRM,
    "bags": replace(
        _DLRM, about="the same with 10 ids in every bag", fields={name: Field(name, (10, 10)) for name in _DLRM_FIELDS}
    ),
    "wide": Shape(
        "40 tables of 50,000 rows x 64, bags of 1 to 100 ids (Zipf, 7.7 on average), small MLPs",
        dict.fromkeys(_WIDE_FIELDS, 50_000),
        {name: Field(name, (1, 100)) for name in _WIDE_FIELDS},
        _WIDE_DIM,
        512,
        lambda: DenseDLRM(len(_WIDE_FIELDS), (dlrm.N_DENSE, 128, _WIDE_DIM), (128, 64, 1)),
    ),
    "din": Shape(
        "DIN with histories of 50 items and their categories, rows x 16",
        {"user": 1_000_000, "item": 500_000, "category": 5_000},
        {
            "user": Field("user"),
            "item": Field("item"),
            "category": Field("category"),
            "items": Field("item", _HISTORY, is_history=True),
            "categories": Field("category", _HISTORY, is_history=True),
        },
        16,
        512,
        lambda: DenseDIN(16),
    ),
}
