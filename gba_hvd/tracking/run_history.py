"""What a job reported, read back: the one value that reports and advice are made from.

From MLflow it comes through `mlflow_run.read_history`; from records on disk, which may not have reached MLflow, through
`from_files`. What can be concluded from it, such as the time spent in each mode, is worked out here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from gba_hvd.errors import BadInput
from gba_hvd.tracking import gauges, recovery_records, traffic_summary
from gba_hvd.tracking.epochs import EPOCH, MeasuredTogether, best_of, is_quality
from gba_hvd.tracking.plots import MODE, THROUGHPUT, ModeSpan, last_staleness, mode_spans
from gba_hvd.tracking.records import Point, Record, merge_events
from gba_hvd.tracking.spool import all_records

END_NOT_REPORTED = "the process that reported for the job ended without reporting its end (killed, or out of memory?)"
DATA_FILE = "data.json"  # the artifact with the description of the data
_ACCOUNT = ("samples_total", "samples_applied", "samples_dropped", "samples_lost")


@dataclass(frozen=True)
class Gap:
    """How far the dense values have moved between a worker's gradients and their steps (`ps.partition.gaps`), means."""

    pushes: int
    mean: float
    mean_in_steps: float


@dataclass(frozen=True)
class RunHistory:
    """A job by its records. Times in milliseconds since 1970; history by metric, ascending in steps.

    params: of the newest launch; first_params: of the first one, where they were others, or are not set any more
    data: the description of the data (`MLflowCallback(data=)`)
    model_awaited: the job has ended, and its model is being written or sent (`MLflowCallback(log_model=)`)
    applied: all points of `samples_applied`

    What was superseded, because the job resumed from a checkpoint, is not in `history`; of `events` it is.
    """

    title: str
    source: str  # where the records were read
    job_id: str
    status: str
    reason: str  # of the status
    started_ms: int | None
    ended_ms: int | None
    params: Mapping[str, str] = field(default_factory=dict)
    history: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    events: Sequence[Record] = ()
    first_params: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    model_awaited: bool = False
    applied: Sequence[Point] = ()

    @property
    def n_steps(self) -> int:
        ends = [points[-1].step for points in self.history.values() if points]
        return max([*ends, *(int(event.get("step", 0)) for event in self.events)], default=0)

    @property
    def account(self) -> dict[str, int]:
        """Where every sample went, as the newest event that has it says; empty when none does."""
        for event in reversed(self.events):
            data = event.get("data", {})
            if all(key in data for key in _ACCOUNT):
                return {key.removeprefix("samples_"): int(data[key]) for key in _ACCOUNT}
        return {}

    @property
    def dropped_for(self) -> dict[str, int]:
        """Dropped samples by reason, as the newest event that has it says.

        Records of older versions have none: there all are stale, where the job was in an asynchronous mode.
        """
        known = [event["data"]["dropped_for"] for event in self.events if "dropped_for" in event.get("data", {})]
        if known:
            return dict(known[-1])
        dropped = self.account.get("dropped", 0)
        return {"stale": dropped} if dropped and self.staleness else {}

    @property
    def staleness(self) -> dict[int, int]:
        """{steps: micro-batches} of the whole job."""
        return last_staleness(self.events)

    @property
    def dense_ages(self) -> dict[int, int]:
        """The same of the dense values that gradients were computed with."""
        return last_staleness(self.events, "lags")

    @property
    def arrivals(self) -> list[list[tuple[int, float]]]:
        """(age, share) of the gradients of each of the newest steps: `gba_hvd.update_rules.delay_sequence`."""
        reported = [event["data"]["arrivals"] for event in self.events if event.get("data", {}).get("arrivals")]
        return [[(int(age), float(share)) for age, share in step] for step in reported[-1]] if reported else []

    @property
    def gaps(self) -> dict[int, Gap]:
        """By rank, in the newest mode that measured it."""
        reported = [event["data"]["gaps"] for event in self.events if event.get("data", {}).get("gaps")]
        found = gauges.gaps_by_rank(reported[-1]) if reported else {}
        return {rank: Gap(n, gap / n, steps / n) for rank, (n, gap, steps, _) in found.items() if n}

    @property
    def measured(self) -> list[MeasuredTogether]:
        """Quality at each step at which it was measured, with its epoch; in the order of time."""
        return [
            MeasuredTogether(step, epoch, {point.key: point.value for point in points})
            for (step, epoch), points in _reported_together(self.history).items()
        ]

    @property
    def best(self) -> MeasuredTogether | None:
        """The best epoch by validation."""
        return best_of(self.measured)

    @property
    def launches(self) -> list[tuple[int, int]]:
        """(first, last) millisecond of each: from the event of its start to that of its end, else to its last record.

        Records and a model are sent after the end.
        """
        if self.started_ms is None:
            return []
        starts = [recovery_records.ms_of(event) for event in self.events_of("started") if "unix_s" in event]
        times = [point.ms for points in self.history.values() for point in points]
        times += [recovery_records.ms_of(event) for event in self.events if "unix_s" in event]
        begins = [self.started_ms, *starts[1:]]
        reported = [
            e for e in recovery_records.without_survived(self.events) if e.get("event") in recovery_records.ENDS
        ]
        times_of_ends = [recovery_records.ms_of(event) for event in reported if "unix_s" in event]
        ends = []
        for begin, until in zip(begins, [*begins[1:], None], strict=True):
            within = [ms for ms in times_of_ends if begin <= ms and (until is None or ms < until)]
            if until is None:
                ends.append(within[-1] if within else max([*times, self.ended_ms or 0]))
            else:
                ends.append(within[-1] if within else max((ms for ms in times if ms < until), default=until))
        return [(begin, max(begin, end)) for begin, end in zip(begins, ends, strict=True)]

    @property
    def adds_an_epoch(self) -> bool:
        """Whether the newest scores are of the one epoch that was trained since the job had finished others: as of a
        job that is launched again for each day, with data of its own."""
        measured = _reported_together(self.history).items()
        scores = [(points[-1].ms, epoch) for (_, epoch), points in measured if epoch is not None]
        newest_ms = max((ms for ms, _ in scores), default=0)
        ends = [recovery_records.ms_of(event) for event in self.events_of("finished") if "unix_s" in event]
        finished_ms = max((ms for ms in ends if ms < newest_ms), default=0)
        before, since = ({epoch for ms, epoch in scores if (ms > finished_ms) is late} for late in (False, True))
        # `epoch` keeps its points where a score is measured again at the same step
        known = before | {int(point.value) for point in self.history.get(EPOCH, ()) if point.ms <= finished_ms}
        return len(since) == 1 and bool(before) and min(since) > max(known)

    @property
    def seconds(self) -> float | None:
        """Of all launches; None where the end is not known."""
        if self.started_ms is None or self.ended_ms is None:
            return None
        return sum(end - begin for begin, end in self.launches) / 1000

    @property
    def measurement_seconds(self) -> dict[tuple[int, int | None], float]:
        """{(step, epoch): seconds within launches} from the measurement before, or the start, to this one."""
        before, seconds, launches = self.started_ms, dict[tuple[int, int | None], float](), self.launches
        for at, points in _reported_together(self.history).items():
            ms = max(point.ms for point in points)
            if before is not None:
                seconds[at] = sum(max(0, min(ms, end) - max(before, begin)) for begin, end in launches) / 1000
            before = ms
        return seconds

    @property
    def epoch_seconds(self) -> list[float]:
        """Of each epoch in which quality was measured, until its last measurement."""
        total: dict[tuple[int, int] | int, float] = {}
        for (step, epoch), seconds in self.measurement_seconds.items():
            key = (step, 0) if epoch is None else epoch
            total[key] = total.get(key, 0.0) + seconds
        return list(total.values())

    @property
    def spans(self) -> list[ModeSpan]:
        return mode_spans(self.history.get(MODE, ()), self.events)

    @property
    def resumes(self) -> list[recovery_records.Resume]:
        return recovery_records.resumes_of_events(self.events)

    @property
    def checkpoints(self) -> list[Record]:
        """Where each is, oldest first, see `recovery_records.pointers`."""
        return recovery_records.pointers(self.events)

    @property
    def newest_checkpoint(self) -> int | None:
        """The step of the newest one in force that the records have: saved, or resumed from."""
        found = [event for event in self.events_of("checkpoint", "resumed") if event.get("data", {}).get("manifest")]
        return int(found[-1]["data"].get("saved_step", found[-1].get("step", 0))) if found else None

    @property
    def checkpoint_place(self) -> str | None:
        """Where the job saves; empty: nowhere; None: the records do not say."""
        saved = [str(one["url"]) for one in self.checkpoints if one["url"]]
        places = [event.get("data", {}).get("checkpoints") for event in self.events_of("started")]
        return saved[-1] if saved else places[-1] if places else None

    @property
    def recoveries(self) -> list[Record]:
        return recovery_records.recoveries(self.events, self.applied)

    @property
    def failures(self) -> list[Record]:
        """Recoveries without those of launches that follow one that ended well, or that is not in the records."""
        return [one for one in self.recoveries if recovery_records.is_failure(one)]

    @property
    def pls(self) -> float | None:
        """Portion of lost samples of all recoveries; None when none has measured it."""
        totals = [one["pls_total"] for one in self.recoveries if one["pls_total"] is not None]
        return float(totals[-1]) if totals else None

    @property
    def logged_model(self) -> Mapping[str, Any] | None:
        """`model_uri`, and where it is registered `name` and `version`, of the newest model in MLflow.

        One that is logged and could not be registered is `model_not_logged`, with its `model_uri`.
        """
        reported = [event.get("data", {}) for event in self.events_of("model_logged", "model_not_logged")]
        logged = [data for data in reported if data.get("model_uri")]
        return logged[-1] if logged else None

    @property
    def kept_best(self) -> recovery_records.KeptBest | None:
        return recovery_records.kept_best(self.events)

    @property
    def better_than_logged(self) -> str:
        """What was better than the logged model, in words; empty: nothing that the records tell of, or none is logged.

        By the checkpoint that was kept as the best one; without such, by the best epoch.
        """
        step, kept, best = (self.logged_model or {}).get("model_step"), self.kept_best, self.best
        if step is None:
            return ""
        if kept is not None:
            return f"{kept.words}, in the checkpoint of step {kept.saved_step:,}" if kept.saved_step != step else ""
        if best is None or step <= best.step or self.adds_an_epoch or self.measured[-1].step <= best.step:
            return ""  # nothing says that a later model is worse
        return f"{best.name}, at step {best.step:,}"

    @property
    def warnings(self) -> list[Record]:
        return [event for event in self.events if event.get("level") == "warning"]

    def events_of(self, *kinds: str) -> list[Record]:
        return [event for event in self.events if event.get("event") in kinds]

    @property
    def n_workers_lost(self) -> int:
        """At least so many. Survivors report a loss when they notice it, and what a worker failed with in the next
        world: these are two events of one worker. Where the next world has the same workers, none was lost: they were
        stopped, or out of reach, for a while.
        """
        changes = [_Change()]
        for event in self.events:
            kind, data = event.get("event"), event.get("data", {})
            if kind == "started" or (kind in ("worker_lost", "membership") and changes[-1].has_formed):
                changes.append(_Change())
            now = changes[-1]
            if kind == "worker_lost":
                now.is_loss, now.before = True, max(now.before, int(data.get("workers", 0)))
            elif kind == "membership":
                now.has_formed, now.after = True, data.get("workers")
                now.is_loss = now.is_loss and not _has_same_workers(event)
            elif kind == "worker_failed":
                now.failed.add((data.get("host"), data.get("pid")))
        return sum(change.n_lost for change in changes)

    @property
    def n_workers_fewer(self) -> int:
        """How many workers less worlds had than the ones before them, where no loss was reported.

        They left, or died in an asynchronous mode, in which training continues and the launcher alone sees why.
        """
        before, fewer, is_loss = 0, 0, False
        for event in self.events:
            kind, data = event.get("event"), event.get("data", {})
            is_loss = is_loss or kind == "worker_lost"
            if kind in ("started", "membership"):
                now = int(data.get("workers", 0))
                if kind == "membership" and not is_loss:
                    fewer += max(0, before - now)
                before, is_loss = now, False
        return fewer

    def last(self, metric: str) -> float | None:
        points = self.history.get(metric)
        return points[-1].value if points else None


