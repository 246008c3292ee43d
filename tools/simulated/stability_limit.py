"""The largest learning rate that is stable under a fixed delay, observed: what `gba_hvd.update_rules.stability.limit`
predicts.

delay + 1 workers of constant speed, started evenly, push in turn: every gradient is `delay` steps old. They train a
quadratic of many curvatures at once, whose elements do not know of each other; the limit lies between the largest
curvature whose element fades and the smallest whose element grows. The prediction only says where to look.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.epoch import EpochPlan
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.update_rules.stability import limit

from .event_loop import Setting, train
from .service_times import Fleet
from .tasks import Quadratic

DELAYS = (0, 1, 2, 4, 8, 16, 32, 64)
_AROUND, _POINTS = 0.15, 601  # a grid of curvatures within 15 % of the prediction, half a thousandth apart
_STEPS_PER_DELAY, _STEPS = 42, 250


@dataclass(frozen=True)
class Limit:
    """lr * curvature: of the law, the largest that faded, the smallest that grew."""

    delay: int
    predicted: float
    stable: float
    unstable: float

    @property
    def observed(self) -> float:
        return (self.stable + self.unstable) / 2

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was observed."""
        return self.predicted / self.observed - 1


class _Watched(Quadratic):
    """Remembers the largest value of each element in the second and in the last third of the run."""

    def __init__(self, curvatures: np.ndarray, steps: int) -> None:
        super().__init__(curvatures.tolist())
        self._third = steps // 3
        self.middle, self.end = np.zeros(len(curvatures)), np.zeros(len(curvatures))

    def gradient(self, values: np.ndarray, micro: int) -> tuple[np.ndarray, list[RowGrad]]:
        seen = self.middle if micro < 2 * self._third else self.end
        if micro >= self._third:
            np.maximum(seen, np.abs(values), out=seen)
        return super().gradient(values, micro)

    def measure(self, values: np.ndarray) -> float:
        return 1.0  # elements that grow are what is looked for


def observe(delay: int) -> Limit:
    """The limit under this delay, in steps."""
    if delay < 0:
        raise BadInput(f"a delay must be a number of steps, not negative, got {delay}")
    predicted, steps = limit(delay), _STEPS_PER_DELAY * (delay + 1) + _STEPS
    curvatures = predicted * np.linspace(1 - _AROUND, 1 + _AROUND, _POINTS)
    task = _Watched(curvatures, steps)
    optimizer = spec_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    setting = Setting(EpochPlan(steps, 1, 1), Discipline("async"), "none", optimizer, start_over=1.0, points=1)
    outcome = train(task, setting, delay + 1, Fleet(delay + 1, shape=math.inf).draws())
    late = {lag: n for lag, n in outcome.lags.items() if lag > delay or n > steps / 2}
    if list(late) != [delay]:
        raise GbaError(f"the gradients were to be {delay} steps old, they were {outcome.lags}")
    grows = task.end > task.middle
    first = int(np.argmax(grows))
    if not grows.any() or first == 0 or not grows[first:].all():
        raise GbaError(f"delay {delay}: no limit within {_AROUND:.0%} of {predicted:.4g}")
    return Limit(delay, predicted, float(curvatures[first - 1]), float(curvatures[first]))
