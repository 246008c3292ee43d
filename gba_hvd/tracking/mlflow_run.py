"""The one MLflow run of a job: found or created, written to, ended. MLflow is called here and in `mlflow_model` only.

All calls may raise; `delivery.decide` says what that means. Nothing here is imported by a training process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlflow import MlflowClient, get_tracking_uri
from mlflow.entities import Dataset, DatasetInput, Experiment, InputTag, Metric, Param, Run, RunStatus, RunTag
from mlflow.exceptions import MlflowException

from gba_hvd.errors import BadInput
from gba_hvd.tracking import mlflow_model, sqlite_file
from gba_hvd.tracking.delivery import may_report
from gba_hvd.tracking.epochs import EPOCH
from gba_hvd.tracking.experiment import DEFAULT, AskedExperiment
from gba_hvd.tracking.records import PAGE_QUERY, LogBatch, Point, Record, merge_events
from gba_hvd.tracking.recovery_records import (
    APPLIED,
    RESUMED_FROM,
    Resume,
    in_force,
    pointers,
    resumes_of_points,
    superseded_words,
)
from gba_hvd.tracking.report.run_note import OWN, run_note
from gba_hvd.tracking.run_history import DATA_FILE, RunHistory
from recovery.redaction import redacted

T = TypeVar("T")
JOB_TAG = "gba_hvd.job_id"
CHIEF_TAG = "gba_hvd.chief"  # stamp of the process that reports for the run, see delivery.may_report
REASON_TAG = "gba_hvd.status_reason"
CHANGED = "gba_hvd.now."  # tags gba_hvd.now.NAME: of parameters that this launch has with another value, or ...
NOT_SET = "(not set)"  # ... does not have
LOGGED_TAG = "gba_hvd.params."  # tags gba_hvd.params.N: names of parameters that launches of the job logged (JSON)
EXPERIMENT_TAG = "gba_hvd.experiment"  # the same of the experiment
RUN_NAME_TAG = "gba_hvd.run_name"  # as the first launch asked for it: a person may rename the run
_MAX_TAGS, _MAX_TAG_CHARS = 100, 4000  # of one call, in one tag
CONTINUES_TAG = "gba_hvd.continues_run"  # the run of another job, from whose checkpoint this one resumed first
SUPERSEDED_TAG = "gba_hvd.superseded_by"
SUPERSEDED_STEPS_TAG = "gba_hvd.superseded_steps"  # of which steps, and from before when, the curves have lost training
PARENT_TAG = "mlflow.parentRunId"  # MLflow's own
_NO_SUCH_RUN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # the latter where it cannot be an id
NOTE_TAG = "mlflow.note.content"  # what MLflow shows as a run's description
EVENTS_FILE = "events.jsonl"
REPORT_FILE = "report.html"
CHECKPOINTS_FILE = "checkpoints.json"  # where they are; what is in them stays there


class RunNotThere(Exception):
    """The chief has not created the job's run yet; only a chief may."""


class ExperimentDeleted(Exception):
    """No run can be made in the job's experiment until a person has acted."""


