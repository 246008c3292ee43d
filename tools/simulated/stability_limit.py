"""The largest learning rate that is stable under delays, observed: what the adviser predicts.

delay + 1 workers of constant speed, started evenly, push in turn: every gradient is `delay` steps old. They train a
quadratic of many curvatures at once, whose elements do not know of each other; the limit lies between the largest
curvature whose element fades and the smallest whose element grows. The prediction only says where to look.

A fleet trains twice: what the adviser needs is measured in a first run, the limit is observed in a longer one, in which
the same workers have other service times. So the prediction is of the job to come, not of the run it was taken from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.epoch import EpochPlan
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.update_rules import delay_roots, delay_sequence
from gba_hvd.update_rules.delay_model import expected_arrivals
from gba_hvd.update_rules.momentum import Momentum
from gba_hvd.update_rules.stability import limit

from .event_loop import Setting, train
from .service_times import SHAPE, Fleet
from .tasks import Quadratic

DELAYS = (0, 1, 2, 4, 8, 16, 32, 64)
_AROUND, _POINTS = 0.15, 601  # a grid of curvatures within 15 % of the prediction, half a thousandth apart
_STEPS_PER_DELAY, _STEPS = 42, 250
_LOST = 1e12  # the first steps of Adam, whose bias correction makes them longer, go far out
_EPS = 1e18  # of Adam: far above all gradients
_MEASURED = delay_sequence.MOST + 64  # steps of the first run; the first few have younger values


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
        """Error of the prediction, relative to what was observed."""
        return self.predicted / self.observed - 1


class _Watched(Quadratic):
    """Remembers the largest value of each element in the second and in the last third of the run."""

    def __init__(self, curvatures: np.ndarray, steps: int) -> None:
        super().__init__(curvatures.tolist())
        self._third = steps // 3
        self.middle, self.end = np.zeros(len(curvatures)), np.zeros(len(curvatures))
        self._is_lost = np.zeros(len(curvatures), bool)  # so far out that it would end the run of the others

    @property
    def grows(self) -> np.ndarray:
        return (self.end > self.middle) | self._is_lost

    def gradient(self, values: np.ndarray, micro: int) -> tuple[np.ndarray, list[RowGrad]]:
        seen = self.middle if micro < 2 * self._third else self.end
        if micro >= self._third:
            np.maximum(seen, np.abs(values), out=seen)
        slope, rows = super().gradient(values, micro)
        self._is_lost |= np.abs(values) > _LOST
        slope[self._is_lost] = 0.0
        return slope, rows

    def measure(self, values: np.ndarray) -> float:
        return 1.0  # elements that grow are what is looked for


def observe(delay: int) -> Limit:
    """The limit under this delay, in steps."""
    predicted, steps = limit(delay), _STEPS_PER_DELAY * (delay + 1) + _STEPS
    curvatures = predicted * np.linspace(1 - _AROUND, 1 + _AROUND, _POINTS)
    task = _Watched(curvatures, steps)
    optimizer = spec_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    setting = Setting(EpochPlan(steps, 1, 1), Discipline("async"), "none", optimizer, start_over=1.0, points=1)
    outcome = train(task, setting, delay + 1, Fleet(delay + 1, shape=math.inf).draws())
    late = {lag: n for lag, n in outcome.dense_ages.items() if lag > delay or n > steps / 2}
    if list(late) != [delay]:
        raise GbaError(f"the gradients were to be {delay} steps old, they were {outcome.dense_ages}")
    grows = task.grows
    first = int(np.argmax(grows))
    if not grows.any() or first == 0 or not grows[first:].all():
        raise GbaError(f"delay {delay}: no limit within {_AROUND:.0%} of {predicted:.4g}")
    return Limit(delay, predicted, float(curvatures[first - 1]), float(curvatures[first]))


@dataclass(frozen=True)
class FleetLimit:
    """lr * curvature of a fleet, predicted from what another run measured, and observed.

    predicted: by `delay_sequence`, ages in their order. roots: by the mean of the ages. plain: by the formula for one
    delay, the mean. drawn: `delay_roots.mean_square_limit`; None: not worked out. speeds: as predicted, of ages that
    follow from the workers' mean times alone (`delay_model.expected_arrivals`). observed: the smallest that grew
    """

    workers: int
    n_micro: int
    momentum: float
    spread: float
    seed: int
    age_mean: float
    age_max: int
    predicted: float
    roots: float
    plain: float
    drawn: float | None
    speeds: float
    observed: float
    ahead: float = 0.0
    optimizer: str = "sgd"

    @property
    def error(self) -> float:
        """Error of the prediction, relative to what was observed."""
        return self.predicted / self.observed - 1


def observe_fleet(
    workers: int, n_micro: int = 1, momentum: float = 0.0, spread: float = 0.0, steps: int = 4000, seed: int = 0,
    ahead: float = 0.0, optimizer: str = "sgd",
) -> FleetLimit:  # fmt: skip
    """The limit of workers with gamma distributed times: ages as they come, not all the same.

    n_micro: 1 is mode async, more is gba. spread: of the workers' mean speeds. steps: of the run that is observed.
    seed: of the speeds and of all service times. ahead: `steps` of rule look_ahead; 0: no rule. optimizer: "sgd", or
    "adam" with `momentum` as its first beta, and an eps so large that the preconditioner is 1. Raises BadInput, and
    GbaError when no limit is found between a third of the prediction by the roots and twice it.
    """
    if ahead and not momentum:
        raise BadInput("a look-ahead needs momentum: give both, or neither")
    mode, n = "async" if n_micro == 1 else "gba", steps * n_micro
    spec = spec_of(_optimizer(optimizer, momentum))
    rule, settings = ("look_ahead", {"steps": ahead}) if ahead else ("none", {})
    setting = Setting(
        EpochPlan(n, n_micro, 1), Discipline(mode), rule, spec, start_over=1.0, points=1, rule_settings=settings
    )
    fleet = Fleet(workers, spread, SHAPE, seed)
    first = replace(setting, cut=EpochPlan(_MEASURED * n_micro, n_micro, 1))
    measured = train(Quadratic([1e-4]), first, workers, fleet.draws())
    ages = measured.dense_ages
    scale = 1 - Momentum.of(spec).dampening
    roots = delay_roots.limit(ages, momentum, ahead) / scale
    curvatures = roots * np.geomspace(1 / 3, 2, 400)
    task = _Watched(curvatures, n)
    train(task, setting, workers, fleet.draws(occasion=2))
    grows = task.grows
    if not grows.any() or grows[0]:
        raise GbaError(f"{workers} workers: no limit between {curvatures[0]:.4g} and {curvatures[-1]:.4g}")
    mean = sum(age * count for age, count in ages.items()) / sum(ages.values())
    drawn = delay_roots.mean_square_limit(ages, momentum, ahead)
    observed = float(curvatures[int(np.argmax(grows))])
    by_order = delay_sequence.stability(measured.arrivals, momentum, ahead).limit / scale
    expected = expected_arrivals(fleet.means().tolist(), n_micro)
    by_speeds = delay_sequence.stability(expected, momentum, ahead).limit / scale
    return FleetLimit(
        workers, n_micro, momentum, spread, seed, mean, max(ages), by_order, roots, limit(mean),
        None if drawn is None else drawn / scale, by_speeds, observed, ahead, optimizer,
    )  # fmt: skip


def _optimizer(name: str, momentum: float) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    if name == "adam":
        return torch.optim.Adam(parameters, lr=_EPS, betas=(momentum, 0.999), eps=_EPS)
    return torch.optim.SGD(parameters, lr=1.0, momentum=momentum)
