"""Small models of `nn.Embedding` and `nn.EmbeddingBag`, with what public ones do to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

N_USERS, N_ITEMS, LENGTH = 60, 30, 5


def spread_weights(model: nn.Module) -> None:
    """Set all matrices to normal(0, 0.1), but padding rows.

    The public models start with rows of 1e-4. Batch norm, cosines and ReLU at values this small turn the rounding of
    sums in another order into differences far above it, so two runs of plain torch would not be equal either.
    """
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.1)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0.0


class Samples:
    """A batch is (inputs, label)."""

    def __init__(self, n: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.user = torch.randint(N_USERS, (n,), generator=draw)
        self.item = torch.randint(1, N_ITEMS, (n,), generator=draw)
        history = torch.randint(1, N_ITEMS, (n, LENGTH), generator=draw)
        lengths = torch.randint(LENGTH + 1, (n, 1), generator=draw)
        self.history = torch.where(torch.arange(LENGTH) < lengths, history, 0)  # some are empty
        self.weight = torch.rand((n, LENGTH), generator=draw)
        self.label = torch.randint(2, (n,), generator=draw).float()

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: np.ndarray) -> tuple[dict[str, Tensor], Tensor]:
        columns = {name: column[rows] for name, column in vars(self).items()}
        return columns, columns.pop("label")


class History(nn.Module):
    """Attention over a padded history in the table of the candidate, batch norm, and a table looked up twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({"user": nn.Embedding(N_USERS, 4), "item": nn.Embedding(N_ITEMS, 4, padding_idx=0)})
        self.mlp = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        candidate, history = self.embed["item"](x["item"]), self.embed["item"](x["history"].int())
        scores = (history * candidate[:, None]).sum(2).masked_fill(x["history"] == 0, -1e9)
        seen = (scores.softmax(1)[:, :, None] * history).sum(1)
        logits: Tensor = self.mlp(torch.cat([self.embed["user"](x["user"]), candidate, seen], dim=1)).squeeze(1)
        return logits.sigmoid()


class Bags(nn.Module):
    """Bags of every kind, and two modules with one weight. The padding row of one is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = nn.EmbeddingBag(N_ITEMS, 4, mode="sum", include_last_offset=True)
        self.mean = nn.EmbeddingBag(N_ITEMS, 4, mode="mean", padding_idx=0)
        self.largest = nn.EmbeddingBag(N_ITEMS, 3, mode="max", padding_idx=0)
        self.user, self.friend = nn.Embedding(N_USERS, 4), nn.Embedding(N_USERS, 4)
        self.friend.weight = self.user.weight
        self.wide = nn.Embedding(N_ITEMS, 1, padding_idx=0)
        nn.init.normal_(self.wide.weight)
        self.out = nn.Linear(4 * 4 + 3, 1)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        ends = torch.arange(0, x["history"].numel() + 1, LENGTH)
        pooled = [
            self.sum(x["history"].flatten(), ends, per_sample_weights=x["weight"].flatten()),
            self.mean(x["history"]),
            self.largest(x["history"]),
            self.user(x["user"]),
            self.friend((x["user"] + 1) % N_USERS),
        ]
        logits: Tensor = self.out(torch.cat(pooled, dim=1)) + self.wide(x["history"]).sum(1)
        return logits.squeeze(1).sigmoid()


class OneTable(nn.Module):
    """All fields in one matrix of floats and one table, by offsets, which are a buffer."""

    offsets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, N_USERS]))
        self.linear, self.embed = nn.Embedding(N_USERS + N_ITEMS, 1), nn.Embedding(N_USERS + N_ITEMS, 6)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        ids = torch.stack([x["user"], x["item"]], dim=1).float().long() + self.offsets
        rows = self.embed(ids)
        pairs = (rows.sum(1) ** 2 - (rows**2).sum(1)).sum(1) / 2
        logits: Tensor = pairs + self.linear(ids).sum((1, 2)) + self.bias
        return logits.sigmoid()


class Factors(nn.Module):
    """Matrix factorisation: rows only, no dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(N_USERS, 4), nn.Embedding(N_ITEMS, 4)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        logits: Tensor = (self.user(x["user"]) * self.item(x["item"])).sum(1)
        return logits.sigmoid()


class Adoptable:
    """As the scripts of `examples/adopt`."""

    def __init__(self, model: type[nn.Module]) -> None:
        self.make_model, self.make_samples = model, Samples

    def outputs(self, model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
        probabilities: Tensor = model(batch[0])
        return probabilities

    def loss_of(self, model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
        return nn.functional.binary_cross_entropy(self.outputs(model, batch), batch[1])


HISTORY, BAGS, ONE_TABLE, FACTORS = Adoptable(History), Adoptable(Bags), Adoptable(OneTable), Adoptable(Factors)
