"""Whether compressing pays: a pure function of what the steps took, equal on all workers, with a sentence why.

Each worker's seconds of a step travel with the commit of the next one. Of the time on the wire the shortest counts (who
comes last waits for nobody), of the time for encoding and decoding the longest. When a world has formed, a few steps
are sent both ways and the faster way is taken. Later the other way is tried again, the more seldom the more it costs:
trying takes half a percent of the time at most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np

_FIRST = (
    True,
    False,
    True,
    False,
    True,
    False,
    True,
    False,
)  # which steps are compressed; the first two are not counted
_UNCOUNTED = 2
_TRY_STEPS, _TRY_SHARE = 2, 0.005
_BETWEEN, _BETWEEN_MOST = 200, 50_000
_GAIN = 0.95  # compressed must take at most this share of the time, when plain is what is done


@dataclass(frozen=True)
class Took:
    """One worker's seconds of one step: waiting on the wire, encoding and decoding, all of the step."""

    wire_s: float
    codec_s: float
    step_s: float


@dataclass(frozen=True)
class Decision:
    """compress: from now on. changed: it is another decision than before."""

    compress: bool
    reason: str
    changed: bool


class Bypass:
    """One world's decision. Every worker feeds it the same numbers and gets the same answers."""

    def __init__(self, is_forced: bool = False) -> None:
        self._is_forced = is_forced
        self._ahead: deque[bool] = deque(() if is_forced else _FIRST)
        self._n_seen = 0
        self._compress = True
        self._decided = is_forced
        self._seconds: dict[bool, deque[float]] = {True: deque(maxlen=5), False: deque(maxlen=5)}
        self._step_s: deque[float] = deque(maxlen=9)
        self._tried: list[float] = []
        self._next_try = 0

    def compresses_next(self) -> bool:
        """Whether the next step is compressed."""
        return self._ahead[0] if self._ahead else self._compress

    def saw(self, compressed: bool, took: list[Took]) -> Decision | None:
        """What a step took on every worker. Returns the decision where one was made."""
        if self._is_forced:
            return None
        self._n_seen += 1
        seconds = min(t.wire_s for t in took) + max(t.codec_s for t in took)
        if self._n_seen > _UNCOUNTED:
            self._seconds[compressed].append(seconds)
            self._step_s.append(max(t.step_s for t in took))
        if self._ahead:
            self._ahead.popleft()
            return None if self._ahead else self._decide()
        if self._n_seen >= self._next_try:
            other = not self._compress
            self._seconds[other].clear()
            self._ahead.extend([other] * _TRY_STEPS)
        return None

    def _decide(self) -> Decision:
        packed, plain = median(self._seconds[True]), median(self._seconds[False])
        before, first = self._compress, not self._decided
        was_plain = first or not before
        self._compress = packed < (_GAIN if was_plain else 1.0) * plain
        self._decided = True
        other = plain if self._compress else packed
        costs = _TRY_STEPS * max(0.0, other - min(packed, plain))
        wait = costs / (_TRY_SHARE * max(1e-6, median(self._step_s)))
        self._next_try = self._n_seen + int(np.clip(wait, _BETWEEN, _BETWEEN_MOST))
        what = "compressed" if self._compress else "as they are"
        reason = (
            f"dense gradients go {what}: a step's take {1000 * packed:.1f} ms compressed, {1000 * plain:.1f} ms without"
        )
        return Decision(self._compress, reason, first or before != self._compress)
