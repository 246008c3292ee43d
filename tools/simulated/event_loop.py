"""The event loop: workers lease, compute and push on a virtual clock, as `gba_hvd.ps.worker` does on a real one.

    lease asked for -> lease in hand -> start: dense values and rows are read, the gradient is computed
                    -> service time passes -> push on its way -> it arrives: accepted, steps decided and applied

As a real worker, a simulated one asks for its next lease when nine tenths of its usual time for the current one have
passed, and starts on it without waiting for its own push to arrive. A worker for whom there is nothing asks again after
each step (where a step is not of M pushes, after each push). Time is virtual: nothing here sleeps, and the order of
events is the same in every run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.epoch import EpochPlan
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.messages import LeaseGrant
from gba_hvd.update_rules.dana_slim import SlimWorker
from gba_hvd.update_rules.sgd_momentum import Sgd

from .simulated_server import SimulatedServer
from .tasks import SimulatedTask

_USUAL, _NEW = 0.7, 0.3  # as `lease_prefetch.LeasePrefetcher` averages
_ASK_AT = 0.9
_DIVERGED = 1e3  # a loss of so many times the first one, or more


@dataclass(frozen=True)
class Setting:
    """What is simulated. Raises BadInput.

    optimizer:  as of `torch_optimizers.spec_of`; its groups have equal parts of the dense values
    latency:    from a worker to the server or back, in units of the mean service time
    serve:      how long the server is busy with a push, in the same units; pushes wait for each other
    rule_settings: of the rule, see `GBACallback`
    start_over: the workers begin spread evenly over this many units of time
    points:     how often the loss is measured on the way
    row_average: as of `DistributedOptimizer`
    """

    cut: EpochPlan
    discipline: Discipline
    rule: str
    optimizer: dict[str, Any]
    latency: float = 0.0
    serve: float = 0.0
    start_over: float = 0.0
    points: int = 40
    row_average: str = "global"
    rule_settings: Mapping[str, float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("latency", "serve", "start_over"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInput(f"{name} must be a number, 0 or more, got {getattr(self, name)}")
        if self.points < 1:
            raise BadInput(f"points must be 1 or more, got {self.points}")


@dataclass(frozen=True)
class TrainingOutcome:
    """What came of it.

    curve:     (time, micro-batches done, loss), the last one at the end; a loss that diverged is infinite
    staleness: histogram in steps, by token; dense_ages: the same by the dense values that gradients were computed with
    gaps: by worker, as of `gba_hvd.ps.partition.gaps.GapMeter.by_worker`
    arrivals: (age, share) of the gradients of the newest steps, `gba_hvd.update_rules.delay_sequence`
    applied, dropped: samples. scores: of the task, at the end. why: of a loss that diverged
    """

    curve: tuple[tuple[float, int, float], ...]
    staleness: dict[int, int]
    dense_ages: dict[int, int]
    steps: int
    applied: int
    dropped: int
    time: float
    values: np.ndarray = field(repr=False)
    scores: dict[str, float] = field(default_factory=dict)
    why: str = ""
    gaps: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    arrivals: tuple[list[tuple[int, float]], ...] = field(default=(), repr=False)

    @property
    def loss(self) -> float:
        return self.curve[-1][2]


@dataclass
class _Worker:
    """usual: how long it takes for a micro-batch, as it sees it; 0 before the first. has_asked: for the next lease."""

    request: int = 0
    usual: float = 0.0
    started: float = 0.0
    has_asked: bool = False
    next: LeaseGrant | None = None
    is_idle: bool = True
    slim: SlimWorker | None = None


@dataclass(frozen=True)
class _Push:
    """On its way: what was computed with the dense values of `dense_step`."""

    worker: int
    lease: LeaseGrant
    gradient: np.ndarray
    rows: list[RowGrad]
    dense_step: int


def train(task: SimulatedTask, setting: Setting, workers: int, takes: Callable[[int], float]) -> TrainingOutcome:
    """One epoch. takes: how long the next micro-batch of a worker takes, its real time for computing left out."""
    cut = setting.cut
    with SimulatedServer(
        task, cut, setting.discipline, setting.rule, setting.optimizer, workers, setting.row_average,
        setting.rule_settings,
    ) as server:  # fmt: skip
        return _Loop(task, setting, workers, takes, server).run()


class _Loop:
    """The clock and what is due. Owns the events; the server is its caller's."""

    def __init__(
        self,
        task: SimulatedTask,
        setting: Setting,
        workers: int,
        takes: Callable[[int], float],
        server: SimulatedServer,
    ) -> None:
        self._task, self._setting, self._takes, self._server = task, setting, takes, server
        self._workers = [_Worker(slim=self._slim()) for _ in range(workers)]
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._waiting: dict[int, None] = {}  # workers for whom there was nothing
        self._busy_until = 0.0
        self._n_total = -(-setting.cut.n_samples // setting.cut.micro_batch)
        self._n_handed = self._n_done = 0
        self._curve: list[tuple[float, int, float]] = [(0.0, 0, task.measure(task.start))]
        self._why = ""

    def run(self) -> TrainingOutcome:
        workers, setting, server = len(self._workers), self._setting, self._server
        for worker in range(workers):
            self._at(setting.start_over * worker / workers, partial(self._ask, worker))
        now = 0.0
        while self._due and not self._why:
            now, _, event = heapq.heappop(self._due)
            event(now)
        if not self._why and not server.ledger.finished:
            raise GbaError(f"the simulation stands still after {self._n_done} of {self._n_total} micro-batches")
        self._measure(now)
        ledger, part = server.ledger, server.part
        scores = {} if self._why else self._task.evaluate(part.dense.values)
        return TrainingOutcome(
            tuple(self._curve), dict(ledger.staleness_histogram), dict(ledger.age_histogram), ledger.step,
            ledger.account.applied, ledger.account.dropped, now, part.dense.values.copy(), scores, self._why,
            dict(part.gaps.by_worker), tuple(part.arrivals),
        )  # fmt: skip

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._due, (time, next(self._order), event))

    def _slim(self) -> SlimWorker | None:
        if self._setting.rule != "dana_slim":
            return None
        n = len(self._task.start)
        n_groups = len(self._setting.optimizer["groups"])
        sgd = Sgd.of(self._setting.optimizer, np.repeat(np.arange(n_groups), n // n_groups))
        by_step = self._setting.discipline.step_of == "batch"
        return SlimWorker(sgd, np.zeros(n, np.float32), by_step)

    # --- what happens to a worker, in this order ---------------------------------------------------------------------

    def _ask(self, worker: int, now: float) -> None:
        state = self._workers[worker]
        state.has_asked = True
        if self._n_handed == self._n_total:
            return
        state.request += 1
        lease = self._server.lease(worker, state.request)
        if lease is None:
            self._waiting[worker] = None
            return
        self._n_handed += 1
        self._at(now + 2 * self._setting.latency, partial(self._lease_came, worker, lease))

    def _lease_came(self, worker: int, lease: LeaseGrant, now: float) -> None:
        state = self._workers[worker]
        state.next = lease
        if state.is_idle:
            self._start(worker, now)

    def _start(self, worker: int, now: float) -> None:
        state, dense, latency = self._workers[worker], self._server.part.dense, self._setting.latency
        lease, state.next = state.next, None
        assert lease is not None
        state.is_idle, state.has_asked, state.started, request = False, False, now, state.request
        gradient, rows = self._task.gradient(dense.shown, lease.micro)
        if state.slim is not None:
            gradient = state.slim.outgoing(gradient, dense.step)
        push = _Push(worker, lease, gradient, rows, dense.step)
        takes = self._takes(worker)
        # A push that takes no time arrives before the next start: the worker sees what came of it.
        self._at(now + takes + latency, partial(self._arrive, push))
        self._at(now + takes, partial(self._finish, worker))
        if state.usual:
            ask_at = now + max(0.0, _ASK_AT * state.usual - 4 * latency)
            self._at(ask_at, partial(self._ask_ahead, worker, request))

    def _ask_ahead(self, worker: int, request: int, now: float) -> None:
        state = self._workers[worker]
        if state.request == request and not state.has_asked:  # else it was done sooner than usual
            self._ask(worker, now)

    def _finish(self, worker: int, now: float) -> None:
        state = self._workers[worker]
        took = now - state.started
        state.usual = took if not state.usual else _USUAL * state.usual + _NEW * took
        state.is_idle = True
        if state.next is not None:
            self._start(worker, now)
        elif not state.has_asked:
            self._ask(worker, now)

    def _arrive(self, push: _Push, now: float) -> None:
        """The server takes pushes one after the other."""
        self._busy_until = max(self._busy_until, now) + self._setting.serve
        if self._busy_until > now:
            self._at(self._busy_until, partial(self._apply, push))
        else:
            self._apply(push, now)

    def _apply(self, push: _Push, now: float) -> None:
        stepped = self._server.push(push.worker, push.lease, push.gradient, push.rows, push.dense_step)
        self._n_done += 1
        self._why = self._server.diverged
        points = self._setting.points
        if self._n_done * points // self._n_total > (self._n_done - 1) * points // self._n_total:
            self._measure(now)
        if self._waiting and (stepped or self._setting.discipline.step_of != "batch"):
            waiting, self._waiting = self._waiting, {}
            for worker in waiting:
                self._ask(worker, now)

    def _measure(self, now: float) -> None:
        loss = math.inf if self._why else self._task.measure(self._server.part.dense.values)
        first = self._curve[0][2]
        if not loss <= _DIVERGED * max(first, 1e-12):
            self._why = self._why or f"the loss is {loss:.3g} after {self._n_done} micro-batches, it was {first:.3g}"
            loss = math.inf
        if self._curve[-1][1] == self._n_done and len(self._curve) > 1:
            self._curve.pop()
        self._curve.append((now, self._n_done, loss))
