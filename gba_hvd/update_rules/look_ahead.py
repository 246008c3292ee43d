"""Rule "look_ahead": the user's optimizer steps; workers are shown where its next step will probably have led.

    w_(k+1) = w_k + step of the user's optimizer          workers are shown w_(k+1) + steps * (w_(k+1) - w_k)

A gradient that comes a step late was then computed near the values it is applied to. With momentum m the next step is m
times the last one and what the gradient adds, so `steps` is the usual momentum, 0.9: with SGD this is the look-ahead of
Nesterov and DANA-Zero. Ours is the use with any optimizer that has momentum, Adam among them, and one look-ahead for
all workers.

Without momentum the next step is not like the last one, and the look-ahead lowers the largest stable learning rate; so
an optimizer without momentum is refused.

Why it matters: with momentum 0.9, an age of one step in 44 % of the gradients makes the largest stable learning rate
0.06 of that without delay; with this look-ahead it is 0.24 of it (`gba_hvd.update_rules.delay_roots.limit`).

Nothing is kept: the file of the server has what is shown, and a server that starts again shows it on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gba_hvd.update_rules.momentum import first_beta
from gba_hvd.update_rules.rule import ByOptimizer, DenseStart, NewValues, Plain, Setting, Step

STEPS = 0.9


def steps_of(rule: str, settings: Mapping[str, Any]) -> float:
    """How far ahead of the model workers are under the rule of that name, in steps; 0 for other rules."""
    return float(settings.get("steps", STEPS)) if rule == "look_ahead" else 0.0


class LookAhead(Plain):
    """For any optimizer with momentum. steps: how far ahead of the model, in steps as long as the last one."""

    looks_ahead: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Setting]] = {"steps": STEPS}

    def __init__(self, steps: float) -> None:
        self._steps = steps

    @classmethod
    def refused(cls, settings: Mapping[str, Setting]) -> str:
        if not 0 < settings.get("steps", STEPS) < math.inf:
            return f"steps is a number above 0, got {settings['steps']!r} (with 0 the rule has no effect: leave it out)"
        return ""

    @classmethod
    def why_not(cls, optimizer: Mapping[str, Any]) -> str:
        if all(group.get("momentum") or first_beta(group) for group in optimizer["groups"]):
            return ""
        name = str(optimizer["class"]).rpartition(":")[2]
        return f"look_ahead needs momentum, or betas as Adam has them, in every group; {name} here has none"

    @classmethod
    def start(cls, optimizer: Mapping[str, Any], dense: DenseStart, workers: Sequence[int]) -> LookAhead:
        return cls(float(dense.settings.get("steps", STEPS)))

    def act(self, step: Step) -> ByOptimizer | NewValues:
        return ByOptimizer(step.lrs, self._steps)

    def shown(self, values: np.ndarray, lrs: Sequence[float]) -> np.ndarray:
        return values.copy()  # no step was seen yet
