"""A simulated training by names and numbers, as commands and benchmarks ask for it. What is wrong is refused here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gba_hvd import update_rules
from gba_hvd.embedding.row_gradients import ROW_AVERAGES, RowGrad
from gba_hvd.epoch import EpochPlan
from gba_hvd.errors import BadInput, refuse_unknown
from gba_hvd.mode_names import REPLICA_MODES, SHARED_MODES
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.torch_optimizers import spec_of

from .click_task import ClickTask
from .event_loop import Setting, TrainingOutcome, train
from .service_times import SHAPE, Fleet
from .tasks import Logistic, NoTables, Quadratic, SimulatedTask, no_rows

TASKS = ("quadratic", "logistic", "clicks")
MOMENTUM = 0.9
_LOST = 1e3  # a loss of so many times the first one is not looked at again
_OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter], float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
    "nadam": lambda parameters, lr: torch.optim.NAdam(
        parameters, lr=lr, betas=(0.99, 0.999), momentum_decay=0.004, decoupled_weight_decay=True
    ),
    "adagrad": lambda parameters, lr: torch.optim.Adagrad(parameters, lr=lr, eps=1e-8),
}
OPTIMIZERS = tuple(_OPTIMIZERS)


@dataclass(frozen=True)
class Experiment:
    """Raises BadInput for what cannot be simulated.

    micro_batches: of the run; micro_batch: samples in one; n_micro: micro-batches of a global batch (gba, bsp)
    spread, shape: see `service_times.Fleet`; latency, serve: see `event_loop.Setting`
    row_average: as of `DistributedOptimizer`, for a task with tables
    """

    task: str = "quadratic"
    workers: int = 8
    mode: str = "async"
    rule: str = "none"
    optimizer: str = "momentum"
    lr: float = 0.01
    micro_batches: int = 2000
    micro_batch: int = 64
    n_micro: int = 8
    spread: float = 0.0
    shape: float = SHAPE
    latency: float = 0.0
    serve: float = 0.0
    tolerance: int = 4
    lookahead: int | None = None
    seed: int = 0
    row_average: str = "global"
    rule_settings: Mapping[str, float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_unknown("task", self.task, TASKS)
        refuse_unknown("optimizer", self.optimizer, OPTIMIZERS)
        refuse_unknown("row_average", self.row_average, tuple(ROW_AVERAGES))
        if self.row_average != "global" and self.task != "clicks":
            raise BadInput(f"row_average={self.row_average!r}: the task {self.task!r} has no tables, use 'clicks'")
        check_mode(self.mode)
        for name in ("micro_batches", "micro_batch", "n_micro"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadInput(f"{name} must be a whole number, 1 or more, got {value!r}")
        if not 0 < self.lr < math.inf:
            raise BadInput(f"lr must be a number above 0, got {self.lr}")
        self.fleet()
        self.setting()
        update_rules.check(self.rule, self.optimizer_spec())
        update_rules.known_settings(self.rule, self.rule_settings)

    def fleet(self) -> Fleet:
        return Fleet(self.workers, self.spread, self.shape, self.seed)

    def optimizer_spec(self) -> dict[str, Any]:
        return spec_of(_OPTIMIZERS[self.optimizer]([torch.nn.Parameter(torch.zeros(1))], self.lr))

    def setting(self) -> Setting:
        cut = EpochPlan(self.micro_batches * self.micro_batch, self.n_micro * self.micro_batch, self.micro_batch)
        discipline = Discipline(self.mode, tolerance=self.tolerance, lookahead=self.lookahead)
        return Setting(
            cut, discipline, self.rule, self.optimizer_spec(), self.latency, self.serve,
            row_average=self.row_average, rule_settings=self.rule_settings,
        )  # fmt: skip


def run(experiment: Experiment, clicks: Path | None = None) -> TrainingOutcome:
    """clicks: folder of samples for the task of that name (`small_ctr.write`)."""
    return train(_task(experiment, clicks), experiment.setting(), experiment.workers, experiment.fleet().draws())


def run_grid(experiment: Experiment, lrs: Sequence[float]) -> list[float]:
    """The final loss at each learning rate, all in one run: what `run` finds with each. For tasks without tables."""
    if experiment.task == "clicks":
        raise BadInput("the task 'clicks' has tables, which a grid of learning rates cannot have: choose another")
    grid = Grid(_task(experiment, None), len(lrs))
    spec = experiment.optimizer_spec()  # of one group, from here on of one for each learning rate
    optimizer = {**spec, "groups": [{**spec["groups"][0], "lr": lr} for lr in lrs]}
    setting = replace(experiment.setting(), optimizer=optimizer, points=1)
    outcome = train(grid, setting, experiment.workers, experiment.fleet().draws())
    return grid.losses(outcome.values)


def loss_at_start(experiment: Experiment) -> float:
    task = _task(experiment, None)
    return task.measure(task.start)


def _task(experiment: Experiment, clicks: Path | None) -> SimulatedTask:
    if experiment.task == "quadratic":
        return Quadratic(np.geomspace(0.01, 1.0, 50).tolist(), noise=0.1, seed=experiment.seed)
    samples = experiment.micro_batches * experiment.micro_batch
    if experiment.task == "logistic":
        return _logistic(min(samples, 100_000), experiment.micro_batch, experiment.seed)
    assert clicks is not None
    return ClickTask(clicks, samples, experiment.micro_batch)


_logistic = lru_cache(maxsize=4)(Logistic)  # it does not change, and its samples take longer to make than to train


def check_mode(mode: str) -> None:
    """Raises BadInput, naming what there is, for a mode with replicas. A misspelt one is refused by `Discipline`."""
    if mode in REPLICA_MODES:
        raise BadInput(
            f"mode {mode!r} cannot be simulated: its workers train replicas of their own, and the simulator has one "
            f"model; choose one of {', '.join(SHARED_MODES)}"
        )


# --- several learning rates at once -----------------------------------------------------------------------------------


class Grid(NoTables):
    """One task without tables at several learning rates in one run: n_copies, independent of each other.

    Each copy is an optimizer group with its own learning rate. Optimizer and rules work element by element, so a copy
    does what it would do alone, at a fraction of the cost: the order of the pushes is the same for all. A copy that
    diverges gets no gradient any more, so that it does not end the run of the others; its loss is infinite.
    """

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
        return self._first  # that of all together means nothing on the way

    def evaluate(self, values: np.ndarray) -> dict[str, float]:
        return {str(number): loss for number, loss in enumerate(self.losses(values))}

    def losses(self, values: np.ndarray) -> list[float]:
        losses = [self._task.measure(copy) for copy in values.reshape(self._n, -1)]
        return [
            math.inf if lost or not loss <= _LOST * self._first else loss
            for loss, lost in zip(losses, self._is_lost, strict=True)
        ]
