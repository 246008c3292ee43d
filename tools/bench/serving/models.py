"""The models that every system serves, and their requests. Imports torch and numpy alone, so that peers' environments
share it: where rows come from, each system decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..allreduce.shape import dense_dlrm
from ..harness import dlrm

DIM, HISTORY = dlrm.DIM, 50
_DIN_SHARES = {"user": 0.5, "item": 0.49, "category": 0.01}  # of all rows


@dataclass(frozen=True)
class Field:
    """ids_per_sample: 0: one, int64 [B]; else int64 [B, L], of which each has a row of its own"""

    table: str
    ids_per_sample: int = 0


@dataclass(frozen=True)
class Shape:
    """What a model looks up. tables: rows by name; n_dense: dense features"""

    name: str
    tables: Mapping[str, int]
    fields: Mapping[str, Field]
    n_dense: int


def shape_of(name: str, n_rows: int) -> Shape:
    """n_rows: of all tables"""
    if name == "din":
        tables = {table: max(1, int(share * n_rows)) for table, share in _DIN_SHARES.items()}
        fields = {"user": Field("user"), "item": Field("item"), "category": Field("category")}
        fields |= {f"history_{name}": Field(name, HISTORY) for name in ("item", "category")}
        return Shape(name, tables, fields, 0)
    tables = {f"c{i}": max(1, n_rows // dlrm.N_TABLES) for i in range(dlrm.N_TABLES)}
    return Shape(name, tables, {name: Field(name) for name in tables}, dlrm.N_DENSE)


class DenseDIN(nn.Module):
    """Deep interest network (Zhou et al. 2018): attention of the candidate to the history, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = dlrm.mlp((8 * DIM, 36, 1), last_relu=False)
        self.top = dlrm.mlp((5 * DIM, 200, 80, 1), last_relu=False)

    def forward(self, user: Tensor, candidate: Tensor, history: Tensor) -> Tensor:
        """user: [B, dim], candidate: [B, 2 dim], history: [B, L, 2 dim] -> logits [B]"""
        asked = candidate.unsqueeze(1).expand_as(history)
        scores = self.attention(torch.cat([asked, history, asked - history, asked * history], dim=2))
        interest = (scores * history).sum(dim=1)
        logits: Tensor = self.top(torch.cat([user, candidate, interest], dim=1))
        return logits.squeeze(1)


def dense_of(name: str) -> nn.Module:
    return DenseDIN() if name == "din" else dense_dlrm()


def logits_of(dense: nn.Module, features: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
    """features: [B, n_dense]; rows: [B, dim] or [B, L, dim] by field -> [B]"""
    if isinstance(dense, DenseDIN):
        candidate, history = (
            torch.cat([rows[f"{of}{name}"] for name in ("item", "category")], dim=-1) for of in ("", "history_")
        )
        return dense(rows["user"], candidate, history)  # type: ignore[no-any-return]
    return dense(features, torch.stack(list(rows.values()), dim=1))  # type: ignore[no-any-return]


class Plain(nn.Module):
    """With `nn.Embedding` tables."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        with torch.device("meta"):  # weights are loaded with `assign`
            tables = {name: nn.Embedding(n, DIM) for name, n in shape.tables.items()}
        self.tables, self.dense = nn.ModuleDict(tables), dense_of(shape.name)

    def forward(self, ids: Mapping[str, Tensor], features: Tensor) -> Tensor:
        rows = {name: self.tables[self.shape.fields[name].table](column) for name, column in ids.items()}
        return logits_of(self.dense, features, rows)


class Packed(nn.Module):
    """The same with one float64 [B, columns] as its input, as MLflow's flavour of PyTorch gives it."""

    def __init__(self, plain: Plain) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, columns: Tensor) -> Tensor:
        ids, at = {}, 0
        for name, field in self.plain.shape.fields.items():
            some = columns[:, at : at + max(1, field.ids_per_sample)].long()
            ids[name] = some if field.ids_per_sample else some[:, 0].contiguous()
            at += some.shape[1]
        return self.plain(ids, columns[:, at:].float()).unsqueeze(1)  # type: ignore[no-any-return]


def request(shape: Shape, n: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Uniform ids by field, and dense features float32 [n, n_dense]."""
    rng = np.random.default_rng(seed)
    ids = {}
    for name, field in shape.fields.items():
        size = (n, field.ids_per_sample) if field.ids_per_sample else n
        ids[name] = torch.from_numpy(rng.integers(0, shape.tables[field.table], size))
    return ids, torch.from_numpy(rng.standard_normal((n, shape.n_dense), dtype=np.float32))


def packed(ids: Iterable[Tensor], features: Tensor) -> np.ndarray:
    """float64 [n, columns], as `Packed` takes them."""
    columns = [one.numpy().reshape(len(features), -1) for one in ids]
    return np.concatenate([*columns, features.numpy()], axis=1, dtype=np.float64)