class JobRun:
    """A run this process may write to; in one that others wrote to before, points they have sent are not repeated."""

    def __init__(self, client: MlflowClient, run: Run, stamp: str, joined: bool, uri: str = "") -> None:
        self._uri = uri
        self.run_id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id
        self._client = client
        self.named: str = run.data.tags.get(RUN_NAME_TAG) or run.info.run_name or ""  # by its first launch
        self._experiment = run.data.tags.get(EXPERIMENT_TAG)
        self._stamp = stamp
        self._params: dict[str, str] = dict(run.data.params)
        # Of points that were there before: metric -> step -> times. None in a run of our own.
        self._known: dict[str, dict[int, list[int]]] | None = {} if joined else None
        self._resumes: list[Resume] | None = None
        self._changed: set[str] = set()  # parameters of which this launch has reported another value
        self.continues: Run | None = None  # of another job, where this one had its run made now

    def asked_experiment(self) -> str:
        """The experiment that its first launch asked for; of a run of an older version, the one that it is in."""
        name = self._experiment or self._client.get_experiment(self.experiment_id).name
        return str(name)

    def is_active(self) -> bool | None:
        """False when the run was deleted, None when the server cannot be asked."""
        try:
            stage: str = self._client.get_run(self.run_id).info.lifecycle_stage
        except Exception:  # any failure to ask is the same answer: not known
            return None
        return stage == "active"

    def send(self, batch: LogBatch) -> list[str]:
        """Log a batch. Parameters the run has already stay, as MLflow has it; those that differ now are tags `CHANGED`.

        Returns their names.
        """
        params = {key: text for key, text in batch.params.items() if key not in self._params}
        changed = [key for key, text in batch.params.items() if self._params.get(key, text) != text]
        again = [key for key in batch.params if key in self._changed and key not in changed]  # as it was at first
        points = [point for point in batch.points if not self._has(point)]
        tags = dict(batch.tags)
        if (changed or again) and self.may_report():
            tags |= {f"{CHANGED}{key}": batch.params[key] for key in (*changed, *again)}
            self._changed.update(changed)
        if points or params or tags:
            self._client.log_batch(
                self.run_id,
                metrics=[Metric(p.key, p.value, p.ms, p.step) for p in points],
                params=[Param(key, text) for key, text in params.items()],
                tags=[RunTag(key, text) for key, text in tags.items()],
                synchronous=True,
            )
        self._params |= params
        if any(point.key == RESUMED_FROM for point in batch.points):  # also where it is sent again
            self._tag_superseded(resumes_of_points(self._history_of(RESUMED_FROM)), self._history_of(APPLIED))
        return changed

    def _tag_superseded(self, resumes: Sequence[Resume], applied: Sequence[Point]) -> None:
        if words := superseded_words(resumes, applied):
            self.set_tags({SUPERSEDED_STEPS_TAG: words})

    def nest_under(self, parent_run_id: str) -> bool:
        """Make it a child of that run; False where there is none."""
        parent = _unless_absent(lambda: self._client.get_run(parent_run_id))
        if parent is None or parent.info.lifecycle_stage != "active":
            return False
        self.set_tags({PARENT_TAG: parent_run_id})
        return True

    def note_settings(self, names: Sequence[str]) -> None:
        """This launch has parameters of these names: others that the job logged are tags `CHANGED` with `NOT_SET`.

        Parameters that were logged by someone else stay as they are.
        """
        tags = self._client.get_run(self.run_id).data.tags
        if tags.get(CHIEF_TAG) != self._stamp:
            return
        lists = [json.loads(text) for tag, text in tags.items() if tag.startswith(LOGGED_TAG)]
        before = {name for one in lists for name in one}
        noted = {f"{CHANGED}{name}": NOT_SET for name in sorted(before - set(names))}
        parts: list[list[str]] = []
        for name in sorted(set(names) - before):
            if not parts or len(json.dumps([*parts[-1], name])) > _MAX_TAG_CHARS:
                parts.append([])
            parts[-1].append(name)
        self.set_tags(noted | {f"{LOGGED_TAG}{i}": json.dumps(part) for i, part in enumerate(parts, len(lists))})

    def _has(self, point: Point) -> bool:
        if self._known is None or point.key.startswith("system/"):
            return False
        if self._resumes is None:
            self._resumes = resumes_of_points(self._history_of(RESUMED_FROM))
        if point.key not in self._known:
            times: dict[int, list[int]] = {}
            for one in self._history_of(point.key):
                times.setdefault(one.step, []).append(one.ms)
            self._known[point.key] = times
        known = self._known[point.key].get(point.step, [])
        if point.key == RESUMED_FROM:  # from one checkpoint a job may resume several times
            self._resumes += resumes_of_points([point])
            return point.ms in known
        if point.key == EPOCH:  # one ends and the next begins at one step
            return point.ms in known
        # A job that resumed has measured again, at that step and later ones, what the run has from before.
        resumes = [one for one in self._resumes if one.ms <= point.ms]
        return any(not any(one.repeats(point.step, ms) for one in resumes) for ms in known)

    def claim(self, stamp: str) -> None:
        """Become the process that reports for the run, unless a later chief already does; then the run is running.

        Removes the reason of the end and the changed settings that an earlier chief reported.
        """
        self._stamp = stamp
        run = self._client.get_run(self.run_id)
        if not may_report(self._stamp, run.data.tags.get(CHIEF_TAG)):
            return
        if run.data.tags.get(CHIEF_TAG) != stamp:
            for tag in run.data.tags:
                if tag == REASON_TAG or tag.startswith(CHANGED):
                    self._client.delete_tag(self.run_id, tag)
        self._client.set_tag(self.run_id, CHIEF_TAG, self._stamp)
        if run.info.status != "RUNNING":
            self._client.update_run(self.run_id, status="RUNNING")

    def may_report(self) -> bool:
        return bool(self._client.get_run(self.run_id).data.tags.get(CHIEF_TAG) == self._stamp)

    def put_text(self, path: str, text: str) -> None:
        self._client.log_text(self.run_id, text, path)

    def put_data(self, text: str) -> None:
        """What the job says of its data (JSON): an artifact, and the run's datasets, one for each part (train, ...)."""
        self.put_text(DATA_FILE, text)
        found = json.loads(text)
        parts = {str(name): one for name, one in found.items() if isinstance(one, dict)} or {"data": found}
        inputs = []
        for name, one in parts.items():
            about = json.dumps(one, sort_keys=True)
            digest = hashlib.sha256(about.encode()).hexdigest()[:8]
            source = json.dumps({"uri": str(one.get("dir", ""))})
            dataset = Dataset(name, digest, "local", source, profile=about[:16_000])
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", name)]))
        self._client.log_inputs(self.run_id, inputs)

    def put_summary(self, values: Mapping[str, float], step: int, ms: int) -> None:
        """Numbers of the whole job: another launch replaces them, also where it ends at the same step."""
        points = [Metric(name, value, ms, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=points, synchronous=True)

    def put_report(self, story: RunHistory, html: str) -> None:
        """The report as an artifact, and its first part as the run's description, unless a person has written one."""
        self.put_text(REPORT_FILE, html)
        self._tag_superseded(story.resumes, story.applied)  # points of the launch before may have come later
        note = self._client.get_run(self.run_id).data.tags.get(NOTE_TAG, "")
        if not note or OWN in note:
            address = f"#/experiments/{self.experiment_id}/runs/{self.run_id}/artifacts/{REPORT_FILE}{PAGE_QUERY}"
            self.set_tags({NOTE_TAG: run_note(story, address)[:8000]})

    def put_file(self, file: Path) -> None:
        self._client.log_artifact(self.run_id, str(file))

    def log_model(self, folder: Path) -> str:
        """See `mlflow_model`."""
        return mlflow_model.log_model(self._uri, self.run_id, folder)

    def register_model(self, folder: Path, model_uri: str, on_alias: Callable[[str], object]) -> str:
        """Register a logged model, if its folder names a registered one; returns the version, or nothing."""
        facts = mlflow_model.read_facts(folder)
        return mlflow_model.register(self._uri, model_uri, facts, on_alias) if facts["registered_model_name"] else ""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        given = [RunTag(key, text) for key, text in tags.items()]
        for i in range(0, len(given), _MAX_TAGS):
            self._client.log_batch(self.run_id, tags=given[i : i + _MAX_TAGS], synchronous=True)

    def events(self) -> list[Record]:
        """Those that were delivered so far."""
        return [json.loads(line) for line in self._text(EVENTS_FILE).splitlines()]

    def _text(self, path: str) -> str:
        """Of an artifact; empty where there is none."""
        if all(info.path != path for info in self._client.list_artifacts(self.run_id)):
            return ""
        with tempfile.TemporaryDirectory(prefix="gba-hvd-") as folder:
            return Path(self._client.download_artifacts(self.run_id, path, folder)).read_text()

    def put_events(self, events: list[Record]) -> list[Record]:
        """Merge `events` with those of earlier chiefs; returns all of them."""
        earlier = self.events()
        merged = merge_events(earlier, events)
        if (saved := pointers(merged)) != pointers(earlier):
            self.put_text(CHECKPOINTS_FILE, json.dumps(saved, indent=2) + "\n")
        if merged != earlier:
            self.put_text(EVENTS_FILE, "".join(json.dumps(event) + "\n" for event in merged))
        return merged

    def history(self, wanted: Callable[[str], bool]) -> dict[str, list[Point]]:
        """Points of the metrics whose name is wanted, by step, without those superseded by a resume."""
        names = self._client.get_run(self.run_id).data.metrics
        resumes = resumes_of_points(self._history_of(RESUMED_FROM)) if RESUMED_FROM in names else []
        return {key: in_force(self._history_of(key), resumes) for key in sorted(names) if wanted(key)}

    def story(self, wanted: Callable[[str], bool], events: list[Record] | None = None) -> RunHistory:
        """All that the run holds, of the metrics that are wanted. events: where they are known"""
        run = self._client.get_run(self.run_id)
        info, tags = run.info, run.data.tags
        now = {tag.removeprefix(CHANGED): text for tag, text in tags.items() if tag.startswith(CHANGED)}
        return RunHistory(
            title=info.run_name or info.run_id,
            source=f"MLflow run {info.run_id} at {redacted(self._uri)}",
            job_id=tags.get(JOB_TAG, ""),
            status=info.status,
            reason=tags.get(REASON_TAG, ""),
            started_ms=info.start_time,
            ended_ms=info.end_time,
            params={key: text for key, text in {**run.data.params, **now}.items() if text != NOT_SET or key not in now},
            first_params={key: run.data.params.get(key, "") for key in now},
            history=self.history(wanted),
            applied=self._history_of(APPLIED) if APPLIED in run.data.metrics else (),
            events=tuple(self.events() if events is None else events),
            data=json.loads(self._text(DATA_FILE) or "{}"),
        )

    def _history_of(self, key: str) -> list[Point]:
        history = self._client.get_metric_history(self.run_id, key)
        return [Point(key, one.value, one.timestamp, one.step) for one in history]

    def finish(self, status: str, reason: str, job_id: str, ended_ms: int | None = None) -> None:
        """Set the final status, and the time of the end, by default now.

        Other runs of this job that were left running are closed as superseded.
        """
        if reason:
            self.set_tags({REASON_TAG: reason[:4000]})
        self._client.set_terminated(self.run_id, status, ended_ms)
        for other in runs_of(self._client, self.experiment_id, job_id):
            if other.info.run_id != self.run_id and other.info.status == "RUNNING":
                self._client.set_tag(other.info.run_id, SUPERSEDED_TAG, self.run_id)
                self._client.set_terminated(other.info.run_id, RunStatus.to_string(RunStatus.KILLED))


def open_run(uri: str, job: Mapping[str, Any], may_create: Callable[[], bool]) -> JobRun:
    """Find the job's run by its id, else by the job's id, else create it.

    A run of another job, whose checkpoint this one resumes from, is not written to: its id is a tag of the new run.
    Raises RunNotThere when there is none and `may_create()` says no, ExperimentDeleted where the experiment was,
    UnusableDatabase.
    """
    with _writer(uri, may_make=may_create()) as client:
        known, other = _known_run(client, job), None
        if known is not None and known.data.tags.get(JOB_TAG, job["job_id"]) != job["job_id"]:
            known, other = None, known
        if known is not None:  # also where this launch asks for another experiment
            return JobRun(client, known, job["stamp"], joined=True, uri=uri)
        experiment_id = _experiment(client, job["experiment"], may_create)
        if found := runs_of(client, experiment_id, job["job_id"]):
            return JobRun(client, found[0], job["stamp"], joined=True, uri=uri)
        if not may_create():
            raise RunNotThere(f"no run of job {job['job_id']} in experiment {job['experiment']!r} yet")
        tags = {JOB_TAG: job["job_id"], CHIEF_TAG: job["stamp"], "mlflow.user": job["user"]}
        tags |= {"mlflow.source.name": job["source"], "mlflow.source.type": "LOCAL", RUN_NAME_TAG: job["run_name"]}
        tags |= {EXPERIMENT_TAG: job["experiment"]}
        if continues := other.info.run_id if other is not None else _continued(client, experiment_id, job):
            tags[CONTINUES_TAG] = continues
        mine = client.create_run(experiment_id, start_time=job["ms"], tags=tags, run_name=job["run_name"])
        runs = runs_of(client, experiment_id, job["job_id"])
        if len(runs) > 1 and not (may_create() and runs[0].info.run_id == mine.info.run_id):
            # Another chief created one at the same moment. Ours is still empty, so it is ours that goes.
            client.delete_run(mine.info.run_id)
            others = [run for run in runs if run.info.run_id != mine.info.run_id]
            return JobRun(client, others[0], job["stamp"], joined=True, uri=uri)
        made = JobRun(client, mine, job["stamp"], joined=False, uri=uri)
        made.continues = other
        return made


def read_history(uri: str, name: str, wanted: Callable[[str], bool]) -> RunHistory | None:
    """What a run holds: by its id, the id of its job, or its name (the latest, where several have it); None: no run."""
    client = _reader(uri)
    run = None if client is None else _run_called(client, name)
    return None if client is None or run is None else JobRun(client, run, "", joined=True, uri=uri).story(wanted)


def run_ids_called(uri: str, name: str) -> list[str]:
    """Of the run with this id or job id (the latest of that job), or else of all with this name, newest first."""
    client = _reader(uri)
    run = None if client is None else _run_called(client, name)
    if client is None or run is None:
        return []
    if name in (run.info.run_id, run.data.tags.get(JOB_TAG)):
        return [str(run.info.run_id)]
    search, order = f"attributes.run_name = '{_quotable(name)}'", ["attributes.start_time DESC"]
    return [str(one.info.run_id) for one in client.search_runs(_experiments(client), search, order_by=order)]


def ask(uri: str) -> bool:
    """Whether there is a store; it may be a file that is made later. Raises MlflowException where MLflow does not
    answer, BadInput."""
    if (client := _reader(uri)) is not None:
        client.search_experiments(max_results=1)
    return client is not None


@contextlib.contextmanager
def run_of_its_own(uri: str, experiment: str, name: str, run_id: str | None) -> Iterator[str]:
    """The id of a run: of a new one, which ends with this context, unless there is one."""
    if run_id is not None:
        yield run_id
        return
    with _writer(uri) as client:
        found = client.get_experiment_by_name(experiment)
        experiment_id = client.create_experiment(experiment) if found is None else found.experiment_id
        run_id = client.create_run(experiment_id, run_name=name).info.run_id
    try:
        yield run_id
    except BaseException:
        client.set_terminated(run_id, "FAILED")
        raise
    client.set_terminated(run_id, "FINISHED")


def newest_runs(uri: str, at_most: int = 10) -> list[str]:
    """What the newest runs are called, "id  name  job", newest first."""
    client = _reader(uri)
    if client is None:
        return []
    found = client.search_runs(_experiments(client), max_results=at_most, order_by=["attributes.start_time DESC"])
    return [f"{run.info.run_id}  {run.info.run_name}  {run.data.tags.get(JOB_TAG, '')}".rstrip() for run in found]


def _experiments(client: MlflowClient) -> list[str]:
    return [experiment.experiment_id for experiment in client.search_experiments()]


def _run_called(client: MlflowClient, name: str) -> Run | None:
    if (run := _unless_absent(lambda: client.get_run(name))) is not None:
        return run
    experiments = _experiments(client)
    quoted = _quotable(name)
    for search in (f"tags.`{JOB_TAG}` = '{quoted}'", f"attributes.run_name = '{quoted}'"):
        runs = client.search_runs(experiments, search, max_results=1, order_by=["attributes.start_time DESC"])
        if runs:
            return runs[0]
    return None


def _unless_absent(get: Callable[[], T]) -> T | None:
    """What MLflow has under an id; None: nothing."""
    try:
        return get()
    except MlflowException as error:
        if error.error_code not in _NO_SUCH_RUN:
            raise
        return None


def _quotable(name: str) -> str:
    return name.replace("'", "")


def experiment_for(uri: str, name: str | None) -> str:
    """The name of the experiment for a new run. Raises BadInput where $MLFLOW_EXPERIMENT_ID is not there."""
    asked = AskedExperiment.of(name)
    if asked.id is None:
        return asked.name or DEFAULT
    found = experiment_name(uri, asked.id)
    if found is None:
        raise BadInput(f"MLFLOW_EXPERIMENT_ID={asked.id!r}: {redacted(uri)} has no experiment with this id")
    return found


def experiment_name(uri: str, experiment_id: str) -> str | None:
    """None where MLflow has no experiment with this id, or has deleted it."""
    client = _reader(uri)
    found = _unless_absent(lambda: client.get_experiment(experiment_id)) if client else None
    return str(found.name) if found and found.lifecycle_stage == "active" else None


def resolved_uri(uri: str | None) -> str:
    """The tracking URI as MLflow understands it here, with an absolute path when it is a local file."""
    uri = uri or get_tracking_uri()
    file, (_, mark, query) = sqlite_file.file_of(uri), uri.partition("?")
    return f"sqlite:///{file.resolve()}{mark}{query}" if file is not None else uri


def runs_of(client: MlflowClient, experiment_id: str, job_id: str) -> list[Run]:
    """Every run tagged with this job, the first one first."""
    runs = client.search_runs([experiment_id], f"tags.`{JOB_TAG}` = '{job_id}'")
    return sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))


