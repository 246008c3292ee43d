"""Whether a job is in the mode that it was asked to be in, and what its start and its end report of that.

No socket, no clock.

"auto" and "allreduce" ask for nothing: with both a job that stays in allreduce is where it should be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gba_hvd.callbacks import Event

_ENOUGH = 0.5  # of the steps for which a mode was asked for; below that the end says how many were in it
_CONTENT = ("allreduce", "auto")
SERVERS_NOT_UP = "the companion servers were not up"


class AskedMode:
    """Counts global steps, on every worker alike.

    now: the mode that is asked for. obstacle: why it could not be entered the last time that this was tried; empty
    while the job is in it.
    switch_at: as in `GBACallback`
    """

    def __init__(self, mode: str, switch_at: Mapping[int, str]) -> None:
        self.now, self.obstacle = mode, ""
        self._switch_at, self._handled = dict(switch_at), -1
        self._seen: int | None = None
        self._steps: dict[str, int] = {}  # by mode: while it was asked for
        self._inside: dict[str, int] = {}  # and those of them in it
        self._first: dict[str, int] = {}  # the first step in it
        self._delays: dict[str, str] = {}  # by mode: the obstacle until then

    def step(self, step: int, mode: str) -> None:
        """The job is at `step`, and has come there in `mode`. Several steps may have passed."""
        for at in sorted(self._switch_at):
            if self._handled < at < step:
                self._handled, self.now = at, self._switch_at[at]
        n, self._seen = step - (step - 1 if self._seen is None else self._seen), step
        if self.now in _CONTENT:
            return
        self._steps[self.now] = self._steps.get(self.now, 0) + n
        if mode == self.now:
            self._inside[mode] = self._inside.get(mode, 0) + n
            self._first.setdefault(mode, step)
            self._delays.setdefault(mode, self.obstacle)
            self.obstacle = ""

    def override_plan(self, step: int) -> None:
        """What was planned up to this step is asked for no more."""
        self._handled = max(self._handled, step)

    def rolled_back(self, step: int) -> None:
        """The job is at this earlier step again: the next step that is reported counts as one."""
        self._seen, self._handled = None, min(self._handled, step - 1)

    def missing(self, mode: str) -> str:
        """The mode that is asked for while the job is in `mode`; empty when it is where it should be."""
        return "" if self.now in (*_CONTENT, mode) else self.now

    def at_start(self, mode: str, auto: str, wait_s: float) -> str:
        """`allreduce (gba was asked for: ...)`: the mode that the job is in, and when that changes.

        auto: when "auto" would change it. wait_s: as in `GBACallback`
        """
        planned = [at for at in sorted(self._switch_at) if at > self._handled]
        until = [f"{self._switch_at[at]} from step {at:,} on" for at in planned]
        if self.now == "auto":
            until.insert(0, f"auto was asked for: {auto}")
        elif self.now != mode:
            up = "it begins after a step, when the companion servers of all hosts are up"
            waits = f"; training waits for them, {wait_s:g} s at most" if wait_s else ""
            until.insert(0, f"{self.now} was asked for: {up}{waits}")
        return f"{mode} ({'; '.join(until)})" if until else mode

    def shortfall(self, step: int, obstacle: str) -> list[Event]:
        """What the end of the job says of modes that it was hardly ever in. obstacle: what is in the way now, if known.

        step: the job's last
        """
        return [
            self._event(mode, n, step, obstacle)
            for mode, n in self._steps.items()
            if self._inside.get(mode, 0) < _ENOUGH * n
        ]

    def state(self) -> dict[str, Any]:
        return {
            "now": self.now, "handled": self._handled, "steps": self._steps, "inside": self._inside,
            "first": self._first, "obstacle": self.obstacle, "delays": self._delays,
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        """The next step that is reported counts as one: how many were lost on the way is not known."""
        self.now, self._handled, self.obstacle = state["now"], state["handled"], state["obstacle"]
        self._steps, self._inside, self._first = dict(state["steps"]), dict(state["inside"]), dict(state["first"])
        self._delays = dict(state.get("delays", {}))
        self._seen = None

    def _event(self, mode: str, asked: int, step: int, obstacle: str) -> Event:
        inside = self._inside.get(mode, 0)
        of = f"{inside:,} of {asked:,} steps"
        if asked < step:
            of += f" since then, of {step:,} in all,"
        if self.obstacle not in ("", SERVERS_NOT_UP):  # a try that failed counts more than servers that are not up now
            obstacle = self.obstacle
        why = obstacle or self.obstacle or "the job ended before it was entered"
        if inside:
            newest = self.obstacle or self._delays.get(mode, "")
            why = f"it was first entered at step {self._first[mode]:,}" + (f"; {newest}" if newest else "")
        text = (
            f"mode {mode} was asked for; {of} were in it: {why}. The other steps were trained in another mode, as a "
            "rule by allreduce, where all workers wait for the slowest. GBACallback(wait_s=60) makes training wait for "
            "the servers, required=True makes a job fail that does not get there"
        )
        data = {"mode": mode, "steps_in_it": inside, "steps_asked": asked, "steps": step, "why": why}
        return Event("mode_missed", step, text, data, level="warning")
