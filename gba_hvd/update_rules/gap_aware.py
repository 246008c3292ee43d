"""Rule "gap_aware" (arXiv 1909.10802): how much a gradient still counts, by how far the parameters have moved since.

The gap of an element of the dense parameters is |now - used|: its value before this step, and the value that the
micro-batch was computed with. Its gradient is divided by 1 + gap / C, where C is the length of a usual step. A gap of 0
leaves a gradient as it is, bit for bit. Decided here from numbers alone; the server that applies the steps owns it.

    v <- gradient of the step         C = lr_max * (sqrt(s / (1 - G^t)) + 1e-8)      SGD without momentum
    v <- (before - after) / lr        the same; this is its momentum buffer          SGD with momentum
    v <- values after - before        C = sqrt(s / (1 - G^t)) + 1e-8                 every other optimizer
    s <- G s + (1 - G) v^2            G = 0.999, t: steps seen, lr_max: largest learning rate yet of the element's group

An optimizer that rescales its gradients takes steps of another length than lr * |v|, so theirs are measured.
Ours, not the paper's: the rows of a push are multiplied by the mean of 1 / (1 + gap / C) over the dense elements of all
servers, since old rows are not kept (`ps.coordinator.step_executor` says how servers agree on it); weight decay
happens at the server, with the newest values, and needs no correction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from gba_hvd.update_rules.rule import Damping, DenseStart, Plain, not_damped
from gba_hvd.update_rules.sgd_momentum import SGD

G = 0.999
_EPS = 1e-8
Measures = Literal["gradient", "buffer", "step"]
_KEPT, _KEPT_BYTES = 32, 256 << 20


class GapAware(Plain):
    """The dense parts of one server, as they were and as they moved.

    Keeps the values of the last 32 steps at 4 n bytes each; fewer, but at least 2, where that would take more than
    256 MiB. It needs 12 n bytes more, and within a step 4 n for each of the older values that its pushes were computed
    with. A push computed with values older than the kept ones is measured against the oldest of them. Nothing of this
    is saved: a server that starts again starts over, and what was computed before counts in full at first.

    values: float32 [n], as of `step`. groups: optimizer group of each element, int [n].
    measures: which of the three v is. (With Nesterov's momentum, the buffer and the gradient are in it.)
    """

    def __init__(
        self, values: np.ndarray, step: int, groups: np.ndarray, *, measures: Measures, kept: int | None = None
    ) -> None:
        if kept is None:
            kept = max(2, min(_KEPT, _KEPT_BYTES // max(1, values.nbytes)))
        self._kept = deque([(step, values.copy())], maxlen=kept)
        self._groups, self._measures = groups, measures
        self._lr_max = np.zeros(int(groups.max(initial=-1)) + 1)  # of each group
        self._s = np.zeros(len(values))
        self._t = 0
        self._usual: np.ndarray | None = None  # C, float32 [n], when it was asked for since the last step
        self._known: dict[int, Damping] = {}  # by step whose values were used, since the last step

    @classmethod
    def start(cls, optimizer: Mapping[str, Any], dense: DenseStart, workers: Sequence[int]) -> GapAware:
        has_momentum = any(group.get("momentum") for group in optimizer["groups"])
        measures: Measures = "step" if optimizer["class"] != SGD else "buffer" if has_momentum else "gradient"
        return cls(dense.values, dense.step, dense.group_of_elements(), measures=measures)

    def damping(self, dense_step: int) -> Damping:
        """Damping of a push computed with the values of step `dense_step`; none when that is negative (not known)."""
        step, used = next((k for k in reversed(self._kept) if k[0] <= dense_step), self._kept[0])
        newest, now = self._kept[-1]
        if dense_step < 0 or step == newest or not len(now):
            return not_damped(dense_step)
        found = self._known.get(step)
        if found is None:
            found = self._known[step] = _damping(np.abs(now - used), self._usual_step())
        return found

    def stepped(self, values: np.ndarray, gradient: np.ndarray, lrs: Sequence[float], step: int) -> None:
        """Step `step` is applied: the values after it, its gradient, the learning rate of each group."""
        v = self._direction(values, gradient, lrs)
        self._s *= G
        self._s += (1 - G) * v * v
        self._t += 1
        self._lr_max = np.maximum(self._lr_max, lrs[: len(self._lr_max)])
        self._kept.append((step, values.copy()))
        self._usual, self._known = None, {}

    def _direction(self, values: np.ndarray, gradient: np.ndarray, lrs: Sequence[float]) -> np.ndarray:
        if self._measures == "gradient":
            return gradient.astype(np.float64)
        v: np.ndarray = np.subtract(values, self._kept[-1][1], dtype=float)
        if self._measures == "buffer":  # but for its sign, which is of no consequence
            lr = np.asarray(lrs, float)[self._groups]
            np.divide(v, lr, out=v, where=lr > 0)
        return v

    def _usual_step(self) -> np.ndarray:
        if self._usual is None:
            usual = np.sqrt(self._s / (1 - G**self._t)) + _EPS
            if self._measures != "step":
                usual *= self._lr_max[self._groups]
            self._usual = usual.astype(np.float32)
        return self._usual


def _damping(gap: np.ndarray, usual: np.ndarray) -> Damping:
    with np.errstate(divide="ignore", over="ignore"):  # a step length of 0: any gap is infinitely many steps
        steps = np.divide(gap, usual, out=np.zeros_like(gap), where=gap > 0)
    dense = 1 / (1 + steps)
    return Damping(dense, float(dense.mean(dtype=np.float64)))
