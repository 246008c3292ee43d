"""`TorchState`: training that survives changes of membership without going back.

Horovod's elastic loop calls `sync` at the start and after every change, `restore` after a failure, `on_reset` after the
world was formed anew. Horovod's own state copies the model at every commit and rolls everyone back to it. This one
does neither: the step's commit (`allreduce`) already decides what happened, so `sync` compares steps and goes on.

`sync`, in the order in which things become visible; every rank runs every line, so no rank can wait for one that skips:

    1. gather  who has state, of which step, which step's row gradients it holds, which memory it maps
    2. agree   the newest step wins; a rank that missed its result applies the row gradients it holds
    3. open    the memory of each host, gather what it holds, place the shards (`routing`)
    4. fill    shards nobody holds get initial rows, shards that change host are copied, then old copies are dropped
    5. send    dense state, position, account, callbacks' state from one rank that has the newest step

A crash anywhere in it ends the others' collectives with an error and Horovod starts it again; 2 and 4 are safe to
repeat, since the marks in shard memory say what was done.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import nn

from gba_hvd import handover, membership
from gba_hvd.allreduce import AllreduceMode
from gba_hvd.callbacks import Callback, Event, Job
from gba_hvd.checkpoints import Checkpoints
from gba_hvd.collectives import World, current_world, hosts_updated, initialise_again, worker_lost
from gba_hvd.compression.exchange import DenseExchange
from gba_hvd.engine import Engine
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.faults import FaultSchedule
from gba_hvd.gba import GbaMode
from gba_hvd.gba_callback import GBACallback
from gba_hvd.launcher import Seat
from gba_hvd.local_server import LocalServer
from gba_hvd.ps.protocol import Position
from gba_hvd.reform import Reformer
from gba_hvd.shard.kept import StateKeeper
from gba_hvd.torch_optimizers import spec_of
from recovery import state_codec
from recovery.callback import CheckpointCallback

# How long the end waits for a world that is being formed: a job whose launcher has to kill a newcomer counts as failed.
_END_TIMEOUT_S, _FAILED_TIMEOUT_S = 60.0, 5.0
_SAVE_LAST_TIMEOUT_S = 600.0
_WORLD_TIMEOUT_S = 600.0  # so long the launcher waits for workers, too
_PREEMPTION_S, _LOOK_S = 30.0, 0.05


class TorchState:
    """Model, optimizer and whatever else must survive: `TorchState(model, optimizer, epoch=0, scheduler=scheduler)`.

    Keyword arguments become attributes. They may be numbers, strings, lists, dicts, tensors, arrays, or objects with
    `state_dict()` and `load_state_dict()`. `optimizer` must come from `DistributedOptimizer`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **values: Any) -> None:
        engine = getattr(optimizer, "engine", None)
        if not isinstance(engine, Engine):
            raise BadInput("TorchState needs an optimizer made by gba_hvd.DistributedOptimizer")
        self.model, self.optimizer, self.engine = model, optimizer, engine
        self._values = list(values)
        for name, value in values.items():
            if hasattr(type(self), name) or name in ("model", "optimizer", "engine"):
                raise BadInput(f"TorchState has a {name!r} of its own; choose another name")
            setattr(self, name, value)
        self._job_id = engine.tables.config.job_id or secrets.token_hex(4)
        self._reset_callbacks: list[Callable[[], None]] = []
        self._has_state = self._synced = self._closed = False
        self._snapshot = b""
        self._met: list[tuple[membership.Joined, World]] = []  # by the background thread, for the training thread
        self._gone: list[tuple[int, float]] = []  # the same: workers that are gone, and the residuals they had
        self._residuals_missing = 0  # in the checkpoint that this job goes on from: of so many workers
        self._line: LocalServer | None = None
        self._keeper: StateKeeper | None = None
        self._seat = Seat()
        self._part = (0, 1)  # this host's number, and how many there are
        self.finished_epoch: int | None = None  # the last epoch this process saw the end of since it last synced

    # --- for the user's loop -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of optimizer applications so far."""
        return self.engine.step

    @property
    def samples(self) -> Any:
        """The account: total, applied, dropped, lost."""
        return self.engine.account

    @property
    def world(self) -> Any:
        """rank, size, local_rank and host of this worker."""
        return self.engine.world

    @property
    def job_id(self) -> str:
        """The job's name, the same on all workers and through all restarts (known after the first sync)."""
        return self._job_id

    def register_callbacks(self, callbacks: Sequence[Callback | CheckpointCallback]) -> None:
        """Add callbacks, in the same order on every worker."""
        self.engine.callbacks.extend(cast(Sequence[Callback], callbacks))
        for callback in callbacks:
            if isinstance(callback, CheckpointCallback):
                if self.engine.checkpoints is not None:
                    raise BadInput("one CheckpointCallback saves a job, a second one came")
                self.engine.checkpoints = Checkpoints(self.engine, callback)
            if isinstance(callback, GBACallback):
                if self.engine.switching is not None:
                    raise BadInput("one GBACallback decides about the mode, a second one came")
                if callback.rule != "none":
                    callback.check_fits(spec_of(self.engine.optimizer))
                self.engine.switching = callback
            elif isinstance(callback, FaultSchedule):
                self.engine.faults = callback

    def report(self, **metrics: float) -> None:
        """Tell the callbacks some metrics of the current step."""
        for callback in self.engine.callbacks:
            callback.on_metrics(self.step, metrics)

    def ensure_synced(self) -> None:
        """Sync now if nobody has (a loop without `elastic.run`). A collective."""
        if not self._synced:
            self.sync()

    def close(self, status: str = "FINISHED", error: BaseException | None = None) -> None:
        """Tell the callbacks how it ended, and let go of the memory. May be called twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        account = {f"samples_{k}": getattr(self.samples, k) for k in ("total", "applied", "dropped", "lost")}
        word = "finished" if error is None else f"{type(error).__name__}: {error}"
        engine = self.engine
        facts = {**account, "restarts": engine.restarts, "refused": engine.refused, "reissued": engine.reissued}
        facts["lags"] = {str(k): n for k, n in sorted(engine.lags.items())}
        facts["staleness"] = {str(k): n for k, n in sorted(engine.staleness.items())}
        try:
            self.engine.emit(Event("finished" if error is None else "failed", self.step, word, facts))
            for callback in self.engine.callbacks:
                callback.on_end(status, error)
        finally:
            if self.engine.reformer is not None:
                self.engine.reformer.stop(_END_TIMEOUT_S if error is None else _FAILED_TIMEOUT_S)
            if self._line is not None:
                self._line.close()
            if self.engine.checkpoints is not None and self.engine.world.rank == 0:
                self.engine.checkpoints.release()
            if isinstance(self.engine.mode, GbaMode):
                self.engine.mode.close(finished=error is None)
            for mode in (self.engine.mode, self.engine.idle_mode):
                if mode is not None:
                    mode.close()
            memory = self.engine.tables.memory
            if memory is not None:  # what a restart could go on from is left to the keeper
                is_of_no_use = self.engine.world.size == 1 and self.engine.checkpoints is None
                memory.close(remove=status == "FINISHED" or is_of_no_use)

    # --- Horovod's verbs ---------------------------------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Functions to run after every change of the world, as in Horovod."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self._synced = False
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_result: int) -> None:
        """Called by Horovod's notification thread, on rank 0 only. The next commit, or heartbeat, tells everyone."""
        mode = self.engine.mode
        if isinstance(mode, GbaMode):
            mode.hosts_updated = True
        else:
            self.engine.hosts_updated = True

    def commit(self) -> None:
        """Nothing to save: every step is committed. Kept so that Horovod scripts run unchanged."""

    def check_host_updates(self) -> None:
        """As `commit`: every step checks, at no cost."""

    def save(self) -> None:
        """Nothing to save."""

    def restore(self) -> None:
        """After a failure: forget the step in flight. What was committed stays.

        Raises GivenUp when the others went on without this worker, LauncherLost when it may be so: it ends.
        """
        self._synced = False
        self.engine.interrupt_due = self.engine.hosts_updated = False
        self.engine.switch_to = None
        self.engine.abandon_step()
        if isinstance(self.engine.mode, AllreduceMode):
            self.engine.mode.leave_step()
        if isinstance(self.engine.mode, GbaMode):  # this worker fell out of it
            if self.engine.reformer is not None:
                self.engine.reformer.stop()
            handover.rescue_dense_state(self.engine, self.engine.mode)
            self.engine.mode.close(finished=False)
            self.engine.mode = self.engine.idle_mode = self.engine.reformer = None
        self._seat.check(self.engine.tables.config.server_s)

    def stop_if_interrupted(self) -> None:
        """Leave the loop when hosts came or went: raised on all workers at the same step, as the commit agreed."""
        if self.engine.interrupt_due:
            self.engine.interrupt_due = self.engine.hosts_updated = False
            self._synced = False
            raise hosts_updated()

    def sync(self) -> None:
        """Agree with all workers on one state. A collective."""
        engine = self.engine
        before = [engine.world.size] if self._has_state else []
        engine.world = current_world()
        try:
            self._seat.take()
        except OSError as error:
            raise worker_lost(f"the launcher cannot be reached: {error}") from error
        engine.size_extra()
        joined = membership.join(engine, engine.world, self._job_id, self._has_state)
        self._job_id = engine.job_id = joined.job_id
        if engine.faults is not None and engine.faults.folder is None:
            engine.faults.record_in(engine.folder / "faults")
        if joined.asynchronous:
            self._join_asynchronous(joined)
            return
        left = joined.resumed or joined.taken  # by a job that is no more
        if left is not None and left.state is not None:  # on the source
            self._resume(state_codec.decode(left.state))
        # Counted before the state is sent, so that no failure from here on loses the count.
        engine.account.shard_steps_missed += joined.shard_steps_missed
        engine.account.rows_lost += joined.rows_lost
        engine.restarts += joined.is_restart
        if engine.checkpoints is not None and self._has_state and joined.rows_lost + joined.rows_restored:
            engine.checkpoints.host_was_lost(joined.load_s if joined.rows_restored else None, engine.seconds_since_step)
        source = joined.source
        data = None
        if engine.world.rank == source:
            data = state_codec.encode(self._whole_state())
        if engine.world.size > 1:
            received = engine.world.broadcast("state", data, source)
            if engine.world.rank != source:
                state = state_codec.decode(received)
                self._load_state_dict(state)
                if engine.checkpoints is not None:
                    engine.checkpoints.load_state(state["checkpoints"])
        if engine.checkpoints is not None:
            engine.checkpoints.world_formed(rows_moved=True)
        if engine.compression is not None:
            self._count_lost_residuals(engine.compression)
        if not self._has_state:
            atexit.register(self._close_at_exit)
        self._has_state, self._synced, self._closed = True, True, False
        self.finished_epoch = None
        self._tell_callbacks(joined, before)
        self._talk_to_server(joined)

    def save_if_due(self) -> None:
        """Between two steps of allreduce mode: have a checkpoint made if the last commit said so. A collective then."""
        engine, checkpoints = self.engine, self.engine.checkpoints
        if checkpoints is None:
            return
        if engine.world.rank == 0 and self._line is not None:
            checkpoints.follow(self._line.saved)
        if checkpoints.somebody_leaves:
            self._save_and_leave()
        elif checkpoints.is_due:
            self._save()

    def _save_and_leave(self) -> None:
        """Some workers are to leave: all wait for a checkpoint, and whoever was told to leaves. A collective."""
        engine, checkpoints = self.engine, self.engine.checkpoints
        assert checkpoints is not None
        checkpoints.somebody_leaves = False
        text = "a worker was told to leave (SIGTERM): first a checkpoint of this step"
        engine.emit(Event("preempted", engine.step, text, {}))
        self.save_last(checkpoints.callback.preemption_s or _PREEMPTION_S)
        engine.world.gather("left", np.zeros(1, dtype=np.int64))  # before that, other hosts may not have saved theirs
        self._leave_if_told()

    def _leave_if_told(self) -> None:
        if self.engine.leave_by_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            raise KeyboardInterrupt("SIGTERM, after a checkpoint")

    def _save(self, again: bool = True) -> bool:
        """A collective. again: also if there is a checkpoint of this step. Returns whether one is being made."""
        engine, checkpoints = self.engine, self.engine.checkpoints
        assert checkpoints is not None
        is_chief, word, started = engine.world.rank == 0, b"null", time.perf_counter()
        if is_chief and (again or not checkpoints.has(engine.step)):
            word = json.dumps(checkpoints.plan()).encode()
        plan = json.loads(engine.world.broadcast("save", word if is_chief else None, 0))
        if plan is not None:
            residual = {} if engine.compression is None else engine.compression.state(engine.world)
            state = state_codec.encode({**self._state_dict(), **residual}) if is_chief else b""
            checkpoints.save(plan, self._line, *self._part, state)
            checkpoints.stood_still(time.perf_counter() - started)
        return plan is not None

    def save_last(self, timeout_s: float = _SAVE_LAST_TIMEOUT_S) -> None:
        """At the end of training, on all workers: a checkpoint of the last step, if there is none yet. Waits for it.

        What goes wrong is told, and is no reason for a job to fail that has done its work.
        """
        engine, checkpoints = self.engine, self.engine.checkpoints
        if checkpoints is None:
            return
        try:
            if isinstance(engine.mode, GbaMode):
                mode = engine.mode
                if engine.world.rank == 0:
                    checkpoints.await_quiet(lambda: mode.saved, timeout_s)
                    if not checkpoints.has(engine.step):
                        checkpoints.save_asynchronously(mode, self._snapshot)
                    checkpoints.await_saved(lambda: mode.saved, engine.step, timeout_s)
                elif mode.own_server:  # the first host's memory stays as long as the chief does
                    checkpoints.await_saved(mode.saved_here, engine.step, timeout_s)
                return
            line = self._line
            if line is not None:
                checkpoints.await_quiet(lambda: line.saved, timeout_s)
            if self._save(again=False) and line is not None:
                checkpoints.await_saved(lambda: line.saved, engine.step, timeout_s)
        except Exception as error:  # of Horovod, too: a worker may have died after its work was done
            text = f"the checkpoint of the last step was not saved: {type(error).__name__}: {error}"
            engine.emit(Event("checkpoint_failed", engine.step, text, {"why": str(error)}))

    def save_asynchronously_if_due(self) -> None:
        """On the chief, before each micro-batch of an asynchronous mode."""
        engine, checkpoints = self.engine, self.engine.checkpoints
        if checkpoints is None or engine.world.rank != 0 or not isinstance(engine.mode, GbaMode):
            return
        checkpoints.follow(engine.mode.saved)
        if checkpoints.is_due_at(engine.step) or checkpoints.is_due_before_a_leave(engine.mode):
            checkpoints.save_asynchronously(engine.mode, self._snapshot)

    def leave_asynchronously_if_told(self) -> None:
        """In an asynchronous mode, before each micro-batch: the others go on; this worker waits for a checkpoint."""
        engine, checkpoints, mode = self.engine, self.engine.checkpoints, self.engine.mode
        if engine.leave_by_s is None or checkpoints is None or not isinstance(mode, GbaMode):
            return
        mode.leaving, step = True, engine.step
        text = "this worker was told to leave (SIGTERM): first a checkpoint"
        engine.emit(Event("preempted", step, text, {"rank": engine.world.rank}))
        while time.monotonic() < engine.leave_by_s:
            self.save_asynchronously_if_due()
            if mode.saved is not None and mode.saved.state == "done" and mode.saved.number >= step:
                break
            time.sleep(_LOOK_S)
        self._leave_if_told()

    # --- asynchronous modes ------------------------------------------------------------------------------------------

    def take_snapshot(self) -> None:
        """Keep what a newcomer starts from. Called where an asynchronous mode begins to hand out an epoch's batches.

        A newcomer runs the user's loop from here: it finds what is left of the epoch, then the evaluations after it,
        finished ones with their results.
        """
        if self._follows_membership or self.engine.checkpoints is not None:
            self._snapshot = state_codec.encode(self._whole_state())
        engine, mode = self.engine, self.engine.mode
        if isinstance(mode, GbaMode):
            self._keep(mode.session.generation, lambda: self._snapshot)
            if engine.compression is not None and engine.checkpoints is not None and mode.saved_residual is None:
                mode.save_residual(engine.compression.feedback)

    def keep_state(self) -> None:
        """Between two steps of allreduce mode: what a job that lost all its workers would go on from."""
        self._keep(0, lambda: state_codec.encode(self._whole_state()))

    def _keep(self, generation: int, state: Callable[[], bytes]) -> None:
        engine = self.engine
        # What compression has not sent yet is in every worker: the chief alone cannot keep it.
        if engine.checkpoints is None or engine.world.rank != 0 or engine.compression is not None:
            self._keeper = None
        elif self._keeper is None:  # this worker has become the chief
            self._keeper = StateKeeper(engine.folder, engine.settings, engine.checkpoints.callback.memory_share)
        if self._keeper is not None and (stopped := self._keeper.keep(self.step, generation, state)):
            self.engine.emit(Event("memory_not_kept", self.step, stopped, {}))

    def watch_membership(self) -> None:
        """Called when an asynchronous mode is on: from now on the world is formed anew beside the training."""
        mode = self.engine.mode
        assert isinstance(mode, GbaMode)
        if self.engine.reformer is None:
            self.engine.reformer = Reformer(mode, 0, self._meet, self._seat, self.engine.tables.config.server_s)
            self.engine.reformer.start()

    def tell_of_membership(self) -> None:
        """In the training thread: tell the callbacks what changed meanwhile."""
        if self._met:
            met, self._met = self._met, []
            joined, world = met[-1]
            before = [self.engine.world.size]
            self.engine.world = world
            if self.engine.checkpoints is not None:
                self.engine.checkpoints.world_formed(rows_moved=False)
            self.engine.restarts += 1
            self._tell_callbacks(joined, before)
            gone, self._gone = self._gone, []
            for n_workers, lost in gone:
                self._tell_lost_residuals(n_workers, lost)

    @property
    def _follows_membership(self) -> bool:
        return os.environ.get("HOROVOD_ELASTIC") == "1"

    def _meet(self, world: World) -> int:
        """A survivor's part in letting newcomers in, in the background."""
        joined = membership.join(self.engine, world, self._job_id, True)
        if not joined.asynchronous:
            raise GbaError("the others have left the asynchronous mode")
        world.broadcast("snapshot", self._snapshot if world.rank == joined.source else None, joined.source)
        if self.engine.compression is not None:
            self._gone.append(self.engine.compression.count_lost(world, True))
        self._met.append((joined, world))
        if isinstance(self.engine.mode, GbaMode):
            self.engine.mode.rank = world.rank  # last: from then on the servers count on it
        return joined.membership

    def _join_asynchronous(self, joined: membership.Joined) -> None:
        """A newcomer's part, before its training."""
        engine, world = self.engine, self.engine.world
        self._snapshot = world.broadcast("snapshot", None, joined.source)
        state = state_codec.decode(self._snapshot)
        self._load_state_dict(state)
        if engine.compression is not None:
            engine.compression.clear()  # whoever was here before was counted as lost
            engine.compression.count_lost(world, False)
        if engine.checkpoints is not None:
            engine.checkpoints.load_state(state["checkpoints"])
            engine.checkpoints.world_formed(rows_moved=False)
        if not self._has_state:
            atexit.register(self._close_at_exit)
        self._has_state, self._synced, self._closed = True, True, False
        self.finished_epoch = None
        engine.reformer = Reformer(
            cast(GbaMode, engine.mode), joined.membership, self._meet, self._seat, engine.tables.config.server_s
        )
        engine.reformer.start()
        self._tell_callbacks(joined, [])

    def _talk_to_server(self, joined: membership.Joined) -> None:
        """The lead of a host follows what an operator wants."""
        engine, world = self.engine, self.engine.world
        if self._line is not None:
            self._line.close()
            self._line = None
        if (engine.switching is not None or engine.checkpoints is not None) and joined.leads_host:
            self._line = LocalServer(
                self._job_id, engine.key, engine.folder, joined.host, engine.worker_id, world.rank, self._look
            )
            self._line.start()
            engine.wishes.operator = self._line.wanted
        self._part = (joined.part, joined.n_hosts)
        self._keeper = None
        if engine.checkpoints is not None and world.rank == 0 and self._line is not None:
            engine.checkpoints.hold(self._line)

    def _look(self) -> dict[str, Any]:
        engine = self.engine
        told = {"step": engine.step, "epoch": engine.cursor.epoch, "workers": engine.world.size}
        last = None if engine.switching is None else engine.switching.last
        reason = {} if last is None else {"last_decision": last.reason}
        return {**told, "account": asdict(engine.account), **reason}

    # -----------------------------------------------------------------------------------------------------------------

    def _tell_callbacks(self, joined: membership.Joined, before: list[int]) -> None:
        engine = self.engine
        world = engine.world
        settings = {
            "tables": {t.name: [t.n_rows, t.dim] for t in engine.tables.layout.tables},
            "n_shards": engine.tables.layout.n_shards,
            "global_batch": engine.global_batch,
            "micro_batch": engine.micro_batch,
            "optimizer": type(self.optimizer).__name__,
            "row_optimizer": repr(engine.tables.optimizer),
        }
        job = Job(self._job_id, world.rank, world.size, world.local_rank, world.host, joined.leads_host, settings)
        for callback in engine.callbacks:
            callback.on_job(job)
        if engine.checkpoints is not None and world.rank == 0:
            engine.checkpoints.plan_pace(joined.n_hosts)
        workers = f"{_count(world.size, 'worker')} on {_count(joined.n_hosts, 'host')}"
        if not joined.is_restart:
            engine.emit(Event("started", self.step, f"{workers}, job {self._job_id}", {"workers": world.size}))
            if (report := joined.resumed) is not None:
                name = report.manifest.name
                text = f"going on at step {self.step} from {name}: {report.n_rows:,} rows in {report.seconds:.1f} s"
                skipped = [f"{one.name}: {one.why}" for one in report.skipped]
                told = {"manifest": name, "rows_restored": report.n_rows, "seconds": report.seconds, "skipped": skipped}
                engine.emit(Event("resumed", self.step, text, told))
            if self._residuals_missing:
                text = f"the checkpoint lacks what {_count(self._residuals_missing, 'worker')} had not sent"
                engine.emit(Event("residual_lost", self.step, text, {"workers": self._residuals_missing}))
            if joined.taken is not None:
                text = f"going on at step {self.step} where the lost job stood: {joined.taken.reason}"
                lost = {"rows_restored": 0, "rows_lost": 0, "shard_steps_missed": joined.shard_steps_missed}
                engine.emit(Event("resumed", self.step, text, {"manifest": "", "from_memory": True, **lost}))
            return
        was = f", before {before[0]}" if before else ""
        facts = {
            "workers": world.size,
            "shard_steps_missed": joined.shard_steps_missed,
            "rows_lost": joined.rows_lost,
            "rows_restored": joined.rows_restored,
        }
        engine.emit(Event("membership", self.step, f"{workers}{was}; going on at step {self.step}", facts))
        if joined.shard_steps_missed:
            text = f"{joined.shard_steps_missed} shards missed a step that their worker died in"
            engine.emit(Event("shard_steps_missed", self.step, text, facts))
        if joined.rows_restored:
            text = (
                f"{joined.rows_restored:,} rows that went down with their host came back from the checkpoint; "
                f"they are {joined.rows_age:.0f} steps old"
            )
            told = {**facts, "pls": self._pls(joined), "age": joined.rows_age}
            engine.emit(Event("rows_restored", self.step, text, told))
        if joined.rows_lost:
            why = "no checkpoint was configured" if engine.checkpoints is None else "no checkpoint has them"
            why = joined.why_lost or why
            text = f"{joined.rows_lost:,} rows went down with their host and begin anew; {why}"
            engine.emit(Event("rows_lost", self.step, text, {**facts, "why": why}))

    def _count_lost_residuals(self, compression: DenseExchange) -> None:
        """A collective: what workers that are gone had not sent yet."""
        self._tell_lost_residuals(*compression.count_lost(self.engine.world, self._has_state))

    def _tell_lost_residuals(self, n_workers: int, lost: float) -> None:
        if n_workers:
            text = f"{_count(n_workers, 'worker')} took gradients along that were not sent; known is {lost:.3g} of |g|"
            self.engine.emit(Event("residual_lost", self.step, text, {"workers": n_workers, "residual": lost}))

    def _pls(self, joined: membership.Joined) -> float:
        """Portion of lost samples, of all so far (CPR): each host's rows lost what came after their checkpoint."""
        n_rows = sum(table.n_rows for table in self.engine.tables.layout.tables)
        lost = sum((self.engine.account.applied - samples) * n for samples, n in joined.refilled)
        return lost / n_rows / max(1, self.engine.account.total)

    def _whole_state(self) -> dict[str, Any]:
        """What newcomers get; a checkpoint has no use for the claim it was saved under."""
        checkpoints = self.engine.checkpoints
        return {**self._state_dict(), "checkpoints": None if checkpoints is None else checkpoints.state()}

    def _state_dict(self) -> dict[str, Any]:
        values = {}
        for name in self._values:
            value = getattr(self, name)
            values[name] = value.state_dict() if hasattr(value, "state_dict") else value
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "values": values,
            "position": self.engine.position(),
            "callbacks": [(type(callback).__name__, callback.state_dict()) for callback in self.engine.callbacks],
        }

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, value in state["values"].items():
            if name not in self._values:
                continue  # of a checkpoint; this script has it no more
            if hasattr(getattr(self, name), "load_state_dict"):
                getattr(self, name).load_state_dict(value)
            else:
                setattr(self, name, value)
        self.engine.load_position(state["position"])
        saved = list(state["callbacks"])
        for callback in self.engine.callbacks:  # by kind: a job that goes on from a checkpoint may have other callbacks
            mine = next((entry for entry in saved if entry[0] == type(callback).__name__), None)
            if mine is not None:
                saved.remove(mine)
                callback.load_state_dict(mine[1])

    def _resume(self, state: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint. One of an asynchronous mode has three parts, see `ps.server`."""
        first = state.get("snapshot", state)
        # The script says which mode it wants, not the job that was lost.
        kept = [entry for entry in first["callbacks"] if entry[0] != GBACallback.__name__]
        self._load_state_dict({**first, "callbacks": kept})
        if self.engine.compression is not None:
            self._residuals_missing = self.engine.compression.load_state(state)
        if "snapshot" not in state:
            return
        self.engine.load_dense(state["dense"])
        self.engine.go_on_from(msgspec.convert(state["position"], Position))

    def _close_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # the exception the interpreter is ending with
        self.close("FINISHED" if error is None else _status_of(error), error)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """`horovod.torch.elastic.run`, and the end is told: callbacks hear how the job ended; SIGTERM interrupts.

    Works without `horovodrun`, and without Horovod, as a world of one.
    """

    @functools.wraps(function)
    def wrapper(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        restore_sigterm = _leave_on_sigterm(state)
        try:
            result = _elastic(function)(state, *args, **kwargs)
            state.save_last()
        except BaseException as error:
            status = _status_of(error)
            state.close(status, None if status == "FINISHED" else error)
            raise
        else:
            state.close()
            return result
        finally:
            restore_sigterm()

    return wrapper


def _elastic(function: Callable[..., Any]) -> Callable[..., Any]:
    if "horovod.torch" not in sys.modules or not sys.modules["horovod.torch"].is_initialized():

        def alone(state: TorchState, *args: Any, **kwargs: Any) -> Any:
            state.sync()
            return function(state, *args, **kwargs)

        return alone
    from horovod.common.elastic import run_fn

    wrapped: Callable[..., Any] = run_fn(function, functools.partial(initialise_again, _WORLD_TIMEOUT_S))
    return wrapped


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n > 1 else ''}"


def _status_of(error: BaseException) -> str:
    if isinstance(error, SystemExit) and error.code in (0, None):
        return "FINISHED"
    return "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"


def _leave_on_sigterm(state: TorchState) -> Callable[[], None]:
    """At once; or, if time for a checkpoint is given, after it: the first signal is a request, a second one is not."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    previous: dict[int, Any] = {}

    def interrupt(signum: int, frame: Any) -> None:
        engine = state.engine
        allowed_s = None if engine.checkpoints is None else engine.checkpoints.callback.preemption_s
        if signum == signal.SIGTERM and allowed_s is not None and engine.leave_by_s is None:
            engine.leave_by_s = time.monotonic() + allowed_s
            previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, allowed_s)  # whatever this worker waits for then
            return
        raise KeyboardInterrupt("SIGTERM")

    previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, interrupt)

    def restore() -> None:
        if signal.SIGALRM in previous:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in previous.items():
            signal.signal(number, handler)

    return restore
