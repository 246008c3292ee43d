"""The gap of pushes: how far the dense values have moved between the computing of a gradient and its step.

    gap = |now - used|_2 / sqrt(n)      now: the model before the step; used: what the worker was shown (DANA,
                                        arXiv 1907.11612)
    in steps: gap / C                   C = sqrt(s / (1 - G^t)), s <- G s + (1 - G) |step|_2^2 / n, G = 0.999: the root
                                        mean square of a usual step (Gap-Aware, arXiv 1909.10802)

Measured only; what a rule makes of such a distance is the rule's. Of more than 65,536 elements, as many are taken,
evenly spread: the figure is an estimate then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from gba_hvd.update_rules.gap_aware import G
from gba_hvd.update_rules.kept_values import KeptValues

SAMPLED = 65_536


class GapMeter:
    """Measures the gaps of one server's dense part. Not thread-safe: belongs to the partition.

    values, shown: float32 [n], the model as of `step`, and what workers are shown.
    by_worker: pushes so far, the sum of their gaps, and the sum of their gaps in steps, by worker
    """

    def __init__(self, values: np.ndarray, shown: np.ndarray, step: int) -> None:
        n = len(values)
        self._at = None if n <= SAMPLED else np.linspace(0, n - 1, SAMPLED).astype(np.int64)
        self._kept = KeptValues(self._of(shown), step)
        self._before = self._of(values).copy()
        self._square, self._t = 0.0, 0
        self.by_worker: dict[int, tuple[int, float, float]] = {}

    def of(self, dense_step: int) -> tuple[float, float] | None:
        """(gap, gap in steps) of a push to the next step; None when the step of its values is not known (negative).

        In steps it is 0 before the first step was seen.
        """
        used = self._kept.used(dense_step)
        if used is None or not len(self._before):
            return None
        gap, usual = _distance(self._before, used), 0.0
        if self._t:
            usual = math.sqrt(self._square / (1 - G**self._t))
        return gap, gap / usual if usual > 0 else 0.0

    def stepped(
        self, pushes: Iterable[tuple[int, tuple[float, float] | None]], values: np.ndarray, shown: np.ndarray, step: int
    ) -> None:
        """A step is applied: its pushes as (worker, the result of `of`), and the values after it."""
        for worker, found in pushes:
            if found is not None and all(map(math.isfinite, found)):
                n, gap, in_steps = self.by_worker.get(worker, (0, 0.0, 0.0))
                self.by_worker[worker] = (n + 1, gap + found[0], in_steps + found[1])
        now = self._of(values)
        self._square = G * self._square + (1 - G) * _distance(now, self._before) ** 2
        self._t += 1
        self._before = now.copy()
        self._kept.add(self._of(shown), step)

    def _of(self, values: np.ndarray) -> np.ndarray:
        return values if self._at is None else values[self._at]


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """Root mean square; not finite where the values are not."""
    with np.errstate(invalid="ignore"):
        apart = one.astype(np.float64) - other
    return float(np.linalg.norm(apart)) / math.sqrt(max(1, len(apart)))
