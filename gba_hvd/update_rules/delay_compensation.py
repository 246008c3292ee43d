"""Rule "dc" (DC-ASGD, Zheng et al., ICML 2017): a late gradient is corrected to where the values are now.

The gradient at the newest values is its Taylor series around those it was computed with, whose Hessian is
approximated by the diagonal of the gradient's outer product with itself. Element by element:

    g~ = g + lambda_t * g * g * (now - used)         now: the model before the step; used: what the worker was shown
    constant:  lambda_t = lambda
    adaptive:  s <- m s + (1 - m) g^2, from s = 0    lambda_t = lambda / sqrt(s + 1e-7)

The user's optimizer takes the step with g~. A gradient that was computed with the newest values stays as it is, bit for
bit. Ours, for steps of several pushes: each push is corrected by its own distance; s is updated once in a step, with
the mean of their g^2. Rows are not corrected: the old ones are not kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gba_hvd.update_rules.kept_values import KeptValues
from gba_hvd.update_rules.rule import DenseStart, Plain, Setting

LAMBDA, MEAN_SQUARE_DECAY = 2.0, 0.95
_EPS = np.float32(1e-7)
DEFAULTS: Mapping[str, Setting] = {"lambda": LAMBDA, "adaptive": True, "mean_square_decay": MEAN_SQUARE_DECAY}


def refused(settings: Mapping[str, Setting]) -> str:
    """Why these settings, of those in `DEFAULTS`, cannot be used; empty: they can."""
    strength, adaptive = settings.get("lambda", LAMBDA), settings.get("adaptive", True)
    if not isinstance(adaptive, bool):
        return f"adaptive is true or false, got {adaptive!r}"
    if not 0 < strength < math.inf:
        return f"lambda is a number above 0, got {strength!r} (with 0 the rule has no effect: leave it out)"
    if not 0 <= settings.get("mean_square_decay", MEAN_SQUARE_DECAY) < 1:
        return f"mean_square_decay is a number from 0 and below 1, got {settings['mean_square_decay']!r}"
    if not adaptive and "mean_square_decay" in settings:
        return "mean_square_decay has no effect with a constant lambda (adaptive=False): leave one of them out"
    return ""


class Compensation:
    """g -> g~ for one server's dense part, and what that takes: the values as they were, and the mean square.

    settings: as of `DEFAULTS`, what is missing is as there. shown: float32 [n], as of `step`.
    Takes 4 n bytes for the mean square (adaptive only), and those of `KeptValues`. Nothing of it is saved.
    """

    def __init__(self, settings: Mapping[str, Setting], shown: np.ndarray, step: int) -> None:
        known = {**DEFAULTS, **settings}
        self._strength, self._is_adaptive = np.float32(known["lambda"]), bool(known["adaptive"])
        self._decay = np.float32(known["mean_square_decay"])
        self._kept = KeptValues(shown, step)
        self._square = np.zeros_like(shown) if self._is_adaptive else None
        self._next = self._square

    @property
    def shown(self) -> np.ndarray:
        """float32 [n], what workers are shown now"""
        return self._kept.newest

    def of(self, pushes: Sequence[tuple[int, np.ndarray]], values: np.ndarray) -> list[np.ndarray]:
        """g~ of each push, float32 [n], at `values`. pushes: (step of the dense values it was computed with, gradient).

        Changes nothing that counts before `stepped`. What overflows is not finite, for the caller to refuse.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            strength: np.ndarray | np.float32 = self._strength
            if self._square is not None and pushes:
                mean = sum((g * g for _, g in pushes), np.zeros_like(values)) / np.float32(len(pushes))
                self._next = self._decay * self._square + (np.float32(1) - self._decay) * mean
                strength = self._strength / np.sqrt(self._next + _EPS)
            return [self._corrected(g, dense_step, values, strength) for dense_step, g in pushes]

    def stepped(self, shown: np.ndarray, step: int) -> None:
        """The step is applied, and workers are shown these values, float32 [n]."""
        self._square = self._next
        self._kept.add(shown, step)

    def _corrected(
        self, g: np.ndarray, dense_step: int, values: np.ndarray, strength: np.ndarray | np.float32
    ) -> np.ndarray:
        used = self._kept.used(dense_step)
        if used is None:
            return g
        corrected: np.ndarray = g + strength * g * g * (values - used)
        return corrected


class DelayCompensated(Plain):
    """For any optimizer. compensation: of this server's part."""

    defaults: ClassVar[Mapping[str, Setting]] = DEFAULTS

    def __init__(self, compensation: Compensation) -> None:
        self._compensation = compensation

    @classmethod
    def refused(cls, settings: Mapping[str, Setting]) -> str:
        return refused(settings)

    @classmethod
    def start(cls, optimizer: Mapping[str, Any], dense: DenseStart, workers: Sequence[int]) -> DelayCompensated:
        return cls(Compensation(dense.settings, dense.values, dense.step))

    def compensated(self, pushes: Sequence[tuple[int, np.ndarray]], values: np.ndarray) -> list[np.ndarray]:
        return self._compensation.of(pushes, values)

    def stepped(self, values: np.ndarray, gradient: np.ndarray, lrs: Sequence[float], step: int) -> None:
        self._compensation.stepped(values, step)
