"""Steps that are shorter than a stop of a worker, as readings of a tenth of a second, and what was lost to stops.

A container with a CPU quota stands still for a part of every 100 ms. A step of 5 ms has such a stop in it or has none,
so that the newest few say nothing about how often workers stop. Steps are gathered until they span `READING_S`; longer
ones are a reading each, in which nothing is looked for.

What a step, or a worker's part of one, takes beyond the usual is a stop if it is more than `ODD` times as long. A few
move nothing, as an odd step does not; `_RECUR` within `_KEPT_S` are how these workers are. Then all count but the first
one, from which on time is counted, and the longest one counts as the second longest. A worker that is stopped while it
waits for others, or exchanges with them, delays all alike: that time is of the workers that are stopped while they
compute, in proportion. In gba it shows in the time between two pushes, wherever it was stopped.
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
    """Share of the time (0 to below 1) that stops take: of the job's steps, and of each worker."""

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


class ShortSteps:
    """Gathers steps, of one mode at a time, and of workers that stay the same."""

    def __init__(self) -> None:
        self._stops: deque[_Stops] = deque()
        self._begin()

    def _begin(self) -> None:
        self._gathered: list[_Measured] = []
        self._recent: deque[_Measured] = deque(maxlen=N_RECENT)
        self._since_push_s: list[float] = []

    def add(self, steps: Steps) -> Reading | None:
        """The reading that these complete, if they do."""
        known = [len(self._recent[-1].steps.done)] if self._recent else [len(one.workers) for one in self._stops][-1:]
        if known not in ([], [len(steps.done)]):
            self._stops.clear()
            self._begin()
        measured = _Measured(steps, self._cycles(steps) if steps.is_look else steps.done)
        self._recent.append(measured)
        self._gathered.append(measured)
        if sum(one.steps.elapsed_s for one in self._gathered) < READING_S:
            return None
        whole, self._gathered = self._gathered, []
        reading, stops = _read(whole, self._recent)
        self._stops.append(stops)
        while sum(one.elapsed_s for one in self._stops) - self._stops[0].elapsed_s > _KEPT_S:
            self._stops.popleft()
        return reading

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
        return workers, 1 + self._share([one.apart for one in self._stops]) / (sum(workers) or math.inf)

    def _share(self, stops: Sequence[tuple[float, ...]]) -> float:
        """Of the time since the first one. stops: of each reading"""
        first = next((at for at, some in enumerate(stops) if some), len(stops))
        since = sorted(stop_s for some in stops[first + 1 :] for stop_s in some)
        if len(since) < _RECUR - 1:
            return 0.0
        elapsed_s = sum(one.elapsed_s for one in list(self._stops)[first + 1 :])
        return (sum(since[:-1]) + since[-2]) / elapsed_s

    def _cycles(self, steps: Steps) -> _Done:
        """Of each worker that has pushed, how many, and the time since it had pushed before."""
        before = self._since_push_s or [0.0] * len(steps.done)
        since = [s + steps.elapsed_s for s in before]
        self._since_push_s = [0.0 if n else s for (n, _), s in zip(steps.done, since, strict=True)]
        return tuple((n, s if n else 0.0) for (n, _), s in zip(steps.done, since, strict=True))


def _read(whole: Sequence[_Measured], recent: Sequence[_Measured]) -> tuple[Reading, _Stops]:
    """whole: the steps of a reading; recent: by which it is known what is usual"""
    steps = [one.steps for one in whole]
    elapsed_s = sum(one.elapsed_s for one in steps)
    usual_s = median(one.steps.elapsed_s / one.steps.n_steps for one in recent)
    is_short = usual_s < READING_S
    limit = ODD if is_short else math.inf
    computing = _stops([one.done for one in steps], [one.steps.done for one in recent], limit)
    workers = computing
    if steps[0].is_look:  # which has several pushes of a worker, of which one was late
        workers = _stops([one.cycles for one in whole], [one.cycles for one in recent], limit, of_one=True)
    of_steps = [_beyond(one.elapsed_s, one.n_steps * usual_s, limit, one.n_steps * usual_s) for one in steps]
    apart = [max(0.0, stop_s - max(own)) for stop_s, own in zip(of_steps, workers, strict=True)]
    seconds = []
    for done, stops in zip(zip(*(one.done for one in steps), strict=True), zip(*computing, strict=True), strict=True):
        n = sum(n for n, _ in done)
        seconds.append((sum(s for _, s in done) - sum(stops)) / n if n else 0.0)
    n_steps, n_micro = sum(one.n_steps for one in steps), sum(one.n_micro for one in steps)
    by_worker = tuple(tuple(filter(None, stops)) for stops in zip(*workers, strict=True))
    found = _Stops(elapsed_s, by_worker, tuple(filter(None, of_steps)), tuple(filter(None, apart)))
    return Reading(n_steps, n_micro, elapsed_s - sum(of_steps), tuple(seconds)), found


def _stops(steps: Sequence[_Done], recent: Sequence[_Done], limit: float, of_one: bool = False) -> list[list[float]]:
    """Of each step, by worker; 0 s: none. of_one: beyond that many times a single micro-batch, not all of a step"""
    usual = [median([s / n for n, s in own if n] or [0.0]) for own in zip(*recent, strict=True)]
    return [
        [_beyond(s, n * each, limit, each if of_one else n * each) for (n, s), each in zip(done, usual, strict=True)]
        for done in steps
    ]


def _beyond(seconds: float, usual_s: float, limit: float, unit_s: float) -> float:
    return seconds - usual_s if usual_s and seconds > usual_s + (limit - 1) * unit_s else 0.0