def _continued(client: MlflowClient, experiment_id: str, job: Mapping[str, Any]) -> str | None:
    """The run of the job that this one resumes from, if that is another one: a checkpoint may be older than its run."""
    other = job.get("continues")
    if not other or other["run"]:
        return other and str(other["run"])
    found = runs_of(client, experiment_id, other["job"])
    return str(found[0].info.run_id) if found else None


def _known_run(client: MlflowClient, job: Mapping[str, Any]) -> Run | None:
    """The run that earlier launches or workers have reported to."""
    if job.get("run_id"):
        try:
            return client.get_run(job["run_id"])
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise  # the server is in trouble; the run may well be there
    return None


def _experiment(client: MlflowClient, name: str, may_create: Callable[[], bool]) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return _active(experiment)
    if not may_create():
        raise RunNotThere(f"no experiment {name!r} yet")
    try:
        return str(client.create_experiment(name))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        raise RunNotThere(f"experiment {name!r} was there and is gone")
    return _active(experiment)


def _active(experiment: Experiment) -> str:
    """Its id."""
    if experiment.lifecycle_stage != "active":
        raise ExperimentDeleted(
            f"the experiment {experiment.name!r} was deleted in MLflow: `mlflow experiments restore --experiment-id "
            f"{experiment.experiment_id}` brings it back, and then these records can be sent. For another launch name "
            "another experiment: MLFLOW_EXPERIMENT_NAME, or MLflowCallback(experiment=)"
        )
    return str(experiment.experiment_id)


