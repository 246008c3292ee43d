"""Rule "dana_slim" (arXiv 1907.11612): DANA-Zero with the momenta in the workers, so a server keeps none.

    worker i: v_i <- momentum * v_i + gradient      sends u = momentum * v_i + gradient
    server:   values <- values - lr * u

The values are then what DANA-Zero shows to workers, at a constant learning rate. They are the model here, too. Where a
step is a global batch (gba, bsp), a worker's momentum shrinks once for each step whose values it sees, as DANA-Zero's
does; elsewhere with each push.

Entering: a worker begins with its part of the momentum buffer, 1 / workers of it (times the pushes of a step, where the
server divides by them). Leaving: the buffer is the running
mean of what workers sent, b <- momentum b + (1 - momentum) u, which for a steady gradient is plain momentum's buffer;
the exact sum of the v_i is in no one place. A dead worker's v_i dies with it, and a late joiner begins without. A
gradient that was computed again by another worker is in both momenta. The buffer is in the server's file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gba_hvd.update_rules import sgd_momentum
from gba_hvd.update_rules.rule import DenseStart, NewValues, Plain, Step
from gba_hvd.update_rules.sgd_momentum import Sgd


class DanaSlim(Plain):
    """The server's part. buffer: float32 [n]."""

    owns_momentum: ClassVar[bool] = True

    def __init__(self, sgd: Sgd, buffer: np.ndarray) -> None:
        self._sgd, self._buffer, self._next = sgd, buffer, buffer

    @classmethod
    def why_not(cls, optimizer: Mapping[str, Any]) -> str:
        return sgd_momentum.why_not("dana_slim", optimizer, takes_weight_decay=False)

    @classmethod
    def start(cls, optimizer: Mapping[str, Any], dense: DenseStart, workers: Sequence[int]) -> DanaSlim:
        return cls(*sgd_momentum.taken_over(optimizer, dense))

    def act(self, step: Step) -> NewValues:
        keeps = self._sgd.momentum
        self._next = keeps * self._buffer + (np.float32(1) - keeps) * step.gradient
        return NewValues(step.values - self._sgd.lr(step.lrs) * step.gradient, self._next)

    def stepped(self, values: np.ndarray, gradient: np.ndarray, lrs: Sequence[float], step: int) -> None:
        self._buffer = self._next


class SlimWorker:
    """The worker's part, for all dense parameters at once.

    v: float32 [n], its part of the momentum there is. by_step: shrink once per step seen, else with each push.
    """

    def __init__(self, sgd: Sgd, v: np.ndarray, by_step: bool) -> None:
        self._sgd, self._v, self._by_step, self._seen = sgd, v, by_step, -1

    def outgoing(self, gradient: np.ndarray, dense_step: int) -> np.ndarray:
        """float32 [n]: what to send for the gradient of a micro-batch computed with the values of `dense_step`."""
        keeps = self._sgd.momentum
        if self._by_step and dense_step == self._seen:
            self._v = self._v + gradient
            sent: np.ndarray = gradient + keeps * gradient
            return sent
        self._v, self._seen = keeps * self._v + gradient, dense_step
        sent = keeps * self._v + gradient
        return sent
