"""`MLflowCallback`: what the training loop sees of MLflow. It writes records to the spool and looks after the sender.

Nothing here talks to MLflow or imports it.
"""

from __future__ import annotations

import dataclasses
import getpass
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gba_hvd.callbacks import OWN_POINT, Callback, Event, Job, StepRecord
from gba_hvd.errors import BadInput
from gba_hvd.mode_names import MODES
from gba_hvd.tracking import gauges, recovery_records
from gba_hvd.tracking.best_metrics import BestMetrics
from gba_hvd.tracking.epochs import EPOCH, is_quality
from gba_hvd.tracking.experiment import DEFAULT, AskedExperiment
from gba_hvd.tracking.plots import DENSE_LR, GRAD_NORM, LOSS, MODE, SCRIPT_LRS, THROUGHPUT, WORKERS
from gba_hvd.tracking.records import (
    SCRIPT,
    Record,
    flatten,
    job_params,
    metric_key,
    metrics_records,
    own_run_words,
    params_records,
    tags_records,
)
from gba_hvd.tracking.spool import (
    SpoolWriter,
    check_folder,
    default_folder,
    left_behind,
    model_path,
    read_status,
)
from gba_hvd.tracking.spool_delivery import SpoolDelivery, how_to_send, say
from recovery.redaction import redacted_values

WARNINGS = "warnings"  # metric: events of level "warning" so far
WARNING_TAG = "gba_hvd.warning"  # the newest of them; all are in events.jsonl
_STATUS = {"NOT_SAVED": "FAILED"}  # what a run can be of what a job can be; the reason says more
_ARGUMENT_OF_TAG = {"mlflow.runName": "run_name", "mlflow.parentRunId": "parent_run_id"}
_numbers = itertools.count()


class ModelLogger(Protocol):
    """Writes the trained model for the sender: `gba_hvd.LogModel`."""

    @property
    def of(self) -> str:
        """Which model: "last" or "best"."""

    def check(self, model: Any) -> None:
        """Raises BadInput for what would be refused at the end of the training."""

    def check_job(self, settings: Mapping[str, Any]) -> None:
        """Raises BadInput for what a job with these settings (`Job.settings`) cannot log."""

    def write(self, model: Any, folder: Path, step: int, checkpoint: Mapping[str, Any] | None) -> int:
        """Write what `mlflow_model` reads into a new folder; returns its bytes."""