def changes_of_workers(events: Iterable[Record]) -> int:
    """How often the workers became others: worlds of others, and losses after which none had formed yet."""
    n, is_open = 0, False
    for event in events:
        kind = event.get("event")
        if kind in ("membership", "started"):  # of a loss before it the new world is the change
            n += (kind == "membership" and not _has_same_workers(event)) or (kind == "started" and is_open)
            is_open = False
        is_open = is_open or kind == "worker_lost"
    return n + is_open


def _has_same_workers(membership: Record) -> bool:
    return bool(membership.get("data", {}).get("same_workers"))


@dataclass
class _Change:
    """From one world of workers to the next, as events tell of it.

    is_loss: workers were lost, it is not known how many. before, after: workers in the two worlds, where that is known
    """

    is_loss: bool = False
    has_formed: bool = False
    before: int = 0
    after: int | None = None
    failed: set[tuple[Any, Any]] = field(default_factory=set)

    @property
    def n_lost(self) -> int:
        missing = self.before - self.after if self.is_loss and self.after is not None else 0
        return max(int(self.is_loss), missing, len(self.failed))


@dataclass(frozen=True)
class InMode:
    """What a mode was good for in a job.

    samples_per_s: all samples over all time, so the harmonic mean of its points, weighted with their steps; None
                   without a point
    """

    mode: str
    steps: int
    visits: int
    samples_per_s: float | None


