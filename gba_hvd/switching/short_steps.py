"""Steps that are shorter than a stop of a worker, as readings of a tenth of a second, and what was lost to stops.

A container with a CPU quota stands still for a part of every 100 ms. A step of 5 ms has such a stop in it or has none,
so that the newest few say nothing about how often workers stop. Steps are gathered until they span `READING_S`; longer
ones are a reading each, in which nothing is looked for.

What a step, or a worker's part of one, takes beyond the usual is a stop if it is more than `ODD` times as long, and
still is by the `_NEWER` times that follow it: a worker that has become slow is not stopped. A few stops move nothing,
as an odd step does not; `_RECUR` within `_KEPT_S` are how these workers are. Then all count but the first one, from
which on time is counted, `_LEAST_S` at least, and the longest one counts as the second longest. A worker that is
stopped while it waits for others, or exchanges with them, delays all alike: that time is of the workers that are
stopped while they compute, in proportion, up to as much again. In gba it shows in the time between two pushes, wherever
it was stopped.

Example: of steps of 10 ms, every tenth takes 110 ms, since worker 2 takes 100 ms longer: it is stopped half the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gba_hvd.switching.measurements import N_RECENT, ODD

READING_S = 0.1  # the period of a CPU quota, by default, in Linux and in Kubernetes
_RECUR = 3
_KEPT_S = 10.0  # of training: several stops of a second each
_LEAST_S = 2.0  # a few in a row are no large share of the time
_NEWER = N_RECENT // 2  # so many and the one itself are most of the recent ones
_FEWEST = 3  # times, before one is usual
_AT_MOST = 2.0  # times what is known: a stop comes while a worker computes about as often as while it waits
_MOST = 0.95  # share of the time: a rate remains
_Done = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Steps:
    """One step, or what passed between two looks at others' pushes.

    done:    of each worker, micro-batches and the seconds that it computed them
    is_look: all have work all the time, so that a worker that has pushed nothing for long is stopped
    """

    n_steps: int
    n_micro: int
    elapsed_s: float
    done: _Done
    is_look: bool = False


@dataclass(frozen=True)
class Reading:
    """Of one step or more, without stops.

    elapsed_s: of n_micro micro-batches; seconds: per micro-batch, by worker, 0 of one that had none
    """

    n_steps: int
    n_micro: int
    elapsed_s: float
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Stopped:
    """Share of the time (0 to below 1) that stops take: of the job's steps, and of each worker; (): not known yet."""

    steps: float
    workers: tuple[float, ...]


@dataclass(frozen=True)
class _Measured:
    """cycles: of each worker, micro-batches, and the time in which it may have been stopped while it had them"""

    steps: Steps
    cycles: _Done


@dataclass(frozen=True)
class _Stops:
    """Seconds of each stop in a reading. apart: of those of steps, what no worker's stop explains"""

    elapsed_s: float
    workers: tuple[tuple[float, ...], ...]
    steps: tuple[float, ...] = ()
    apart: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Usual:
    """Seconds of a step, and of each worker's micro-batches and the cycles of these; 0: too few are known"""

    step_s: float
    computing: list[float]
    cycles: list[float]

    @property
    def limit(self) -> float:
        return ODD if self.step_s < READING_S else math.inf


class _Times:
    """The newest of each worker, however long ago it had a micro-batch."""

    def __init__(self, n_workers: int) -> None:
        self.n = [0] * n_workers
        self._each: list[deque[float]] = [deque(maxlen=N_RECENT) for _ in range(n_workers)]

    def add(self, done: _Done) -> None:
        for worker, (n, seconds) in enumerate(done):
            if n:
                self.n[worker] += 1
                self._each[worker].append(seconds / n)

    def usual(self) -> list[float]:
        return [median(own) if len(own) >= _FEWEST else 0.0 for own in self._each]


@dataclass(frozen=True)
class _Unconfirmed:
    """The steps of a reading. n_steps, n_of: how many there had been with them, and of each worker"""

    whole: Sequence[_Measured]
    n_steps: int
    n_of: tuple[int, ...]


