"""Entire Space Multi-Task Model of torch-rechub. Needs `pip install --no-deps -r requirements-models.txt`.

gba-hvd run -np 2 examples/adopt/esmm.py
"""

from __future__ import annotations

import features
import loop
from mmoe import make_samples
from torch import Tensor, nn
from torch_rechub.models.multi_task import ESMM

TASKS = loop.CLICKS_AND_PURCHASES


def make_model() -> nn.Module:
    model: nn.Module = ESMM(
        user_features=[features.user()],
        item_features=[features.item(), features.category()],
        cvr_params={"dims": [16]},
        ctr_params={"dims": [16]},
    )
    return model


def outputs(model: nn.Module, batch: loop.Batch) -> Tensor:
    probabilities: Tensor = model(batch[0])  # [B, 3]: bought if clicked, clicked, bought
    return probabilities[:, 1:]


def loss_of(model: nn.Module, batch: loop.Batch) -> Tensor:
    return nn.functional.binary_cross_entropy(outputs(model, batch), batch[1])


if __name__ == "__main__":
    loop.train(make_model, make_samples, loss_of, outputs, TASKS)
