"""What a whole run took, as one number each, by which runs can be sorted: recorded in MLflow once, when the job ends.

Times are those of the report: of all launches, steps that were lost and made again included. No file, no clock.
"""

from __future__ import annotations

from statistics import harmonic_mean
from typing import TYPE_CHECKING

from gba_hvd.mode_names import MODES
from gba_hvd.tracking.plots import MODE, THROUGHPUT
from gba_hvd.tracking.recovery_records import LAUNCHER_STARTED, ms_of
from gba_hvd.tracking.run_history import steps_of_rates

if TYPE_CHECKING:
    from gba_hvd.tracking.run_history import RunHistory

MEAN_RATE = "samples_per_s_mean"
TRAINING = "seconds_of_training"  # from the first world of workers to the end of training, as `RunHistory.seconds`
LAUNCHES = "seconds_of_launches"  # the same from the start of the launcher
IN_MODE = "seconds_in_"  # before a mode's name; together they are `TRAINING`
NEEDED = (MODE, THROUGHPUT)  # metrics


def summary_of(story: RunHistory) -> dict[str, float]:
    """By name of the metric; without what the records do not tell."""
    if story.seconds is None:
        return {}
    found = {TRAINING: story.seconds, LAUNCHES: launch_seconds(story)}
    found |= {f"{IN_MODE}{mode}": seconds for mode, seconds in mode_seconds(story).items()}
    if (rate := mean_rate(story)) is not None:
        found[MEAN_RATE] = rate
    return found


def mean_rate(story: RunHistory) -> float | None:
    """All samples over the time of all steps, without evaluations and pauses: samples/s."""
    found = steps_of_rates(story)
    return harmonic_mean([rate.value for rate, _ in found], [n_steps for _, n_steps in found]) if found else None


def mode_seconds(story: RunHistory) -> dict[str, float]:
    """Within launches, evaluations and pauses included, by mode in the order in which they first came.

    A point has the mode of the time before it, an event the exact time of a change.
    """
    seen = [
        (point.ms, MODES[int(point.value)], MODES[int(point.value)])
        for point in story.history.get(MODE, ())
        if 0 <= point.value < len(MODES)
    ]
    for event in story.events_of("switch"):
        if "unix_s" in event and {"from", "to"} <= event.get("data", {}).keys():
            seen.append((ms_of(event), str(event["data"]["from"]), str(event["data"]["to"])))
    seconds: dict[str, float] = {}
    for begin, end in story.launches:
        at, mode = begin, ""
        for ms, before, after in sorted(seen):
            if begin <= ms <= end:
                seconds[before] = seconds.get(before, 0.0) + (ms - at) / 1000
                at, mode = ms, after
        if mode:
            seconds[mode] = seconds.get(mode, 0.0) + (end - at) / 1000
    return {mode: s for mode, s in seconds.items() if s > 0}


def launch_seconds(story: RunHistory) -> float:
    """Of all launches, each from the start of its launcher, where that is known, else from its first world.

    A launcher that starts all workers again counts from the end of the launch before.
    """
    launchers = [event.get("data", {}).get(LAUNCHER_STARTED) for event in story.events_of("started")]
    total_ms, before_ms = 0.0, 0.0
    for i, (begin, end) in enumerate(story.launches):
        started_s = launchers[i] if i < len(launchers) else None
        total_ms += end - (begin if started_s is None else min(begin, max(1000 * float(started_s), before_ms)))
        before_ms = end
    return total_ms / 1000
