"""`TorchState`: what the user's loop and Horovod's elastic loop hold of a job. `elastic` has the order of `sync`."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from gba_hvd import membership
from gba_hvd.callbacks import Callback, Event
from gba_hvd.checkpoint.job_checkpoints import JobCheckpoints, checkpoints_of
from gba_hvd.comm.collectives import all_or_none, current_world, hosts_updated, worker_lost
from gba_hvd.comm.launcher_slot import LauncherSlot
from gba_hvd.comm.world_formation import END_WAITS, end_waits
from gba_hvd.config import checked_job_name
from gba_hvd.elastic import continuation, endings, job_events, launch_file, rollback
from gba_hvd.elastic.job_health import JobHealth, health_of
from gba_hvd.elastic.late_joiners import LateJoiners
from gba_hvd.elastic.log_lines import show_log_lines
from gba_hvd.elastic.training_state import TrainingState
from gba_hvd.elastic.worker_saves import WorkerSaves
from gba_hvd.errors import BadInput, ShardMemoryError
from gba_hvd.faults import FaultSchedule
from gba_hvd.membership import JoinResult
from gba_hvd.membership.resume_job import ResumedFromMemory
from gba_hvd.ps.client import ServerRefused
from gba_hvd.switching.callback import GBACallback
from gba_hvd.switching.mode_limits import check_modes, check_optimizer
from gba_hvd.switching.requests import ModeRequests, switching_of
from gba_hvd.tracking.epochs import is_quality
from gba_hvd.tracking.progress_line import ProgressLine
from gba_hvd.training.engine import Engine
from gba_hvd.training.parameter_watch import refuse_not_exchanged, untrained
from gba_hvd.training.pauses import LOSS
from recovery import state_codec
from recovery.callback import CheckpointCallback
from recovery.redaction import redacted
from recovery.restore import Report

log = logging.getLogger("gba_hvd")

# How long the end waits for a world that is being formed: a job whose launcher has to kill a late joiner counts as
# failed.
_END_TIMEOUT_S, _FAILED_TIMEOUT_S = 60.0, 5.0
_STOOD_STILL = "this worker's training stood still meanwhile"
_ADDED = 2  # a bit of Horovod's HostUpdateResult: removed (1), added (2), both (3)
_CAUSE_S = 1.5  # a launcher that lost a worker kills the others 5 s later; they report the cause first


def checked_state(state: object, caller: str) -> TorchState:
    """Raises BadInput for the state of another library, and for a state's parts."""
    if isinstance(state, TorchState):
        return state
    kind = type(state)
    raise BadInput(
        f"{caller} needs a gba_hvd.elastic.TorchState, got {kind.__module__}.{kind.__qualname__}: pass "
        "gba_hvd.elastic.TorchState(model, optimizer, epoch=0), with the optimizer of gba_hvd.DistributedOptimizer"
    )


