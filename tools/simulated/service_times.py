"""How long micro-batches take: gamma service times, equal workers or not (the straggler model of arXiv 1907.11612).

A worker's mean is 1 where all are equal, else drawn from a gamma law of mean 1 and standard deviation `spread`; each of
its micro-batches then takes a time of that mean and the standard deviation 1 / sqrt(shape) of it. The means are drawn
once, so the same workers are slow all the time. Times are in units of the mean micro-batch of the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gba_hvd.errors import BadInput

SHAPE = 100.0


@dataclass(frozen=True)
class Fleet:
    """Raises BadInput for what is no fleet.

    spread: standard deviation of the workers' mean times; 0: all are equal
    shape:  of the gamma law of a worker's times; infinite: they do not vary
    """

    workers: int
    spread: float = 0.0
    shape: float = SHAPE
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 1:
            raise BadInput(f"workers must be a whole number, 1 or more, got {self.workers!r}")
        if not 0 <= self.spread < math.inf:
            raise BadInput(f"spread must be a number, 0 or more, got {self.spread}")
        if not self.shape > 0:
            raise BadInput(f"shape must be above 0, got {self.shape}")

    def means(self) -> np.ndarray:
        """float64 [workers]"""
        if not self.spread:
            return np.ones(self.workers)
        shape = 1 / self.spread**2
        return np.random.default_rng([self.seed, 0]).gamma(shape, 1 / shape, self.workers)

    def draws(self, occasion: int = 1) -> Callable[[int], float]:
        """How long the next micro-batch of a worker takes. The same numbers for the same fleet and occasion."""
        means, rng = self.means().tolist(), np.random.default_rng([self.seed, occasion])
        if math.isinf(self.shape):
            return lambda worker: means[worker]
        return lambda worker: means[worker] * float(rng.gamma(self.shape, 1 / self.shape))
