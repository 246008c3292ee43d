"""Deep Interest Evolution Network of torch-rechub. Needs `pip install --no-deps -r requirements-models.txt`.

gba-hvd run -np 2 examples/adopt/dien.py
"""

from __future__ import annotations

import features
import loop
from features import make_samples
from torch import Tensor, nn
from torch_rechub.models.ranking import DIEN


def make_model() -> nn.Module:
    model: nn.Module = DIEN(
        features=[features.user(), features.category(), features.age()],
        history_features=[features.items("history")],
        neg_history_features=[features.items("negatives")],  # for the auxiliary loss
        target_features=[features.item()],
        mlp_params={"dims": [32, 16]},
    )
    return model


def outputs(model: nn.Module, batch: loop.Batch) -> Tensor:
    probabilities, _ = model(batch[0])
    scores: Tensor = probabilities
    return scores


def loss_of(model: nn.Module, batch: loop.Batch) -> Tensor:
    x, clicked = batch
    probabilities, auxiliary = model(x)
    loss: Tensor = nn.functional.binary_cross_entropy(probabilities, clicked) + auxiliary
    return loss


if __name__ == "__main__":
    loop.train(make_model, make_samples, loss_of, outputs)
