"""What must hold of a job under all faults: a pure function of recorded facts.

A record is JSON (see `Record`), so that a schedule's verdict can be made again from what was stored of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from .plan import STORE

SILENCE_S = 45.0  # longest time without a step and without an event
STANDSTILL_S = 120.0  # longest time without a step, in spite of reports
LEAST_AUC = 0.85
_SLOW_START_S = 10.0  # where starting a process takes so long, a sender may not be done when the job waits no more
_LATE_S = 5.0  # what saving itself may take, beside the interval


@dataclass
class Record:
    """What was seen of one schedule.

    limit: the tool ended the job, since it still ran after so many seconds. result: as the chief wrote it.
    steps: (time, step) whenever a newer step was seen; last_workers: that took part in the last one.
    words: (time, level, text), events and lines of the log. ends: status reported by each worker that ended.
    left: processes and files that remained. fired: faults that happened, with kind, step, time.
    checkpoints: times at which one was complete; checkpoint_s: the interval asked for. tracked: status of the MLflow
    run; spooled: records of the end wait in the spool. replay: the result of the independent computation.
    """

    plan: dict[str, Any]
    started: float = 0.0
    ended: float = 0.0
    exit_code: int | None = None
    limit: float | None = None
    result: dict[str, Any] | None = None
    total: int = 0
    steps: list[tuple[float, int]] = field(default_factory=list)
    last_workers: int = 0
    words: list[tuple[float, str, str]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    fired: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[float] = field(default_factory=list)
    checkpoint_s: float | None = None
    tracked: str | None = None
    spooled: bool = False
    replay: dict[str, Any] | None = None

    @property
    def start_s(self) -> float:
        """From the launch to the first step: what starting a process takes on this machine, as busy as it is.

        A worker or server that is replaced takes as long, so the limits are multiples of it where it is long.
        """
        return self.steps[0][0] - self.started if self.steps else 0.0


@dataclass(frozen=True)
class Standstill:
    """The longest time without a step: how long, after which step, and the events meanwhile."""

    seconds: float
    after_step: int
    words: tuple[str, ...]


def standstill(record: Record) -> Standstill:
    """From the first step to the last; what comes before is the start, and after it the end."""
    return max(_standstills(record), key=lambda found: found.seconds, default=Standstill(0.0, 0, ()))


def _standstills(record: Record) -> Iterator[Standstill]:
    marks = list(record.steps)
    if record.limit is not None or record.exit_code != 0:
        marks.append((record.ended, -1))  # it never resumed
    for (begun, step), (ended, _) in pairwise(marks):
        words = tuple(text for at, _, text in record.words if begun < at < ended)
        yield Standstill(ended - begun, step, words)


def violations(record: Record, may_fail: bool = False) -> list[str]:
    """What does not hold, a sentence each; empty: all does.

    may_fail: the faults may end the job; then it must say why, and leave nothing.
    """
    failed = record.exit_code != 0
    found = [*_ending(record, may_fail), *_left(record), *_waiting(record), *_tracking(record, failed)]
    if not failed or is_not_saved(record):
        found += [*_account(record), *_model(record), *_age(record), *_replay(record)]
    return found


def _ending(record: Record, may_fail: bool) -> Iterator[str]:
    if record.limit is not None:
        yield f"the job still ran after {record.limit:.0f} s and was ended"
    elif record.exit_code != 0 and not (may_fail or is_not_saved(record) or all_workers_died(record)):
        yield f"exit code {record.exit_code}, expected 0"
    elif (
        record.exit_code != 0
        and not {"FAILED", "NOT_SAVED"} & set(record.ends)
        and not any(level == "error" for _, level, _ in record.words)
    ):
        yield f"exit code {record.exit_code}, and no worker reported that it failed"
    elif record.exit_code == 0 and "FINISHED" not in record.ends:
        yield f"exit code 0, but the workers reported {record.ends or 'nothing'} at the end"


def is_not_saved(record: Record) -> bool:
    """The training was done, its last checkpoint could not be saved, and the job ended saying so, as it should."""
    stood = any(fault["kind"] in ("full_disk", *STORE) for fault in record.fired)
    return bool(stood and record.exit_code == 1 and record.limit is None and "NOT_SAVED" in record.ends)


def all_workers_died(record: Record) -> bool:
    """Every worker of the newest world was killed, before one that was starting had joined: the launcher gives up.

    Started again, such a job resumes from memory or from its checkpoint.
    """
    last = record.steps[-1][1] if record.steps else 0
    killed = sum(fault["kind"] == "kill" and (fault["step"] or 0) >= last for fault in record.fired)
    return bool(0 < record.last_workers <= killed)


def _left(record: Record) -> Iterator[str]:
    if record.left and record.limit is None:  # else the tool killed what would have cleaned up
        yield f"left behind: {', '.join(record.left[:5])}"


def _account(record: Record) -> Iterator[str]:
    result = record.result
    if result is None:
        yield "there is no result"
        return
    if result["total"] != record.total:
        yield f"the account has {result['total']} samples, the job has {record.total}"
    parts = result["applied"] + result["dropped"] + result["lost"]
    if parts != result["total"]:
        yield f"applied + dropped + lost = {parts}, the total is {result['total']}"
    allowed = lost_at_most(record)
    if result["lost"] > allowed:
        yield f"{result['lost']} samples lost, what happened explains {allowed}"


def lost_at_most(record: Record) -> int:
    """A server of several that dies may lose the step that others have applied. Nothing else loses samples."""
    if not record.plan["apart"]:
        return 0
    fatal = ("kill_server", "host_leaves", "kill", "network_cut", "network_reset", "stop_server_in_switch")
    return 96 * sum(fault["kind"] in fatal for fault in record.fired)


def _model(record: Record) -> Iterator[str]:
    result = record.result
    if result is None:
        return
    if result.get("doubtful_ids"):
        yield f"the vocabulary has ids with two rows, or that nobody looked up: {result['doubtful_ids'][:5]}"
    if not result["finite"]:
        yield "the model has values that are not finite"
    if not result["aucs"] or not max(result["aucs"]) >= LEAST_AUC:
        yield f"the model did not learn: AUC {result['aucs']}, expected at least {LEAST_AUC}"


def _age(record: Record) -> Iterator[str]:
    """While steps are made, the newest checkpoint is at most two intervals old, or there was a warning."""
    if record.checkpoint_s is None or len(record.steps) < 2:
        return
    late_s = max(_LATE_S, record.start_s / 2)
    limit = 2 * record.checkpoint_s + late_s
    newest, moved = record.steps[0][0], 0.0
    # A standstill makes nothing that could be lost: it counts as a slow step, however busy the machine is.
    slowest_s = min(2.0, 10 * median(at - begun for (begun, _), (at, _) in pairwise(record.steps)))
    for (begun, _), (at, step) in pairwise(record.steps):
        complete = [time for time in record.checkpoints if time <= at]
        if complete and complete[-1] > newest:
            newest, moved = complete[-1], 0.0
        moved += min(at - max(begun, newest), slowest_s)
        warned = any(
            newest <= time <= at + late_s and level != "info" and "checkpoint" in text
            for time, level, text in record.words
        )
        if moved > limit and not warned:
            yield (
                f"at step {step} the newest checkpoint was {at - newest:.0f} s old ({moved:.0f} s of training), twice "
                f"the interval is {2 * record.checkpoint_s:.0f} s, and there was no warning"
            )
            return


def _waiting(record: Record) -> Iterator[str]:
    if not record.steps:
        if record.exit_code == 0 or record.limit is not None:
            yield "no step was ever made"
        return
    silence_s, standstill_s = max(SILENCE_S, 2 * record.start_s), max(STANDSTILL_S, 4 * record.start_s)
    for wait in _standstills(record):
        if wait.seconds > standstill_s:
            yield f"no step for {wait.seconds:.0f} s after step {wait.after_step}; events: {list(wait.words[-3:])}"
        elif wait.seconds > silence_s and not wait.words:
            yield f"no step for {wait.seconds:.0f} s after step {wait.after_step}, and not a word"


def _tracking(record: Record, failed: bool) -> Iterator[str]:
    tracking = record.plan["tracking"]
    if tracking == "good" and record.limit is None:
        expected = "FAILED" if failed else "FINISHED"
        waits = record.spooled and any("NOT everything reached MLflow" in text for _, _, text in record.words)
        if record.tracked != expected and not failed and not (waits and record.start_s > _SLOW_START_S):
            yield f"the MLflow run is {record.tracked or 'not there'}, expected {expected}"
    elif tracking and not failed and not record.spooled:
        yield "the tracking server was no use, and the end of the run does not wait in the spool"


def _replay(record: Record) -> Iterator[str]:
    if record.replay is not None and "wrong" in record.replay:
        yield f"the independent replay: {record.replay['wrong']}"
