"""What a worker's loop does beside a micro-batch: between `optimizer.step()` and the next batch.

Part of a micro-batch's time as forward and backward pass are: a change of mode makes none of it shorter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class LoopTime:
    """Of one worker. What the job itself does in between (evaluations, reports) is not counted."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._stepped_s: float | None = None
        self._apart_s = 0.0
        self.pending_s = 0.0  # of the micro-batch that comes next

    def stepped(self) -> None:
        """`optimizer.step()` returns."""
        self._stepped_s, self._apart_s = self._clock(), 0.0

    def resumed(self) -> None:
        """The loop asks for its next batch."""
        if self._stepped_s is not None:
            self.pending_s = self._clock() - self._stepped_s - self._apart_s
        self._stepped_s = None

    def take(self) -> float:
        """Seconds, once."""
        pending_s, self.pending_s = self.pending_s, 0.0
        return pending_s

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What is done meanwhile is the job's own."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._apart_s += self._clock() - began_s
