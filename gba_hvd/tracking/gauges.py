"""Readings of a running job between its events: staleness, drops, the pace of every worker. Metrics named `job/...`.

What they are called and how they are worked out is decided here. The engine's chief reports them every few seconds
with an event of the kind `rates`; it is no line and no record of its own: MLflow gets the readings with its points, or
those marked `OWN_POINT` at once; the progress line shows two of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

EVENT = "rates"
PREFIX = "job/"
STALENESS_MEAN = "job/staleness_mean"  # steps; over the micro-batches since the reading before
STALENESS_MAX = "job/staleness_max"
DENSE_AGE_MEAN = "job/dense_age_mean"  # steps; of the dense values that these were computed with, dropped ones too
DENSE_AGE_MAX = "job/dense_age_max"
DROPPED = "job/samples_dropped"  # these four: so far in the job
LOST = "job/samples_lost"
REFUSED = "job/micro_batches_refused"
REISSUED = "job/micro_batches_reissued"
CHECKPOINT_AGE_S = "job/checkpoint_age_s"  # of the newest good checkpoint; since the start where there is none
CHECKPOINT_AGE_STEPS = "job/checkpoint_age_steps"
BYTES_SENT, BYTES_RECEIVED = "job/bytes_sent", "job/bytes_received"  # so far, on the wires of all workers
# In mode auto, as the decisions have them: how many times as fast as allreduce gba is, and samples/s of both: of the
# mode that the job is in as achieved, of the other one as predicted.
GAIN = "job/predicted_gain"
RATES = {"allreduce_samples_per_s": "job/allreduce_samples_per_s", "gba_samples_per_s": "job/gba_samples_per_s"}
ELP = "job/elp"  # example-level parallelism (ShadowSync): samples computed on at once, batch x threads x workers
VOCABULARY = "job/vocabulary/"  # of a hashed table, of the chief's host: TABLE/size and the others of _OF_VOCABULARY
_OF_VOCABULARY = ("size", "capacity", "admitted", "evicted", "no_room", "missed_share", "filled")
_COUNTS = {"dropped": DROPPED, "lost": LOST, "refused": REFUSED, "reissued": REISSUED}
_COUNTS |= {"bytes_sent": BYTES_SENT, "bytes_received": BYTES_RECEIVED, "gain": GAIN}
_COUNTS |= RATES
_COUNTS |= {"elp": ELP, "checkpoint_age_s": CHECKPOINT_AGE_S, "checkpoint_age_steps": CHECKPOINT_AGE_STEPS}
ROUNDS = {
    "rounds_per_s": "job/rounds_per_s",  # of workers that keep replicas of the dense parameters
    "seconds_per_round": "job/seconds_per_round",
    "steps_per_round": "job/local_steps_per_round",
    "spread": "job/spread_of_replicas",  # RMS distance, see `gba_hvd.averaging.sync_thread.SyncMetrics`
    "rounds_dropped": "job/rounds_dropped",  # so far
}
_PACE = "job/ms_per_micro_batch/rank_"
GAP, GAP_IN_STEPS = "job/gap/rank_", "job/gap_in_steps/rank_"  # see `gba_hvd.ps.partition.gaps`; since the one before
_DROPPED_FOR = {  # as in `SampleAccount.dropped_for`
    "stale": "too stale when they arrived", "not_finite": "with a gradient that was not finite",
    "overflow": "of steps that overflowed",
}  # fmt: skip
_MEANS = (STALENESS_MEAN, DENSE_AGE_MEAN)


def vocabulary_of(table: str, name: str) -> str:
    """Name of a gauge of a table, in the characters that MLflow takes."""
    return f"{VOCABULARY}{re.sub(r'[^A-Za-z0-9_. -]', '_', table)}/{name}"


def pace_of(rank: int) -> str:
    """Name of a worker's pace, in milliseconds per micro-batch."""
    return f"{_PACE}{rank}"


def rank_of(name: str, kind: str = _PACE) -> int | None:
    """The inverse of `pace_of`, or the worker of a gauge `GAP` or `GAP_IN_STEPS`; None for other names."""
    text = name.removeprefix(kind)
    return int(text) if name.startswith(kind) and text.isdigit() else None


def point_of(name: str, readings: Sequence[float]) -> float:
    """Several readings of a gauge as one point: the mean of paces, ages and gaps, the largest, or the last one."""
    if name in _MEANS or any(rank_of(name, kind) is not None for kind in (_PACE, GAP, GAP_IN_STEPS)):
        return sum(readings) / len(readings)
    return max(readings) if name in (STALENESS_MAX, DENSE_AGE_MAX) else readings[-1]