class MLflowCallback(Callback):
    """One MLflow run per job, through failures of its workers and of the tracking server.

    run_name: default the job's name: `TorchState(name=)`, else $GBA_HVD_JOB_NAME, else the name of the script. Of the
        first launch; another one in a later launch of the job is warned of (`run_name_unused`).
    experiment: default $MLFLOW_EXPERIMENT_NAME, else that of $MLFLOW_EXPERIMENT_ID, else "gba-hvd". As `run_name`:
        `experiment_unused`. An id that is not there is warned of (`experiment_id_unused`).
    tracking_uri: default MLflow's own ($MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working directory).
    params: nested values, such as `vars(args)`, logged as parameters together with the job's settings and `config`.
        Where the job has a setting of that name with another value, the script's is `script.` and the name.
    config, data: the model's configuration and the data's description, kept as config.json and data.json; the
        values of config are parameters too. Each mapping in data is a dataset of the run, under its key ("train", ...)
        and at the URI in its entry "dir"; without mappings, data is one dataset.
    tags: tags of the run, of the newest launch.
    parent_run_id: the run, of the same tracking server, that this one is nested under: MLflow's tag
        `mlflow.parentRunId`. One that is not there is warned of (`parent_run_id_unused`).
    log_every_steps: a point per so many steps; its loss and throughput are means over them.
    system_metrics, system_every_s: CPU, memory, network and /dev/shm of every host.
    spool_dir: default $GBA_HVD_SPOOL_DIR, else ./gba-hvd-spool; removed when everything is sent. The job is refused
        where it cannot be written.
    flush_timeout_s: how long the end of training may wait for the last records to be sent. A model that is logged has
        longer, while MLflow answers: a second for each 8 MiB, then two minutes. 0: it has no more than the former.
    log_model: a `gba_hvd.LogModel`: log the trained model with the run, and register it.

    Raises BadInput where $MLFLOW_RUN_ID names another run than `parent_run_id`: a job has a run of its own.
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        params: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
        parent_run_id: str | None = None,
        log_every_steps: int = 10,
        system_metrics: bool = True,
        system_every_s: float = 10.0,
        spool_dir: str | Path | None = None,
        spool_limit_bytes: int = 1 << 30,
        flush_timeout_s: float = 30.0,
        log_model: ModelLogger | None = None,
    ) -> None:
        if log_every_steps < 1:
            raise BadInput(f"MLflowCallback: log_every_steps must be at least 1, not {log_every_steps}")
        if importlib.util.find_spec("mlflow") is None:
            raise ModuleNotFoundError("MLflowCallback needs mlflow: pip install 'mlflow>=3.7'", name="mlflow")
        _refuse_foreign_run(os.environ.get("MLFLOW_RUN_ID"), parent_run_id)
        self._tags = _checked_tags(tags or {})
        self._parent_run_id = parent_run_id
        self._experiment = AskedExperiment.of(experiment)
        self._tracking_uri = tracking_uri
        self._run_name = run_name
        self._params = dict(params or {})
        self._artifacts = {"config.json": config, "data.json": data}
        self._log_every_steps = log_every_steps
        self._system_every_s = system_every_s if system_metrics else 0.0
        self._spool_dir = Path(spool_dir or default_folder()).absolute()
        self._spool_limit_bytes = spool_limit_bytes
        self._flush_timeout_s = flush_timeout_s
        self._log_model = log_model
        self._model: Any = None
        self._checkpoint: Mapping[str, Any] | None = None  # the data of the newest event of one
        self._resumed_step = -1
        self._best_checkpoint: Mapping[str, Any] | None = None  # the same of the first one of the best model
        self._step = 0

        self._job: Job | None = None
        self._run_id: str | None = None
        self._run_of: str | None = None  # the job that has this run
        self._continues: dict[str, str | None] | None = None  # the job whose checkpoint this one resumes from; its run
        self._stamp = ""
        self._writer: SpoolWriter | None = None
        self._delivery: SpoolDelivery | None = None  # of what it writes
        self._logged_step = -1
        self._mode: str | None = None
        self._workers: int | None = None  # of the newest step
        self._seen_step: int | None = None
        self._newest_ms = self._resumed_ms = 0  # of points and resumes; of the newest resume
        self._since = _Interval()
        self._readings = gauges.Readings()
        # Of a worker that is not the chief, since the newest world: what it reports where the chief has died meanwhile.
        self._unreported: deque[Event] = deque(maxlen=64)
        self._unreported_metrics: deque[Record] = deque(maxlen=64)
        self._ended = False
        self._reported_left_behind = False
        self._n_warnings = 0
        self._best = BestMetrics()
        self._epoch: int | None = None
        self._lrs: dict[str, float] = {}  # the newest learning rates that are on record
        self._script_logs_lr = False

    @property
    def run_id(self) -> str | None:
        """The id of the job's run, on rank 0; None on the others, and until MLflow has made the run, seconds after the
        start."""
        return self._known_run_id() if self._job is not None and self._job.is_chief else None

    @property
    def uses_last_checkpoint(self) -> bool:  # type: ignore[override]
        """A logged model has its name, and may be made from it."""
        return self._log_model is not None

    # The training thread calls these.

    def on_model(self, model: Any) -> None:
        if self._log_model is not None:
            self._log_model.check(model)
            self._model = model

    def on_start(self, is_chief: bool, is_host_leader: bool) -> None:
        if not self._writes(is_chief, is_host_leader):
            return
        try:
            check_folder(self._spool_dir)
        except OSError as error:
            raise BadInput(
                f"MLflowCallback cannot write its records to {self._spool_dir}: {error.strerror or error}. Name a "
                "folder that can be written: GBA_HVD_SPOOL_DIR, or MLflowCallback(spool_dir=)"
            ) from error

    def _writes(self, is_chief: bool, is_host_leader: bool) -> bool:
        """Whether a worker has records of its own."""
        return is_chief or (is_host_leader and self._system_every_s > 0)

    def on_job(self, job: Job) -> None:
        if self._log_model is not None:
            self._log_model.check_job(job.settings)
        was_chief = self._job is not None and self._job.is_chief and not self._ended
        if self._ended:
            self._open_again()
        self._job = job
        self._leave_run_of_another()
        self._since = _Interval()
        if not self._writes(job.is_chief, job.is_host_leader) and self._writer is None:
            self._forget_unreported()
            return
        if job.is_chief and not was_chief:
            self._stamp = f"{_now_ms()}:{job.host}:{os.getpid()}"
        self._write(
            {
                "kind": "job",
                **{"job_id": metric_key(job.job_id), "rank": job.rank, "size": job.size, "host": job.host},
                **{"chief": job.is_chief, "leads_host": job.is_host_leader, "stamp": self._stamp, "ms": _now_ms()},
                **{
                    "experiment": self._experiment.name or DEFAULT,
                    "experiment_id": self._experiment.id,
                    "tracking_uri": self._tracking_uri,
                    "run_name": self._run_name or job.name or job_name(),
                    "names_run": self._run_name is not None,
                    "names_experiment": self._experiment.is_asked,
                    "parent_run_id": self._parent_run_id,
                },
                **{"run_id": self._known_run_id(), "system_every_s": self._system_every_s},
                **{"continues": self._continues},
                **{"elastic": os.environ.get("HOROVOD_ELASTIC") == "1"},
                **{"user": _user(), "source": sys.argv[0] or "python"},
            }
        )
        if job.is_chief and not was_chief:
            if not self._reported_left_behind:
                self._reported_left_behind = True
                self._report_left_behind()
            if not self._lrs and DENSE_LR in job.settings:
                self._lrs[DENSE_LR] = job.settings[DENSE_LR]
            config = self._artifacts["config.json"] or {}
            self._write(*tags_records(self._tags))
            in_use = {name: value for name, value in job.settings.items() if name not in job.idle_settings}
            params, renamed = job_params(redacted_values(in_use), redacted_values({**config, **self._params}))
            if renamed:
                say(_renamed_words(renamed))
            self._write(*params_records(params))
            for path, values in self._artifacts.items():
                if values is not None:
                    text = json.dumps(redacted_values(values), indent=2, default=str) + "\n"
                    self._write({"kind": "artifact", "path": path, "text": text})
            while self._unreported:  # what the previous chief may not have reported
                self._write_event(self._unreported.popleft())
            self._write(*self._unreported_metrics)  # the sender leaves out those that the run has
        self._forget_unreported()
        assert self._delivery is not None
        self._delivery.look(job.is_chief)

    def _open_again(self) -> None:
        """The job continues in this process: with another spool, whose sender writes to the same run."""
        self._run_id = self._known_run_id()
        self._ended, self._writer, self._delivery = False, None, None

    def _leave_run_of_another(self) -> None:
        """Where the checkpoint is of a job with another id: this one gets a run of its own."""
        assert self._job is not None
        own = metric_key(self._job.job_id)
        if self._run_of is not None and self._run_of != own:
            if self._job.is_chief:
                say(own_run_words(own, self._run_of))
            self._continues = {"job": self._run_of, "run": self._run_id}
            self._run_id, self._n_warnings = None, 0
        self._run_of = own

    def _forget_unreported(self) -> None:
        self._unreported.clear()
        self._unreported_metrics.clear()

    def on_step(self, record: StepRecord) -> None:
        self._epoch, self._step = record.epoch, record.step
        before = self._since.last
        if before is not None and (before.mode, before.workers) != (record.mode, record.workers):
            self._write_point(before)  # no point is the mean of two modes, or of what other workers did
        self._since.add(record)
        # In asynchronous modes a worker may receive several steps at once.
        due = record.step - record.step % self._log_every_steps
        seen = record.step - 1 if self._seen_step is None else self._seen_step
        if seen < due:
            self._write_point(record)
        self._write_change_of_workers(record)
        self._seen_step = record.step

    def _write_change_of_workers(self, record: StepRecord) -> None:
        """A point of the number alone, at the first step of others: they may be gone before the next one is due."""
        before, self._workers = self._workers, record.workers
        is_chief = self._job is not None and self._job.is_chief
        if is_chief and before not in (None, record.workers) and record.step > self._logged_step:
            self._write(*metrics_records(record.step, self._point_ms(), {WORKERS: record.workers}))

    def _write_point(self, record: StepRecord) -> None:
        since, self._since = self._since, _Interval()
        job = self._job
        if job is None or self._writer is None or record.step <= self._logged_step:
            return
        values: dict[str, float] = {}
        if job.is_chief:
            values = {**since.values(), EPOCH: record.epoch, WORKERS: record.workers}
            values[recovery_records.APPLIED] = record.samples_applied
            if not self._script_logs_lr:
                lrs = _named(record.dense_lrs, by_group=_group(0) in self._lrs)
                moved = {name: lr for name, lr in lrs.items() if lr != self._lrs.get(name)}
                self._lrs |= moved
                values |= moved
            if record.mode in MODES:
                values[MODE] = MODES.index(record.mode)
            if record.mode != self._mode:
                self._mode = record.mode
                self._tag("gba_hvd.mode", record.mode)
        self._write({"kind": "metrics", "step": record.step, "ms": self._point_ms(), "values": values})
        self._logged_step = record.step
        if self._delivery is not None and self._delivery.is_due:
            self._delivery.look(job.is_chief)

    def on_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._job is None:
            return
        values = {}
        self._script_logs_lr = self._script_logs_lr or any(name in metrics for name in SCRIPT_LRS)
        for key, value in metrics.items():
            try:
                values[key] = float(value)
            except (TypeError, ValueError):
                if self._job.is_chief:
                    say(f"metric {key!r} is {type(value).__name__} {value!r}, not a number: not logged")
        if self._epoch is not None and any(is_quality(key) for key in values):
            values.setdefault(EPOCH, self._epoch)  # so that it is known which one was evaluated
        values |= self._best.add(step, self._epoch, values)
        records = metrics_records(step, self._point_ms(), values)
        if self._job.is_chief:
            self._write(*records)
        else:
            self._unreported_metrics.extend(records)

    def on_event(self, event: Event) -> None:
        if event.kind == gauges.EVENT:
            self._take_readings(event)
            return
        if event.kind == "resumed":
            event = self._after_all_points(event)
            self._resumed_step, self._resumed_ms = event.step, recovery_records.ms_of({"unix_s": event.unix_s})
        elif recovery_records.ms_of({"unix_s": event.unix_s}) < self._resumed_ms:  # of a clock that was set back
            event = _at_ms(event, self._resumed_ms)
        if event.kind == "checkpoint":
            self._note_checkpoint(event.data)
        if event.kind == "learning_rates_set":
            self._write_settings(event.data["settings"])
        if event.kind == "resumed":
            self._readings.begin(event.data)
        if event.kind == "resumed" and event.step < self._logged_step:  # these steps come again (full recovery)
            self._logged_step = self._seen_step = event.step
            self._since = _Interval()
        if self._job is not None and self._job.is_chief:
            self._write_event(event)
        else:
            self._unreported.append(event)

    def _point_ms(self) -> int:
        """Now, unless a point or a resume has a later time already."""
        self._newest_ms = max(self._newest_ms, _now_ms())
        return self._newest_ms

    def _after_all_points(self, resumed: Event) -> Event:
        """With a time after that of every point so far: it supersedes only earlier ones, and they may be of the same
        millisecond, or of a clock that was set back since."""
        earliest_ms = self._newest_ms + 1
        self._newest_ms = max(earliest_ms, recovery_records.ms_of({"unix_s": resumed.unix_s}))
        if self._newest_ms > earliest_ms:
            return resumed
        return _at_ms(resumed, earliest_ms)

    def _take_readings(self, event: Event) -> None:
        """They are reported with the next point, unless they are a point of their own."""
        readings = self._readings.take(event.data)
        if not event.data.get(OWN_POINT):
            self._since.read(readings)
            return
        self._since.forget(readings)
        if self._job is not None and self._job.is_chief:
            self._write(*metrics_records(event.step, self._point_ms(), readings))

    def _write_settings(self, settings: Mapping[str, Any]) -> None:
        """Those of the job that are others now than when the world formed."""
        if self._job is not None and self._job.is_chief:
            self._write({"kind": "params", "values": flatten(redacted_values(settings))})

    def _note_checkpoint(self, data: Mapping[str, Any]) -> None:
        self._checkpoint, best_step, known = data, data.get("best_step"), self._best_checkpoint
        saved_step, until = int(data.get("saved_step", 0)), data.get("best_until")
        if best_step is None or saved_step < best_step:
            self._best_checkpoint = None
        elif known is None or known["best_step"] != best_step:
            if best_step <= self._resumed_step:  # the checkpoint has it that the job resumed from, or one before
                data = {**data, "saved_step": min(saved_step, self._resumed_step)}
            elif until is not None and saved_step >= until:
                return
            self._best_checkpoint = data

    def on_end(self, status: str, error: BaseException | None) -> None:
        """Waits until everything is sent, at most `flush_timeout_s`; what is left then stays on disk."""
        if self._ended or self._writer is None or self._delivery is None or self._job is None:
            return
        self._ended = True
        if self._since.last is not None:  # the steps after the last multiple of `log_every_steps`
            self._write_point(self._since.last)
        if self._job.is_chief:
            self._repeat_best()
        reason = "" if error is None else f"{type(error).__name__}: {error}"
        of_the_run = _STATUS.get(status, status)
        logs_model = self._log_model is not None and self._job.is_chief and status in ("FINISHED", "NOT_SAVED")
        end: dict[str, Any] = {"kind": "end", "status": of_the_run if self._job.is_chief else None, "reason": reason}
        end["ms"] = _now_ms()
        self._delivery.put_spool_back()
        self._write(end | ({"model": True} if logs_model else {}))
        if logs_model:  # after the end: the run has its status also if this process is killed now
            self._write({"kind": "model", "written": self._write_model()})
        self._writer.close()
        self._delivery.wait(status == "FINISHED", self._job.is_chief)
        self._run_id = self._delivery.run_id or self._run_id
        self._delivery.report(of_the_run, self._run_id, self._job.is_chief)

    def _repeat_best(self) -> None:
        """MLflow takes the value of the highest step for the newest. That is the best epoch's also where steps above it
        were lost, with a score of theirs."""
        last = max(self._step, self._logged_step)
        if self._best.step is not None and self._best.step < last:
            self._write(*metrics_records(last, self._point_ms(), self._best.values))

    def _write_model(self) -> bool:
        """Write the model that the sender logs; whether it could be written."""
        assert self._writer is not None and self._delivery is not None and self._log_model is not None
        folder = model_path(self._writer.path)
        try:
            if self._model is None:
                raise BadInput("the callback was not registered with state.register_callbacks()")
            n_bytes = self._log_model.write(self._model, folder, self._step, self._checkpoint)
        except Exception as error:  # any error: the training is done, and its records are to be sent
            shutil.rmtree(folder, ignore_errors=True)
            place = recovery_records.place_of(self._checkpoint) if self._checkpoint else ""
            made = f"`gba-hvd model export` makes it from the checkpoint {place}, and `gba-hvd model log` logs it"
            todo = made if place else "no checkpoint has it"
            message = f"the model was not logged: {type(error).__name__}: {error}; {todo}"
            self._write_event(Event("model_not_logged", self._step, message, level="warning"))
            say(message)
            return False
        self._delivery.expect_model(n_bytes)
        self._report_better_model()
        return True

    def _report_better_model(self) -> None:
        """The model that is logged may not be the best one."""
        best = self._best_checkpoint
        if (
            best is None
            or best.get("saved_step") == self._step
            or self._log_model is None
            or self._log_model.of != "last"
        ):
            return
        url, what = shlex.quote(str(best.get("url") or "URL")), "FILE.py:CALLABLE"
        say(
            f"the logged model is of step {self._step:,}, the last one. The best one has "
            f"{recovery_records.KeptBest.of(best, best).words}: LogModel(of='best') logs that one. To make a model of "
            f"it now: gba-hvd model export {url} MODEL_URL --best --build {what} --example {what}; to log that: "
            "gba-hvd model log MODEL_URL --name NAME"
        )

    # These travel with the elastic state.

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "run_id": self._known_run_id(),
            "logged_step": self._logged_step,
            "warnings": self._n_warnings,
        }
        state |= {"run_of": self._run_of, "continues": self._continues}
        best = self._best.state_dict()
        state |= {"best_metrics": best} if best else {}
        return state | ({} if self._best_checkpoint is None else {"best_checkpoint": dict(self._best_checkpoint)})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._run_id = state.get("run_id") or self._run_id
        self._run_of = state.get("run_of") or self._run_of
        self._continues = state.get("continues") or self._continues
        self._n_warnings = max(self._n_warnings, int(state.get("warnings", 0)))
        self._logged_step = max(self._logged_step, int(state.get("logged_step", -1)))
        self._best_checkpoint = state.get("best_checkpoint") or self._best_checkpoint
        self._best.load_state_dict(state.get("best_metrics", {}))

    @property
    def spool(self) -> Path | None:
        """This process's spool file, once it has one."""
        return None if self._writer is None else self._writer.path

    def _tag(self, name: str, text: str) -> None:
        self._write({"kind": "tags", "values": {name: text}})

    def _write(self, *records: Record) -> None:
        if self._writer is None:
            assert self._job is not None
            name = f"{metric_key(self._job.job_id)}.{self._job.host}.{os.getpid()}.{next(_numbers)}.jsonl".replace(
                "/", "_"
            )
            self._writer = SpoolWriter(self._spool_dir / name, self._spool_limit_bytes, reserves=True)
            self._delivery = SpoolDelivery(self._writer, self._flush_timeout_s)
        for record in records:
            # The job record goes to the sender alone, which needs the URI as it is; all else is shown to people.
            self._writer.append(record if record["kind"] == "job" else redacted_values(record))

    def _write_event(self, event: Event) -> None:
        values = {"step": event.step, "message": event.message, "data": dict(event.data), "unix_s": event.unix_s}
        if event.level == "warning":
            values["level"] = event.level
        self._write({"kind": "event", "event": event.kind, **values})
        ms = recovery_records.ms_of(values)
        step, found = recovery_records.metrics_of(event.kind, event.step, event.data)
        if event.level == "warning":
            self._n_warnings += 1
            self._tag(WARNING_TAG, f"[{event.kind}] step {event.step}: {event.message}"[:4000])
            self._write(*metrics_records(event.step, ms, {WARNINGS: self._n_warnings}))
        self._write(*metrics_records(step, ms, found))
        if event.kind == "switch":
            self._write_first_used(event.data.get("settings_first_used", ()))
        if event.kind == "checkpoint":
            self._tag(recovery_records.CHECKPOINT_TAG, recovery_records.place_of(event.data))

    def _write_first_used(self, names: Sequence[str]) -> None:
        """An operator has requested a mode that uses these settings."""
        assert self._job is not None
        values = {name: self._job.settings[name] for name in names if name in self._job.settings}
        if values:
            self._write({"kind": "params", "values": flatten(redacted_values(values))})

    def _known_run_id(self) -> str | None:
        if self._run_id is None and self._writer is not None:
            self._run_id = read_status(self._writer.path).run_id
        return self._run_id

    @property
    def problem(self) -> str:  # type: ignore[override]
        return "" if self._delivery is None else self._delivery.problem

    def _report_left_behind(self) -> None:
        """Say which earlier jobs have records here that were never sent."""
        found = left_behind(self._spool_dir, self.spool)
        if found:
            which = found[0] if len(found) == 1 else self._spool_dir
            jobs = "an earlier job" if len(found) == 1 else f"{len(found)} workers of earlier jobs"
            say(f"records of {jobs} never reached MLflow and wait in {which}; {how_to_send(which)}")


