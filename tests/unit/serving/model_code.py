"""A model that a file builds: it is copied beside the rows. Knows nothing of the tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gba_hvd


class Clicks(nn.Module):
    """Users of a hashed table or a plain one, items with a history, dense features."""

    def __init__(self, tables: gba_hvd.EmbeddingTables) -> None:
        super().__init__()
        self.tables = tables
        self.mlp = nn.Sequential(nn.Linear(4 + 3 + 3 + 2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        out = self.tables(batch.ids)
        return self.mlp(torch.cat([out["user"], out["item"], out["history"], batch.dense], dim=1)).squeeze(1)


class OfStrings(nn.Module):
    """Users and the histories of users, of one hashed table; one dense feature."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = gba_hvd.EmbeddingTables(
            {"user": gba_hvd.Table(dim=4, keys="hash64", capacity=64)},
            gba_hvd.SGD(lr=0.1),
            features={"user": "user", "history": "user"},
        )

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        out = self.tables(batch.ids)
        return (out["user"] + out["history"]).sum(1) + batch.dense[:, 0]


def tables(users: int = 50, hashed: bool = False, seed: int = 2) -> gba_hvd.EmbeddingTables:
    user = gba_hvd.Table(dim=4, keys="hash64", capacity=users, fallback_rows=8) if hashed else (users, 4)
    return gba_hvd.EmbeddingTables(
        {"user": user, "item": gba_hvd.Table(9, 3, padding_idx=0), "word": (5, 3)},
        gba_hvd.Adagrad(lr=0.5),
        features={"user": "user", "item": "item", "history": gba_hvd.Feature("item", "mean")},
        seed=seed,
    )


def make_model(users: int = 50, hashed: bool = False, seed: int = 2, width: int = 6) -> Clicks:
    model = Clicks(tables(users, hashed, seed))
    if width != 6:
        model.mlp[3] = nn.Linear(width, 1)
    return model


def forgetful(**how: int) -> Clicks:
    """A model with a constant that is in no state_dict."""
    model = make_model(**how)
    model.mlp[2] = nn.Softsign()
    return model


def example() -> gba_hvd.Batch:
    """An input of two samples."""
    history = gba_hvd.Bag(torch.tensor([1, 2, 3]), torch.tensor([0, 2]))
    ids = {"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4]), "history": history}
    return gba_hvd.Batch(ids, torch.ones(2, 2), torch.zeros(2))


class OfStore(nn.Module):
    """The rows of all features of a prepared dataset, and its dense values. rows: by table; features: their tables"""

    def __init__(self, rows: dict[str, int], features: dict[str, str]) -> None:
        super().__init__()
        self.tables = gba_hvd.EmbeddingTables(
            {table: (n, 4) for table, n in rows.items()},
            gba_hvd.SGD(lr=0.1),
            features={name: gba_hvd.Feature(table, "mean") for name, table in features.items()},
        )

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        return sum(self.tables(batch.ids).values()).sum(1) + batch.dense.sum(1)
