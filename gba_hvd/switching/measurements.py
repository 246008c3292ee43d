"""Recent measurements of a job's speed in the mode that it is in, as the decision takes them.

One odd micro-batch or step moves nothing: a time of more than `ODD` times the median of its window counts as that
much.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

from gba_hvd.switching.predictions import StepWaits

N_RECENT = 32  # times that are kept: enough to compare two modes to a percent or two where times vary by a tenth
N_NEWEST = 8  # of these, what a decision goes by: few enough to notice a slow worker within five of its steps
FORGET_S = 3600.0  # what was measured in the other mode counts for so long: a cluster's load changes over hours
ODD = 4.0
REPLACED_S = 120.0  # without a worker that was lost: the launcher starts one after 2 to 16 s, which then imports
_N_COSTS = 9


class PushReadings:
    """What workers have pushed since the last look, from counts that a coordinator keeps of each."""

    def __init__(self) -> None:
        self._counts: dict[int, int] | None = None
        self._computed_s: dict[int, float] = {}
        self.done: tuple[tuple[int, float], ...] = ()  # as of `short_steps.Steps`, at the last look that is known
        self.members_changed = False  # other workers than at the last look

    def take(
        self, newest: Sequence[tuple[int, int, int, float]], computed: Sequence[tuple[int, float]] = ()
    ) -> tuple[list[float], int, bool]:
        """Seconds of the newest micro-batch by worker, how many all have pushed, and whether that is known.

        newest, computed: as of `JobPosition`. 0 s of a worker that pushed none. Nothing is known at the first look, and
        where others take part than at the last one, or the counts begin again.
        """
        before, counts = self._counts, {worker: count for _, worker, count, _ in newest}
        before_s, self._computed_s = self._computed_s, dict(computed)
        self._counts, self.done = counts, ()
        self.members_changed = before is not None and before.keys() != counts.keys()
        if before is None or self.members_changed or any(counts[w] < before[w] for w in counts):
            return [0.0] * len(newest), 0, False
        seconds = [s if count > before[worker] else 0.0 for _, worker, count, s in newest]
        if before_s.keys() == self._computed_s.keys() == counts.keys():
            self.done = tuple((counts[w] - before[w], self._computed_s[w] - before_s[w]) for _, w, *_ in newest)
        return seconds, sum(counts.values()) - sum(before.values()), True


class LostWorkers:
    """How many workers were lost and may be replaced: until as many train as before, or the wait for them is over."""

    def __init__(self) -> None:
        self._n_before, self._lost_s = 0, -math.inf
        self._n_newest = 0

    def look(self, n: int, is_forming: bool, now_s: float) -> int:
        """n: workers that train. is_forming: the next world is, so that the launcher waits for its workers."""
        if n < self._n_newest or is_forming:
            self._lost_s = now_s
        self._n_newest = n
        self._n_before = n if now_s - self._lost_s > REPLACED_S else max(n, self._n_before)
        return self._n_before - n


class RecentTimes:
    """The last `N_RECENT` seconds per micro-batch of each worker, by rank."""

    def __init__(self) -> None:
        self._seconds = np.full((0, N_RECENT), np.inf)  # the newest last; inf: none yet

    def add(self, seconds: Sequence[float]) -> None:
        """One of each worker; 0 of one that had none. Of another number of workers than before: all begin again."""
        if len(seconds) != len(self._seconds):
            self._seconds = np.full((len(seconds), N_RECENT), np.inf)
        new = np.asarray(seconds)
        known = np.flatnonzero(new > 0)
        self._seconds[known, :-1] = self._seconds[known, 1:]
        self._seconds[known, -1] = new[known]

    def median(self, worker: int) -> float | None:
        """Seconds per micro-batch; None when nothing was measured yet."""
        if worker >= len(self._seconds) or self._seconds[worker, -1] == np.inf:
            return None
        own = self._seconds[worker]
        return float(np.median(own[own < np.inf]))

    def times(self, last: int = N_RECENT) -> np.ndarray | None:
        """float [workers, N_RECENT]: so many of the newest, the newest last, inf where there is none.

        None until every worker has one.
        """
        if not len(self._seconds) or (self._seconds[:, -1] == np.inf).any():
            return None
        times = self._seconds.copy()
        times[:, : N_RECENT - last] = np.inf
        in_order, counts = np.sort(times, axis=1), (times < np.inf).sum(axis=1)
        rows = np.arange(len(times))
        middle = (in_order[rows, (counts - 1) // 2] + in_order[rows, counts // 2]) / 2
        return np.where(times < np.inf, np.minimum(times, ODD * middle[:, None]), np.inf)

    def waits(self, shares: Sequence[int], gain: float = 1.0) -> StepWaits | None:
        """Of allreduce steps, in each of which every worker with a share added a time; None of fewer than two workers.

        shares: micro-batches of a step, by worker. gain: of seconds per micro-batch in the step, the share of these
        """
        n_w = np.asarray(shares)
        if len(n_w) != len(self._seconds) or (n_w > 0).sum() < 2:
            return None
        workers = np.flatnonzero(n_w > 0)
        busy = self._seconds[workers] * n_w[workers, None] * gain
        busy = busy[:, (busy < np.inf).all(axis=0)]
        if not busy.shape[1]:
            return None
        two_slowest = np.partition(busy, -2, axis=0)[-2:]
        slowest = busy.argmax(axis=0)
        waited_s = np.bincount(slowest, two_slowest[1] - two_slowest[0], len(workers))
        most = int(waited_s.argmax())
        median_s, slowest_s = np.median(busy, axis=0).mean(), two_slowest[1].mean()
        n_slowest = int((slowest == most).sum())
        return StepWaits(int(workers[most]), n_slowest, busy.shape[1], float(median_s), float(slowest_s))


def mean_times(times: np.ndarray) -> tuple[float, ...]:
    """Of each worker; times: as of `RecentTimes.times`."""
    known = times < np.inf
    return tuple((np.where(known, times, 0.0).sum(axis=1) / known.sum(axis=1)).tolist())


def neighbours(times: np.ndarray, n_together: Sequence[int]) -> np.ndarray:
    """Means over so many neighbours of each worker's times, as they vary over several micro-batches; all of fewer.

    times: as of `RecentTimes.times`, which this returns, too. n_together: by worker
    """
    n_known = (times < np.inf).sum(axis=1)
    sums = np.concatenate((np.zeros((len(times), 1)), np.cumsum(np.where(times < np.inf, times, 0.0), axis=1)), axis=1)
    n = np.clip(np.asarray(n_together), 1, n_known)[:, None]
    ends = np.arange(1, times.shape[1] + 1)[None, :]
    begins = ends - n
    is_whole = begins >= times.shape[1] - n_known[:, None]
    rows = np.arange(len(times))[:, None]
    return np.where(is_whole, (sums[:, 1:] - sums[rows, np.maximum(begins, 0)]) / n, np.inf)


class RecentRate:
    """Micro-batches/s over the last `N_RECENT` readings, each of how many were done in how many seconds."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque(maxlen=N_RECENT)

    def add(self, n_micro: int, seconds: float) -> None:
        """Readings in which nothing was done are part of the next one."""
        if self._readings and not self._readings[-1][1]:
            seconds += self._readings.pop()[0]
        self._readings.append((seconds, n_micro))

    def value(self, last: int = N_RECENT) -> float | None:
        """Of so many of the newest readings; None when there was none."""
        done = [(seconds / n, n) for seconds, n in self._readings if n][-last:]
        if not done:
            return None
        most_s = ODD * median([each for each, _ in done])
        total_s = sum(min(each, most_s) * n for each, n in done)
        return sum(n for _, n in done) / total_s if total_s > 0 else None


class RecentCost:
    """Seconds of what a mode costs beside computing: a median of its last readings.

    Of a mode that the job has not been in for `FORGET_S` the least that it ever was: it may be so again.
    """

    def __init__(self, first_s: float) -> None:
        """first_s: until there is a reading"""
        self._readings: deque[float] = deque(maxlen=_N_COSTS)
        self._first_s, self._at_s, self._least_s = first_s, 0.0, math.inf

    def add(self, seconds: float, at_s: float) -> None:
        self._readings.append(seconds)
        self._at_s = at_s
        if len(self._readings) == _N_COSTS:  # of fewer, one odd reading would be the least for good
            self._least_s = min(self._least_s, median(self._readings))

    def value(self, at_s: float) -> float:
        if not self._readings:
            return self._first_s
        now_s = median(self._readings)
        return min(self._least_s, now_s) if at_s - self._at_s > FORGET_S else now_s
