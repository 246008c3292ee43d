"""The model that `bench checkpoint` trains and saves: embedding tables with Adagrad, with a small network on top.

Built so that all contestants find the same: the same values for the same size, the same rows changed for the same share
of them. Tables and slots are noise in steps of their own scale, as trained ones are: nothing in them compresses well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn

N_TABLES, DIM, BATCH = 4, 16, 1024
_NOISE = 1 << 20  # numbers; each repetition gets a scale of its own, so that no two are alike


class SavedModelClicks(nn.Module):
    """Logits [B] of ids int64 [N_TABLES, B]."""

    def __init__(self, tables: list[Tensor]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(len(table), DIM, sparse=True, _weight=table) for table in tables)
        self.top = nn.Sequential(nn.Linear(N_TABLES * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    @property
    def weights(self) -> list[Tensor]:
        """float32 [n, DIM] of each table."""
        return [table.weight for table in self.tables if isinstance(table, nn.Embedding)]

    def forward(self, ids: Tensor) -> Tensor:
        vectors = [table(some) for table, some in zip(self.tables, ids, strict=True)]
        logits: Tensor = self.top(torch.cat(vectors, dim=1))
        return logits.squeeze(1)


def made(n_bytes: int, trained: bool = True) -> tuple[SavedModelClicks, torch.optim.Adagrad]:
    """A model whose tables and slots together have about so many bytes; not trained: all ones, for a restore."""
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, but then it warns
    n_rows = max(BATCH, n_bytes // (2 * N_TABLES * DIM * 4))
    model = SavedModelClicks([torch.empty(n_rows, DIM) for _ in range(N_TABLES)])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    with torch.no_grad():
        for number, weight in enumerate(model.weights):
            for tensor, is_slot in ((weight, False), (optimizer.state[weight]["sum"], True)):
                if trained:
                    _fill_(tensor, seed=2 * number + is_slot, positive=is_slot)
                else:
                    tensor.fill_(1.0)
    return model, optimizer


def hot_rows(model: SavedModelClicks, share: float) -> list[np.ndarray]:
    """The rows that training changes, in random order: int64, for each table."""
    sizes = enumerate(map(len, model.weights))
    return [np.random.default_rng(number).permutation(n)[: max(BATCH, round(share * n))] for number, n in sizes]


class Training:
    """The loop that runs while a checkpoint is made."""

    def __init__(
        self,
        model: SavedModelClicks,
        optimizer: torch.optim.Optimizer,
        hot: list[np.ndarray],
        around: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """around: the context in which rows change."""
        self._model, self._optimizer, self._around = model, optimizer, around
        self._hot = [torch.from_numpy(rows) for rows in hot]
        self._labels = (torch.arange(BATCH) % 3 == 0).float()
        self._at = 0

    def step(self) -> float:
        """One step on rows that differ; its seconds."""
        started = time.perf_counter()
        indices = (torch.arange(BATCH) + self._at) % len(self._hot[0])
        self._at += BATCH
        ids = torch.stack([rows[indices] for rows in self._hot])
        loss = nn.functional.binary_cross_entropy_with_logits(self._model(ids), self._labels)
        loss.backward()
        with self._around():
            self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - started

    def steps(self, seconds: float) -> list[float]:
        """Steps for so long, 20 at the least; the seconds of each."""
        took: list[float] = []
        until = time.perf_counter() + seconds
        while len(took) < 20 or time.perf_counter() < until:
            took.append(self.step())
        return took


def _fill_(tensor: Tensor, seed: int, positive: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    noise, flat = torch.randn(_NOISE, generator=random), tensor.view(-1)
    for part in flat.split(_NOISE):
        torch.mul(noise[: len(part)], 0.05 + 0.1 * torch.rand(1, generator=random), out=part)
        if positive:
            part.square_().add_(0.01)
