"""DLRM of TorchRec, on its `KeyedJaggedTensor`. Needs `pip install --no-deps -r requirements-models.txt`.

gba-hvd run -np 2 examples/adopt/dlrm.py
"""

from __future__ import annotations

from typing import Any

import loop
import numpy as np
import torch
from samples import ITEMS, PADDING, USERS, impressions
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

DIM = 8


class KeyedSamples:
    """A batch is ((dense float32 [B, 1], ids), label)."""

    def __init__(self, n: int, seed: int) -> None:
        self.columns = impressions(n, seed)

    def __len__(self) -> int:
        return len(self.columns["clicked"])

    def take(self, rows: np.ndarray) -> tuple[tuple[Tensor, Any], Tensor]:
        some = {name: column[rows] for name, column in self.columns.items()}
        one, is_item = torch.ones(len(rows), dtype=torch.int64), some["history"] != PADDING
        ids = KeyedJaggedTensor(
            keys=["user", "item", "history"],
            values=torch.cat([some["user"], some["item"], some["history"][is_item]]),
            lengths=torch.cat([one, one, is_item.sum(dim=1)]),
        )
        return (some["age"][:, None], ids), some["clicked"]


make_samples = KeyedSamples


def make_model() -> nn.Module:
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name="user", embedding_dim=DIM, num_embeddings=USERS, feature_names=["user"]),
            EmbeddingBagConfig(name="item", embedding_dim=DIM, num_embeddings=ITEMS, feature_names=["item", "history"]),
        ]
    )
    model: nn.Module = DLRM(bags, 1, dense_arch_layer_sizes=[16, DIM], over_arch_layer_sizes=[16, 1])
    return model


def outputs(model: nn.Module, batch: loop.Batch) -> Tensor:
    dense, ids = batch[0]
    logits: Tensor = model(dense, ids)
    return logits.squeeze(1).sigmoid()


def loss_of(model: nn.Module, batch: loop.Batch) -> Tensor:
    return nn.functional.binary_cross_entropy(outputs(model, batch), batch[1])


if __name__ == "__main__":
    loop.train(make_model, make_samples, loss_of, outputs)
