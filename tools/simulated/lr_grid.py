"""One task at several learning rates in one run: copies of the model side by side that do not know of each other.

Each copy is an optimizer group with its own learning rate. Optimizer and rules work element by element, so a copy does
what it would do alone, at a fraction of the cost: the order of the pushes is the same for all. A copy that diverges
gets no gradient any more and stays where it is thrown, so that it does not end the run of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gba_hvd.embedding.row_gradients import RowGrad

from .tasks import NoTables, SimulatedTask, no_rows

_LOST = 1e3  # a loss of so many times the first one is not looked at again


class Grid(NoTables):
    """n_copies of a task without tables. `losses(values)` are those of the copies, infinite where one diverged."""

    def __init__(self, task: SimulatedTask, n_copies: int) -> None:
        self._task, self._n = task, n_copies
        self.start = np.tile(task.start, n_copies)
        self._bound = _LOST * max(1.0, float(np.abs(task.start).max(initial=0.0)))
        self._is_lost = np.zeros(n_copies, bool)
        self._first = task.measure(task.start)

    def gradient(self, values: np.ndarray, micro: int) -> tuple[np.ndarray, list[RowGrad]]:
        copies = values.reshape(self._n, -1)
        self._is_lost |= ~(np.abs(copies).max(axis=1) < self._bound)
        gradient = np.zeros_like(copies)
        for number in np.flatnonzero(~self._is_lost):
            gradient[number] = self._task.gradient(copies[number], micro)[0]
        return gradient.ravel(), no_rows(self.layout)

    def measure(self, values: np.ndarray) -> float:
        return self._first  # of all together there is nothing to say on the way

    def evaluate(self, values: np.ndarray) -> dict[str, float]:
        return {str(number): loss for number, loss in enumerate(self.losses(values))}

    def losses(self, values: np.ndarray) -> list[float]:
        losses = [self._task.measure(copy) for copy in values.reshape(self._n, -1)]
        return [
            math.inf if lost or not loss <= _LOST * self._first else loss
            for loss, lost in zip(losses, self._is_lost, strict=True)
        ]


def with_rates(optimizer: dict[str, Any], lrs: Sequence[float]) -> dict[str, Any]:
    """A description of one group (`torch_optimizers.spec_of`) as one of a group for each learning rate."""
    return {**optimizer, "groups": [{**optimizer["groups"][0], "lr": lr} for lr in lrs]}
