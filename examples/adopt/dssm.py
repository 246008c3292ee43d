"""DSSM, two towers, of torch-rechub. Needs `pip install --no-deps -r requirements-models.txt`.

gba-hvd run -np 2 examples/adopt/dssm.py
"""

from __future__ import annotations

import features
import loop
from features import make_samples
from torch import Tensor, nn
from torch_rechub.models.matching import DSSM


def make_model() -> nn.Module:
    model: nn.Module = DSSM(
        user_features=[features.user(), features.items("history", pooling="mean")],
        item_features=[features.item(), features.category()],
        user_params={"dims": [32, 16]},
        item_params={"dims": [32, 16]},
    )
    return model


def outputs(model: nn.Module, batch: loop.Batch) -> Tensor:
    probabilities: Tensor = model(batch[0])
    return probabilities


def loss_of(model: nn.Module, batch: loop.Batch) -> Tensor:
    return nn.functional.binary_cross_entropy(outputs(model, batch), batch[1])


if __name__ == "__main__":
    loop.train(make_model, make_samples, loss_of, outputs)
