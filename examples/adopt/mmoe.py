"""Multi-gate Mixture-of-Experts of torch-rechub. Needs `pip install --no-deps -r requirements-models.txt`.

gba-hvd run -np 2 examples/adopt/mmoe.py
"""

from __future__ import annotations

import features
import loop
import torch
from samples import Samples, impressions
from torch import Tensor, nn
from torch_rechub.models.multi_task import MMOE

TASKS = loop.CLICKS_AND_PURCHASES


def make_samples(n: int, seed: int) -> Samples:
    """Two tasks: label [n, 2] is clicked and bought."""
    columns = impressions(n, seed)
    return Samples(features.make_samples(n, seed).inputs, torch.stack([columns["clicked"], columns["bought"]], dim=1))


def make_model() -> nn.Module:
    model: nn.Module = MMOE(
        [features.user(), features.item(), features.category(), features.age()],
        task_types=["classification", "classification"],
        n_expert=3,
        expert_params={"dims": [16]},
        tower_params_list=[{"dims": [8]}, {"dims": [8]}],
    )
    return model


def outputs(model: nn.Module, batch: loop.Batch) -> Tensor:
    probabilities: Tensor = model(batch[0])  # [B, 2]
    return probabilities


def loss_of(model: nn.Module, batch: loop.Batch) -> Tensor:
    return nn.functional.binary_cross_entropy(outputs(model, batch), batch[1])


if __name__ == "__main__":
    loop.train(make_model, make_samples, loss_of, outputs, TASKS)
