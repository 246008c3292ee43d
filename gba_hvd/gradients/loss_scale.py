"""The loss scale of a job that trains with `torch.amp.GradScaler`: one number for all workers, moved by global steps.

    scaler.scale(loss).backward()    gradients of this micro-batch times the scale, dense ones and rows
    scaler.step(optimizer)           both are divided by it again, at once; one that is not finite is an overflow
    a global step ends               with an overflow on any worker it is skipped everywhere, and the scale backs off;
                                     the scale grows after `growth_interval` steps in a row without one

So micro-batches of one step may have been computed with different scales, and every worker finds the same next one: in
allreduce mode from the commit, in asynchronous modes from the coordinator's position. A skipped step counts as a step;
its samples count as dropped, and `SampleAccount.steps_skipped` counts it: the bias correction of `Adam` leaves it
out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

SKIPPED = -1.0  # in the place of a step's row factor: it was decided, and is not applied


@dataclass
class LossScale:
    """The scale, and what moves it, by the names of `torch.amp.GradScaler`.

    growth_tracker: steps in a row without overflow; overflows: steps in a row with one
    """

    scale: float = 2.0**16
    growth_tracker: int = 0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    overflows: int = 0

    def step(self, overflowed: bool) -> None:
        """A global step ended; as `GradScaler.update()`, rounded to float32."""
        self.overflows = self.overflows + 1 if overflowed else 0
        if overflowed:
            self.scale, self.growth_tracker = float(np.float32(self.scale * self.backoff_factor)), 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            self.growth_tracker = 0
            with np.errstate(over="ignore"):
                grown = float(np.float32(self.scale * self.growth_factor))
            self.scale = grown if math.isfinite(grown) else self.scale

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def now(self) -> tuple[float, int, int]:
        """What moves: (scale, growth_tracker, overflows)."""
        return self.scale, self.growth_tracker, self.overflows

    @property
    def settings(self) -> tuple[float, float, int]:
        """What does not."""
        return self.growth_factor, self.backoff_factor, self.growth_interval

    def load(self, now: Sequence[float] | None) -> None:
        """The inverse of `now`; None: not known."""
        if now is not None:
            self.scale, self.growth_tracker, self.overflows = float(now[0]), int(now[1]), int(now[2])
