"""Rule "delayed_nesterov": Nesterov's momentum with a discounted gradient (Ajanthan et al., arXiv 2505.01099).

    d = momentum * (w_t - w_(t-1))          w_(t+1) = w_t + d - lr (1 - momentum) * gradient at (w + d), some steps old

With the buffer b of `torch.optim.SGD`, w_(t+1) = w_t - lr b, this is b <- momentum b + (1 - momentum) gradient, and
workers are shown w - lr momentum b. The two are equal at a constant learning rate; when it changes, the buffer keeps
its meaning as torch has it. The discount makes steps (1 - momentum) as long as plain momentum makes them, so it takes
a learning rate 1 / (1 - momentum) times as large to go as fast.

torch.optim.NAdam has the discount and the look-ahead in its own step, and is what the authors use, with
betas=(0.99, 0.999): with it, this rule adds nothing.

The buffer is the optimizer's state: entering and leaving keep it as it is, and a server that starts again has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gba_hvd.update_rules import sgd_momentum
from gba_hvd.update_rules.rule import DenseStart, NewValues, Plain, Rule, Step
from gba_hvd.update_rules.sgd_momentum import Sgd

NADAM = "torch.optim.nadam:NAdam"


class DelayedNesterov(Plain):
    """For SGD. buffer: float32 [n], what momentum there is."""

    looks_ahead: ClassVar[bool] = True
    owns_momentum: ClassVar[bool] = True

    def __init__(self, sgd: Sgd, buffer: np.ndarray) -> None:
        self._sgd, self._buffer, self._next = sgd, buffer, buffer

    @classmethod
    def why_not(cls, optimizer: Mapping[str, Any]) -> str:
        if optimizer["class"] == NADAM:
            return ""
        found = sgd_momentum.why_not("delayed_nesterov", optimizer)
        return f"{found}; or use torch.optim.NAdam" if found else ""

    @classmethod
    def start(cls, optimizer: Mapping[str, Any], dense: DenseStart, workers: Sequence[int]) -> Rule:
        return Plain() if optimizer["class"] == NADAM else cls(*sgd_momentum.taken_over(optimizer, dense))

    def act(self, step: Step) -> NewValues:
        keeps = self._sgd.momentum
        gradient = self._sgd.decayed(step.gradient, step.values)
        self._next = keeps * self._buffer + (np.float32(1) - keeps) * gradient
        values = step.values - self._sgd.lr(step.lrs) * self._next
        return NewValues(values, self._next, self._ahead(values, self._next, step.lrs))

    def stepped(self, values: np.ndarray, gradient: np.ndarray, lrs: Sequence[float], step: int) -> None:
        self._buffer = self._next

    def shown(self, values: np.ndarray, lrs: Sequence[float]) -> np.ndarray:
        return self._ahead(values, self._buffer, lrs)

    def _ahead(self, values: np.ndarray, buffer: np.ndarray, lrs: Sequence[float]) -> np.ndarray:
        ahead: np.ndarray = values - self._sgd.lr(lrs) * self._sgd.momentum * buffer
        return ahead
