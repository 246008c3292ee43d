"""Delivers the records of one spool to MLflow, in order, each once: carries out what `delivery.py` decides.

How long it is tried, and in which process, is decided in `sender_process.py`.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gba_hvd.errors import BadInput
from gba_hvd.tracking import delivery
from gba_hvd.tracking.delivery import DeliveryAction, first_line
from gba_hvd.tracking.records import LogBatch, Record, SpoolLine, halves, own_run_words, pack
from gba_hvd.tracking.run_history import DATA_FILE, END_NOT_REPORTED
from gba_hvd.tracking.spool import all_records, model_path, read_lines, read_status, write_status
from recovery.redaction import redacted

if TYPE_CHECKING:
    from gba_hvd.tracking.mlflow_run import JobRun

HEARTBEAT_TAG = "gba_hvd.heartbeat"  # unix time of the last heartbeat of the chief's training loop
HEARTBEAT_EVERY_S = 30.0
EVENTS_EVERY_S = 10.0
ARTIFACT_ATTEMPTS = 3
REPORT_ATTEMPTS, REPORT_PAUSE_S = 5, 1.0
LOST_EVENT = "records_lost"


class Blocked(Exception):
    """Nothing more can be sent now."""


class Stopped(Exception):
    """Nothing more can be sent until a person has acted."""


class Sender:
    """Delivers the records of one spool, in order. Not thread-safe; one per spool, which `locked` sees to.

    Use: call `turn(now)` again and again; it delivers what it can and returns. `status` says how far it has come.
    before_each: called before each batch; what it raises ends the turn
    """

    def __init__(self, spool: Path, before_each: Callable[[], object] = lambda: None) -> None:
        self.spool = spool
        self._before_each = before_each
        self.status = replace(read_status(spool), problem=None, stopped=False)
        self.job: Record | None = None
        self.orphaned = False  # the worker is gone, nothing will be added
        self._has_end = False  # the worker has written it, and waits
        self.late = False  # and long ago: no other process is at work for this job
        self._run: JobRun | None = None
        self._failures = 0
        self._artifact_failures = 0
        self._own_events: list[Record] = []
        self._failed_s = 0.0
        self._next_heartbeat_s = 0.0
        self._next_events_s = 0.0
        self._events_waiting = False
        self.last_step = 0
        self._last_sign_s = 0.0
        self._seen = 0
        self.newest_job: Record | None = None
        self.look()

    def look(self) -> None:
        """Read what is new without sending it: where training stands, even while nothing gets through."""
        while lines := read_lines(self.spool, self._seen):
            for line in lines:
                self._note(line)
            self._seen = lines[-1].end

    def turn(self, now: float) -> None:
        """Deliver until nothing is left or something is in the way; after that, wait for the back-off to be over."""
        if self.status.done:
            return
        is_ending = self.orphaned or self._has_end
        if self._failures and now < self._failed_s + delivery.backoff_s(self._failures, ending=is_ending):
            return
        try:
            self._deliver(now)
        except Stopped as stopped:
            self._set(problem=redacted(str(stopped)), stopped=True)
            say(f"stopped: {stopped}")
        except Blocked as blocked:
            self._failures += 1
            self._failed_s = now
            if self.status.problem != redacted(str(blocked)):
                say(f"cannot send now: {blocked}")
            self._set(problem=redacted(str(blocked)))
        else:
            self._failures = 0
            if self.status.problem is not None:
                say("sending again")
                self._set(problem=None)

    def _deliver(self, now: float) -> None:
        while not self.status.done and (lines := read_lines(self.spool, self.status.offset)):
            for item in pack(lines):
                self._before_each()
                if isinstance(item, LogBatch):
                    self._send(item)
                    self._events_waiting |= item.has_event
                else:
                    self._carry_out(item)
        if self.status.done:
            return
        if self.job is not None and self.job["chief"] and self._last_sign_s and now >= self._next_heartbeat_s:
            self._call(lambda run: run.set_tags({HEARTBEAT_TAG: str(round(self._last_sign_s))}))
            self._next_heartbeat_s = now + HEARTBEAT_EVERY_S
        if self._events_waiting and (self.orphaned or now >= self._next_events_s):
            self._put_events()
            self._next_events_s = now + EVENTS_EVERY_S
        if self.orphaned:
            is_chief = self.job is not None and self.job["chief"] and not self.status.recorded
            if is_chief and self._call(lambda run: run.may_report()):
                self._finish("FAILED", END_NOT_REPORTED)
            elif self.status.recorded:  # its end was written
                self._model_failed("the model was not logged: the worker ended while it wrote it; a checkpoint has it, "
                                   "if the job saved one: `gba-hvd model export`")  # fmt: skip
                self._put_report()
            self._set(done=True)

    def _carry_out(self, line: SpoolLine) -> None:
        record = line.record
        match record["kind"]:
            case "job":
                self.job = record
                if record["chief"]:
                    self._call(lambda run: run.claim(record["stamp"]))
            case "settings":
                self._call(lambda run: run.note_settings(record["names"]))
            case "artifact":
                path, text = record["path"], record["text"]
                self._call(
                    lambda run: run.put_data(text) if path == DATA_FILE else run.put_text(path, text), artifact=path
                )
            case "end":
                self._report_lost(record)
                if self._events_waiting:
                    self._put_events()
                status = record["status"]
                if status and self._call(lambda run: run.may_report()):
                    self._finish(status, record["reason"], bool(record.get("model")), record.get("ms"))
                self._set(done=not record.get("model"))
            case "model":
                if record["written"]:
                    self._log_model()
                elif self._events_waiting:  # one says why
                    self._put_events()
                self._put_report()  # again, with the model
                self._set(done=True)
        self._set(offset=line.end, sent=self.status.sent + 1)

    def _report_lost(self, end: Record) -> None:
        """What the worker could not write, as its end has it. The event is of the chief's run."""
        n, why = end.get("lost", 0), end.get("why_lost")
        if not n:
            return
        self._set(lost=n)
        if self.job is None or not self.job["chief"] or any(one["event"] == LOST_EVENT for one in self._own_events):
            return
        text = (
            f"{n:,} records were lost before they were sent, so curves and events have gaps: {why}. Free some space in "
            f"{self.spool.parent}, or name another folder: GBA_HVD_SPOOL_DIR, or MLflowCallback(spool_dir=)"
        )
        event = self._event(LOST_EVENT, text, "warning", {"lost": n, "why": why})
        self._own_events.append(event | {"unix_s": end["ms"] / 1000})  # of a sender after this one, the same
        self._events_waiting = True

    def _send(self, batch: LogBatch) -> None:
        sent = self._sent_of(batch) if len(batch) else 0
        dropped = len(batch) - sent
        self._set(offset=batch.end, sent=self.status.sent + sent, dropped=self.status.dropped + dropped)

    def _sent_of(self, batch: LogBatch) -> int:
        """Send a batch, halving a refused one until the refused values stand alone. Returns how many were taken."""
        try:
            changed = self._run_now().send(batch)
        except (Blocked, Stopped):
            raise
        except Exception as error:
            verdict = self._verdict_on(error)
            if verdict.action is not DeliveryAction.DROP:
                raise _as_signal(verdict) from error
            parts = halves(batch)
            if parts is not None:
                return sum(self._sent_of(part) for part in parts)
            what = [point.key for point in batch.points] + list(batch.params) + list(batch.tags)
            say(f"MLflow refused {what[0]!r}, dropped: {verdict.reason}")
            return 0
        if changed:
            say(f"parameters keep their first values, the new ones are tags gba_hvd.now.*: {', '.join(changed)}")
        return len(batch)

    def _call(self, call: Any, artifact: str | None = None) -> Any:
        """Do something with the run; what MLflow refuses for good is dropped, anything else ends this turn."""
        try:
            return call(self._run_now())
        except (Blocked, Stopped):
            raise
        except Exception as error:
            verdict = self._verdict_on(error)
            if (
                artifact is not None
                and verdict.action is DeliveryAction.RETRY
                and self._run is not None
                and self._run.is_active()
            ):
                # The tracking server answers, so the artifact store is in trouble: no reason to hold back metrics.
                self._artifact_failures += 1
                if self._artifact_failures >= ARTIFACT_ATTEMPTS:
                    self._artifact_failures = 0
                    verdict = delivery.DeliveryVerdict(DeliveryAction.DROP, verdict.reason)
            if verdict.action is not DeliveryAction.DROP:
                raise _as_signal(verdict) from error
            say(f"MLflow refused {artifact or 'a change of the run'}, dropped: {verdict.reason}")
            self._set(dropped=self.status.dropped + 1)
            return None

    def _log_model(self) -> None:
        """Log and register the model that the worker has written. What MLflow refuses for good is an event; so is the
        first failure of what may pass, after which the spool waits with the model."""
        from gba_hvd.tracking.mlflow_model import read_facts

        folder = model_path(self.spool)
        try:
            if self.status.model_uri is None:
                uri = self._call(lambda run: run.log_model(folder))
                if uri is None:
                    self._set(keeps_model=True)
                    self._model_failed(f"MLflow refused the model, which is kept: {folder}/model, a saved model as of "
                                       "gba_hvd.load_for_inference; the log of the sender has the reason")  # fmt: skip
                    return
                self._set(model_uri=uri)
            moves: list[str] = []
            version = self._call(lambda run: run.register_model(folder, self.status.model_uri, moves.append))
        except Blocked as blocked:
            if self.status.model_problem is None:
                with contextlib.suppress(Blocked, Stopped):
                    self._model_failed(f"the model is not logged or registered yet, it waits in {folder}: {blocked}; "
                                       f"send it with: gba-hvd mlflow send {self.spool}")  # fmt: skip
            raise
        uri = self.status.model_uri
        if version is None:
            self._model_failed(
                f"the model is logged as {uri} and was not registered: call mlflow.register_model({uri!r}, name)"
            )
            return
        facts = read_facts(folder)
        served_as = f"models:/{facts['registered_model_name']}/{version}" if version else uri
        step = int(facts["step"])
        move = moves[-1] if moves else None
        self._set(model_problem=None, served_as=served_as, model_step=step, alias_move=move)
        as_version = (f", version {version}" if version else "") + (f"; alias {move}" if move else "")
        name = facts["registered_model_name"] if version else facts["name"]
        self._report_event(
            "model_logged",
            f"the model of step {step:,} is logged as {uri}{as_version}",
            "info",
            name=name,
            version=version,
            model_step=step,
        )

    def _model_failed(self, message: str) -> None:
        self._set(model_problem=message)
        say(message)
        self._report_event("model_not_logged", message, "warning")

    def _report_event(self, kind: str, message: str, level: str, **about: Any) -> None:
        data = {"model_uri": self.status.model_uri, "folder": str(model_path(self.spool)), **about}
        self._own_events.append(self._event(kind, message, level, data))
        self._put_events()

    def _event(self, kind: str, message: str, level: str, data: Record) -> Record:
        event = {"event": kind, "step": self.last_step, "message": message, "data": data, "unix_s": time.time()}
        return event | ({"level": level} if level == "warning" else {})

    def _run_now(self) -> JobRun:
        if self._run is not None:
            return self._run
        if self.job is None:
            raise Stopped(f"{self.spool} does not begin with a job record: not a spool of this program?")
        try:
            from gba_hvd.tracking.mlflow_run import (
                ExperimentDeleted,
                RunNotThere,
                experiment_name,
                open_run,
                resolved_uri,
            )
            from gba_hvd.tracking.sqlite_file import UnusableDatabase
        except ModuleNotFoundError as error:
            raise _as_signal(delivery.decide(error, run_is_active=None)) from error
        uri = self.status.tracking_uri or resolved_uri(self.job["tracking_uri"])
        self._set(tracking_uri=uri)
        try:
            not_there = list[str]()
            if asked := self.job.get("experiment_id"):
                if experiment := experiment_name(uri, asked):
                    self.job["experiment"] = experiment
                else:
                    not_there.append("experiment_id")
            run = open_run(uri, self.job, self._may_create)
            parent = self.job.get("parent_run_id") if self.job["chief"] else None
            if parent and not run.nest_under(parent):
                not_there.append("parent_run_id")
        except (ExperimentDeleted, UnusableDatabase) as error:
            raise Stopped(str(error)) from error
        except (RunNotThere, BadInput) as error:
            raise Blocked(str(error)) from error
        except Exception as error:
            raise _as_signal(self._verdict_on(error)) from error
        self._run = run
        self._set(run_id=run.run_id, experiment_id=run.experiment_id)
        if (other := run.continues) is not None and self.job["chief"]:  # its checkpoint did not say whose it is
            of = str(other.data.tags.get("gba_hvd.job_id", ""))
            self._set(note=own_run_words(self.job["job_id"], of))
        self._report_unused(run, self.job, not_there)
        return run

    def _report_unused(self, run: JobRun, job: Record, not_there: Sequence[str]) -> None:
        """Warn of another name or experiment than the first launch asked for, which the run has, and of ids that MLflow
        does not have."""
        if not job["chief"]:
            return
        why, is_first = dict[str, str](), "all launches of a job are one run, which its first launch"
        if job.get("names_run") and job["run_name"] != run.named:
            why["run_name"] = f"{is_first} called {run.named!r}. Rename it in MLflow, or leave run_name out"
        if "experiment_id" not in not_there and _asks_for_another_experiment(run, job):
            why["experiment"] = (
                f"{is_first} put into the experiment {run.asked_experiment()!r}. For a run of its own give the job "
                "another name (GBA_HVD_JOB_NAME) and place for checkpoints, else leave experiment out"
            )
        uri = redacted(self.status.tracking_uri or "")
        if "parent_run_id" in not_there:
            why["parent_run_id"] = f"{uri} has no run with this id"
        if "experiment_id" in not_there:
            is_in = f"the run is in the experiment {run.asked_experiment()!r}"
            why["experiment_id"] = f"{uri} has no experiment with this id; {is_in}"
        set_as = {"experiment_id": "MLFLOW_EXPERIMENT_ID"}
        texts = {name: f"{set_as.get(name, name)}={job[name]!r} is not used: {text}" for name, text in why.items()}
        for name, text in texts.items():
            self._own_events.append(self._event(f"{name}_unused", text, "warning", {name: job[name]}))
            self._events_waiting = True
        if texts:
            self._set(note=". ".join(filter(None, (self.status.note, *texts.values()))))

    def _may_create(self) -> bool:
        """Only a chief, and not one that a survivor is just replacing."""
        assert self.job is not None
        may_be_replaced = self.job["size"] > 1 and self.job.get("elastic", True)
        return bool(self.job["chief"]) and not (self.orphaned and may_be_replaced and not self.late)

    def _verdict_on(self, error: Exception) -> delivery.DeliveryVerdict:
        active = None
        if self._run is not None and getattr(error, "error_code", None) is not None:
            active = self._run.is_active()
        return delivery.decide(error, active)

    def _put_events(self) -> list[Record]:
        own = [_without_kind(record) for record in all_records(self.spool) if record.get("kind") == "event"]
        own += self._own_events
        merged: list[Record] | None = self._call(lambda run: run.put_events(own), artifact="events.jsonl")
        self._events_waiting = False
        return merged if merged is not None else own

    def _finish(self, status: str, reason: str, model_awaited: bool = False, ended_ms: int | None = None) -> None:
        """The status first: when time runs out, a missing picture is the smaller loss."""
        assert self.job is not None
        job = self.job
        self._call(lambda run: run.finish(status, reason, job["job_id"], ended_ms))
        self._put_summary()
        self._set(recorded=True)
        self._put_report(with_plots=True, model_awaited=model_awaited)

    def _put_summary(self) -> None:
        from gba_hvd.tracking.run_summary import NEEDED, summary_of

        def put(run: JobRun) -> None:
            story = run.story(lambda key: key in NEEDED, events)
            if values := summary_of(story):
                run.put_summary(values, story.n_steps, ms=story.launches[-1][1])

        events = self._put_events()
        self._call(put, artifact="the summary of the run")

    def _put_report(self, with_plots: bool = False, model_awaited: bool = False) -> None:
        """The report, and the pictures as files of their own. model_awaited: it is logged after this report

        The record of the run is complete by now, only what is made of it is missing: so it is tried again here, a few
        times, where that may help, and holds up nothing else.
        """
        problem: Exception | None = None
        for attempt in range(REPORT_ATTEMPTS):
            time.sleep(REPORT_PAUSE_S if attempt else 0.0)
            try:
                self._make_report(with_plots or self.status.report_problem is not None, model_awaited)
            except Exception as error:
                problem = error
                if not isinstance(error, Blocked | OSError) and not hasattr(error, "error_code"):  # not of the network
                    break
            else:
                self._set(report_problem=None)
                return
        assert problem is not None
        say(f"no report: {first_line(problem)}")
        self._set(report_problem=redacted(first_line(problem)))

    def _make_report(self, with_plots: bool, model_awaited: bool) -> None:
        from gba_hvd.tracking.plots import draw_plots
        from gba_hvd.tracking.report.page import page

        assert self.job is not None
        run = self._run_now()
        story = run.story(lambda key: not key.startswith("system/"), self._put_events())
        story = replace(story, model_awaited=model_awaited)
        if with_plots:
            title = self.job["run_name"] or self.job["job_id"]
            with tempfile.TemporaryDirectory(prefix="gba-hvd-") as folder:
                for file in draw_plots(story.history, story.events, title, Path(folder)):
                    run.put_file(file)
        run.put_report(story, page(story))

    def _note(self, line: SpoolLine) -> None:
        record = line.record
        behind_us = line.end <= self.status.offset  # delivered by an earlier sender of this spool
        match record.get("kind"):
            case "job":
                self.newest_job = record
                self.job = record if behind_us else self.job
            case "end":
                self._has_end = True
            case "event" if behind_us:
                self._events_waiting = True
            case "metrics" if not record.get("host"):
                self.last_step = max(self.last_step, record["step"])
                self._last_sign_s = max(self._last_sign_s, record["ms"] / 1000)
            case "broken" if not behind_us:
                say("a line of the spool is not readable, skipped")
                self._set(dropped=self.status.dropped + 1)

    def _set(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)
        with contextlib.suppress(OSError):  # a full disk: the old status stays, and more is sent twice after a crash
            write_status(self.spool, self.status)


def _as_signal(verdict: delivery.DeliveryVerdict) -> Exception:
    return Stopped(verdict.reason) if verdict.action is DeliveryAction.STOP else Blocked(verdict.reason)


def _asks_for_another_experiment(run: JobRun, job: Record) -> bool:
    """By its id where it is named so: a person may have renamed it."""
    if not job.get("names_experiment"):
        return False
    if job.get("experiment_id"):
        return bool(job["experiment_id"] != run.experiment_id)
    return bool(job["experiment"] != run.asked_experiment())


def _without_kind(record: Record) -> Record:
    return {key: value for key, value in record.items() if key != "kind"}


def say(message: str) -> None:
    with contextlib.suppress(OSError):  # a full disk: the status has what matters
        print(f"{time.strftime('%H:%M:%S')} {redacted(message)}", file=sys.stderr, flush=True)
