"""DeepFM of deepctr-torch. Needs `pip install --no-deps -r requirements-models.txt`.

gba-hvd run -np 2 examples/adopt/deepfm.py
"""

from __future__ import annotations

import loop
import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat
from deepctr_torch.models import DeepFM
from samples import ITEMS, LENGTH, USERS, Samples, impressions
from torch import Tensor, nn


def make_samples(n: int, seed: int) -> Samples:
    """Inputs: one float matrix, as this library takes them."""
    columns = impressions(n, seed)
    single = [columns[name][:, None] for name in ("user", "item")]
    matrix = torch.cat([*single, columns["history"], columns["age"][:, None]], dim=1).float()
    return Samples(matrix, columns["clicked"])


def make_model() -> nn.Module:
    item = SparseFeat("item", ITEMS, embedding_dim=8)
    columns = [
        SparseFeat("user", USERS, embedding_dim=8),
        item,
        VarLenSparseFeat(item._replace(name="history"), maxlen=LENGTH, combiner="mean"),  # its table is the item's
        DenseFeat("age", 1),
    ]
    model: nn.Module = DeepFM(columns, columns, dnn_hidden_units=(32, 16))
    return model


def outputs(model: nn.Module, batch: loop.Batch) -> Tensor:
    x, _ = batch
    probabilities: Tensor = model(x).squeeze(1)
    return probabilities


def loss_of(model: nn.Module, batch: loop.Batch) -> Tensor:
    return nn.functional.binary_cross_entropy(outputs(model, batch), batch[1])


if __name__ == "__main__":
    loop.train(make_model, make_samples, loss_of, outputs)
