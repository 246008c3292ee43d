"""Readings of a running job between its events: staleness, drops, the pace of every worker. Metrics named `job/...`.

What they are called and how they are worked out is decided here. The engine's chief reports them every few seconds
with an event of the kind `rates`; it is no line and no record of its own: MLflow gets the readings with its points, the
progress line shows two of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

EVENT = "rates"
PREFIX = "job/"
STALENESS_MEAN = "job/staleness_mean"  # steps; over the micro-batches since the reading before
STALENESS_MAX = "job/staleness_max"
DROPPED = "job/samples_dropped"  # these four: so far in the job
LOST = "job/samples_lost"
REFUSED = "job/micro_batches_refused"
REISSUED = "job/micro_batches_reissued"
CHECKPOINT_AGE_S = "job/checkpoint_age_s"  # of the newest good checkpoint; since the start where there is none
CHECKPOINT_AGE_STEPS = "job/checkpoint_age_steps"
_COUNTS = {"dropped": DROPPED, "lost": LOST, "refused": REFUSED, "reissued": REISSUED}
_COUNTS |= {"checkpoint_age_s": CHECKPOINT_AGE_S, "checkpoint_age_steps": CHECKPOINT_AGE_STEPS}
ROUNDS = {
    "rounds_per_s": "job/rounds_per_s",  # of workers that keep replicas of the dense parameters
    "seconds_per_round": "job/seconds_per_round",
    "steps_per_round": "job/local_steps_per_round",
    "spread": "job/spread_of_replicas",  # RMS distance, see `gba_hvd.averaging.sync_thread.SyncMetrics`
    "rounds_dropped": "job/rounds_dropped",  # so far
}
_PACE = "job/ms_per_micro_batch/rank_"


def pace_of(rank: int) -> str:
    """Name of a worker's pace, in milliseconds per micro-batch."""
    return f"{_PACE}{rank}"


def rank_of(name: str) -> int | None:
    """The inverse of `pace_of`; None for other names."""
    text = name.removeprefix(_PACE)
    return int(text) if name.startswith(_PACE) and text.isdigit() else None


def point_of(name: str, readings: Sequence[float]) -> float:
    """Several readings of a gauge as one point: the mean of paces and staleness, the largest, or the last one."""
    if name == STALENESS_MEAN or rank_of(name) is not None:
        return sum(readings) / len(readings)
    return max(readings) if name == STALENESS_MAX else readings[-1]


class Readings:
    """Works out gauges from what `rates` events carry; remembers the staleness reported before."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}

    def take(self, data: Mapping[str, Any]) -> dict[str, float]:
        """Gauges of one event. Any key of `data` may be missing:

            seconds:           {rank: seconds per micro-batch}; 0 when a worker had none
            staleness:         {steps: micro-batches} of the whole job
            dropped, lost:     samples; refused, reissued: micro-batches; all since the job began
            checkpoint_age_s, checkpoint_age_steps: of the newest good checkpoint
        the keys of ROUNDS
        """
        values = {pace_of(int(rank)): 1000 * float(s) for rank, s in data.get("seconds", {}).items() if s > 0}
        values |= {name: float(data[key]) for key, name in (_COUNTS | ROUNDS).items() if key in data}
        now = whole_numbers(data.get("staleness"))
        fresh = {steps: n - self._before.get(steps, 0) for steps, n in now.items() if n > self._before.get(steps, 0)}
        if fresh:
            values |= {STALENESS_MEAN: mean_staleness(fresh), STALENESS_MAX: float(max(fresh))}
        self._before = now or self._before
        return values


def mean_staleness(histogram: Mapping[int, int]) -> float:
    """Of a histogram that is not empty."""
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


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "<1%"
