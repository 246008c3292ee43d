"""The way back: a server's newest dense values, as differences to what each worker of another host has.

The server keeps a mirror of every such worker's values and sends what changed, compressed; both then do the same
additions, so mirror and worker stay equal bit for bit, and what was not sent is in the next difference. A worker asks
with the step it has. What becomes of a request that is repeated:

    it has the step the last answer led to     a new difference
    it has the step the last answer began at   the same answer again: it was lost
    it has an older one                        the same; no worker waits for it: the request comes late
    anything else, or a server that restarted  all values, and the mirror starts over

Where every element travels as it is there are no differences, only values: so the worker has them bit for bit.

A mirror takes as much memory as the values: it goes when its worker is gone, and all go with the mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gba_hvd.compression.dense_push import add_
from gba_hvd.compression.error_feedback import Feedback, plain_of, spans_of
from gba_hvd.compression.spec import Spec
from gba_hvd.compression.thresholds import Thresholds
from gba_hvd.errors import NonFiniteGradient

_MOST_WORKERS = 256  # mirrors; one more, and the oldest is discarded: its worker, if it lives, gets all values again


@dataclass
class _Mirror:
    values: np.ndarray
    base: int  # the step that the last answer began at, -1: it had all values
    step: int
    answer: bytes
    thresholds: Thresholds  # its own: they age with its answers, and a slow worker's differences are larger


class DenseDeltas:
    """One server's mirrors, by worker. Not thread-safe."""

    def __init__(self, spec: Spec, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.spec, self._sizes = spec, list(sizes)
        self._coder = Feedback(spec, names, sizes, np.dtype(np.float32))  # no residual here: mirrors know what waits
        everything = range(len(self._sizes))
        self._spans, self._n = spans_of(self._sizes, everything)
        self._plain = plain_of(self._sizes, everything)
        self._is_whole = spec.keep == 1.0 and spec.values == "none"  # subtracting and adding again would only round
        self._mirrors: dict[int, _Mirror] = {}

    def answer(self, worker: int, has: int, values: np.ndarray, step: int) -> tuple[int, Any]:
        """What brings a worker that has step `has` to `step`: (step it begins at, message), or (-1, all values)."""
        mirror = self._mirrors.get(worker)
        if mirror is not None and 0 <= has <= mirror.base:
            return mirror.base, mirror.answer
        if mirror is None or mirror.step != has or self._is_whole:
            return self._all(worker, values, step)
        with np.errstate(over="ignore", invalid="ignore"):
            change = values - mirror.values
        plain = [values[at] for at in self._plain]
        small = np.concatenate(plain) if plain else values[:0]
        self._coder.begin()
        self._coder.thresholds = mirror.thresholds
        try:
            mirror.answer = self._coder.encode(change, self._spans, self._n, small)
        except NonFiniteGradient:  # the model has diverged: the worker is to see it
            return self._all(worker, values, step)
        add_(mirror.values, mirror.answer, self._sizes)
        mirror.base, mirror.step = has, step
        return mirror.base, mirror.answer

    def _all(self, worker: int, values: np.ndarray, step: int) -> tuple[int, np.ndarray]:
        """All values; the mirror starts over."""
        if worker not in self._mirrors and len(self._mirrors) >= _MOST_WORKERS:
            del self._mirrors[next(iter(self._mirrors))]
        whole = values.copy()
        self._mirrors[worker] = _Mirror(whole.copy(), -1, step, b"", Thresholds(self.spec, len(self._sizes)))
        return -1, whole

    def forget(self, worker: int) -> None:
        """It is gone; should it come back, it gets all values."""
        self._mirrors.pop(worker, None)

    def step_of(self, worker: int) -> int:
        """The step the last answer led to, -1 if there was none."""
        return self._mirrors[worker].step if worker in self._mirrors else -1
