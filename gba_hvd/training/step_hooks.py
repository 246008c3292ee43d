"""Functions that run once per global step that is applied, on every worker, such as `scheduler.step`.

In allreduce mode they run when a step is applied; in an asynchronous mode when the worker learns of it, once for each
step that was applied meanwhile. As torch's own optimizer hooks, they do not run for a step that is skipped since a
gradient overflowed, so what is counted here are steps that were applied, on all workers alike. `ran_until` travels with
the position, so that a worker that joins, or a job that resumes, runs them for the steps that its copy of the scheduler
has not seen, and for no step twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class _Seen:
    """What a scheduler had counted at some step."""

    count: int
    step: int


class StepHooks:
    """One worker's. Belongs to the training thread.

    ran_until: so many times the functions have run, in the whole job.
    """

    def __init__(self) -> None:
        self.functions: list[Callable[[], Any]] = []
        self.ran_until = 0
        self._schedulers: dict[str, Any] = {}
        self._seen: dict[str, _Seen] = {}

    def run(self, n_applied: int) -> None:
        """Catch up to so many steps that were applied."""
        while self.ran_until < n_applied:
            self.ran_until += 1
            for function in self.functions:
                function()

    def watch(self, values: Mapping[str, Any], step: int) -> None:
        """From here on count how often the learning-rate schedulers among `values` step."""
        self._schedulers = {n: v for n, v in values.items() if isinstance(getattr(v, "last_epoch", None), int)}
        self._seen = {name: _Seen(one.last_epoch, step) for name, one in self._schedulers.items()}

    def too_fast(self, step: int) -> list[str]:
        """Schedulers that stepped more often than global steps were made; each is named once."""
        found = []
        for name, seen in list(self._seen.items()):
            if self._schedulers[name].last_epoch - seen.count > step - seen.step:
                found.append(name)
                del self._seen[name]
        return found
