"""What a chaos job learns: a click if user and item are of certain kinds, which a linear model can learn well."""

from __future__ import annotations

import numpy as np
import torch

import gba_hvd


class ChaosClicks:
    """n samples: two fields of 300 users and 40 items, two dense numbers that mean nothing, a label.

    raw: users have 64-bit ids, half of them negative
    """

    def __init__(self, n: int, raw: bool = False) -> None:
        rng = np.random.default_rng(7)
        self.user, self.item = rng.integers(0, 300, n), rng.integers(0, 40, n)
        self.dense = rng.normal(size=(n, 2)).astype(np.float32)
        self._users = raw_ids(self.user) if raw else self.user
        self.label = ((self.user % 7 + self.item % 3) > 4).astype(np.float32)

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        ids: dict[str, torch.Tensor | gba_hvd.Bag] = {
            "user": torch.from_numpy(self._users[rows]),
            "item": torch.from_numpy(self.item[rows]),
        }
        return gba_hvd.Batch(ids, torch.from_numpy(self.dense[rows]), torch.from_numpy(self.label[rows]))


def raw_ids(users: np.ndarray) -> np.ndarray:
    """int64 [n]: what numbers from 0 to 299 are called in a hashed table."""
    found: np.ndarray = (users - 150) * 61_440_000_000_000_001
    return found
