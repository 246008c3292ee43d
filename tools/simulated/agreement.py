"""A job of the real system and the simulation of the same settings: what is set, what is drawn, how far they are apart.

Both train the click model of the emulated benchmarks on the same samples in the same order; a worker's service times
are the same numbers in both. What differs is time that is not emulated: messages, and other work of the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from gba_hvd import update_rules
from gba_hvd.epoch import EpochPlan
from gba_hvd.errors import BadInput
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.torch_optimizers import spec_of

from ..bench.harness import emulated_accelerators as emulated
from ..bench.harness import small_ctr
from .click_task import ClickTask
from .event_loop import Setting, train
from .experiment import check_mode

HISTOGRAMS = ("staleness", "lags")
SCORES = ("auc", "log_loss", "time", "steps", "dropped")


@dataclass(frozen=True)
class JobSettings:
    """Raises BadInput.

    slow: the last worker takes so many times as long. latency_s: of a message, as the simulation has it.
    """

    workers: int
    mode: str = "gba"
    rule: str = "none"
    slow: float = 1.0
    service_s: float = 0.1
    micro_batches: int = 800
    micro_batch: int = 256
    n_micro: int = 8
    tolerance: int = 4
    latency_s: float = 0.002
    seed: int = 0

    def __post_init__(self) -> None:
        if self.workers < 1 or not self.slow >= 1 or not self.service_s > 0 or not self.latency_s >= 0:
            raise BadInput(
                "expected at least 1 worker, slow of at least 1, a service time above 0 and a latency of 0 or more, "
                f"got {self.workers}, {self.slow}, {self.service_s} and {self.latency_s}"
            )
        EpochPlan(self.micro_batches * self.micro_batch, self.n_micro * self.micro_batch, self.micro_batch)
        Discipline(self.mode, tolerance=self.tolerance)
        check_mode(self.mode)
        update_rules.check(self.rule, optimizer_spec())

    def scenario(self) -> emulated.Scenario:
        slow = (emulated.Slow(self.workers - 1, self.slow),) if self.slow > 1 else ()
        endless = float("inf")
        return emulated.Scenario("agreement", self.service_s, 0.0, endless, slow, gamma=True, n_workers=self.workers)


def simulate(job: JobSettings, data: Path) -> dict[str, Any]:
    """The same figures as a real job's."""
    n_samples = job.micro_batches * job.micro_batch
    setting = Setting(
        EpochPlan(n_samples, job.n_micro * job.micro_batch, job.micro_batch),
        Discipline(job.mode, tolerance=job.tolerance),
        job.rule,
        optimizer_spec(),
        latency=job.latency_s / job.service_s,
        points=1,
    )
    task = ClickTask(data, n_samples, job.micro_batch)
    found = train(task, setting, job.workers, draws(job))
    return {
        "staleness": found.staleness, "lags": found.dense_ages, **found.scores, "time": found.time,
        "steps": found.steps, "dropped": found.dropped,
    }  # fmt: skip


def optimizer_spec() -> dict[str, Any]:
    """Description of the optimizer that the emulated benchmarks train with (`torch_optimizers.spec_of`)."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    return spec_of(torch.optim.Adagrad(parameters, lr=small_ctr.LEARNING_RATE, eps=small_ctr.EPS))


def compared(real: Sequence[Mapping[str, Any]], simulated: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """How far real jobs of the same settings are from their simulation, and from each other.

    apart: of each histogram and score, the median over the real jobs of its distance from the simulation
    noise: the median distance of two real jobs; None where there is only one
    """
    apart: dict[str, float | None] = {}
    noise: dict[str, float | None] = {}
    for name in (*HISTOGRAMS, *SCORES):
        far: Callable[[Any, Any], float] = distance if name in HISTOGRAMS else lambda one, other: abs(one - other)
        apart[name] = median(far(job[name], simulated[name]) for job in real)
        between = [far(one[name], other[name]) for one, other in combinations(real, 2)]
        noise[name] = median(between) if between else None
    return {"apart": apart, "noise": noise}


def together(histograms: Sequence[Mapping[Any, int]]) -> dict[int, int]:
    """One histogram of all; keys of JSON are strings."""
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update({int(key): n for key, n in histogram.items()})
    return dict(total)


def draws(job: JobSettings) -> Callable[[int], float]:
    """Service times in units of the mean, the numbers that the emulated accelerators of the real workers draw."""
    scenario, shape = job.scenario(), emulated.GAMMA_SHAPE
    rngs = [np.random.default_rng([job.seed, worker]) for worker in range(job.workers)]
    means = [scenario.mean_service_s(worker, 0.0) / job.service_s for worker in range(job.workers)]
    return lambda worker: means[worker] * float(rngs[worker].gamma(shape, 1 / shape))


def shares(histogram: Mapping[Any, int]) -> dict[int, float]:
    """The share of each staleness, keys in order."""
    n = sum(histogram.values())
    return {int(key): histogram[key] / n for key in sorted(histogram, key=int)} if n else {}


def distance(a: Mapping[Any, int], b: Mapping[Any, int]) -> float:
    """Half the sum of differences of the shares (total variation): 0 for equal ones, 1 for nothing in common."""
    left, right = shares(a), shares(b)
    return sum(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in {*left, *right}) / 2
