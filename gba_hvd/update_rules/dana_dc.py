"""Rule "dana_dc" (DANA with delay compensation, arXiv 1907.11612): `dana_zero` on gradients corrected as in `dc`.

    g~ = g + lambda_t * g * g * (values - what the worker was shown)          `delay_compensation`
    v_i <- momentum * v_i + g~        values <- values - lr * v_i             `dana_zero`

Workers are shown the look-ahead, so the difference is what the look-ahead did not foresee. What a gradient is corrected
to, the source does not say. By default it is the model, to which the step is applied, as in `dc`: then a fresh gradient
is corrected, too. With the setting `to_look_ahead` it is the newest look-ahead, which the server would send now.

Entering, leaving, the death of a worker and a server that starts again are as with `dana_zero`; the compensation starts
over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gba_hvd.update_rules import sgd_momentum
from gba_hvd.update_rules.dana_zero import DanaZero
from gba_hvd.update_rules.delay_compensation import DEFAULTS, Compensation, refused
from gba_hvd.update_rules.rule import DenseStart, NewValues, Setting, Step
from gba_hvd.update_rules.sgd_momentum import Sgd


class DanaDc(DanaZero):
    """dense: as the rule finds it, with the settings of `delay_compensation.DEFAULTS`, and `to_look_ahead`."""

    defaults: ClassVar[Mapping[str, Setting]] = {**DEFAULTS, "to_look_ahead": False}

    def __init__(self, sgd: Sgd, buffer: np.ndarray, workers: Sequence[int], dense: DenseStart) -> None:
        super().__init__(sgd, buffer, workers)
        shown = dense.shown
        if shown is None:
            shown = self.shown(dense.values, dense.lrs) if dense.lrs else dense.values
        self._compensation = Compensation(dense.settings, shown, dense.step)
        self._next_shown = shown
        self._to_look_ahead = bool(dense.settings.get("to_look_ahead"))

    @classmethod
    def why_not(cls, optimizer: Mapping[str, Any]) -> str:
        return sgd_momentum.why_not("dana_dc", optimizer)

    @classmethod
    def refused(cls, settings: Mapping[str, Setting]) -> str:
        return refused(settings)

    @classmethod
    def start(cls, optimizer: Mapping[str, Any], dense: DenseStart, workers: Sequence[int]) -> DanaDc:
        return cls(*sgd_momentum.taken_over(optimizer, dense), workers, dense)

    def compensated(self, pushes: Sequence[tuple[int, np.ndarray]], values: np.ndarray) -> list[np.ndarray]:
        return self._compensation.of(pushes, self._compensation.shown if self._to_look_ahead else values)

    def act(self, step: Step) -> NewValues:
        answer = super().act(step)
        assert answer.shown is not None
        self._next_shown = answer.shown
        return answer

    def stepped(self, values: np.ndarray, gradient: np.ndarray, lrs: Sequence[float], step: int) -> None:
        super().stepped(values, gradient, lrs, step)
        self._compensation.stepped(self._next_shown, step)