def steps_of_rates(story: RunHistory) -> list[tuple[Point, int]]:
    """The points of the throughput, each with the number of steps that it is of."""
    rates = [point for point in story.history.get(THROUGHPUT, ()) if point.value > 0]
    spans = story.spans
    begins = [spans[0].first if spans else 0, *(point.step for point in rates)]
    return [(point, max(1, point.step - begin)) for begin, point in zip(begins, rates, strict=False)]


def by_mode(story: RunHistory) -> list[InMode]:
    """In the order in which the modes first came."""
    rates, spans = steps_of_rates(story), story.spans
    found = []
    for mode in dict.fromkeys(span.mode for span in spans):
        own = [span for span in spans if span.mode == mode]
        within = [(point, n) for point, n in rates if any(span.first < point.step <= span.last for span in own)]
        mean = harmonic_mean([point.value for point, _ in within], [n for _, n in within]) if within else None
        found.append(InMode(mode, sum(span.last - span.first for span in own), len(own), mean))
    return found


def asynchronous_modes(story: RunHistory) -> list[str]:
    """Those that the job was in, in the order in which they first came."""
    return [one.mode for one in by_mode(story) if one.mode != "allreduce"]


def from_files(path: Path) -> RunHistory:
    """From a spool file, a folder of spools of one job, or a folder with a run's `events.jsonl`.

    Raises BadInput when there is nothing of the kind, or records of several jobs.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    spools = sorted((list(all_records(file)) for file in files), key=_first_ms)
    records = [record for spool in spools for record in spool]
    loose = [record for record in records if "kind" not in record and "event" in record]  # an events.jsonl of MLflow
    jobs = [record for record in records if record.get("kind") == "job"]
    if not jobs and not loose:
        raise BadInput(f"{path} holds no records of a job: expected a spool (*.jsonl) or a run's events.jsonl")
    job_ids = sorted({str(job["job_id"]) for job in jobs})
    if len(job_ids) > 1:
        raise BadInput(f"{path} holds records of {len(job_ids)} jobs ({', '.join(job_ids)}): name one of its files")
    params, first = dict[str, str](), dict[str, str]()
    for record in records:
        if record.get("kind") == "params":
            params, first = {**params, **record["values"]}, {**record["values"], **first}
        elif record.get("kind") == "settings":
            params = {name: params[name] for name in record["names"] if name in params}
    ends = [record for record in records if record.get("kind") == "end" and record.get("status")]
    reported = [{k: v for k, v in record.items() if k != "kind"} for record in records if record.get("kind") == "event"]
    events = merge_events(loose, reported)
    points = _points(records)
    times = [int(record["ms"]) for record in records if "ms" in record]
    times += [int(1000 * event["unix_s"]) for event in events if "unix_s" in event]
    statuses = {"finished": "FINISHED", "failed": "FAILED", "not_saved": "FAILED", "interrupted": "KILLED"}
    end_statuses = [statuses[event["event"]] for event in events if event.get("event") in statuses]
    status = str(ends[-1]["status"]) if ends else end_statuses[-1] if end_statuses else "not ended"
    named = [str(job["run_name"]) for job in jobs if job.get("run_name")]
    return RunHistory(
        title=(named or job_ids or [path.name])[0],
        source=str(path),
        job_id=job_ids[0] if job_ids else "",
        status=status,
        reason=str(ends[-1].get("reason", "")) if ends else "",
        started_ms=min(times, default=None),
        ended_ms=max(times, default=None),
        params=params,
        first_params={key: text for key, text in first.items() if text != params.get(key)},
        history=recovery_records.history_in_force(points),
        applied=points.get(recovery_records.APPLIED, ()),
        events=tuple(events),
        data=_data_of(records),
        model_awaited=bool(ends and ends[-1].get("model")) and not _model_not_written(records),
    )


def _model_not_written(records: Iterable[Record]) -> bool:
    """Whether the newest model could not be written; a spool that is there does not say that one was sent."""
    return [record["written"] for record in records if record.get("kind") == "model"][-1:] == [False]


def _data_of(records: Iterable[Record]) -> dict[str, Any]:
    texts = [record["text"] for record in records if record.get("kind") == "artifact" and record["path"] == DATA_FILE]
    return json.loads(texts[-1]) if texts else {}


def _reported_together(history: Mapping[str, Sequence[Point]]) -> dict[tuple[int, int | None], list[Point]]:
    """{(step, epoch): points of quality}. The epoch was reported with them, or is the newest one until that step."""
    epochs = history.get(EPOCH, ())
    with_them = {(point.step, point.ms): int(point.value) for point in epochs}
    found: dict[tuple[int, int | None], list[Point]] = {}
    scores = [point for key in history if is_quality(key) for point in history[key]]
    for point in sorted(scores, key=lambda point: (point.step, point.ms)):
        until = [int(one.value) for one in epochs if one.step <= point.step][-1:]
        epoch = with_them.get((point.step, point.ms), until[0] if until else None)
        found.setdefault((point.step, epoch), []).append(point)
    return found


def _first_ms(records: Sequence[Record]) -> int:
    return next((int(record["ms"]) for record in records if "ms" in record), 0)


def _points(records: Iterable[Record]) -> dict[str, list[Point]]:
    history: dict[str, list[Point]] = {}
    for record in records:
        if record.get("kind") != "metrics":
            continue
        step, ms = int(record["step"]), int(record["ms"])
        for key, value in record["values"].items():
            history.setdefault(key, []).append(Point(key, float(value), ms, step))
    return history


def as_json(story: RunHistory) -> dict[str, Any]:
    """The figures of a report, for programs."""
    return {
        "title": story.title, "job_id": story.job_id, "status": story.status, "reason": story.reason,
        "best": None if story.best is None else story.best.as_dict(),
        "epochs": [one.as_dict() for one in story.measured],
        "warnings": story.warnings,
        "steps": story.n_steps, "samples": story.account, "staleness": story.staleness,
        "dense_ages": story.dense_ages, "gaps": {rank: vars(gap) for rank, gap in story.gaps.items()},
        "modes": [vars(one) for one in by_mode(story)],
        "decisions": [
            {"step": e.get("step"), "reason": e.get("message"), **e.get("data", {})}
            for e in story.events_of("decision")
        ],
        "switches": [{"step": e.get("step"), **e.get("data", {})} for e in story.events_of("switch")],
        "checkpoints": story.checkpoints,
        "recoveries": story.recoveries,
        "bytes": [
            {"mode": mode, "kind": kind, **n_bytes}
            for (mode, kind), n_bytes in traffic_summary.bytes_by_mode(story.events).items()
        ],
        "density": traffic_summary.density(story.events),
        "row_density": traffic_summary.row_density(story.events),
        "compression": [vars(one) for one in traffic_summary.decisions(story.events)],
        "last": {key: points[-1].value for key, points in story.history.items() if points},
        "kept_best": None if story.kept_best is None else asdict(story.kept_best),
        "model": None if story.logged_model is None else dict(story.logged_model),
        "data": dict(story.data),
        "params": dict(story.params),
        "first_params": dict(story.first_params),
    }  # fmt: skip
