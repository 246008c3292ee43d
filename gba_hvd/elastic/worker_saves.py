"""A worker's part in saving: checkpoints between two steps and at the end, leaving after one, and the state in memory.

`save_schedule` decides when one is due, from fields of the commit (allreduce) or the coordinator's replies
(asynchronous modes). In allreduce mode all workers come here at the same step, so what is a collective is run by all.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

import msgspec
import numpy as np

from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.job_checkpoints import JobCheckpoints, checkpoints_of
from gba_hvd.checkpoint.save_schedule import is_complete
from gba_hvd.elastic import endings, rng_state
from gba_hvd.elastic.training_state import TrainingState
from gba_hvd.errors import LastCheckpointFailed, ShardMemoryError
from gba_hvd.membership import JoinResult
from gba_hvd.ps.messages import SavePlan
from gba_hvd.ps.state_files import path_of
from gba_hvd.ps.worker.host_server import HostServer
from gba_hvd.ps.worker.server_restarts import ServerRestarts
from gba_hvd.ps.worker.worker import PsWorker
from gba_hvd.shm import retained_state
from gba_hvd.shm.retained_state import Absence, StateRetainer
from gba_hvd.switching.requests import ModeRequests
from gba_hvd.training.engine import Engine
from recovery import state_codec

_SAVE_LAST_TIMEOUT_S = 600.0
_PREEMPTION_S, _LOOK_S = 30.0, 0.05
_BEST_S = 60.0
_NEXT_CHIEF_S = 90.0  # for so long another worker may take to be the chief, where the chief died


class WorkerSaves:
    """Belongs to the training thread. Owns the connection to the host's server, and retains the state."""

    def __init__(self, engine: Engine, state: TrainingState) -> None:
        self._engine, self._state = engine, state
        self._host_server: HostServer | None = None
        self._server_restarts: ServerRestarts | None = None  # while this worker is its host's leader
        self._keeper: StateRetainer | None = None
        self._part = (0, 1)  # this host's number, and how many there are
        self._folder_reported = False
        self._best_patience_s = _BEST_S  # for so long the best model waits for servers
        self._not_kept_reported = set[Absence]()  # after a change of workers it is tried again
        # Digest of the user's values in the newest checkpoint that this worker asked servers for, if it did.
        self._values_saved: bytes | None = None
        # Take over the world that formed beside an asynchronous mode, if one did; set by the state.
        self.report_worlds: Callable[[], None] = lambda: None

    def world_formed(self, joined: JoinResult) -> None:
        """In allreduce mode. A host leader passes on an operator's request."""
        engine, world = self._engine, self._engine.world
        requests, checkpoints = engine.participant(ModeRequests), checkpoints_of(engine)
        if self._host_server is not None:
            self._host_server.close()
            self._host_server = None
        if (requests is not None or checkpoints is not None) and joined.is_host_leader:
            self._host_server = HostServer(
                engine.job.id, engine.job.key, engine.folder, joined.host, engine.job.worker_id, world.rank,
                self._status, self._n_servers,
            )  # fmt: skip
            self._host_server.start()
            if requests is not None:
                requests.operator_request = self._host_server.requested_mode
        engine.host.server, self._folder_reported = self._host_server, False
        self._part = (joined.part, joined.n_hosts)
        self._keeper = None
        if checkpoints is not None and self._host_server is not None:
            checkpoints.delegate_claim(self._host_server, *self._part)

    @property
    def _n_servers(self) -> int:
        """Of each host of this job."""
        requests = self._engine.participant(ModeRequests)
        if requests is None:
            return int(checkpoints_of(self._engine) is not None)
        return requests.callback.servers_per_host

    def _status(self) -> dict[str, Any]:
        engine = self._engine
        status = {"step": engine.progress.step, "epoch": engine.progress.cursor.epoch, "workers": engine.world.size}
        requests = engine.participant(ModeRequests)
        decided = {} if requests is None else requests.for_people()
        return {**status, "account": asdict(engine.progress.account), **decided}

    def close(self) -> None:
        """At the end of the job. May be called twice."""
        if self._host_server is not None:
            self._host_server.close()
        self._server_restarts = None
        self.release_claim()
        self.stop_renewing()

    def stop_renewing(self) -> None:
        """A claim on the checkpoint location, on any worker."""
        if (checkpoints := checkpoints_of(self._engine)) is not None:
            checkpoints.stop_renewing()

    def release_claim(self) -> None:
        """On the chief, where this process saves nothing more. May be called twice."""
        checkpoints = checkpoints_of(self._engine)
        if checkpoints is not None and self._engine.world.rank == 0:
            checkpoints.release()

    # --- allreduce mode ----------------------------------------------------------------------------------------------

    def save_if_due(self) -> None:
        """Between two steps: have a checkpoint made if the last commit agreed on one. A collective then."""
        engine, checkpoints = self._engine, checkpoints_of(self._engine)
        self._report_lost_folder()
        self._report_restarts()
        if checkpoints is None:
            return
        if engine.world.rank == 0 and self._host_server is not None:
            checkpoints.schedule.poll(self._host_server.saved)
            checkpoints.schedule.look_at_age(self._host_server.why_not_ready)
        if checkpoints.worker_leaves:
            self._save_and_leave()
        elif checkpoints.is_due:
            self._save()

    def save_the_best(self) -> None:
        """Where an epoch begins: if an evaluation since the last step found the best model so far, have a checkpoint
        made of these very rows. A collective.

        Waits for the servers, and for a checkpoint in flight, for a limited time; then it is due with the next commits.
        """
        checkpoints = checkpoints_of(self._engine)
        if checkpoints is None or checkpoints.callback.keep_best is None:
            return
        began_s = time.monotonic()
        while (found := self._look_for_the_best(began_s)) == "wait":
            time.sleep(_LOOK_S)
        if found == "save":
            self._save(of_one_step=True)

    def _look_for_the_best(self, began_s: float) -> Literal["none", "wait", "save"]:
        """What to do about the best model now; the same on all workers. A collective."""
        engine, line, checkpoints = self._engine, self._host_server, checkpoints_of(self._engine)
        assert checkpoints is not None
        schedule, best = checkpoints.schedule, checkpoints.callback.best_so_far
        is_chief, limit_s = engine.world.rank == 0, self._best_patience_s
        if is_chief and line is not None:
            schedule.poll(line.saved)
        is_due = is_chief and checkpoints.callback.best_is_due(engine.progress.step)
        is_missing, never = line is not None and not line.is_ready(), line is not None and bool(line.why_not_started())
        is_late = time.monotonic() - began_s > limit_s
        row = [is_due, is_chief and schedule.is_in_flight, is_missing, never, is_chief and is_late]
        due, busy, missing, hopeless, late = engine.world.gather("best", np.array(row, dtype=np.int64)).sum(axis=0)
        if not due:
            return "none"
        if not busy and not missing:
            self._best_patience_s = _BEST_S
            return "save"
        why = "" if line is None else line.why_not_ready()
        why = why or ("a server of another host is not up" if missing else "the checkpoint before is still being saved")
        if hopeless or late:
            self._best_patience_s = 0.0  # what took so long is not awaited again, until a save can begin at once
            if best is not None:
                best.why_not = why
            return "none"
        schedule.report_wait_for_best(why, began_s, limit_s)
        return "wait"

    def _report_lost_folder(self) -> None:
        """Once, on the host leader."""
        line = self._host_server
        if line is not None and line.folder_lost and not self._folder_reported:
            self._folder_reported = True
            event = Event(
                "folder_lost",
                self._engine.progress.step,
                line.folder_lost,
                {"folder": str(self._engine.folder)},
                "warning",
            )
            self._engine.emit(event, only_here=True)

    def _report_restarts(self) -> None:
        """Of servers that died, on the host leader."""
        engine = self._engine
        if not engine.host.is_leader or not self._n_servers:
            self._server_restarts = None
            return
        if self._server_restarts is None:
            self._server_restarts = ServerRestarts(engine.folder, self._n_servers)
        cost = "" if self._servers is None else "; micro-batches whose gradients it held are computed again"
        for one in self._server_restarts.since_last():
            text = (
                f"the companion server {one.server} of this host (process {one.before}) has died, and was started "
                f"again (process {one.now}). Training continues{cost}; a checkpoint that it was saving has failed. "
                f"Where {path_of(engine.folder, one.server, 'log')} has no reason, it was killed"
            )
            data = {"server": one.server, "before": one.before, "now": one.now}
            engine.emit(Event("server_restarted", engine.progress.step, text, data), only_here=True)

    def _save_and_leave(self) -> None:
        """Some workers are preempted: all wait for a checkpoint, then those workers leave. A collective."""
        engine, checkpoints = self._engine, checkpoints_of(self._engine)
        assert checkpoints is not None
        checkpoints.worker_leaves = False
        text = "a worker is being preempted (SIGTERM): first a checkpoint of this step"
        engine.emit(Event("preempted", engine.progress.step, text, {}))
        if why := self._save_last(checkpoints.callback.preemption_s or _PREEMPTION_S):
            text = (
                f"the checkpoint of step {engine.progress.step}, before a worker leaves, was not saved: {why}. A job "
                f"that resumes from {checkpoints.callback.url} loses what came after its newest checkpoint"
            )
            engine.emit(Event("checkpoint_failed", engine.progress.step, text, {"why": why}, level="warning"))
        engine.world.gather(
            "saved before leaving", np.zeros(1, dtype=np.int64)
        )  # before that, other hosts may not have saved theirs
        self._leave_if_preempted()

    def _leave_if_preempted(self) -> None:
        if self._engine.signals.preempt_deadline_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            raise KeyboardInterrupt("SIGTERM, after a checkpoint")

    def _save(self, again: bool = True, of_one_step: bool = False) -> bool:
        """A collective. Returns whether a checkpoint is being made.

        again: also if there is one of this step. Else it may be the last, so it leaves out no change. of_one_step: wait
        until the rows are read, as all saves do that are strict
        """
        engine, checkpoints = self._engine, checkpoints_of(self._engine)
        assert checkpoints is not None
        is_chief, word, started = engine.world.rank == 0, b"null", time.perf_counter()
        if is_chief and (again or not checkpoints.schedule.has(engine.progress.step)):
            checkpoints.claim_again_if_free()
            word = msgspec.json.encode(checkpoints.plan(is_last=not again))
        plan = msgspec.json.decode(engine.world.broadcast("save", word if is_chief else None, 0), type=SavePlan | None)
        if plan is not None:
            state = self._whole_state()
            checkpoints.save(plan, self._host_server, *self._part, state)
            if of_one_step or checkpoints.is_strict:
                checkpoints.schedule.await_read(self._host_server, plan.number)
                engine.world.gather("checkpoint read", np.zeros(1, dtype=np.int64))
            checkpoints.schedule.record_stall(time.perf_counter() - started)
        return plan is not None

    def _whole_state(self) -> bytes:
        """What a checkpoint has beside the rows; empty on others than the chief. A collective."""
        engine = self._engine
        residual = {} if engine.model.compression is None else engine.model.compression.state(engine.world)
        random = {"random": rng_state.gather(engine.world)}
        return state_codec.encode({**self._state.to_save(), **residual, **random}) if engine.world.rank == 0 else b""

    def _is_as_resumed(self) -> bool:
        """Whether this launch would save what it resumed from. In allreduce mode. A collective."""
        engine, checkpoints = self._engine, checkpoints_of(self._engine)
        assert checkpoints is not None
        is_chief = engine.world.rank == 0
        may_be = b"1" if is_chief and checkpoints.may_be_as_resumed() else b"0"
        if engine.world.broadcast("may be as resumed", may_be, 0) == b"0":
            return False
        state = self._whole_state()
        is_so = b"1" if is_chief and checkpoints.is_as_resumed(state) else b"0"
        return engine.world.broadcast("is as resumed", is_so, 0) == b"1"

    def keep_state(self) -> None:
        """Between two steps: what a job that lost all its workers would resume from."""
        self._keep(0, self._encoded)

    def _encoded(self) -> bytes:
        memory = self._engine.model.tables.memory
        assert memory is not None
        memory.await_device()  # the rows are kept with the state
        return self._state.encoded()

    def _keep(self, generation: int, state: Callable[[], bytes]) -> None:
        engine, checkpoints = self._engine, checkpoints_of(self._engine)
        if checkpoints is None or engine.world.rank != 0:
            self._keeper = None
            return
        if self._keeper is None:  # this worker has become the chief
            self._keeper = self._retainer(checkpoints.callback.retain_state_share)
        if stopped := self._keeper.keep(engine.progress.step, generation, state):
            level: Literal["info", "warning"] = "warning" if stopped.is_notable else "info"
            why = retained_state.absence(engine.folder)
            if why in self._not_kept_reported:
                return
            self._not_kept_reported.add(why)
            text = f"{stopped.reason}. {_restart(checkpoints.schedule.saved_step)}"
            engine.emit(Event("memory_not_kept", engine.progress.step, text, {}, level=level))

    def _retainer(self, share: float) -> StateRetainer:
        engine = self._engine
        is_compressed = engine.model.compression is not None
        return StateRetainer(engine.folder, engine.job.settings, share, is_compressed=is_compressed)

    def _keep_once(self) -> None:
        """Retain the state at any cost, since no other step follows. On the chief."""
        step, servers = self._engine.progress.step, self._servers
        if self._engine.world.rank != 0:
            return
        if servers is None:
            self._retainer(1.0).keep(step, 0, self._encoded)
        else:
            self._retainer(1.0).keep(step, servers.session.generation, self._state.encoded)

    def retain_pause(self) -> None:
        """The job was interrupted in a pause: one that resumes from memory counts it. On the chief."""
        engine, pauses = self._engine, self._engine.reports.pauses
        if engine.world.rank or not pauses.over or pauses.over[-1].step is not None:
            return

        def amended(state: bytes) -> bytes:
            return state_codec.encode({**state_codec.decode(state), "pauses": pauses.state_dict()})

        with contextlib.suppress(OSError, ShardMemoryError):
            retained_state.amend(engine.folder, amended)

    # --- asynchronous modes ------------------------------------------------------------------------------------------

    def epoch_begins(self) -> None:
        """Where an asynchronous mode begins to hand out an epoch's batches."""
        servers, compression = self._servers, self._engine.model.compression
        assert servers is not None
        self._state.take_snapshot()
        self._keep(servers.session.generation, lambda: self._state.snapshot)
        if compression is not None and checkpoints_of(self._engine) is not None and servers.saved_residual is None:
            servers.save_residual(compression.feedback)

    @property
    def _servers(self) -> PsWorker | None:
        return None if self._engine.mode is None else self._engine.mode.servers

    def save_asynchronously_if_due(self) -> None:
        """Before each micro-batch, and while its lease is awaited. Saves are of the chief."""
        engine, checkpoints = self._engine, checkpoints_of(self._engine)
        self._report_lost_folder()
        self._report_restarts()
        servers = self._servers
        if checkpoints is None or servers is None:
            return
        self._adopt_claim(servers)
        if engine.world.rank != 0:
            return
        checkpoints.schedule.poll(servers.contact.saved)
        checkpoints.schedule.look_at_age(lambda: "")
        leaves = checkpoints.schedule.is_due_before_a_leave(servers)
        if leaves or checkpoints.schedule.is_due_at(engine.progress.step):
            self._values_saved = self._state.values_in_snapshot
            self._save_asynchronously(servers, self._state.snapshot_to_save(), is_last=leaves)

    def _adopt_claim(self, servers: PsWorker) -> None:
        """Where the chief has claimed the location again: this worker may be the next chief."""
        checkpoints = checkpoints_of(self._engine)
        if checkpoints is not None and servers.contact.claim is not None:
            checkpoints.adopt_claim(*servers.contact.claim)
            checkpoints.delegate_if_new(self._host_server, *self._part)

    def _save_asynchronously(self, servers: PsWorker, state: bytes, is_last: bool) -> None:
        """On the chief."""
        checkpoints = checkpoints_of(self._engine)
        assert checkpoints is not None
        self._adopt_claim(servers)
        checkpoints.claim_again_if_free()
        checkpoints.delegate_if_new(self._host_server, *self._part)
        checkpoints.save_asynchronously(servers, state, is_last)

    def leave_asynchronously_if_preempted(self) -> None:
        """Before each micro-batch, and while its lease is awaited: this worker waits for a checkpoint."""
        engine, checkpoints, servers = self._engine, checkpoints_of(self._engine), self._servers
        if engine.signals.preempt_deadline_s is None or checkpoints is None or servers is None:
            return
        contact, step = servers.contact, engine.progress.step
        contact.leaving = True
        text = "this worker is being preempted (SIGTERM): first a checkpoint"
        engine.emit(Event("preempted", step, text, {"rank": engine.world.rank}))
        while time.monotonic() < engine.signals.preempt_deadline_s:
            self.save_asynchronously_if_due()
            saved = checkpoints.schedule.in_force(contact.saved)
            if saved is not None and saved.facts.saved_step >= step and is_complete(saved):
                break
            time.sleep(_LOOK_S)
        self._leave_if_preempted()

    # --- any mode ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """At the end of training, on all workers: a checkpoint of the last step, if there is none yet, or, of servers
        of one host, none with the user's values as they are now. Waits for it.

        Raises LastCheckpointFailed when it was not saved: who asked for checkpoints counts on the last one.
        """
        engine, checkpoints = self._engine, checkpoints_of(self._engine)
        why = self._save_last(_SAVE_LAST_TIMEOUT_S, may_spare=True)
        if checkpoints is not None:
            checkpoints.schedule.report_unsaved_best()
        if why and checkpoints is not None:
            self._keep_once()
            kept = endings.kept_in_memory(engine)
            raise LastCheckpointFailed(
                f"the training is done (step {engine.progress.step}), but the checkpoint of its last step was not "
                f"saved at {checkpoints.callback.url}: {why}. When that is repaired, start the same command again: "
                f"{f'it {kept}, and saves it; else ' if kept else ''}{endings.where_it_begins(engine)}"
            )

    def _await_the_chief(self, servers: PsWorker, timeout_s: float) -> str:
        """Wait until the chief's last save is complete or has failed, in an asynchronous mode. On the others.

        A chief that dies before leaves it to another worker: returns as soon as this one is the chief. Returns why
        no server will save where no world forms any more; empty also where the chief lives and has not saved in
        `timeout_s`: then it may have other work to do.
        """
        engine, checkpoints, mode = self._engine, checkpoints_of(self._engine), self._engine.mode
        rejoin = None if mode is None else mode.rejoin
        if checkpoints is None or rejoin is None or not endings.is_elastic():
            return ""
        step, deadline, changed_s = engine.progress.step, time.monotonic() + timeout_s, None
        while time.monotonic() < deadline:
            self.report_worlds()
            saved = checkpoints.schedule.in_force(servers.contact.saved)
            is_over = saved is not None and saved.number >= step and (saved.state == "failed" or is_complete(saved))
            if engine.world.rank == 0 or is_over:
                return ""
            if servers.position.membership_epoch <= rejoin.number:
                changed_s = None
            elif changed_s is None:
                changed_s = time.monotonic()
            elif time.monotonic() - changed_s > _NEXT_CHIEF_S:
                return (
                    f"a worker was lost when training was done, and no world has formed without it for "
                    f"{_NEXT_CHIEF_S:.0f} s, so there is no chief that could save"
                )
            time.sleep(_LOOK_S)
        return ""

    def _have_values_changed(self) -> bool:
        """Whether the user's values are others than in the newest checkpoint that this worker asked servers for."""
        return self._values_saved not in (None, self._state.digest_of_values())

    def _save_values(self, servers: PsWorker, checkpoints: JobCheckpoints, timeout_s: float) -> None:
        """Save a step that is saved once more, with the user's values as they are now. A failure is reported.

        On the chief, of one host: of several the workers of the others have left, with their servers.
        """
        engine, schedule, step = self._engine, checkpoints.schedule, self._engine.progress.step
        try:
            self._save_asynchronously(servers, self._state.encoded(), is_last=True)
            schedule.await_saved(lambda: servers.contact.saved, step, timeout_s)
            why = schedule.why_not_saved(step)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            text = (
                f"the checkpoint of step {step:,} has the script's values of the start of the epoch: one with those of "
                f"the end was not saved: {why}"
            )
            engine.emit(Event("checkpoint_failed", step, text, {"why": why}, level="warning"))

    def _save_last(self, timeout_s: float, may_spare: bool = False) -> str:
        """A checkpoint of this step, if there is none yet; where servers make it, also if its values are older.

        Returns why it was not saved, where this worker knows.
        may_spare: none where this launch has changed nothing of what it resumed from
        """
        engine, checkpoints, servers = self._engine, checkpoints_of(self._engine), self._servers
        if checkpoints is None:
            return ""
        schedule = checkpoints.schedule
        try:
            if servers is not None:
                if engine.world.rank and (why := self._await_the_chief(servers, timeout_s)):
                    return why
                if engine.world.rank == 0:
                    schedule.await_quiet(lambda: servers.contact.saved, timeout_s)
                    # The training function has returned: the user's values are the last ones.
                    if not schedule.has(engine.progress.step):
                        self._save_asynchronously(servers, self._state.encoded(), is_last=True)
                    elif not servers.several_hosts and self._have_values_changed():
                        self._save_values(servers, checkpoints, timeout_s)
                        return ""
                    schedule.await_saved(lambda: servers.contact.saved, engine.progress.step, timeout_s)
                elif servers.own_server:  # the first host's memory stays as long as the chief does
                    schedule.await_saved(servers.saved_here, engine.progress.step, timeout_s)
                return schedule.why_not_saved(engine.progress.step)
            if may_spare and self._is_as_resumed():
                return ""
            line = self._host_server
            if line is not None:
                schedule.await_quiet(lambda: line.saved, timeout_s)
            if self._save(again=False) and line is not None:
                schedule.await_saved(lambda: line.saved, engine.progress.step, timeout_s, line.why_not_ready)
        except Exception as error:  # of Horovod, too: a worker may have died after its work was done
            why = f"{type(error).__name__}: {error}"
            if servers is not None and engine.world.rank:  # the chief reports the complete save
                text = f"this host got no report that its part of the last checkpoint was saved: {why}"
                engine.emit(Event("checkpoint_failed", engine.progress.step, text, {"why": why}, level="warning"), True)
                return ""
            return why
        return schedule.why_not_saved(engine.progress.step)


def _restart(saved_step: int) -> str:
    """Where a job without its state in memory begins again. saved_step: of the newest checkpoint; -1: there is none."""
    if saved_step >= 0:
        return "A restart will begin at the newest checkpoint"
    return "A restart will begin at the start until a checkpoint is complete, then at the newest one"
