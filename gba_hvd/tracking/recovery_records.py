"""Checkpoints and recoveries, as records have them: their metrics, the pointers to them, and what was superseded.

When a whole job resumes from the checkpoint of step k, or all its workers roll back there (full recovery), what the
records hold of later steps is of training that was lost. MLflow can neither delete nor change a point, so a point of
the metric `resumed_from_step` covers all of them: its value is k, its time is when the job resumed. A point of a
step above k and of an earlier time is *superseded*. This is one small point however many it covers; no later resume
overwrites it, as it would a tag; it comes in order with the points around it; and readers with other tools can apply
the same rule. Readers here leave superseded points out. In words, they are a tag of the run and in its description.

Pure functions over plain values; no file, no MLflow.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gba_hvd.tracking.epochs import EPOCH
from gba_hvd.tracking.records import Point, Record
from recovery.catalog.best_step import Saved, UnsavedBest, best_words, kept_of, unsaved_of

APPLIED = "samples_applied"  # metric: so far in the job
RESUMED_FROM = "resumed_from_step"
FULL_RECOVERY = "recovery_full"  # 1: all workers rolled back; 0: only the lost rows came back
CHECKPOINT_TAG = "gba_hvd.checkpoint"  # where the newest one is
CONTINUES, ENDED = "training_continues", "ended_in_pause"  # a pause is over: a step ended it, or the end of the job
PAUSES = (CONTINUES, ENDED)
PAUSED = "paused_s"  # metric: by all pauses of the job so far
_PAUSES = {"loss": "pause_after_loss_s", "joined": "pause_to_let_workers_in_s", "left": "pause_after_leave_s"}
PAUSE_WORDS = {"loss": "after a loss of workers", "joined": "to let workers in", "left": "since workers left"}
LAUNCHER_STARTED = "launcher_unix_s"  # in the data of the event `started`
KINDS = ("resumed", "rows_restored", "rows_lost")  # of events that are recoveries
ENDS = ("finished", "not_saved", "failed", "interrupted")
_LOST = ("lost", "no end")  # ways a launch ended, see `recoveries`
_OF_A_LAUNCH = ("started", "resumed", "checkpoint", "switch", *ENDS)
_OF_CHECKPOINT = {
    "seconds": "checkpoint_seconds", "n_bytes": "checkpoint_bytes", "stall_s": "checkpoint_stall_seconds",
}  # fmt: skip
_OF_PLAN = {"interval_s": "checkpoint_interval_s", "overhead": "checkpoint_overhead_expected", "pls": "pls_expected"}
_OF_RECOVERY = ("rows_restored", "rows_lost", "pls", "pls_total", "samples_redone")
# Of the choice between full and partial recovery: what each was expected to cost, as a share of training time.
_OF_CHOICE = {"overhead_full": "recovery_overhead_full", "overhead_partial": "recovery_overhead_partial"}
_LABEL_OF_CHOICE = ("strategy", "strategy_reason", *_OF_CHOICE, "pls_expected", "target_pls")
_THEN = "samples_then"  # of the event `resumed`: that were applied in what the job resumed from
_MEASURED_ANYWAY = "system/"  # of hosts, not of training: never superseded
_NAMED = 3  # of what resumes superseded, so many are named: MLflow limits tags and descriptions


def metrics_of(kind: str, step: int, data: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """The metrics that an event stands for, and their step: that of the saved state, for a checkpoint."""
    if kind == "checkpoint":
        found = {name: float(data[key]) for key, name in _OF_CHECKPOINT.items() if data.get(key) is not None}
        return int(data.get("saved_step", step)), found
    if kind == "checkpoint_plan":
        return step, {name: float(data[key]) for key, name in _OF_PLAN.items() if key in data}
    if kind in PAUSES:
        so_far = {PAUSED: float(data["so_far_s"])} if "so_far_s" in data else {}
        return step, {_PAUSES[cause_of(data)]: float(data["seconds"]), **so_far}
    if not is_recovery(kind, data):
        return step, {}
    found = {name: float(data[name]) for name in _OF_RECOVERY if data.get(name) is not None}
    found |= {name: float(data[key]) for key, name in _OF_CHOICE.items() if data.get(key) is not None}
    if "strategy" in data:
        found[FULL_RECOVERY] = float(data["strategy"] == "full")
    if kind == "resumed":
        found[RESUMED_FROM] = float(step)
    return step, found


def cause_of(pause: Mapping[str, Any]) -> str:
    """Of a pause, from the data of its event: versions before had those after a loss only."""
    return str(pause.get("cause", "loss"))


def is_recovery(kind: str, data: Mapping[str, Any]) -> bool:
    """Rows that are lost although others came back are in the event of those, too."""
    return kind in KINDS and not (kind == "rows_lost" and bool(data.get("rows_restored")))


def lost_the_job(recovery: Mapping[str, Any]) -> bool | None:
    """Whether the whole job came back in a recovery of `recoveries`; None where the records do not tell."""
    if recovery["kind"] != "resumed" or recovery["strategy"]:
        return False
    return None if recovery["launch_before"] == "unknown" else recovery["launch_before"] in _LOST


def is_failure(recovery: Mapping[str, Any]) -> bool:
    """Whether something was lost, or came back that was. Not so of a launch that follows one that ended well, also at a
    later step, or that a person interrupted."""
    is_of_a_launch = recovery["kind"] == "resumed" and not recovery["strategy"]
    return not is_of_a_launch or recovery["launch_before"] in _LOST or bool(recovery["rows_lost"])


def place_of(data: Mapping[str, Any]) -> str:
    """A checkpoint as one address, from the data of its event."""
    return f"{str(data.get('url', '')).rstrip('/')}/{data.get('manifest', '')}"


# --- what was superseded ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resume:
    """The job resumed from `step` at `ms` since 1970."""

    step: int
    ms: int

    def supersedes(self, step: int, ms: float) -> bool:
        return step > self.step and ms < self.ms

    def repeats(self, step: int, ms: float) -> bool:
        """Whether what was measured then may be measured again: also at `step` itself, before its next step."""
        return step >= self.step and ms < self.ms


def resumes_of_points(points: Iterable[Point]) -> list[Resume]:
    """From the history of `resumed_from_step`."""
    return sorted({Resume(int(point.value), point.ms) for point in points}, key=lambda one: one.ms)


def resumes_of_events(events: Iterable[Record]) -> list[Resume]:
    resumed = [event for event in events if event.get("event") == "resumed"]
    return sorted({Resume(int(e.get("step", 0)), ms_of(e)) for e in resumed if "unix_s" in e}, key=lambda one: one.ms)


def ms_of(event: Mapping[str, Any]) -> int:
    return int(1000 * float(event["unix_s"]))


def is_superseded(point: Point, resumes: Sequence[Resume]) -> bool:
    if point.key.startswith(_MEASURED_ANYWAY) or point.key == RESUMED_FROM:
        return False
    return any(resume.supersedes(point.step, point.ms) for resume in resumes)


def superseded_words(resumes: Sequence[Resume], applied: Sequence[Point]) -> str:
    """Which steps were trained again, and until when their points are superseded: the newest resumes first, older ones
    as a number; may be empty.

    applied: all points of APPLIED, which say how far training had come
    """
    words = []
    for i, resume in enumerate(resumes):
        lost = [one for one in applied if resume.supersedes(one.step, one.ms) and not is_superseded(one, resumes[:i])]
        if lost:
            last = max(one.step for one in lost)
            until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(resume.ms / 1000))
            words.append(
                f"steps {resume.step + 1:,} to {last:,} from before {until}: trained again from {resume.step:,}"
            )
    earlier = [f"and {n:,} earlier ones" if n > 1 else "and an earlier one"] if (n := len(words) - _NAMED) > 0 else []
    return "; ".join([*words[: -_NAMED - 1 : -1], *earlier])


def in_force(points: Iterable[Point], resumes: Sequence[Resume]) -> list[Point]:
    """Points without the superseded ones; of a step, the newest, and of the metric `epoch` all. Ascending in steps."""
    kept: dict[tuple[int, int], Point] = {}
    for point in points:
        at = (point.step, point.ms if point.key == EPOCH else 0)
        if not is_superseded(point, resumes) and (at not in kept or point.ms >= kept[at].ms):
            kept[at] = point
    return [kept[at] for at in sorted(kept)]


def history_in_force(points: Mapping[str, Sequence[Point]]) -> dict[str, list[Point]]:
    """By metric. points: all of them, those of RESUMED_FROM included"""
    resumes = resumes_of_points(points.get(RESUMED_FROM, ()))
    return {key: in_force(some, resumes) for key, some in sorted(points.items())}


def events_in_force(events: Iterable[Record]) -> list[Record]:
    """Events without those of steps that were done again."""
    all_events = list(events)
    resumes = resumes_of_events(all_events)
    return [event for event in all_events if not is_event_superseded(event, resumes)]


def is_event_superseded(event: Record, resumes: Sequence[Resume]) -> bool:
    if "unix_s" not in event:
        return False
    return any(resume.supersedes(int(event.get("step", 0)), ms_of(event)) for resume in resumes)


# --- pointers --------------------------------------------------------------------------------------------------------


def pointers(events: Iterable[Record]) -> list[Record]:
    """Every checkpoint that was saved, oldest first: where it is, of which step, what kind, how large, its checksum.

    Which of them still exist is for the store to say (`gba-hvd checkpoint ls URL`): the job keeps only some.
    """
    found = []
    for event in events:
        if event.get("event") == "checkpoint":
            step, data = int(event.get("step", 0)), event.get("data", {})
            found.append({
                "step": int(data.get("saved_step", step)), "kind": data.get("kind"), "bytes": data.get("n_bytes"),
                "rows": data.get("rows"), "seconds": data.get("seconds"), "stall_s": data.get("stall_s"),
                "url": data.get("url"), "manifest": data.get("manifest"), "checksum": data.get("checksum"),
                "unix_s": event.get("unix_s"),
            })  # fmt: skip
    return found


@dataclass(frozen=True)
class KeptBest:
    """The checkpoint that `keep_best` keeps. best_step: at which `value` of `metric` was measured; saved_step: its own.

    place: its address. unsaved: a model that was better still, and was not saved
    """

    metric: str
    value: float | None
    best_step: int
    saved_step: int
    place: str
    unsaved: UnsavedBest | None = None

    @classmethod
    def of(cls, kept: Mapping[str, Any], namer: Mapping[str, Any], unsaved: UnsavedBest | None = None) -> KeptBest:
        """Of the data of two events `checkpoint`. namer: of the one that names the best step"""
        metric, value, step = str(namer.get("best_metric", "")), namer.get("best_value"), int(namer["best_step"])
        return cls(metric, value, step, int(kept["saved_step"]), place_of(kept), unsaved)

    @property
    def words(self) -> str:
        return best_words(self.metric, self.value, self.best_step)


def kept_best(events: Iterable[Record]) -> KeptBest | None:
    """None where the records name none, or it is of a job that these records are not of. The manifests themselves may
    tell more: `recovery.catalog.best`."""
    saved, resumed_step = list[Saved[Mapping[str, Any]]](), -1
    for event in events_in_force(events):
        data = event.get("data", {})
        if event.get("event") == "resumed":
            resumed_step = int(event.get("step", 0))
        elif event.get("event") == "checkpoint" and "saved_step" in data:
            step, best_step = int(data["saved_step"]), data.get("best_step")
            is_later = best_step is not None and best_step <= resumed_step < step
            about = {"until": data.get("best_until"), "metric": str(data.get("best_metric", ""))}
            saved.append(Saved(data, step, best_step, is_later=is_later, **about))
    if (found := kept_of(saved)) is None:
        return None
    namer = next(one.what for one in reversed(saved) if one.best_step is not None)
    return KeptBest.of(*found, unsaved_of(dict(namer), dict(found[1])))


def recoveries(events: Iterable[Record], applied: Sequence[Point] = ()) -> list[Record]:
    """Every recovery: what it was, at which step, rows that came back and rows that did not, age in steps, PLS of this
    one, of all so far, expected and tolerable, samples that are trained again; the choice between full and partial,
    where there was one. launch_before, of a job that resumed: "finished", "went further" (finished, at a later step: as
    after `gba-hvd checkpoint rollback`), "interrupted", "lost" (it failed, or newer checkpoints could not be used),
    "no end" (none is on record, as of one that was killed) or "unknown".

    Of a job that was launched again, age is the number of steps that are made again, and samples_redone their samples,
    by the end that the launch before reported; where it was killed, by its newest point, so it may be a few more.
    applied: all points of `samples_applied`
    """
    found = []
    all_events = list(events)
    for i, event in enumerate(all_events):
        kind, data = str(event.get("event")), event.get("data", {})
        if is_recovery(kind, data):
            facts = {name: data.get(name) for name in (*_OF_RECOVERY, "age", "manifest", "skipped", *_LABEL_OF_CHOICE)}
            step = int(event.get("step", 0))
            before = _launch_before(all_events[:i], step, data) if kind == "resumed" else None
            if kind == "resumed" and not data.get("strategy"):
                facts |= _made_again(all_events[:i], event, applied)
            found.append({"kind": kind, "step": step, "launch_before": before, **facts})
    return found


def _made_again(events: Sequence[Record], resumed: Record, applied: Sequence[Point]) -> Record:
    """Steps and samples of the launch before that are after what the job resumed from. events: until then"""
    mark, step, then = (
        _last_of_the_launch_before(events),
        int(resumed.get("step", 0)),
        resumed.get("data", {}).get(_THEN),
    )
    if mark is not None and mark.get("event") in ENDS:
        reached, n_applied = int(mark.get("step", 0)), mark.get("data", {}).get(APPLIED)
    elif point := _newest_of_the_launch_before(events, resumed, applied):
        reached, n_applied = point.step, point.value
    else:
        return {"age": None}
    samples = None if then is None or n_applied is None else max(0, int(n_applied) - int(then))
    return {"age": max(0, reached - step), "samples_redone": samples or None}


def _newest_of_the_launch_before(events: Sequence[Record], resumed: Record, points: Sequence[Point]) -> Point | None:
    starts = [ms_of(event) for event in events if event.get("event") == "started" and "unix_s" in event]
    if len(starts) < 2 or "unix_s" not in resumed:
        return None
    own = [point for point in points if starts[-2] <= point.ms < starts[-1]]
    return max(own, key=lambda point: (point.ms, point.step), default=None)


def without_survived(events: Sequence[Record]) -> list[Record]:
    """Without failures after which the job continued in the same launch: a new world formed."""
    kept, has_formed = list[Record](), False
    for event in reversed(events):
        kind = event.get("event")
        if kind in ("membership", "continued", "started"):
            has_formed = kind != "started"
        if kind != "failed" or not has_formed:
            kept.append(event)
    return kept[::-1]


def _last_of_the_launch_before(events: Sequence[Record]) -> Record | None:
    starts = [i for i, event in enumerate(events) if event.get("event") == "started"]
    earlier = events[: starts[-1]] if starts else events
    marks = [event for event in without_survived(earlier) if event.get("event") in _OF_A_LAUNCH]
    return marks[-1] if marks else None


def _launch_before(events: Sequence[Record], step: int, data: Mapping[str, Any]) -> str:
    """How the launch ended before the one that resumed from `step`. events: until then; data: of the event `resumed`"""
    mark = _last_of_the_launch_before(events)
    if mark is None:
        return "unknown"
    if mark.get("event") == "interrupted":
        return "interrupted"
    if mark.get("event") == "finished":
        went_further = "lost" if data.get("skipped") else "went further"
        return "finished" if int(mark.get("step", 0)) <= step else went_further
    return "lost" if mark.get("event") in ENDS else "no end"
