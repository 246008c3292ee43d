"""Functions that run once per global step that is applied, on every worker, such as `scheduler.step`.

In allreduce mode they run when a step is applied; in an asynchronous mode when the worker learns of it, once for each
step that was applied meanwhile. As torch's own optimizer hooks, they do not run for a step that is skipped since a
gradient overflowed, so what is counted here are steps that were applied, on all workers alike. `ran_until` travels with
the position, so that a worker that joins, or a job that resumes, runs them for the steps that its copy of the scheduler
has not seen, and for no step twice.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


@dataclass
class _Watched:
    """A scheduler, and what it had counted at some step."""

    name: str
    scheduler: Any
    count: int
    step: int
    is_named: bool = False


class StepHooks:
    """One worker's. Belongs to the training thread.

    optimizer: that which makes the steps. ran_until: so many times the functions have run, in the whole job.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._optimizer = optimizer
        self.functions: list[Callable[[], Any]] = []
        self.ran_until = 0
        self._watched: list[_Watched] = []
        self._has_looked = False

    def run(self, n_applied: int) -> None:
        """Catch up to so many steps that were applied."""
        with self._has_stepped():
            while self.ran_until < n_applied:
                self.ran_until += 1
                for function in self.functions:
                    function()

    @contextmanager
    def _has_stepped(self) -> Iterator[None]:
        """For the schedulers of torch, which warn where the optimizer has made no step in this process: those that
        they run for here were made, perhaps before this worker joined."""
        if self._optimizer is None or getattr(self._optimizer, "_opt_called", False):
            yield
            return
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        try:
            yield
        finally:  # what the script runs too early is warned of as ever
            del self._optimizer._opt_called  # type: ignore[attr-defined]

    def watch(self, values: Mapping[str, Any], step: int) -> None:
        """From here on count how often the learning-rate schedulers among `values` step."""
        schedulers = {n: v for n, v in values.items() if isinstance(getattr(v, "last_epoch", None), int)}
        self._watched = [_Watched(name, one, one.last_epoch, step) for name, one in schedulers.items()]
        self._has_looked = False

    def loop_begins(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Watch the optimizer's schedulers that are not in the state, too, by their classes; count from here on.

        What steps once per epoch also steps in an epoch that was complete and makes no global step.
        """
        if not self._has_looked and "step" in vars(optimizer):  # a scheduler was made for it
            self._has_looked = True
            every = [o for o in gc.get_objects() if issubclass(type(o), LRScheduler)]
            found = [o for o in every if getattr(o, "optimizer", None) is optimizer]
            known = {id(watched.scheduler) for watched in self._watched}
            for outer in found:  # of a ChainedScheduler, which does not count, the first one inside counts
                known.update(map(id, getattr(outer, "_schedulers", ())[not hasattr(outer, "last_epoch") :]))
            new = [o for o in found if id(o) not in known and hasattr(o, "last_epoch")]
            self._watched += [_Watched(type(o).__name__, o, o.last_epoch, step) for o in new]
        for one in self._watched:
            one.count, one.step = one.scheduler.last_epoch, step

    def too_fast(self, step: int) -> list[str]:
        """Schedulers that stepped more often than global steps were made; each is named once."""
        found = [
            one for one in self._watched if not one.is_named and one.scheduler.last_epoch - one.count > step - one.step
        ]
        for one in found:
            one.is_named = True
        return [one.name for one in found]
