"""What troubles a job: its warnings so far, which of them still hold, and its newest checkpoint.

From the events that this worker reports. `gba-hvd status` reads it on the board of the host; the chief's has it of the
whole job. Counts travel with the training state and lie on the board, so a chief after the first continues them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gba_hvd.callbacks import Callback, Event, Job, StepRecord
from gba_hvd.shm.job_board import Board
from gba_hvd.tracking.open_warnings import ends, is_over_at_once
from gba_hvd.training.engine import Engine

_SHOW_EVERY_S = 2.0
_TEXT = 400  # characters that are shown of a warning
# In the data of warnings of one kind, see `ends`.
_DISTINGUISHED_BY = ("waiting", "to", "worker", "pid", "stands", "mode")


@dataclass
class StandingWarning:
    """Warnings of one kind that still hold. step, message, unix_s: of the newest; since_unix_s: of the first."""

    kind: str
    data: dict[str, Any]
    step: int
    message: str
    since_unix_s: float
    unix_s: float
    n: int = 1

    @classmethod
    def of(cls, event: Event) -> StandingWarning:
        data = {name: event.data[name] for name in _DISTINGUISHED_BY if name in event.data}
        return cls(event.kind, data, event.step, event.message[:_TEXT], event.unix_s, event.unix_s)

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, json.dumps(self.data, sort_keys=True, default=str)


class JobHealth(Callback):
    """One worker's. n, n_over: warnings of the job so far, and how many of them do not hold any more.

    Not in the training state: the newest checkpoint, which every launch learns as it begins.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.n = self.n_over = 0
        self._standing: dict[tuple[str, str], StandingWarning] = {}
        self._checkpoint: dict[str, Any] | None = None  # the newest: its step; unix_s: None of an earlier launch
        self._board: Board | None = None  # that it was shown on last
        self._problems: list[str] = []
        self._is_chief = False
        self._next_look_s = 0.0

    @property
    def standing(self) -> list[StandingWarning]:
        """The newest last."""
        return sorted(self._standing.values(), key=lambda one: one.unix_s)

    def account(self, with_another: bool) -> dict[str, Any]:
        """For the end of the job. standing: kind, step and text of the newest of each. with_another: about to come"""
        standing = [[one.kind, one.step, one.message] for one in self.standing]
        return {"n": self.n + with_another, "over": self.n_over, "standing": standing}

    def on_job(self, job: Job) -> None:
        self._is_chief = job.is_chief

    def on_event(self, event: Event) -> None:
        changed = self._take_over_board()
        changed |= self._end_those_that(event)
        if event.level == "warning":
            self._add(event)
        elif event.kind == "checkpoint":
            self._note_checkpoint(int(event.data.get("saved_step", event.step)), event.unix_s)
        elif event.kind == "resumed" and event.data.get("manifest"):
            self._checkpoint = {"step": event.step, "unix_s": None}
        elif not changed:
            return
        self._show()

    def _note_checkpoint(self, step: int, unix_s: float) -> None:
        """A new chief reports the newest one again."""
        if self._checkpoint is None or self._checkpoint["step"] != step:
            self._checkpoint = {"step": step, "unix_s": unix_s}

    def on_step(self, record: StepRecord) -> None:
        """Show it on a board that is new, and what callbacks cannot do now."""
        now_s = time.monotonic()
        is_new = self._take_over_board()
        if not is_new and now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _SHOW_EVERY_S
        problems = [text for one in self._engine.callbacks if isinstance(text := getattr(one, "problem", ""), str)]
        problems = [text for text in problems if text]
        if is_new or problems != self._problems:
            self._problems = problems
            self._show()

    def _end_those_that(self, event: Event) -> bool:
        """Whether the event ended a warning."""
        known = self._standing.items()
        over = [key for key, one in known if ends(one.kind, one.data, event.kind, event.data, one.step)]
        for key in over:
            self.n_over += self._standing.pop(key).n
        return bool(over)

    def _add(self, event: Event) -> None:
        self.n += 1
        if is_over_at_once(event.kind, event.data):
            self.n_over += 1
            return
        now = StandingWarning.of(event)
        if (before := self._standing.get(now.key)) is not None:
            now.n, now.since_unix_s = before.n + 1, before.since_unix_s
        self._standing[now.key] = now

    def _take_over_board(self) -> bool:
        """Whether this host has another board than before; of it, what an earlier leader of the host has shown."""
        board, before = self._engine.host.board, self._board
        self._board = board
        if board is None or board is before:
            return False
        with contextlib.suppress(TypeError, KeyError, AttributeError, ValueError):  # of another version
            self._continue_from(board.found_health)
        return True

    def _show(self) -> None:
        board = self._board
        if board is None:
            return
        report = {**self.state_dict(), "checkpoint": self._checkpoint}
        report |= {"chief": self._is_chief, "problems": self._problems}
        while not board.show_health(report) and report["standing"]:
            report["standing"] = report["standing"][1:]

    # --- of a chief before -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        standing = [asdict(one) for one in self.standing]
        return {"n": self.n, "over": self.n_over, "standing": standing}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._continue_from(state)

    def _continue_from(self, found: Mapping[str, Any] | None) -> None:
        """Of two accounts of a job, the one with more warnings is the newer one."""
        if found is None:
            return
        self._checkpoint = self._checkpoint or found.get("checkpoint")
        if found.get("n", 0) > self.n:
            self.n, self.n_over = int(found["n"]), int(found["over"])
            known = [StandingWarning(**one) for one in found["standing"]]
            self._standing = {one.key: one for one in known}


def health_of(engine: Engine) -> JobHealth | None:
    return next((one for one in engine.callbacks if isinstance(one, JobHealth)), None)
