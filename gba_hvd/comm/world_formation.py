"""How long workers wait for a world that forms, and when that is reported. No Horovod here; nothing is decided by it.

Horovod forms worlds in a call that cannot be interrupted, in allreduce mode in the training thread. So what is reported
of a world that was late comes when it stands; in asynchronous modes, where another thread waits, also meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gba_hvd.callbacks import Event
from gba_hvd.comm.wait_notices import Patience

LATE_S = 30.0  # as long as Horovod's workers wait for one another by default
SLOW = (
    "When this comes again and again, look at what the launcher says of new workers: the cause of a failure is in "
    "the worker's output. Where none failed, a new worker takes longer to start than the others wait for it: raise "
    "HOROVOD_GLOO_TIMEOUT_SECONDS (horovodrun --gloo-timeout-seconds), 30 s by default"
)


@dataclass(frozen=True)
class Wait:
    """n_broken: how often the world broke up while it formed; why: the newest time, if ever."""

    seconds: float
    n_broken: int = 0
    why: str = ""

    @property
    def is_worth_a_word(self) -> bool:
        return self.n_broken > 0 or self.seconds >= LATE_S

    @property
    def words(self) -> str:
        broke = f", in which it broke up {self.n_broken} time{'s' * (self.n_broken > 1)} (at last: {self.why})"
        return f"{self.seconds:.0f} s{broke if self.n_broken else ''}"


class Forming:
    """The wait for the next world. Written by the one thread that forms it, which others may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._patience = clock, Patience(first_s=LATE_S)
        self._since_s: float | None = None
        self._n_broken, self._why = 0, ""

    def begin(self) -> None:
        """Continue a wait that has begun: until workers have agreed on a state, no world has formed."""
        if self._since_s is None:
            self._n_broken, self._why, self._patience = 0, "", Patience(first_s=LATE_S)
            self._since_s = self._clock()

    def broke_up(self, error: Exception) -> None:
        self._n_broken, self._why = self._n_broken + 1, f"{type(error).__name__}: {error}"

    def end(self) -> Wait | None:
        """The world stands. How long that took, if one has formed since the last time."""
        wait, self._since_s = self.wait(), None
        return wait

    def wait(self) -> Wait | None:
        """So far, if a world is being formed."""
        since_s = self._since_s
        return None if since_s is None else Wait(self._clock() - since_s, self._n_broken, self._why)

    def word(self) -> Wait | None:
        """The wait so far, if it is due to be reported: after `LATE_S`, then less often. For the training thread."""
        wait = self.wait()
        return None if self._patience.word(wait is not None, self._clock()) is None else wait


def stands(step: int, wait: Wait, workers: int, meanwhile: str) -> Event:
    """meanwhile: what training did."""
    text = f"the world of {workers} worker{'s' * (workers > 1)} took {wait.words} to form; {meanwhile}. {SLOW}"
    return _event(step, wait, text, is_over=True)


def still_forms(step: int, wait: Wait, meanwhile: str) -> Event:
    text = f"a world of workers has been forming for {wait.words}, and does not stand yet; {meanwhile}. {SLOW}"
    return _event(step, wait, text)


def end_waits(step: int, wait: Wait) -> Event:
    """The training is over, and Horovod still forms the world that was begun before."""
    return _event(step, wait, f"{END_WAITS} It has done so for {wait.words}")


END_WAITS = (
    "the training is over, but this process has to wait: workers came or went shortly before, and Horovod connects "
    "those that are left, in which it cannot be interrupted. Nothing is lost by it, and nothing needs to be done: the "
    "process goes when that is done, or when the launcher gives it up (--elastic-timeout, 600 s by default)."
)


def _event(step: int, wait: Wait, text: str, is_over: bool = False) -> Event:
    data = {"seconds": round(wait.seconds, 1), "broken": wait.n_broken, "why": wait.why, "stands": is_over}
    return Event("world_late", step, text, data, level="warning")
