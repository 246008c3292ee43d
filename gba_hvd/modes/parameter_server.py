"""A mode with servers: each worker leases micro-batches and pushes their gradients. Within an epoch it waits for none.

    lease -> newest dense values -> rows read in place -> loss.backward -> push
             (the next lease is prefetched beside the computation)

Messages to servers are in `ps.worker`; what the job needs of the replies goes to the engine from here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from typing import Any

from torch import Tensor

from gba_hvd.callbacks import Event
from gba_hvd.comm.world_formation import still_forms
from gba_hvd.embedding.passes import PulledRows
from gba_hvd.epoch import run_number
from gba_hvd.errors import GbaError
from gba_hvd.modes import evaluation
from gba_hvd.modes.allreduce import AllreduceMode
from gba_hvd.ps.messages import GroupSetting, LeaseGrant, LeaseReply
from gba_hvd.ps.worker.lease_prefetch import LeasePrefetcher
from gba_hvd.ps.worker.replies import Disagreement
from gba_hvd.ps.worker.worker import PsWorker
from gba_hvd.trace import TRACE
from gba_hvd.training.engine import Engine
from gba_hvd.training.mode import CountRun, EpochRun, EvaluationRun, MicroBatch, RankFacts, Rejoin, RetrievalRun
from gba_hvd.training.settings_watch import ChangedSettings
from gba_hvd.update_rules import rule_class

_RESCUE_TIMEOUT_S = 3.0


class ParameterServerMode:
    """One worker in a mode with servers. `servers` is its conversation with them, which it closes.

    idle: the allreduce mode that was left for this one, as long as its world stands
    changed: settings of the dense groups since the mode began; None: servers do not step the dense part
    """

    steps_together = False
    survives_world = True

    def __init__(
        self, engine: Engine, servers: PsWorker, idle: AllreduceMode | None = None,
        changed: ChangedSettings | None = None,
    ) -> None:  # fmt: skip
        self._engine, self.servers, self.idle = engine, servers, idle
        self.name = servers.name
        self.rejoin: Rejoin | None = None
        self._leases: LeasePrefetcher[Any] | None = None  # of the loop over batches, until it is over or left
        self._hanging: dict[int, int] = {}  # of workers that live and do nothing: the rank, by process
        self._changed = changed
        self._has_model = False  # the dense values here are the model's, as exported, not what workers are shown

    # --- the epoch ---------------------------------------------------------------------------------------------------

    def micro_batches(self, epoch: EpochRun) -> Generator[Any, None, bool]:
        """See `Mode.micro_batches`.

        A loop that is left early returns its leases and brings the model to what the servers have: when it is closed or
        interrupted, else, as after an error in here or where a traceback keeps it, when the next one begins.
        """
        engine, servers = self._engine, self.servers

        def fetch() -> tuple[LeaseReply, Any, list[PulledRows | None] | None]:
            """In a thread of its own. Rows: None where only the training thread can find out which."""
            lrs = [*engine.model.group_lrs, engine.model.row_lr]
            given = servers.ask(
                epoch.epoch, epoch.segment, epoch.order_digest, epoch.n_samples, lrs, engine.progress.step,
                lambda: ahead.is_closed, self._settings(),
            )  # fmt: skip
            if given.lease is None:
                return given, None, []
            epoch.expect(range(micro, micro + 1) for micro in (given.lease.micro, *given.lease.expected))
            batch = epoch.read(given.lease.micro)
            if not servers.several_hosts:
                return given, batch, []
            if epoch.runs_model(batch):
                return given, batch, None
            rows = servers.fetch_rows(epoch.keys([batch]), bags=epoch.bags([batch]))
            return given, batch, rows

        if self._leases is not None:
            self._leave_early(self._leases)
        engine.model.dense.zero_()  # what a backward pass left that was cut off
        epoch.leases_begin()
        self._note_pause()
        engine.progress.n_steps = epoch.cut.n_steps
        self._leases = ahead = LeasePrefetcher(fetch, epoch.before_micro_batch)
        try:
            while True:
                asked_s = time.perf_counter()
                given, batch, rows = ahead.next()
                if given.lease is None:
                    break
                if rows is None:
                    rows = servers.fetch_rows(epoch.keys([batch]), bags=epoch.bags([batch]))
                if rows:
                    servers.use_rows(rows)
                got_s = time.perf_counter()
                epoch.lease_came()
                engine.observe(servers.position)
                self._report_hanging()
                epoch.before_micro_batch()
                begun_s = time.perf_counter()
                self._begin(given.lease)
                waited_s = time.perf_counter() - begun_s + got_s - asked_s
                for participant in engine.participants:
                    participant.before_micro_batch(servers, waited_s)
                yield batch
                engine.check_stepped()
        except (GeneratorExit, KeyboardInterrupt):
            if self._leases is ahead:
                self._leave_early(ahead)
            raise
        finally:
            ahead.close()
        self._leases = None
        if given.status == "finished":
            epoch.leases_end()
            self.take_dense_state(leaving=False)
            engine.observe(given.position)
            self._note_epoch_over()
            return True
        epoch.leave_mode(given.position)
        return False

    def _leave_early(self, loop: LeasePrefetcher[Any]) -> None:
        """End a loop before its epoch's end. A failure here is raised where the servers are asked next."""
        loop.fail(GbaError("this loop over batches() has no more batches: it was left, or another one has begun"))
        loop.close()
        self._engine.forget_micro_batch()
        with contextlib.suppress(Exception):
            self.take_dense_state(leaving=False, ended=False)
            self._leases = None
            self._note_epoch_over()

    def _report_hanging(self) -> None:
        """Report workers that live and do nothing, each once for each time, and that they work again.

        The lowest other rank that works reports it: rank 0, or another one, in its own log, of rank 0.
        """
        engine, position = self._engine, self.servers.position
        found = {pid: (rank, seconds) for rank, pid, seconds in position.hanging}
        before, self._hanging = self._hanging, {pid: rank for pid, (rank, _) in found.items()}
        step, me, ranks = engine.progress.step, engine.world.rank, {rank for rank, _ in position.rates}
        at_work = ranks - set(self._hanging.values())

        def reports(rank: int) -> bool:
            return me == min(at_work - {rank}, default=-1)

        for pid, (rank, seconds) in found.items():
            if pid in before or not reports(rank):
                continue
            text = (
                f"rank {rank} (process {pid}) lives, and has done nothing for {seconds:.0f} s: it hangs, is stopped, "
                "or is in long code of the script. The others train without it, and nothing replaces it while it "
                f"lives. `py-spy dump --pid {pid}` (pip install py-spy) shows where it is; in an elastic job a new "
                "worker comes when it is killed"
            )
            data = {"rank": rank, "pid": pid, "seconds": seconds}
            engine.emit(Event("worker_hangs", step, text, data, level="warning"), only_here=True)
        for pid, rank in before.items():
            if pid not in found and rank in ranks and reports(rank):
                text = f"rank {rank} (process {pid}) works again"
                engine.emit(Event("worker_works", step, text, {"pid": pid}), only_here=True)

    def _begin(self, lease: LeaseGrant) -> None:
        """The newest dense values are in place from here on."""
        self._engine.observe(self.servers.position)
        self._engine.reports.row_settings()
        self._engine.model.tables.drop_gradients()
        self._refresh_dense_()
        self._engine.begin_micro_batch(lease.micro, lease.n_samples, is_last=False, lease=lease)

    def _refresh_dense_(self) -> None:
        reports = self._engine.reports
        reports.other_writers()
        if self._changed is not None:
            reports.dense_settings(self.name, self._changed.kept(self._engine.model.dense_settings))
        self._has_model = False
        self.servers.refresh_dense_()
        self._engine.model.parameter_watch.note()

    def submit(self, micro: MicroBatch, loss: Tensor | float | None) -> None:
        engine, lease = self._engine, micro.lease
        assert lease is not None
        if TRACE is not None:
            TRACE.write(
                "push", generation=self.servers.session.generation, epoch=engine.progress.cursor.epoch,
                segment=engine.progress.cursor.segment, micro=micro.index, serial=lease.serial, token=lease.token,
                dense_steps=self.servers.dense_steps, mode=self.name, tables=TRACE.rows_used(engine.model.tables),
            )  # fmt: skip
        grads = engine.take_gradients(micro, loss)
        if grads.not_finite:
            engine.reports.refused(micro.index, grads.not_finite)
        if refused := self.servers.push(
            lease, grads.rows_on_host, grads.loss, grads.seconds, grads.not_finite, self._before_push()
        ):
            engine.reports.refused(lease.micro, refused)
        engine.reports.compression()
        engine.model.dense.zero_()

    def _settings(self) -> list[dict[str, GroupSetting]]:
        return [] if self._changed is None else self._changed.followed(self._engine.model.dense_settings)

    def _before_push(self) -> bool:
        """Gives the servers this worker's learning rates; planned faults happen here. Returns whether one loses it."""
        engine = self._engine
        self.servers.rates = engine.progress.step, [*engine.model.group_lrs, engine.model.row_lr], self._settings()
        fault = None if engine.faults is None else engine.faults.push_fault(engine.world.rank, engine.progress.step)
        if fault is None:
            return False
        time.sleep(fault.seconds or 0.0)
        return fault.kind == "drop_push"

    @property
    def is_within_step(self) -> bool:
        return False

    @property
    def batches_in_step(self) -> int:
        return 0

    @property
    def computed_in_step(self) -> int:
        return self.servers.position.n_waiting

    def evaluate(self, job: EvaluationRun) -> list[dict[str, Any]]:
        if rule_class(self.servers.session.rule).looks_ahead and not self._has_model:
            self.take_dense_state(leaving=False)  # the model is scored, not what a rule shows to workers
        scores = evaluation.by_leases(job, self.servers, *self._engine.progress.begin_evaluation())
        self._note_pause()
        return scores

    def _note_pause(self) -> None:
        for participant in self._engine.participants:
            participant.paused()

    def _note_epoch_over(self) -> None:
        for participant in self._engine.participants:
            participant.epoch_over(self.servers)

    def while_saved(self) -> contextlib.AbstractContextManager[None]:
        """`EmbeddingTables.while_saved`."""
        what = "the saved version has parts of several steps, so it is no model that was evaluated. Save"
        return self._others_wait("saved_while_training", "save_model", what)

    def others_wait(self) -> contextlib.AbstractContextManager[None]:
        """See `between_epochs.others_wait`."""
        return self._others_wait(
            "others_trained", "others_wait", "its code may have seen parts of several steps. Use it"
        )

    @contextlib.contextmanager
    def _others_wait(self, kind: str, name: str, outcome: str) -> Iterator[None]:
        """Between two epochs others wait, however long it takes; where they trained, it is reported."""
        engine, memory = self._engine, self._engine.model.tables.memory
        assert memory is not None
        before, (first, _) = memory.marks(), memory.step_span()
        with self.servers.contact.others_wait():
            yield
        last, dense = memory.step_span()[1], self.servers.model_step
        found = f"others trained from step {first} to {last} before {name} had ended"
        if memory.stood_still_since(before):
            if not 0 <= dense < last:
                return
            first, found = dense, f"the dense part is of step {dense}, and the rows are of step {last}"
        text = (
            f"{found}: {outcome} between two epochs: there the others wait for {name}, and up to "
            f"{engine.model.tables.config.lease_s:.0f} s (GBA_HVD_LEASE_S) for what the script does before; for longer "
            "code, `with gba_hvd.others_wait(state):`"
        )
        data = {"first": first, "last": last}
        engine.emit(Event(kind, engine.progress.step, text, data, level="warning"), only_here=True)

    def count(self, job: CountRun) -> list[int]:
        run = run_number(job.epoch, job.segment)
        try:
            return evaluation.count_by_leases(job, self.servers, 2 * run, len(self._engine.model.tables.layout.groups))
        except Disagreement as error:
            raise self.servers.source_names.explained(error) from None

    def retrieve(self, job: RetrievalRun) -> list[float]:
        (found,) = self.evaluate(job.alone)
        return list(found["sums"])

    # --- the dense state ---------------------------------------------------------------------------------------------

    def take_dense_state(self, leaving: bool, ended: bool = True) -> None:
        """Bring the model's dense parameters and the optimizer's state to what the servers hold, bit for bit.

        ended: the epoch is over or the mode is left, on all workers; else this one alone has left the epoch's loop.
        """
        self.servers.quiesce()
        self.servers.flush()
        self._engine.model.put_dense(self.servers.export(leaving, ended))
        self._has_model = True

    def _rescue_dense_state(self) -> None:
        """This worker was evicted from the mode. Export the reachable dense state; report what is missing."""
        engine, n_tensors = self._engine, len(self._engine.model.dense.parameters)
        found = self.servers.rescue(_RESCUE_TIMEOUT_S)
        engine.observe(self.servers.position)
        engine.model.put_dense(found)
        missing = n_tensors - len(found)
        if missing:
            text = (
                f"{missing} of {n_tensors} dense tensors were on servers that do not answer any more: "
                "their values are those this worker last saw, their optimizer state is of the last epoch's end or "
                "switch"
            )
            data = {"tensors": missing}
            event = Event("dense_state_old", engine.progress.step, text, data, level="warning")
            engine.emit(event, only_here=True)

    # --- the world ---------------------------------------------------------------------------------------------------

    def rank_facts(self) -> RankFacts:
        return RankFacts(-1, self.servers.session.generation, self.servers.contact.acknowledged_membership)

    def settle(self, catches_up: bool, row_factor: float, step: int) -> bool:
        """Nothing is held here. Survivors of such a mode stand at different steps, and none was left behind."""
        return False

    def on_hosts_updated(self) -> None:
        self.servers.contact.hosts_updated = True

    def end_rejoin(self) -> None:
        """Return when no world forms beside the mode any more: without one, training cannot continue."""
        engine = self._engine

        def waits() -> None:
            if (wait := engine.forming.word()) is not None:
                step = engine.progress.step
                engine.emit(still_forms(step, wait, "the mode is left, and training stands still until then"))

        if self.rejoin is not None:
            self.rejoin.stop(waits=waits)

    def recover(self) -> None:
        self.end_rejoin()
        self._rescue_dense_state()
        self.close(finished=False)
        self._engine.mode = None

    def take_over_from_servers(self) -> None:
        self._rescue_dense_state()

    def leave_together(self, patience_s: float) -> None:
        self.servers.leave_together(patience_s)

    def close(self, finished: bool = True) -> None:
        self.servers.close(finished)
        if self.idle is not None:
            self.idle.close()
