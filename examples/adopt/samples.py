"""Generated impressions: a user sees an item, and clicks or not. The same on all workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

USERS, ITEMS, CATEGORIES, LENGTH = 2000, 500, 20, 8  # rows of the tables; items before this one
PADDING = 0  # where a history is shorter; no item has this id


class Samples:
    """Samples by number, as `gba_hvd.batches` reads them: a batch is (inputs, label).

    inputs: a tensor [n, ...] or tensors by name; label: float32 [n, ...]
    """

    def __init__(self, inputs: Tensor | dict[str, Tensor], label: Tensor) -> None:
        self.inputs, self.label = inputs, label

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: np.ndarray) -> tuple[Any, Tensor]:
        inputs = self.inputs
        some = inputs[rows] if isinstance(inputs, Tensor) else {name: column[rows] for name, column in inputs.items()}
        return some, self.label[rows]


def impressions(n: int, seed: int) -> dict[str, Tensor]:
    """Columns of n impressions: user, item, category int64 [n]; history, negatives int64 [n, LENGTH], ages float32 [n].

    clicked, bought: float32 [n], bought only where clicked. Negatives are items that the user did not click.
    """
    taste, rng = np.random.default_rng(7), np.random.default_rng(seed)
    users, items, popularity = (taste.normal(size=size) for size in ((USERS, 4), (ITEMS, 4), ITEMS))
    user, item = rng.integers(0, USERS, n), rng.integers(1, ITEMS, n)
    likes = 1 / (1 + np.exp(-(users[user] * items[item]).sum(1) - 2 * popularity[item]))
    clicked = rng.random(n) < likes
    history = rng.integers(1, ITEMS, (n, LENGTH))
    history[np.arange(LENGTH) >= rng.integers(0, LENGTH + 1, n)[:, None]] = PADDING
    columns = {
        "user": user,
        "item": item,
        "category": item % CATEGORIES,
        "history": history,
        "negatives": rng.integers(1, ITEMS, (n, LENGTH)),
        "age": rng.random(n).astype(np.float32),
        "clicked": clicked.astype(np.float32),
        "bought": (clicked & (rng.random(n) < likes)).astype(np.float32),
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}