class _Interval:
    """The steps since the last point."""

    def __init__(self) -> None:
        self._samples = 0
        self._seconds = 0.0
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._readings: dict[str, list[float]] = {}
        self.last: StepRecord | None = None

    def add(self, record: StepRecord) -> None:
        self.last = record
        self._samples += record.samples
        self._seconds += record.seconds
        if record.loss is not None:
            self._losses.append(record.loss)
        if record.grad_norm is not None:
            self._norms.append(record.grad_norm)

    def read(self, readings: Mapping[str, float]) -> None:
        for name, value in readings.items():
            self._readings.setdefault(name, []).append(value)

    def forget(self, names: Iterable[str]) -> None:
        """Readings of these, of which there are newer ones."""
        for name in names:
            self._readings.pop(name, None)

    def values(self) -> dict[str, float]:
        values = {metric_key(name): gauges.point_of(name, read) for name, read in self._readings.items()}
        if self._losses:
            values[LOSS] = sum(self._losses) / len(self._losses)
        if self._norms:
            values[GRAD_NORM] = sum(self._norms) / len(self._norms)
        if self._seconds > 0:
            values[THROUGHPUT] = self._samples / self._seconds
        return values


def job_name(environ: Mapping[str, str] = os.environ) -> str:
    """What a job without a name of its own is called: $GBA_HVD_JOB_NAME, else the script without folder and suffix."""
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-", "-c", "-m") else ""
    return environ.get("GBA_HVD_JOB_NAME") or script or "python"


