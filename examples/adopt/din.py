"""Deep Interest Network of torch-rechub. Needs `pip install --no-deps -r requirements-models.txt`.

gba-hvd run -np 2 examples/adopt/din.py
"""

from __future__ import annotations

import features
import loop
from features import make_samples
from torch import Tensor, nn
from torch_rechub.models.ranking import DIN


def make_model() -> nn.Module:
    model: nn.Module = DIN(
        features=[features.user(), features.category()],
        history_features=[features.items("history")],  # [B, L, dim], not pooled
        target_features=[features.item()],
        mlp_params={"dims": [32, 16]},
        attention_mlp_params={"dims": [16]},
    )
    return model


def outputs(model: nn.Module, batch: loop.Batch) -> Tensor:
    probabilities: Tensor = model(batch[0])
    return probabilities


def loss_of(model: nn.Module, batch: loop.Batch) -> Tensor:
    return nn.functional.binary_cross_entropy(outputs(model, batch), batch[1])


if __name__ == "__main__":
    loop.train(make_model, make_samples, loss_of, outputs)
