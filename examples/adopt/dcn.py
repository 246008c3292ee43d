"""Deep & Cross Network of torchfm. Needs `pip install --no-deps -r requirements-models.txt`.

gba-hvd run -np 2 examples/adopt/dcn.py
"""

from __future__ import annotations

import loop
import torch
from samples import CATEGORIES, ITEMS, USERS, Samples, impressions
from torch import Tensor, nn
from torchfm.model.dcn import DeepCrossNetworkModel


def make_samples(n: int, seed: int) -> Samples:
    """Inputs: int64 [n, 3]; the model adds offsets, for one table of all fields."""
    columns = impressions(n, seed)
    return Samples(torch.stack([columns[name] for name in ("user", "item", "category")], dim=1), columns["clicked"])


def make_model() -> nn.Module:
    model: nn.Module = DeepCrossNetworkModel(
        [USERS, ITEMS, CATEGORIES], embed_dim=8, num_layers=2, mlp_dims=(32, 16), dropout=0.0
    )
    return model


def outputs(model: nn.Module, batch: loop.Batch) -> Tensor:
    probabilities: Tensor = model(batch[0])
    return probabilities


def loss_of(model: nn.Module, batch: loop.Batch) -> Tensor:
    return nn.functional.binary_cross_entropy(outputs(model, batch), batch[1])


if __name__ == "__main__":
    loop.train(make_model, make_samples, loss_of, outputs)