@contextlib.contextmanager
def _writer(uri: str, may_make: bool = True) -> Iterator[MlflowClient]:
    """A client to write with, alone in the folder of a SQLite file, which is made where it is not there.

    Raises RunNotThere where it may not be made.
    """
    file = sqlite_file.file_of(uri)
    if file is None:
        yield MlflowClient(tracking_uri=uri)
        return
    if may_make:
        file.parent.mkdir(parents=True, exist_ok=True)
    elif sqlite_file.is_missing(file):
        raise RunNotThere(f"{file} is not there; on several hosts use a tracking server or a shared folder")
    with sqlite_file.one_at_a_time(file):
        if sqlite_file.is_missing(file):
            sqlite_file.make(file, lambda new: MlflowClient(tracking_uri=new))
        yield sqlite_file.opened(file, lambda: MlflowClient(tracking_uri=uri))


def _reader(uri: str) -> MlflowClient | None:
    """A client that neither makes nor upgrades a database: None where there is none.

    Raises BadInput for one that cannot be read as it is.
    """
    file = sqlite_file.file_of(uri)
    if file is None:
        return MlflowClient(tracking_uri=uri)
    if not (tables := sqlite_file.tables_of(file)):
        return None
    import mlflow.store.db.utils  # noqa: F401  so that all tables are known
    from mlflow.store.db.base_sql_model import Base

    if missing := sorted(set(Base.metadata.tables) - tables):
        why = f"it lacks {len(missing)} tables, such as {missing[0]}"
        raise sqlite_file.unusable(file, why, file.stat().st_mtime)
    return sqlite_file.opened(file, lambda: MlflowClient(tracking_uri=uri))