def _refuse_foreign_run(run_id: str | None, parent_run_id: str | None) -> None:
    """run_id: by MLflow's convention, the run that a process is to report to"""
    if run_id and run_id != parent_run_id:
        raise BadInput(
            f"MLFLOW_RUN_ID={run_id} is set, and MLflowCallback reports to no run that others have made: a job has "
            "one of its own, through all launches. Unset it, or name that run as the parent: "
            "MLflowCallback(parent_run_id=os.environ['MLFLOW_RUN_ID'])"
        )


def _checked_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    """As text. Raises BadInput for names that MLflow, or the run, has no place for."""
    for name in tags:
        instead = _ARGUMENT_OF_TAG.get(name)
        if instead is not None:
            raise BadInput(f"MLflowCallback: the tag {name!r} is the argument {instead}")
        if not isinstance(name, str) or not name or metric_key(name) != name:
            raise BadInput(
                f"MLflowCallback: {name!r} is no name of a tag: MLflow takes up to 250 letters, digits and _-.:/ and "
                "spaces"
            )
        if name.startswith("gba_hvd."):
            raise BadInput(f"MLflowCallback: the tag {name!r} begins with gba_hvd., as the job's own do: rename it")
    return {name: str(value) for name, value in tags.items()}


def _named(lrs: Sequence[float], by_group: bool) -> dict[str, float]:
    """Metrics of the dense groups' learning rates: the largest, and each by group, or where they differ."""
    named = {DENSE_LR: max(lrs)} if lrs else {}
    if by_group or len(set(lrs)) > 1:
        named |= {_group(i): lr for i, lr in enumerate(lrs)}
    return named


def _group(i: int) -> str:
    return f"{DENSE_LR}/group_{i}"


def _renamed_words(names: Sequence[str]) -> str:
    theirs = ", ".join(f"{SCRIPT}{name}" for name in names)
    return (
        f"warning: parameters of the script that the job has with another value: {', '.join(names)}. The job's own "
        f"values stay; the script's are {theirs}"
    )


def _at_ms(event: Event, ms: int) -> Event:
    return dataclasses.replace(event, unix_s=(ms + 0.5) / 1000)  # no rounding takes it back


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        return "unknown"