class Readings:
    """Works out gauges from what `rates` events carry; remembers the ages and gaps reported before."""

    def __init__(self) -> None:
        self._before: dict[str, dict[int, int]] = {}
        self._gaps: dict[int, tuple[int, float, float]] = {}  # by worker: ranks change hands

    def begin(self, data: Mapping[str, Any]) -> None:
        """The job resumed: what was counted before, by the keys `staleness`, `lags` and `gaps` of `take`."""
        self._before = {key: whole_numbers(data.get(key)) for key in ("staleness", "lags")}
        self._gaps = {worker: (n, gap, steps) for n, gap, steps, worker in gaps_by_rank(data.get("gaps")).values()}

    def take(self, data: Mapping[str, Any]) -> dict[str, float]:
        """Gauges of one event. Any key of `data` may be missing:

            seconds:           {rank: seconds per micro-batch}; 0 when a worker had none
            staleness:         {steps: micro-batches} of the whole job
            lags:              the same of the dense values that gradients were computed with
            gaps:              {rank: [pushes, sum of gaps, sum of gaps in steps, worker]}, since the mode began
            dropped, lost:     samples; refused, reissued: micro-batches; all since the job began
            checkpoint_age_s, checkpoint_age_steps: of the newest good checkpoint
            elp:               samples computed on at once
            bytes_sent, bytes_received: of all workers, so far
            gain:              predicted, of gba over allreduce; allreduce_samples_per_s, gba_samples_per_s
            vocabulary:        {table: {"size": ids with a row, "capacity", "admitted", "evicted", "no_room": ids that
                               found none, "missed_share" of lookups without a row, "filled" share of the filter}}
        the keys of ROUNDS
        """
        values = {pace_of(int(rank)): 1000 * float(s) for rank, s in data.get("seconds", {}).items() if s > 0}
        values |= {name: float(data[key]) for key, name in (_COUNTS | ROUNDS).items() if key in data}
        if fresh := self._fresh("staleness", data):
            values |= {STALENESS_MEAN: mean_staleness(fresh), STALENESS_MAX: float(max(fresh))}
        if fresh := self._fresh("lags", data):
            values |= {DENSE_AGE_MEAN: mean_staleness(fresh), DENSE_AGE_MAX: float(max(fresh))}
        for table, found in data.get("vocabulary", {}).items():
            values |= {vocabulary_of(table, name): float(found[name]) for name in _OF_VOCABULARY if name in found}
        return values | self._fresh_gaps(data)

    def _fresh(self, key: str, data: Mapping[str, Any]) -> dict[int, int]:
        """What a histogram has more than the one before."""
        now, before = whole_numbers(data.get(key)), self._before.get(key, {})
        self._before[key] = now or before
        return {steps: n - before.get(steps, 0) for steps, n in now.items() if n > before.get(steps, 0)}

    def _fresh_gaps(self, data: Mapping[str, Any]) -> dict[str, float]:
        """The mean gaps of each worker's pushes since the reading before."""
        values: dict[str, float] = {}
        found = gaps_by_rank(data.get("gaps"))
        for rank, (*now, worker) in found.items():
            before = self._gaps.get(worker, (0, 0.0, 0.0))
            if any(sum_ < sum_before for sum_, sum_before in zip(now, before, strict=True)):
                before = (0, 0.0, 0.0)  # the mode began again, or the server
            if (more := now[0] - before[0]) > 0:
                values |= {
                    f"{GAP}{rank}": (now[1] - before[1]) / more,
                    f"{GAP_IN_STEPS}{rank}": (now[2] - before[2]) / more,
                }
        self._gaps |= {worker: (n, gap, in_steps) for n, gap, in_steps, worker in found.values()}
        return values


def gaps_by_rank(gaps: Mapping[str, Sequence[float]] | None) -> dict[int, tuple[int, float, float, int]]:
    """By rank: pushes, sum of gaps, sum of gaps in steps, and the worker's id (the rank where that is missing)."""
    return {
        int(rank): (int(n), gap, steps, int(worker[0]) if worker else int(rank))
        for rank, (n, gap, steps, *worker) in sorted((gaps or {}).items())
    }


def mean_staleness(histogram: Mapping[int, int]) -> float:
    """Mean of a histogram that is not empty."""
    return sum(steps * n for steps, n in histogram.items()) / sum(histogram.values())


def whole_numbers(histogram: Mapping[str, int] | Mapping[int, int] | None) -> dict[int, int]:
    """A histogram as JSON has it, or as it is: by steps, ascending, without empty bins."""
    return dict(sorted((int(steps), int(n)) for steps, n in (histogram or {}).items() if n))


def staleness_words(histogram: Mapping[int, int]) -> str:
    """`mean 0.42, max 3 (0: 81%, 1: 12%, 2: 5%, 3: 2%)`: at most the six commonest bins."""
    total = sum(histogram.values())
    common = sorted(sorted(histogram, key=lambda steps: -histogram[steps])[:6])
    shares = ", ".join(f"{steps}: {_percent(histogram[steps] / total)}" for steps in common)
    return f"mean {mean_staleness(histogram):.2f}, max {max(histogram)} ({shares})"


def dropped_words(by_reason: Mapping[str, int]) -> str:
    """`too stale when they arrived`; where there were several reasons, with the samples of each."""
    found = [(by_reason[reason], words) for reason, words in _DROPPED_FOR.items() if by_reason.get(reason)]
    return ", ".join(f"{n:,} {words}" if len(found) > 1 else words for n, words in found)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "<1%"