class ShortSteps:
    """Gathers steps, of one mode at a time, and of workers that stay the same."""

    def __init__(self) -> None:
        self._stops: deque[_Stops] = deque()
        self._begin()

    def _begin(self, n_workers: int = 0) -> None:
        self._gathered: list[_Measured] = []
        self._unconfirmed: deque[_Unconfirmed] = deque()
        self._steps_s: deque[float] = deque(maxlen=N_RECENT)
        self._n_steps = 0
        self._computing, self._pushes = _Times(n_workers), _Times(n_workers)
        self._since_push_s: list[float] = [0.0] * n_workers

    def add(self, steps: Steps) -> Reading | None:
        """The reading that these complete, if they do."""
        n_workers = len(steps.done)
        if self._stops and len(self._stops[-1].workers) != n_workers:
            self._stops.clear()
        if len(self._computing.n) != n_workers:
            self._begin(n_workers)
        measured = _Measured(steps, self._cycles(steps) if steps.is_look else steps.done)
        self._note(measured)
        if sum(one.steps.elapsed_s for one in self._gathered) < READING_S:
            return None
        whole, self._gathered = self._gathered, []
        n_of = self._pushes.n if steps.is_look else self._computing.n
        self._unconfirmed.append(_Unconfirmed(whole, self._n_steps, tuple(n_of)))
        usual = _Usual(median(self._steps_s), self._computing.usual(), self._pushes.usual())
        self._confirm(usual, n_of)
        return _read(whole, usual)

    def _note(self, measured: _Measured) -> None:
        self._gathered.append(measured)
        self._n_steps += 1
        self._steps_s.append(measured.steps.elapsed_s / measured.steps.n_steps)
        self._computing.add(measured.steps.done)
        if measured.steps.is_look:
            self._pushes.add(measured.cycles)

    def _confirm(self, usual: _Usual, n_of: Sequence[int]) -> None:
        """Take note of the stops in readings after which enough is known; what is not known for long is none."""
        waiting_s = sum(one.steps.elapsed_s for reading in self._unconfirmed for one in reading.whole)
        while self._unconfirmed:
            first = self._unconfirmed[0]
            found = _found(first.whole, usual)
            late = [n - before for n, before, own in zip(n_of, first.n_of, found.workers, strict=True) if own]
            newer = min(late + [self._n_steps - first.n_steps] * bool(found.steps), default=_NEWER)
            if newer < _NEWER and waiting_s < _KEPT_S:
                return
            self._unconfirmed.popleft()
            waiting_s -= found.elapsed_s
            self._keep(found if newer >= _NEWER else _Stops(found.elapsed_s, ((),) * len(found.workers)))

    def _keep(self, stops: _Stops) -> None:
        self._stops.append(stops)
        while sum(one.elapsed_s for one in self._stops) - self._stops[0].elapsed_s > _KEPT_S:
            self._stops.popleft()

    def stopped(self) -> Stopped:
        workers, more = self._of_workers()
        steps = self._share([one.steps for one in self._stops])
        return Stopped(min(_MOST, steps), tuple(min(_MOST, share * more) for share in workers))

    def changed_mode(self) -> None:
        """Steps are others now. How long the workers are stopped is known from before."""
        _, more = self._of_workers()
        self._stops = deque(
            _Stops(one.elapsed_s, tuple(tuple(stop_s * more for stop_s in own) for own in one.workers))
            for one in self._stops
        )
        self._begin()

    def _of_workers(self) -> tuple[list[float], float]:
        """The share of the time in stops that are known to be of each, and times so much with those that are not."""
        workers = [self._share(stops) for stops in zip(*(one.workers for one in self._stops), strict=True)]
        apart = self._share([one.apart for one in self._stops])
        return workers, min(_AT_MOST, 1 + apart / (sum(workers) or math.inf))

    def _share(self, stops: Sequence[tuple[float, ...]]) -> float:
        """Of the time since the first one. stops: of each reading"""
        first = next((at for at, some in enumerate(stops) if some), len(stops))
        since = sorted(stop_s for some in stops[first + 1 :] for stop_s in some)
        if len(since) < _RECUR - 1:
            return 0.0
        elapsed_s = sum(one.elapsed_s for one in list(self._stops)[first + 1 :])
        return (sum(since[:-1]) + since[-2]) / max(_LEAST_S, elapsed_s)

    def _cycles(self, steps: Steps) -> _Done:
        """Of each worker that has pushed, how many, and the time since it had pushed before."""
        since = [s + steps.elapsed_s for s in self._since_push_s]
        self._since_push_s = [0.0 if n else s for (n, _), s in zip(steps.done, since, strict=True)]
        return tuple((n, s if n else 0.0) for (n, _), s in zip(steps.done, since, strict=True))


def _read(whole: Sequence[_Measured], usual: _Usual) -> Reading:
    """whole: the steps of a reading"""
    steps = [one.steps for one in whole]
    stops = _late([one.done for one in steps], usual.computing, usual.limit)
    seconds = []
    for done, own in zip(zip(*(one.done for one in steps), strict=True), zip(*stops, strict=True), strict=True):
        n = sum(n for n, _ in done)
        seconds.append((sum(s for _, s in done) - sum(own)) / n if n else 0.0)
    elapsed_s = sum(one.elapsed_s for one in steps) - sum(_late_steps(steps, usual))
    return Reading(sum(one.n_steps for one in steps), sum(one.n_micro for one in steps), elapsed_s, tuple(seconds))


def _found(whole: Sequence[_Measured], usual: _Usual) -> _Stops:
    steps = [one.steps for one in whole]
    if steps[0].is_look:  # which has several pushes of a worker, of which one was late
        workers = _late([one.cycles for one in whole], usual.cycles, usual.limit, of_one=True)
    else:
        workers = _late([one.done for one in steps], usual.computing, usual.limit)
    of_steps = _late_steps(steps, usual)
    apart = [max(0.0, stop_s - max(own)) for stop_s, own in zip(of_steps, workers, strict=True)]
    by_worker = tuple(tuple(filter(None, stops)) for stops in zip(*workers, strict=True))
    elapsed_s = sum(one.elapsed_s for one in steps)
    return _Stops(elapsed_s, by_worker, tuple(filter(None, of_steps)), tuple(filter(None, apart)))


def _late_steps(steps: Sequence[Steps], usual: _Usual) -> list[float]:
    each = [one.n_steps * usual.step_s for one in steps]
    return [_beyond(one.elapsed_s, usual_s, usual.limit, usual_s) for one, usual_s in zip(steps, each, strict=True)]


def _late(steps: Sequence[_Done], usual: list[float], limit: float, of_one: bool = False) -> list[list[float]]:
    """Of each step, by worker; 0 s: none. of_one: beyond that many times a single micro-batch, not all of a step"""
    return [
        [_beyond(s, n * each, limit, each if of_one else n * each) for (n, s), each in zip(done, usual, strict=True)]
        for done in steps
    ]


def _beyond(seconds: float, usual_s: float, limit: float, unit_s: float) -> float:
    return seconds - usual_s if usual_s and seconds > usual_s + (limit - 1) * unit_s else 0.0
