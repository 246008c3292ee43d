"""YoutubeDNN of torch-rechub. Needs `pip install --no-deps -r requirements-models.txt`.

gba-hvd run -np 2 examples/adopt/youtube_dnn.py
"""

from __future__ import annotations

import features
import loop
import torch
from features import make_samples
from torch import Tensor, nn
from torch_rechub.models.matching import YoutubeDNN


def make_model() -> nn.Module:
    model: nn.Module = YoutubeDNN(
        user_features=[features.user(), features.items("history", pooling="mean")],
        item_features=[features.item()],
        neg_item_feature=[features.items("negatives")],
        user_params={"dims": [32, features.DIM]},
    )
    return model


def outputs(model: nn.Module, batch: loop.Batch) -> Tensor:
    """Of the item among the negatives: a probability."""
    scores: Tensor = model(batch[0])  # [B, 1 + negatives]
    return scores.softmax(dim=1)[:, 0]


def loss_of(model: nn.Module, batch: loop.Batch) -> Tensor:
    """Sampled softmax over the item and the negatives, of the clicked items."""
    x, clicked = batch
    scores = model(x)
    each = nn.functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long), reduction="none")
    return (each * clicked).mean()


if __name__ == "__main__":
    loop.train(make_model, make_samples, loss_of, outputs)