class TorchState:
    """Model, optimizer and all else that must survive: `TorchState(model, optimizer, epoch=0, scheduler=scheduler)`.

    Keyword arguments become attributes. They may be numbers, strings, lists, dicts, tensors, arrays, or objects with
    `state_dict()` and `load_state_dict()`. `optimizer` must come from `DistributedOptimizer`. `name` is what people
    call the job; by default $GBA_HVD_JOB_NAME, else the script's name.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, name: str | None = None, **values: Any
    ) -> None:
        engine = getattr(optimizer, "engine", None)
        if not isinstance(engine, Engine):
            raise BadInput("TorchState needs an optimizer made by gba_hvd.DistributedOptimizer")
        engine.model.refuse_if_replaced()
        self.model, self.optimizer, self.engine = model, optimizer, engine
        engine.identify(
            id=engine.model.tables.config.job_id or secrets.token_hex(4),
            name=engine.job.name if name is None else checked_job_name(name),
        )
        if health_of(engine) is None:
            engine.callbacks.append(JobHealth(engine))
        self._slot = LauncherSlot()
        self.training_state = TrainingState(engine, model, self, list(values))
        self.saving = WorkerSaves(engine, self.training_state)
        self.late_joiners = LateJoiners(engine, self.training_state, self._slot)
        self.saving.report_worlds = self.late_joiners.report
        self._reset_callbacks: list[Callable[[], None]] = []
        self._has_state = self._synced = self._closed = False
        self._closed_unix_s = 0.0
        self._memory_trouble = ""  # what happened to the tables' file, if training continues all the same
        self._exit_watch = endings.ExitWatch()
        self.finished_epoch: int | None = None  # the last epoch this process saw the end of since it last synced
        for attribute, value in values.items():
            if hasattr(self, attribute):
                raise BadInput(f"TorchState has a {attribute!r} of its own; choose another name")
            setattr(self, attribute, value)

    # --- for the user's loop -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of optimizer applications so far."""
        return self.engine.progress.step

    @property
    def samples(self) -> Any:
        """The account: total, applied, dropped, lost."""
        return self.engine.progress.account

    @property
    def world(self) -> Any:
        """rank, size, local_rank and host of this worker."""
        return self.engine.world

    @property
    def job_id(self) -> str:
        """The job's name, the same on all workers and through all restarts (known after the first sync)."""
        return self.engine.job.id

    @property
    def name(self) -> str:
        """What people call the job."""
        return self.engine.job.name

    def register_callbacks(self, callbacks: Sequence[Callback | CheckpointCallback]) -> None:
        """Add callbacks, in the same order on every worker.

        Raises BadInput for a second one that decides about the mode or saves the job, and for a `CheckpointCallback`
        that comes after `sync`.
        """
        self.engine.callbacks.extend(cast(Sequence[Callback], callbacks))
        for callback in callbacks:
            if isinstance(callback, Callback):
                callback.on_model(self.model)
            if isinstance(callback, CheckpointCallback):
                if checkpoints_of(self.engine) is not None:
                    raise BadInput("one CheckpointCallback saves a job, a second one came")
                if self.engine.model.tables.memory is not None:
                    raise BadInput(
                        "register the CheckpointCallback before state.sync() and the first batch: it claims a location,"
                        " resumes and determines what the tables' memory counts when the world first forms"
                    )
                self.engine.register(JobCheckpoints(self.engine, callback))
            if isinstance(callback, GBACallback):
                if switching_of(self.engine) is not None:
                    raise BadInput("one GBACallback decides about the mode, a second one came")
                check_optimizer(self.engine, callback)
                self.engine.register(ModeRequests(self.engine, callback))
                check_modes(self.engine)
            elif isinstance(callback, FaultSchedule):
                self.engine.plan_faults(callback)

    def on_step(self, function: Callable[[], Any]) -> None:
        """Run `function()` once per global step that is applied, on every worker, such as a scheduler's `step`:

            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10_000)
            state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0, scheduler=scheduler)
            state.on_step(scheduler.step)                   # and no scheduler.step() in the loop

        The loop over `batches` runs once per micro-batch of this worker, so a schedule stepped there would depend on
        the number of workers. In asynchronous modes the function runs when the worker learns of a step, and the servers
        use the learning rates that come with a step's gradients. A step that is skipped for an overflow (`grad_scaler`)
        runs it nowhere, in no mode: as the loop `if scaler.get_scale() >= before: scheduler.step()` does in plain
        PyTorch. A scheduler must be among the state's values, so that
        it survives failures with the count of the steps that it has seen. Raises BadInput for one that is not.
        """
        owner = getattr(function, "__self__", None)
        if hasattr(owner, "last_epoch") and all(getattr(self, n) is not owner for n in self.training_state.names):
            raise BadInput(
                f"on_step: the {type(owner).__name__} is not in the state, so a restarted worker would begin its "
                "schedule from its start: TorchState(model, optimizer, ..., scheduler=scheduler)"
            )
        self.engine.step_hooks.functions.append(function)

    def report(self, **metrics: float) -> None:
        """Report metrics of the current step to the callbacks. They are of `state.epoch`, where the state has one.

        On all workers: what rank 0 does not report is shown nowhere, and what it alone reported is lost with it, if it
        dies before that is sent. Scores of which some report none are a warning (`reported_by_some`) at the next
        evaluation in allreduce mode.
        """
        self.engine.progress.n_reported += any(map(is_quality, metrics))
        epoch = getattr(self, "epoch", None)
        if epoch is None:
            epoch = self.engine.progress.epoch  # of the newest `batches`
        with self.engine.loop_time.apart():
            for callback in self.engine.callbacks:
                if epoch is not None:
                    callback.on_epoch(epoch)
                callback.on_metrics(self.step, metrics)

    def ensure_synced(self) -> None:
        """Sync now if the loop has not (a loop without `elastic.run`). A collective."""
        if not self._synced:
            self.sync()
        self._training_begins()

    def ensure_trains(self) -> None:
        """As `ensure_synced`, before training: after the end of the job it continues. A collective."""
        if self._ended or not self._synced:
            self.sync()
        self._training_begins()

    def _training_begins(self) -> None:
        job_events.training_begins(self.engine, self.training_state.take_replaced_rates())

    def check_parameters(self) -> None:
        """As an epoch begins: the model may have got other modules, and the optimizer's groups other parameters.

        Raises BadInput for one in a group whose gradient workers do not exchange.
        """
        trained = self.engine.model
        refuse_not_exchanged(self.model, trained.grouped, trained.dense.parameters)
        known, trained.untrained = trained.untrained, untrained(self.model, trained.grouped)
        if new := [name for name in trained.untrained if name not in known]:
            job_events.parameters_changed(self.engine, new)

    def close(self, status: str = "FINISHED", error: BaseException | None = None) -> None:
        """Report to the callbacks how it ended, and release the memory. May be called twice.

        The process still has all values. `batches`, or a function with `elastic.run`, continues the job with them.
        """
        if self._closed:
            return
        self._closed, self._closed_unix_s = True, time.time()
        atexit.unregister(self._close_at_exit)
        self._exit_watch.leave()
        engine = self.engine
        if error is not None:
            endings.leave_note(engine, status, error)
        if engine.host.board is not None:
            engine.host.board.ends()
        rejoin = None if engine.mode is None else engine.mode.rejoin
        try:
            self.saving.release_claim()  # first: a launcher that was interrupted may kill this process while it reports
            self._report_unformed_world(_FAILED_TIMEOUT_S if error is None else 0.0)
            continuation.keep_state_of_servers(engine)
            job_events.ended(engine, status, error)
            if status == "KILLED" and engine.model.tables.memory is not None:
                self.saving.retain_pause()
        finally:
            patience_s = _END_TIMEOUT_S if error is None else _FAILED_TIMEOUT_S
            if rejoin is not None and not rejoin.stop(patience_s):
                log.warning("%s It continues after %.0f s more", END_WAITS, patience_s)
            self.saving.close()
            if engine.mode is not None:
                if error is None:
                    engine.mode.leave_together(engine.model.tables.config.server_timeout_s)
                engine.mode.close(finished=error is None)
            memory = engine.model.tables.memory
            engine.model.tables.on_device.close()
            if memory is not None:  # what a restart could resume from is left to the reaper
                memory.close(remove=status == "FINISHED" or self._is_of_no_use)

    @property
    def _is_of_no_use(self) -> bool:
        """What this process leaves in memory."""
        return self.engine.world.size == 1 and checkpoints_of(self.engine) is None

    @property
    def _ended(self) -> bool:
        return self._closed and self._has_state

    def _report_unformed_world(self, patience_s: float) -> None:
        """Callbacks receive nothing after the end: what this process may wait for then is reported before it."""
        engine = self.engine
        with contextlib.suppress(KeyboardInterrupt):  # SIGTERM at the end: the end is reported all the same
            rejoin = None if engine.mode is None else engine.mode.rejoin
            if rejoin is None or rejoin.stop(patience_s):
                return
            wait = engine.forming.wait()
            if wait is not None and wait.seconds >= _FAILED_TIMEOUT_S:
                engine.emit(end_waits(engine.progress.step, wait), only_here=True)

    def _end_is_shown(self) -> bool:
        """By Horovod's launcher, or by a callback."""
        return "HOROVOD_RANK" in os.environ or any(isinstance(one, ProgressLine) for one in self.engine.callbacks)

    def _close_at_exit(self) -> None:
        error = self._exit_watch.error()
        self.close("FINISHED" if error is None else endings.status_of(error), error)

    # --- Horovod's verbs ---------------------------------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Functions to run after every change of the world, as in Horovod."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self._synced = False
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_result: int) -> None:
        """Called by Horovod's notification thread, on rank 0 only. The next commit, or heartbeat, carries it to all."""
        mode = self.engine.mode  # the training thread may leave it meanwhile
        if (mode is None or mode.steps_together) and update_result & _ADDED:
            self.engine.signals.workers_come = True
        if mode is not None:
            mode.on_hosts_updated()
        else:
            self.engine.signals.hosts_updated = True

    def report_pause(self) -> None:
        """Before the world forms again: that training waits for workers that start, where this worker knows of any.

        And for `gba-hvd status`, on each host leader, that it stands still.
        """
        signals, mode = self.engine.signals, self.engine.mode
        if self.engine.host.board is not None:
            is_loss = self.engine.reports.pauses.cause == LOSS
            self.engine.host.board.show_pause("a worker is gone" if is_loss else "workers come or leave")
        comes, signals.workers_come = signals.workers_come, False
        if comes and (mode is None or mode.steps_together):
            job_events.pauses_for_workers(self.engine)

    def commit(self) -> None:
        """Nothing to save: every step is committed. Here so that Horovod scripts run unchanged."""

    def check_host_updates(self) -> None:
        """As `commit`: every step checks, at no cost."""

    def save(self) -> None:
        """Nothing to save."""

    def restore(self) -> None:
        """After a failure: discard the step in flight. What was committed stays.

        Raises WorkerEvicted when the others continued without this worker, LauncherUnreachable when it may be so: it
        ends. Raises WorldLost where no elastic launcher forms the world again: waiting for it, this worker would be
        killed.
        """
        engine = self.engine
        failure = sys.exc_info()[1]  # Horovod's loop is handling it
        memory = engine.model.tables.memory
        if memory is not None and (trouble := memory.trouble()):
            raise ShardMemoryError(trouble)
        # (Workers that all fell out of an asynchronous mode, since a server was lost, can form their world again.)
        cause = None if endings.is_elastic() else endings.cause_elsewhere(engine, _CAUSE_S)
        survives = engine.mode is not None and engine.mode.survives_world
        continues = endings.is_elastic() or engine.world.size == 1 or survives
        if cause is not None or not continues:
            raise cause or endings.world_lost(engine)
        if endings.is_elastic() and engine.world.size > 1:
            job_events.worker_gone(engine)
            engine.reports.worker_lost()
            if memory is not None:
                memory.end_stopped(engine.host.neighbours.values())
        self._synced = False
        engine.signals.clear_interrupt()
        engine.signals.requested_mode = None
        engine.abandon_step()
        if engine.mode is not None:
            mode, requests = engine.mode.name, engine.participant(ModeRequests)
            engine.mode.recover()
            if failure is not None and isinstance(failure.__cause__, ServerRefused) and requests is not None:
                requests.servers_refused(mode, str(failure.__cause__))
        self._slot.verify(engine.model.tables.config.server_timeout_s)

    def check_memory(self) -> None:
        """Between two steps: whether the tables' file is still what is mapped.

        Raises ShardMemoryError where continuing would end in SIGBUS, or where servers that train have lost it. In
        allreduce mode the workers have all that they need: then it is reported, and training continues.
        """
        engine, memory = self.engine, self.engine.model.tables.memory
        if memory is None or self._memory_trouble or not (trouble := memory.trouble()):
            return
        if memory.is_cut_short or (engine.mode is not None and not engine.mode.steps_together):
            raise ShardMemoryError(trouble)
        self._memory_trouble = trouble
        text = f"{trouble}. Training continues with what is mapped, until a worker comes, goes or dies"
        engine.emit(
            Event("memory_removed", engine.progress.step, text, {"folder": str(memory.folder)}, level="warning")
        )

    def stop_if_interrupted(self) -> None:
        """Leave the loop when hosts joined or left: raised on all workers at the same step, as the commit agreed."""
        if self.engine.signals.interrupt_due:
            self.engine.signals.clear_interrupt()
            self._synced = False
            raise hosts_updated()

    def sync(self) -> None:
        """Agree with all workers on one state. A collective."""
        try:
            self._sync()
        except BaseException:
            if not self._has_state:  # nothing ends it later where a loop has no `elastic.run`
                self.saving.stop_renewing()
            if self._ended:
                self._end_again()
            raise

    def _end_again(self) -> None:
        """The job could not continue. The process still has the rows."""
        self.saving.close()
        memory = self.engine.model.tables.memory
        if memory is not None:
            memory.close(remove=self._is_of_no_use)

    def _sync(self) -> None:
        engine, continues = self.engine, self._ended
        engine.model.refuse_if_replaced()
        engine.model.tables.when_loaded = None  # what is loaded until `_note_synced` comes with the rows
        if not self._has_state:
            self.training_state.note_script_rates()
        if continues:
            continuation.refuse_in_elastic_job()
            continuation.begin(engine, self._closed_unix_s)
        show_log_lines()
        launch_file.remove()
        endings.show_ends_briefly(self._end_is_shown)
        # What the thread beside an asynchronous mode met and did not report yet comes before this world: reported
        # later, it would put its world, which is no more, in place of this one.
        self.late_joiners.report()
        before, neighbours = engine.world.size if self._has_state else None, engine.host.neighbours
        engine.world = current_world()
        try:
            self._slot.register()
        except OSError as error:
            raise worker_lost(f"the launcher cannot be reached: {error}") from error
        joined = membership.join(engine, engine.world, engine.job.id, self._has_state)
        engine.identify(id=joined.job_id)
        if engine.faults is not None and engine.faults.folder is None:
            engine.faults.record_in(engine.folder / "faults")
        if joined.asynchronous:
            self.late_joiners.join_running_mode(joined)
            self._note_synced()
            wait = engine.forming.end()  # before another thread forms worlds
            self.late_joiners.start_rejoin(joined.membership)
            job_events.world_formed(engine, joined, None)
            job_events.world_was_late(engine, wait, _STOOD_STILL)
            return
        engine.reports.world_forms(None if continues else before)
        self._come_to_one_state(joined)
        self._note_synced()
        engine.reports.after_world_forms(before)
        state = self.training_state
        job_events.world_formed(engine, joined, before, state.residuals_missing, state.restored, after_end=continues)
        job_events.world_was_late(engine, engine.forming.end(), _STOOD_STILL)
        for event in endings.failed_neighbours(engine, neighbours):
            engine.emit(event, only_here=True)
        self.saving.world_formed(joined)

    def _come_to_one_state(self, joined: JoinResult) -> None:
        """In allreduce mode, when the rows are in place: the part of `sync` that is not of the memory. A collective."""
        engine, checkpoints, n_before = self.engine, checkpoints_of(self.engine), self.engine.rollback.number
        if joined.rolled_back is not None and joined.rolled_back.state is not None:  # on the source
            rollback.load(engine, self.training_state, joined)
        left = joined.resumed or joined.taken  # by a job that is no more
        if not joined.is_restart:
            all_or_none(engine.world, False, "resume from", lambda: self._resume(left), "what the launch before left")
        # Counted before the state is sent, so that no failure from here on loses the count.
        engine.progress.account.shard_steps_missed += joined.shard_steps_missed
        engine.progress.account.rows_lost += joined.rows_lost
        engine.progress.world_formed(joined.workers, joined.is_restart and not self._ended)
        if checkpoints is not None and self._has_state and joined.rows_lost + joined.rows_restored:
            checkpoints.schedule.host_was_lost(
                joined.load_s if joined.rows_restored else None,
                engine.reports.seconds_since_step,
                joined.samples_lost(engine.progress.account.applied, engine.model.tables.layout.n_rows),
            )
        self.training_state.share(joined.source)
        if engine.rollback.number > n_before and engine.world.rank != joined.source:
            rollback.forget(engine)
        if checkpoints is not None:
            checkpoints.world_formed(rows_moved=True)
        if engine.model.compression is not None:
            lost = engine.model.compression.count_lost(engine.world, self._has_state)
            if engine.rollback.number == n_before:  # else residuals are those of the checkpoint
                job_events.residuals_lost(engine, *lost)

    def _resume(self, left: Report | ResumedFromMemory | None) -> None:
        """Take over the training state of a job that is no more. On the source, the only rank that has one."""
        if left is None or left.state is None:
            return
        checkpoints = checkpoints_of(self.engine)
        where = "what the launch before left in memory"
        if isinstance(left, Report) and checkpoints is not None:
            where = f"the checkpoint at {redacted(checkpoints.store.url)} ({left.manifest.name})"
        self.training_state.resume(state_codec.decode(left.state, where), where)

    def _note_synced(self) -> None:
        if not self._has_state or self._closed:
            atexit.register(self._close_at_exit)
            self._exit_watch.enter()
        self._has_state, self._synced, self._closed = True, True, False
        self.finished_epoch = None
        engine = self.engine
        engine.model.untrained = untrained(self.model, engine.model.grouped)
        engine.model.parameter_watch.name_as_in(self.model)
        engine.model.tables.when_loaded = lambda: engine.reports.rows_not_loaded(after_end=self._closed)
        hooks, values = self.engine.step_hooks, {name: getattr(self, name) for name in self.training_state.names}
        hooks.run(self.engine.progress.n_applied)
        hooks.watch(values, self.engine.progress.step)
