"""Rule "dana_zero" (arXiv 1907.11612): a momentum for each worker, and a look past the steps of all the others.

    v_i <- momentum * v_i + gradient of worker i        values <- values - lr * v_i
    workers are shown values - lr * momentum * sum_j v_j, about where the values will be when their gradient arrives

Ours, for steps of several pushes: worker i's gradient is the sum of its pushes in the step, each by its share, and the
v_i of those who have one are applied; the others stay. So a step to which all contributed is a step of plain momentum.

Entering: each worker's v_i is the same part of the optimizer's momentum buffer, so sum_j v_j is the buffer. Leaving:
the buffer is sum_j v_j; without another gradient both would still move the values by lr * momentum / (1 - momentum)
times it. A dead worker's v_i goes to the living in equal parts: the sum stays, and what it still had to move the values
is moved. The sum is in the server's file as the optimizer's buffer; a server that starts again divides it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gba_hvd.update_rules import sgd_momentum
from gba_hvd.update_rules.rule import DenseStart, NewValues, Plain, Received, Step
from gba_hvd.update_rules.sgd_momentum import Sgd


class DanaZero(Plain):
    """Takes 4 n bytes for each worker that ever pushed and lives, and 8 n for the sum.

    buffer: float32 [n], the momentum there is. workers: who shares it at first.
    """

    looks_ahead: ClassVar[bool] = True
    owns_momentum: ClassVar[bool] = True
    knows_workers: ClassVar[bool] = True

    def __init__(self, sgd: Sgd, buffer: np.ndarray, workers: Sequence[int]) -> None:
        part = buffer / np.float32(max(1, len(workers)))
        self._sgd, self._start = sgd, part
        self._v: dict[int, np.ndarray] = dict.fromkeys(workers, part)
        self._sum = buffer.astype(np.float64)  # added to for the whole job: float32 would drift
        self._next = self._v, self._sum

    @classmethod
    def why_not(cls, optimizer: Mapping[str, Any]) -> str:
        return sgd_momentum.why_not("dana_zero", optimizer)

    @classmethod
    def start(cls, optimizer: Mapping[str, Any], dense: DenseStart, workers: Sequence[int]) -> DanaZero:
        return cls(*sgd_momentum.taken_over(optimizer, dense), workers)

    @property
    def workers(self) -> list[int]:
        """Who has a momentum here."""
        return sorted(self._v)

    def of(self, worker: int) -> np.ndarray:
        """v_i, float32 [n]; zeros for a worker without."""
        return self._v.get(worker, np.zeros_like(self._start))

    def act(self, step: Step) -> NewValues:
        sgd, total = self._sgd, self._sum.copy()
        v = _inherited(self._v, step.workers)
        moved = np.zeros_like(step.values)
        for worker, (share, summed) in _by_worker(step.pushes).items():
            gradient = sgd.decayed(summed, step.values, share)
            before = v.get(worker)
            after = gradient if before is None else sgd.momentum * before + gradient
            total += after if before is None else after - before
            v[worker] = after
            moved += after
        self._next = v, total
        values = step.values - sgd.lr(step.lrs) * moved
        return NewValues(values, total.astype(np.float32), self._ahead(values, total, step.lrs))

    def stepped(self, values: np.ndarray, gradient: np.ndarray, lrs: Sequence[float], step: int) -> None:
        self._v, self._sum = self._next

    def shown(self, values: np.ndarray, lrs: Sequence[float]) -> np.ndarray:
        return self._ahead(values, self._sum, lrs)

    def _ahead(self, values: np.ndarray, total: np.ndarray, lrs: Sequence[float]) -> np.ndarray:
        ahead: np.ndarray = values - self._sgd.lr(lrs) * self._sgd.momentum * total.astype(np.float32)
        return ahead


def _by_worker(pushes: Sequence[Received]) -> dict[int, tuple[float, np.ndarray]]:
    """Each worker's part of the step, the parts adding up to 1, and its gradient float32 [n]."""
    total = sum(push.share for push in pushes) or 1.0
    found: dict[int, tuple[float, np.ndarray]] = {}
    for push in pushes:
        part, gradient = push.share / total, np.float32(push.share) * push.gradient
        if push.worker in found:
            part, gradient = found[push.worker][0] + part, found[push.worker][1] + gradient
        found[push.worker] = part, gradient
    return found


def _inherited(v: dict[int, np.ndarray], living: Sequence[int]) -> dict[int, np.ndarray]:
    """The momenta, those of workers that are gone divided among the living; all of them if none is known to live."""
    gone = [worker for worker in v if worker not in set(living)] if living else []
    kept = {worker: own for worker, own in v.items() if worker not in gone}
    for worker in gone:
        part = v[worker] / np.float32(len(living))
        for heir in living:
            kept[heir] = kept[heir] + part if heir in kept else part
    return kept
