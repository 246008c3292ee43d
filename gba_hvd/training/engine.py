"""One worker's training engine: the model, how far it is, the world, and the mode that carries its steps.

`batches` asks the mode for micro-batches, the optimizer gives their gradients to the engine, and the mode makes global
steps of them; `membership` and `elastic` carry the engine through changes of the world, `switching` from mode to mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from gba_hvd.callbacks import Callback, Event
from gba_hvd.comm.collectives import SoloWorld, World
from gba_hvd.comm.traffic import Traffic
from gba_hvd.comm.world_formation import Forming
from gba_hvd.compression import row_exchange
from gba_hvd.embedding.on_device.host_view import number_of
from gba_hvd.embedding.on_device.row_gradients import RowGrads
from gba_hvd.errors import GbaError
from gba_hvd.faults import FaultSchedule
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.ps import launch
from gba_hvd.ps.messages import JobPosition, LeaseGrant
from gba_hvd.training.commit_fields import CommitFields, StepParticipant
from gba_hvd.training.job_state import JobIdentity, LocalHost, Progress, Rollback, Signals
from gba_hvd.training.loop_time import LoopTime
from gba_hvd.training.mode import MicroBatch, MicroGradients, Mode
from gba_hvd.training.model import TrainedModel
from gba_hvd.training.reports import Reports
from gba_hvd.training.step_hooks import StepHooks
from gba_hvd.training.traffic_account import TrafficAccount

_Participant = TypeVar("_Participant", bound=StepParticipant)


class Engine:
    """One worker's part of the training. Not thread-safe; belongs to the training thread, all but `take_gradients`.

    mode: None before the first world, and after a failure until there is one again. fields: what rides on a step's
    commit. forming: the next world. rollback: full recoveries. n_begun: micro-batches that were handed out here;
    n_threads: that compute them
    """

    def __init__(self, model: TrainedModel) -> None:
        self.model, self.step_hooks = model, StepHooks(model.optimizer)
        self.job = JobIdentity(name=model.tables.config.job_name)
        self.progress = Progress(model.loss_scale, self.step_hooks)
        self.signals, self.host, self.rollback = Signals(), LocalHost(), Rollback()
        self._world: World = SoloWorld()
        self.mode: Mode | None = None
        self.fields = CommitFields(lambda: model.dense)
        self._participants: dict[type, StepParticipant] = {}
        self.traffic, self.forming = Traffic(), Forming()
        self._participants[TrafficAccount] = TrafficAccount(self.traffic, self.progress)
        self.reports = Reports(
            model, self.progress, self.host, lambda: self._world, self._participants.values(), self.traffic
        )
        self.faults: FaultSchedule | None = None
        self.n_begun, self.n_threads = 0, 1
        self.loop_time = LoopTime()
        self._micro: MicroBatch | None = None
        self.lay_out()

    def identify(self, **changes: Any) -> None:
        """Replace fields of the job's identity, as the workers have agreed on them."""
        self.job = replace(self.job, **changes)

    def compute_in(self, n_threads: int) -> None:
        """So many threads of this worker compute micro-batches at once from now on."""
        self.n_threads = n_threads

    @property
    def elp(self) -> int:
        """Example-level parallelism (ShadowSync): samples that the job computes on at once, all workers being alike."""
        steps_together = self.mode is None or self.mode.steps_together
        batch = self.model.micro_batch * (self.model.together if steps_together else 1)
        return batch * self.n_threads * self._world.size

    # --- the world, and who takes part in its commits ----------------------------------------------------------------

    @property
    def world(self) -> World:
        return self._world

    @world.setter
    def world(self, world: World) -> None:
        self._world = world
        self.lay_out()

    def lay_out(self) -> None:
        size, model = self._world.size, self.model
        self.fields.lay_out({
            **{one.name: one.n_fields() for one in self._participants.values()},
            **dict.fromkeys(("micro_batch_s", "reading_s"), size),
            "rows": 0 if model.row_coder is None else row_exchange.N_NUMBERS * size,
            "dense": 0 if model.compression is None else model.compression.n_numbers(size),
        })  # fmt: skip

    def register(self, participant: StepParticipant) -> None:
        """The same on every worker, in any order. Raises GbaError within a step, whose numbers would be lost."""
        if self.is_within_step:
            raise GbaError("callbacks can be registered only between steps")
        self._participants[type(participant)] = participant
        ordered = sorted(self._participants.items(), key=lambda item: item[1].order)
        self._participants.clear()
        self._participants.update(ordered)  # in place: reports look at them, too
        self.lay_out()

    def participant(self, kind: type[_Participant]) -> _Participant | None:
        """The one of this kind, if the job has one."""
        found = self._participants.get(kind)
        assert found is None or isinstance(found, kind)
        return found

    @property
    def participants(self) -> Iterator[StepParticipant]:
        return iter(self._participants.values())

    @property
    def folder(self) -> Path:
        """The job's folder on this host."""
        assert self.model.tables.memory is not None
        return self.model.tables.memory.folder

    # --- micro-batches -----------------------------------------------------------------------------------------------

    def begin_micro_batch(
        self, index: int, n_samples: int, is_last: bool, lease: LeaseGrant | None = None, n_micro: int = 1
    ) -> None:
        """By the mode, as it hands one out."""
        self.n_begun += 1
        self._micro = MicroBatch(index, n_samples, is_last, time.perf_counter(), lease, n_micro, self.loop_time.take())

    @property
    def micro_batch(self) -> MicroBatch | None:
        """The one that was handed out, until `optimizer.step()`."""
        return self._micro

    def check_stepped(self) -> None:
        self.loop_time.resumed()
        if self._micro is not None:
            raise GbaError(
                f"micro-batch {self._micro.index} was handed out, but optimizer.step() was not called for it: call it "
                "for each; global_batch / micro_batch make a step. To skip one: zero_grad(), step(), no backward()"
            )

    def forget_micro_batch(self) -> None:
        """The loop was left with one that was handed out."""
        self._micro = None

    def detach_micro_batch(self) -> MicroBatch:
        """The micro-batch that was begun, for another thread."""
        micro, self._micro = self._micro, None
        assert micro is not None
        return micro

    @property
    def is_within_step(self) -> bool:
        """Some micro-batch of a step was handed out, and the step is not applied yet."""
        return self._micro is not None or (self.mode is not None and self.mode.is_within_step)

    def add_micro_batch(self, loss: Tensor | float | None) -> None:
        """Take in the gradients of the micro-batch that was handed out. Called by the user's loop, in the optimizer."""
        if self._micro is None or self.mode is None:
            raise GbaError(
                "optimizer.step() needs a micro-batch: call it once for each batch of gba_hvd.batches(dataset, state)"
            )
        self.reports.gradient(self._micro.index)
        self.mode.submit(self.detach_micro_batch(), loss)
        self.loop_time.stepped()

    def take_gradients(
        self,
        micro: MicroBatch,
        loss: Tensor | float | None,
        dense: DenseGradients | None = None,
        meanwhile: Callable[[RowGrads], None] | None = None,
    ) -> MicroGradients:
        """Those of rows, taken from the tables' records; dense ones are in the flat buffer of `dense` afterwards.

        dense: of one of several threads; default: the model's. meanwhile: asks more of the device that computes them,
        while it is not known yet whether they are finite. Planned faults happen here. Safe in several threads.
        """
        dense = dense or self.model.dense
        value, model, contributors = number_of(loss), self.model, None
        if micro.n_micro > 1 and model.row_average != "global":
            contributors = model.tables.contributors(model.micro_batch, micro.n_samples)
        rows = model.tables.take_gradients_in_place()
        dense.collect_()
        not_finite = model.not_finite(value, rows, dense, meanwhile)
        seconds = self._took(micro) + micro.beside_s
        return MicroGradients(rows, value(), seconds, not_finite, contributors)

    def abandon_step(self) -> None:
        """Discard the micro-batches of a step that will be computed again (row gradients held stay: see `elastic`)."""
        self.forget_micro_batch()
        self.progress.left.forget()
        self.model.dense.zero_()
        self.model.dense.clear_total_()
        self.model.tables.drop_gradients()

    def rolled_back(self) -> None:
        """The job is at an earlier step than before, that of a checkpoint; on every worker, between two steps."""
        self.abandon_step()
        self.signals.requested_mode = None
        for participant in self.participants:
            participant.rolled_back(self.progress.step)

    # --- reports -----------------------------------------------------------------------------------------------------

    @property
    def callbacks(self) -> list[Callback]:
        return self.reports.callbacks

    def emit(self, event: Event, only_here: bool = False) -> None:
        """See `Reports.emit`."""
        self.reports.emit(event, only_here)

    def observe(self, position: JobPosition) -> None:
        """Take over what the coordinator of servers says of the job, and report the steps since."""
        known, lrs, passed = self.progress.step, tuple(self.model.dense_lrs), self.progress.merge(position)
        self.reports.count_workers(len(position.rates), self.forming.wait() is not None)
        if self.mode is not None:
            norms = tuple(norm for step, norm in position.grad_norms if known < step <= position.step)
            self.reports.passed(passed, position.loss, self.mode.name, position.grad_norm, norms, lrs)

    # --- planned faults ----------------------------------------------------------------------------------------------

    def plan_faults(self, faults: FaultSchedule) -> None:
        self.faults = faults

    def _took(self, micro: MicroBatch) -> float:
        """Seconds the micro-batch took; planned faults happen here."""
        seconds = time.perf_counter() - micro.started_s
        if self.faults is None:
            return seconds
        rank, step, each_s = self._world.rank, self.progress.step, seconds / micro.n_micro
        micros = range(micro.index, micro.index + micro.n_micro)
        time.sleep(sum(self.faults.service(rank, step, each_s, index) for index in micros))
        for fault in self.faults.due(rank, step):
            servers = None if self.mode is None else self.mode.servers
            where = () if servers is None else ([one.host for one in servers.session.servers], servers.host)
            self.faults.carry_out(fault, launch.companion_pids(self.folder, *where), step)
        return time.perf_counter() - micro.started_s
