"""`TorchState`: what the user's loop and Horovod's elastic loop hold of a job. `elastic` tells the order of `sync`."""

from __future__ import annotations

import atexit
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from gba_hvd import handover, membership
from gba_hvd.allreduce import AllreduceMode
from gba_hvd.callbacks import Callback
from gba_hvd.checkpoints import Checkpoints
from gba_hvd.collectives import current_world, hosts_updated, worker_lost
from gba_hvd.elastic import telling
from gba_hvd.elastic.loop import status_of
from gba_hvd.elastic.newcomers import Newcomers
from gba_hvd.elastic.saving import Saving
from gba_hvd.elastic.training_state import TrainingState
from gba_hvd.engine import Engine
from gba_hvd.errors import BadInput
from gba_hvd.faults import FaultSchedule
from gba_hvd.gba import GbaMode
from gba_hvd.gba_callback import GBACallback
from gba_hvd.launcher import Seat
from gba_hvd.membership import Joined
from gba_hvd.torch_optimizers import spec_of
from recovery import state_codec
from recovery.callback import CheckpointCallback

# How long the end waits for a world that is being formed: a job whose launcher has to kill a newcomer counts as failed.
_END_TIMEOUT_S, _FAILED_TIMEOUT_S = 60.0, 5.0


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
        engine.job_id = engine.tables.config.job_id or secrets.token_hex(4)
        self._seat = Seat()
        self.training_state = TrainingState(engine, model, self, list(values))
        self.saving = Saving(engine, self.training_state)
        self.newcomers = Newcomers(engine, self.training_state, self._seat)
        self._reset_callbacks: list[Callable[[], None]] = []
        self._has_state = self._synced = self._closed = False
        self.finished_epoch: int | None = None  # the last epoch this process saw the end of since it last synced
        for name, value in values.items():
            if hasattr(self, name):
                raise BadInput(f"TorchState has a {name!r} of its own; choose another name")
            setattr(self, name, value)

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
        return self.engine.job_id

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
        engine = self.engine
        try:
            telling.ended(engine, status, error)
        finally:
            if engine.reformer is not None:
                engine.reformer.stop(_END_TIMEOUT_S if error is None else _FAILED_TIMEOUT_S)
            self.saving.close()
            if isinstance(engine.mode, GbaMode):
                if error is None:
                    engine.mode.leave_together(engine.tables.config.server_s)
                engine.mode.close(finished=error is None)
            for mode in (engine.mode, engine.idle_mode):
                if mode is not None:
                    mode.close()
            memory = engine.tables.memory
            if memory is not None:  # what a restart could go on from is left to the keeper
                is_of_no_use = engine.world.size == 1 and engine.checkpoints is None
                memory.close(remove=status == "FINISHED" or is_of_no_use)

    def _close_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # the exception the interpreter is ending with
        self.close("FINISHED" if error is None else status_of(error), error)

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
            mode.contact.hosts_updated = True
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
        engine = self.engine
        self._synced = False
        engine.interrupt_due = engine.hosts_updated = False
        engine.switch_to = None
        engine.abandon_step()
        if isinstance(engine.mode, AllreduceMode):
            engine.mode.leave_step()
        if isinstance(engine.mode, GbaMode):  # this worker fell out of it
            if engine.reformer is not None:
                engine.reformer.stop()
            handover.rescue_dense_state(engine, engine.mode)
            engine.mode.close(finished=False)
            engine.mode = engine.idle_mode = engine.reformer = None
        self._seat.check(engine.tables.config.server_s)

    def stop_if_interrupted(self) -> None:
        """Leave the loop when hosts came or went: raised on all workers at the same step, as the commit agreed."""
        if self.engine.interrupt_due:
            self.engine.interrupt_due = self.engine.hosts_updated = False
            self._synced = False
            raise hosts_updated()

    def sync(self) -> None:
        """Agree with all workers on one state. A collective."""
        engine = self.engine
        before = engine.world.size if self._has_state else None
        engine.world = current_world()
        try:
            self._seat.take()
        except OSError as error:
            raise worker_lost(f"the launcher cannot be reached: {error}") from error
        engine.size_extra()
        joined = membership.join(engine, engine.world, engine.job_id, self._has_state)
        engine.job_id = joined.job_id
        if engine.faults is not None and engine.faults.folder is None:
            engine.faults.record_in(engine.folder / "faults")
        if joined.asynchronous:
            self.newcomers.come_in(joined)
            self._note_synced()
            self.newcomers.watch(joined.membership)
            telling.world_formed(engine, joined, None)
            return
        self._come_to_one_state(joined)
        self._note_synced()
        telling.world_formed(engine, joined, before, self.training_state.residuals_missing)
        self.saving.world_formed(joined)

    def _come_to_one_state(self, joined: Joined) -> None:
        """In allreduce mode, when the rows are in place: the part of `sync` that is not of the memory. A collective."""
        engine, checkpoints = self.engine, self.engine.checkpoints
        left = joined.resumed or joined.taken  # by a job that is no more
        if left is not None and left.state is not None:  # on the source
            self.training_state.resume(state_codec.decode(left.state))
        # Counted before the state is sent, so that no failure from here on loses the count.
        engine.account.shard_steps_missed += joined.shard_steps_missed
        engine.account.rows_lost += joined.rows_lost
        engine.restarts += joined.is_restart
        if checkpoints is not None and self._has_state and joined.rows_lost + joined.rows_restored:
            checkpoints.host_was_lost(joined.load_s if joined.rows_restored else None, engine.seconds_since_step)
        self.training_state.share(joined.source)
        if checkpoints is not None:
            checkpoints.world_formed(rows_moved=True)
        if engine.compression is not None:
            telling.residuals_lost(engine, *engine.compression.count_lost(engine.world, self._has_state))

    def _note_synced(self) -> None:
        if not self._has_state:
            atexit.register(self._close_at_exit)
        self._has_state, self._synced, self._closed = True, True, False
        self.finished_epoch = None
