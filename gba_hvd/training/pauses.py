"""How long training stands still: after a loss of workers, to let workers in, and since workers left.

Decided here: when a pause begins and ends, and what is no part of it. When the world changes is decided elsewhere. The
account is of the job: it travels with the training state, to late joiners and into checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

LOSS, JOINED, LEFT = "loss", "joined", "left"  # why training stands still


@dataclass(frozen=True)
class Pause:
    """step: the one that ended it; None: the job ended first."""

    cause: str
    seconds: float
    step: int | None


@dataclass(frozen=True)
class OpenPause:
    """since_unix_s: when the newest work before it ended, later by the work that was done within it."""

    cause: str
    since_unix_s: float


class Pauses:
    """One worker's account. Work is a step, or a batch of an evaluation. Belongs to the training thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._worked_unix_s: float | None = None  # None: no step yet, so that nothing can pause
        self._evaluated_unix_s = 0.0
        self._open: OpenPause | None = None
        self._formed_unix_s: float | None = None  # the newest world within the open pause
        self.over: list[Pause] = []

    @property
    def cause(self) -> str | None:
        """Why training stands still now, as far as is known."""
        return None if self._open is None else self._open.cause

    @property
    def total_s(self) -> float:
        """Of all that are over."""
        return sum(pause.seconds for pause in self.over)

    def begin(self, cause: str) -> None:
        """Training stands still since the newest work. A second cause within a pause changes nothing."""
        if self._open is None and self._worked_unix_s is not None:
            self._open, self._formed_unix_s = OpenPause(cause, self._worked_unix_s), None

    def world_formed(self) -> None:
        """Training can continue."""
        self._formed_unix_s = self._clock()

    def stepped(self, step: int) -> Pause | None:
        """A step ended; returns the pause that it ended."""
        self._worked_unix_s = self._clock()
        return self._close(step, self._worked_unix_s)

    def job_ends(self, *, finished: bool) -> Pause | None:
        """Returns the pause that the job ended in: until the newest work within it, else until now.

        finished: all is trained, so that nothing stood still once the newest world had formed
        """
        worked, formed = self._worked_unix_s, self._formed_unix_s if finished else None
        if self._open is None or worked is None:
            return self._close(None, self._clock())
        until = max([at for at in (worked, formed) if at is not None and at > self._open.since_unix_s], default=None)
        return self._close(None, self._clock() if until is None else until)

    def evaluation_begins(self) -> None:
        self._evaluated_unix_s = self._clock()

    def evaluated(self) -> None:
        """Of an evaluation, what was done since it began, or since this was called last, is no part of a pause."""
        now = self._clock()
        if self._open is not None:
            worked_s = now - self._evaluated_unix_s
            self._open = replace(self._open, since_unix_s=self._open.since_unix_s + worked_s)
        if self._worked_unix_s is not None:
            self._worked_unix_s = now
        self._evaluated_unix_s = now

    def _close(self, step: int | None, until_unix_s: float) -> Pause | None:
        if self._open is None:
            return None
        seconds = max(0.0, until_unix_s - self._open.since_unix_s)
        pause, self._open = Pause(self._open.cause, round(seconds, 3), step), None
        self.over.append(pause)
        return pause

    # --- in the training state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        over = [asdict(pause) for pause in self.over]
        if self._open is None:
            return {"open": None, "over": over}
        return {"open": asdict(self._open), "over": over, "as_of_unix_s": self._clock()}

    def load_state_dict(self, state: Mapping[str, Any] | None, *, with_open: bool) -> None:
        """with_open: the state is of this moment, so that its open pause is this worker's, too.

        Checkpoints of older versions have no state.
        """
        state = state or {}
        self.over = [Pause(**pause) for pause in state.get("over", ())]
        found = state.get("open") if with_open else None
        self._open = None if found is None else OpenPause(**found)

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Take over the state of a launch that is no more: a pause that it was in counts until the state was taken."""
        as_of_unix_s = (state or {}).get("as_of_unix_s")
        self.load_state_dict(state, with_open=as_of_unix_s is not None)
        if as_of_unix_s is not None:
            self._close(None, as_of_unix_s)

    def meet(self, state: Mapping[str, Any], ahead_s: float = 0.0) -> None:
        """Take over the state of another worker, of this moment. ahead_s: of this worker's clock, before that one's.

        A late joiner of an asynchronous mode may lack the newest pauses: the longer account holds. A pause that this
        worker is in itself counts by its own clock.
        """
        own, over = self._open, self.over
        self.load_state_dict(state, with_open=True)
        self.over = max(self.over, over, key=len)
        if own is not None and self._open is not None:
            self._open = replace(self._open, since_unix_s=own.since_unix_s)
        elif self._open is not None:
            self._open = replace(self._open, since_unix_s=self._open.since_unix_s + ahead_s)
