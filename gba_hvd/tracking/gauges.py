"""Readings of a running job between its events: staleness, drops, the pace of every worker. Metrics named `job/...`.

What they are called and how they are worked out is decided here. The engine hands them to `Callback.on_metrics`, every
step if it likes, before `on_step`; the trackers know them by their prefix: MLflow gets them with its points, the
progress line shows two of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

PREFIX = "job/"
STALENESS_MEAN = "job/staleness_mean"  # steps; over the micro-batches since the reading before
STALENESS_MAX = "job/staleness_max"
DROPPED = "job/samples_dropped"  # these four: so far in the job
LOST = "job/samples_lost"
REFUSED = "job/micro_batches_refused"
REISSUED = "job/micro_batches_reissued"
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


def pace(seconds: Iterable[tuple[int, float]]) -> dict[str, float]:
    """From (rank, seconds per micro-batch); a worker that had none is left out."""
    return {pace_of(rank): 1000 * s for rank, s in seconds if s > 0}


def gauges(
    staleness: Mapping[int, int],
    before: Mapping[int, int],
    *,
    dropped: int,
    lost: int,
    refused: int,
    reissued: int,
    seconds: Iterable[tuple[int, float]] = (),
) -> dict[str, float]:
    """One reading of a job in an asynchronous mode.

    staleness, before: histograms {steps: micro-batches} of the whole job, now and at the reading before
    dropped, lost:     samples; refused, reissued: micro-batches; all since the job began
    seconds:           (rank, seconds per micro-batch) of each worker
    """
    fresh = {steps: n - before.get(steps, 0) for steps, n in staleness.items() if n > before.get(steps, 0)}
    values: dict[str, float] = {DROPPED: dropped, LOST: lost, REFUSED: refused, REISSUED: reissued}
    if fresh:
        values[STALENESS_MEAN] = mean_staleness(fresh)
        values[STALENESS_MAX] = max(fresh)
    return {**values, **pace(seconds)}


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
