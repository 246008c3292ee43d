"""One worker's training engine: it takes in micro-batches and makes global steps of them.

In allreduce mode the last micro-batch of a worker's share closes the step: gradients are exchanged, the step is
committed, and dense parameters and rows are updated once. In an asynchronous mode each micro-batch is pushed to the
servers. `batches` drives the engine, the optimizer feeds it, `elastic` carries it through changes of membership.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gba_hvd.callbacks import Callback, Event, StepRecord
from gba_hvd.checkpoint.job_checkpoints import N_NUMBERS, Checkpoints
from gba_hvd.clipping import Clip, Factors, squares
from gba_hvd.comm import traffic
from gba_hvd.comm.collectives import SoloWorld, World
from gba_hvd.comm.traffic import Traffic
from gba_hvd.comm.wait_notices import Patience, missing
from gba_hvd.comm.world_formation import Forming
from gba_hvd.compression import Compression, Spec, row_exchange
from gba_hvd.compression.dense_exchange import DenseExchange
from gba_hvd.compression.row_codec import RowCoder
from gba_hvd.dense_gradients import DenseGradients
from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.epoch import Account, Cut, EpochOrder
from gba_hvd.errors import BadInput, GbaError, NonFiniteGradient, StateMismatch
from gba_hvd.faults import FaultSchedule
from gba_hvd.loss_scale import SKIPPED, LossScale
from gba_hvd.modes.allreduce_exchange import AllreduceMode
from gba_hvd.modes.model_averaging import ReplicaMode
from gba_hvd.modes.parameter_server import GbaMode
from gba_hvd.ps import launch
from gba_hvd.ps.messages import GivenLease, Position
from gba_hvd.ps.worker.host_server import LocalServer
from gba_hvd.ps.worker.lease_prefetch import Ahead
from gba_hvd.shm.job_board import Board
from gba_hvd.switching import requests
from gba_hvd.switching.callback import GBACallback
from gba_hvd.torch_optimizers import put_state, spec_of
from gba_hvd.trace import TRACE
from gba_hvd.training.parameter_watch import ParameterWatch, names_in_words
from gba_hvd.training.step_hooks import StepHooks

if TYPE_CHECKING:
    from gba_hvd.elastic.world_rejoin import Reformer

log = logging.getLogger("gba_hvd")

# The numbers that travel with the dense gradients, so that a step needs no other collective. After them come those of
# `wishes` and `checkpoints`, a number for each worker (its seconds per micro-batch), and those of
# `compression.row_exchange` and `compression.exchange`.
_SAMPLES, _LOSS, _LOSS_WEIGHT, _HOSTS_UPDATED, _N_BAD, _BAD_MICRO, _RATES, _ROW_SQUARES, _WISHES = range(9)
_SAVE = _WISHES + requests.N_NUMBERS
_TIMES = _SAVE + N_NUMBERS
_OVERFLOWS = 100  # so many steps in a row are skipped for an overflow; then training ends


@dataclass
class Cursor:
    """Where training stands in the data: steps done of one epoch. Epoch -1 is before the first.

    moved: index -> the micro-batch that stands in its place in this epoch, after going on from an asynchronous mode
    """

    epoch: int = -1
    steps_done: int = 0
    moved: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Micro:
    """A micro-batch being computed."""

    index: int
    n_samples: int
    is_last: bool
    started_s: float
    lease: GivenLease | None = None  # in an asynchronous mode


class Engine:
    """One worker's part of the training: position, account, gradients under way, and the mode that carries them.

    step: number of optimizer applications so far, equal on all workers.
    Not thread-safe; belongs to the training thread, all but `push_micro_batch`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tables: EmbeddingTables,
        names: Mapping[int, str],
        global_batch: int,
        micro_batch: int,
        row_average: str = "global",
        compression: Spec = Compression.none,
        row_compression: Spec = Compression.none,
        clip: Clip = Clip(),  # noqa: B008  # a value
        loss_scale: LossScale | None = None,
    ) -> None:
        Cut(1, global_batch, micro_batch)  # refuses a bad pair now
        if row_average not in ("global", "contributors"):
            raise BadInput(f"row_average must be 'global' or 'contributors', got {row_average!r}")
        self.row_average, self.clip, self.loss_scale = row_average, clip, loss_scale
        self.n_begun = 0  # micro-batches that were handed out here
        self.factors = Factors()  # of the newest step that this worker saw
        self.optimizer, self.tables = optimizer, tables
        self.global_batch, self.micro_batch = global_batch, micro_batch
        parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        self.names = [names.get(id(p), f"parameter {i} {tuple(p.shape)}") for i, p in enumerate(parameters)]
        self.dense = DenseGradients(parameters, _TIMES + 1)
        self.compression = None if compression.is_none else DenseExchange(compression, self.names, self.dense)
        self.row_compression, self.traffic = row_compression, Traffic()
        dims = [group.dim for group in tables.layout.groups]
        self.row_coder = None if row_compression.is_none else RowCoder(row_compression, dims)
        self.world: World = SoloWorld()
        self.mode: AllreduceMode | GbaMode | None = None
        self.idle_mode: AllreduceMode | None = None  # waits while an asynchronous mode is on
        self.switching: GBACallback | None = None
        self.checkpoints: Checkpoints | None = None
        self.faults: FaultSchedule | None = None
        self.job_id, self.job_name, self.key = "", tables.config.job_name, b""
        self.board: Board | None = None  # on a host's lead
        self.settings = 0  # fingerprint of what all workers agree on, see `membership`
        self.worker_id = secrets.randbits(62)
        self.staleness: dict[int, int] = {}  # of all micro-batches so far in asynchronous modes
        self.lags: dict[int, int] = {}  # the same for the dense values that gradients were computed with
        self.refused = self.reissued = 0
        self.wishes = requests.Wishes(self)
        self.line: LocalServer | None = None  # to this host's server, on the host's lead
        self._server_patience = Patience()
        self.step_dense: Callable[[], None] = lambda: None  # the user's optimizer, on the dense parameters
        self.reformer: Reformer | None = None
        self.forming = Forming()  # the next world
        self.leases: Ahead[Any] | None = None  # where the next lease of the epoch comes from, in an asynchronous mode
        self.epoch_over = False
        self.n_evaluated = 0  # evaluations since the last epoch of batches ended: their names in asynchronous modes
        self.switch_to: tuple[str, str] | None = None  # agreed: (mode, reason), to be carried out before the next step
        self._n_refused = 0
        self._began_s = 0.0
        self._seconds: list[float] = []  # of this worker's micro-batches in the step
        self._traced: list[int] = []  # the same, where they are traced: their indices
        self.step, self.cursor, self.account = 0, Cursor(), Account()
        self.order: EpochOrder | None = None  # of the newest epoch whose batches were asked for
        self.step_hooks = StepHooks()
        self.parameter_watch = ParameterWatch(self.dense.parameters, self.names)
        self.untrained: list[str] = []  # parameters of the model that are in no group of the optimizer
        self.restarts = 0
        self.memory_trouble = ""  # what happened to the tables' file, if training goes on all the same
        self.neighbours: dict[int, int] = {}  # processes of the other workers of this host, by rank
        self.callbacks: list[Callback] = []
        self.hosts_updated = False  # Horovod told this worker (only rank 0 is told)
        self.leave_by_s: float | None = None  # this worker was told to leave (SIGTERM), by this monotonic time
        self.interrupt_due = False  # all workers know by now, and stop at the same step
        self._micro: Micro | None = None
        self._rows: list[list[tuple[RowGrad, float]]] = []
        self._bad: str | None = None
        self._bad_micro = -1
        self._cut, self._step_of_epoch, self._ended = Cut(1, 1, 1), 0, time.perf_counter()

    # --- driven by `batches` -----------------------------------------------------------------------------------------

    def begin_step(self, cut: Cut, epoch: int, step_of_epoch: int) -> None:
        assert isinstance(self.mode, AllreduceMode)
        if self.cursor.epoch != epoch:
            self.cursor = Cursor(epoch, 0)
        self._cut, self._step_of_epoch = cut, step_of_epoch
        self._rows = [[] for _ in self.tables.layout.groups]
        self._bad, self._micro, self._seconds, self._began_s = None, None, [], time.perf_counter()
        self._traced = []
        self.dense.clear_total_()
        self.tables.drop_gradients()
        self.mode.await_rows(self.step)

    def begin_micro(self, index: int, is_last: bool) -> None:
        self.n_begun += 1
        self._micro = Micro(index, self._cut.samples_of_micro(index), is_last, time.perf_counter())

    def begin_lease(self, lease: GivenLease, cut: Cut, epoch: int) -> None:
        """In an asynchronous mode: the newest dense values are in place from here on."""
        assert isinstance(self.mode, GbaMode)
        self._cut = cut
        self.observe(self.mode.position)
        self.tables.drop_gradients()
        if isinstance(self.mode, ReplicaMode):  # its rounds write beside the training
            self.parameter_watch.forget()
            self.mode.refresh_dense_()
        else:
            self._tell_other_writers()
            self.mode.refresh_dense_()
            self.parameter_watch.note()
        self.n_begun += 1
        self._micro = Micro(lease.micro, lease.n_samples, False, time.perf_counter(), lease)

    def check_stepped(self) -> None:
        if self._micro is not None:
            raise GbaError(
                f"micro-batch {self._micro.index} was handed out, but optimizer.step() was not called for it: "
                "call it once for each"
            )

    @property
    def is_within_step(self) -> bool:
        """Some micro-batch of a step was handed out, and the step is not applied yet."""
        return self._micro is not None or float(self.dense.extra[_SAMPLES]) > 0

    # --- called by the user's loop, through the optimizer ------------------------------------------------------------

    def add_micro_batch(self, loss: Tensor | float | None) -> None:
        """Take in the gradients of one micro-batch; close the step if it was the last of this worker's share."""
        if self._micro is None:
            raise GbaError(
                "optimizer.step() needs a micro-batch: call it once for each batch of gba_hvd.batches(dataset, state)"
            )
        micro, self._micro = self._micro, None
        weight = micro.n_samples / self.micro_batch
        value = _number(loss)
        if TRACE is not None:
            self._trace_micro_batch(micro)
        rows = self.tables.take_gradients()
        self.dense.collect_()
        seconds = self._took(micro)
        bad = self._bad_of(value, rows, self.dense)
        if micro.lease is not None:
            if bad:
                self.tell_refused(micro.index, bad)
            self._push(micro.lease, rows, value, seconds, bad)
            self.dense.zero_()
            return
        if bad:
            self._bad, self._bad_micro = bad, micro.index
        self._seconds.append(seconds)
        extra = self.dense.extra
        extra[_SAMPLES] += micro.n_samples
        if bad and self.loss_scale is not None:  # the step will be skipped: nothing of this is to reach anybody
            self.dense.zero_()
            value = None
        else:
            self.dense.add_micro_batch_(weight)
            for group, grads in enumerate(rows):
                self._rows[group] += [(grad, weight) for grad in grads]
        if value is not None:
            extra[_LOSS] += value * micro.n_samples
            extra[_LOSS_WEIGHT] += micro.n_samples
        if micro.is_last:
            self.close_step()

    def unscale_(self, factor: float) -> None:
        """Multiply the gradients of this micro-batch, of dense parameters and rows."""
        self.dense.scale_(factor)
        self.tables.scale_gradients_(factor)

    def hand_out(self) -> Micro:
        """The micro-batch that was begun, for another thread, which ends it by `push_micro_batch`."""
        micro, self._micro = self._micro, None
        assert micro is not None and micro.lease is not None
        return micro

    def push_micro_batch(self, micro: Micro, loss: Tensor | float | None, dense: DenseGradients) -> str:
        """`add_micro_batch` of one of several threads that share a replica, with gradients of its own.

        Safe in several threads at once, but only one may call for each micro-batch. Returns what was not finite and is
        still to be told (`tell_refused`), or nothing.
        """
        assert micro.lease is not None
        value, rows = _number(loss), self.tables.take_gradients()
        dense.collect_()
        seconds = self._took(micro)
        bad = self._bad_of(value, rows, dense)
        self._push(micro.lease, rows, value, seconds, bad, dense)
        return bad

    def close_step(self) -> None:
        """Exchange, commit and apply the global step. A collective; workers without a micro-batch call it too."""
        assert isinstance(self.mode, AllreduceMode)
        n_samples = self._cut.samples_of_step(self._step_of_epoch)
        scale, extra = self.micro_batch / n_samples, self.dense.extra
        extra[_HOSTS_UPDATED] = float(self.hosts_updated)
        rates = extra[_RATES] = sum(float(group["lr"]) for group in self.optimizer.param_groups)
        if self._bad is not None:
            extra[_N_BAD], extra[_BAD_MICRO] = 1.0, self._bad_micro
        if self._seconds:
            extra[_TIMES + self.world.rank] = sum(self._seconds) / len(self._seconds)
        self.wishes.tell(extra[_WISHES:_SAVE])
        if self.checkpoints is not None:
            self.checkpoints.tell(extra[_SAVE:_TIMES])
        if TRACE is not None:
            micros, self._traced = self._traced, []
            facts = {"step": self.step + 1, "world": self.restarts, "epoch": self.cursor.epoch}
            TRACE.write("attempt", **facts, micros=micros)
        skipped_so_far = self.account.steps_skipped
        self.mode.exchange(self.step + 1, self._rows, scale, self._tables_group["lr"], skipped_so_far)
        if not self.clip.is_none:
            extra[_ROW_SQUARES] = self.mode.row_squares()
        self.mode.commit(self.dense)
        if TRACE is not None:
            TRACE.write("commit", **facts, lrs=self.dense_lrs, row_lr=self.row_lr, order=self._step_of_epoch)
        agreed = extra.tolist()
        overflowed = bool(agreed[_N_BAD]) or not math.isfinite(float(self.dense.total.sum()))
        if overflowed and (self.loss_scale is None or self.loss_scale.overflows >= _OVERFLOWS):
            self.mode.forget_held()
            self.dense.clear_total_()
            raise self._non_finite(agreed)
        if round(agreed[_SAMPLES]) != n_samples:
            raise StateMismatch(
                f"step {self.step + 1}: the workers computed {agreed[_SAMPLES]:.0f} samples, the plan has {n_samples}; "
                "do all workers use the same dataset, global_batch and micro_batch?"
            )
        if abs(agreed[_RATES] - rates * self.world.size) > 1e-5 * abs(agreed[_RATES]):
            raise StateMismatch(
                f"step {self.step + 1}: this worker's learning rates add up to {rates}, the mean of all workers is "
                f"{agreed[_RATES] / self.world.size}: step the scheduler once per epoch or "
                "global step, on all workers, and give it to TorchState"
            )
        torch.mul(self.dense.total[: self.dense.n], scale, out=self.dense.flat)
        self._tell_other_writers()
        factors = Factors(rows=SKIPPED) if overflowed else Factors()
        if not self.clip.is_none and not overflowed:
            factors = self.clip.factors(squares([self.dense.flat.detach().cpu().numpy()]), agreed[_ROW_SQUARES])
            if factors.dense != 1.0:
                self.dense.flat.mul_(factors.dense)
        if overflowed:
            self.mode.skip_held()
        else:
            self.step_dense()
            self.mode.apply_held(factors.rows)
        self.parameter_watch.note()
        self.dense.zero_()
        self.dense.clear_total_()
        self.step, self.factors = self.step + 1, factors
        self.cursor.steps_done = self._step_of_epoch + 1
        self.account.total += n_samples  # by the plan
        if overflowed:
            self.account.dropped += n_samples
            self.account.steps_skipped += 1
        else:
            self.account.applied += round(agreed[_SAMPLES])  # by the workers' own count
        if self.loss_scale is not None:
            before = self.loss_scale.scale
            self.loss_scale.step(overflowed)
            if overflowed:
                self._tell_overflow(1, before)
        self.step_hooks.run(self.n_applied)
        self.interrupt_due = self.interrupt_due or agreed[_HOSTS_UPDATED] > 0
        self.wishes.hear(agreed[_WISHES:_SAVE])
        if self.checkpoints is not None:
            self.checkpoints.hear(agreed[_SAVE:_TIMES])
        self._tell_of_missing_servers()
        self.tell_decisions()
        loss = agreed[_LOSS] / agreed[_LOSS_WEIGHT] if agreed[_LOSS_WEIGHT] else None
        seconds = time.perf_counter() - self._began_s
        self._report_step(n_samples, loss, self.mode.name, factors.norm)
        if self.switching is not None:
            times = agreed[_TIMES : _TIMES + self.world.size]
            self.switching.measured_allreduce(self.step, times, seconds, self._cut.n_micro)
            if self.world.rank == 0:
                self.wishes.tell_rates({str(rank): round(s, 5) for rank, s in enumerate(times) if s})

    # --- what the elastic state carries ------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "cursor": asdict(self.cursor),
            "order": None if self.order is None else asdict(self.order),
            "account": asdict(self.account),
            "restarts": self.restarts,
            "step_hooks": self.step_hooks.ran_until,
            "staleness": [[k, n] for k, n in self.staleness.items()],
            "refused": self.refused,
            "reissued": self.reissued,
            "loss_scale": None if self.loss_scale is None else list(self.loss_scale.now),
        }

    def load_position(self, position: Mapping[str, Any]) -> None:
        self.step, self.restarts = position["step"], position["restarts"]
        self.cursor, self.account = Cursor(**position["cursor"]), Account(**position["account"])
        self.step_hooks.ran_until = position.get(
            "step_hooks", self.n_applied
        )  # checkpoints of older versions have none
        order = position.get("order")  # checkpoints of older versions have none
        self.order = None if order is None else EpochOrder(**order)
        self.staleness = {k: n for k, n in position["staleness"]}
        self.refused, self.reissued = position["refused"], position["reissued"]
        self._load_scale(position.get("loss_scale"))

    def load_dense(self, tensors: Mapping[str, Any]) -> None:
        """Dense values and their optimizer state by name, from a checkpoint."""
        self.parameter_watch.forget()
        for number, name in enumerate(self.names):
            if name in tensors:
                self.dense.set_parameters_([number], torch.from_numpy(tensors[name]["values"]))
                if tensors[name]["state"]:
                    put_state(self.optimizer, self.dense.parameters[number], tensors[name]["state"])

    def go_on_from(self, position: Position) -> None:
        """Where a checkpoint of an asynchronous mode stands."""
        self.step, self.account = position.step, Account(**position.account)
        self.step_hooks.run(self.n_applied)
        self.cursor = Cursor(position.epoch, position.steps_done, position.moved)
        self.staleness, self.lags = position.staleness, position.lags
        self.refused, self.reissued = position.refused, position.reissued
        self._load_scale(position.loss_scale)

    def wire_position(self) -> Position:
        """The position as servers take it."""
        return Position(
            step=self.step, epoch=self.cursor.epoch, steps_done=self.cursor.steps_done, account=asdict(self.account),
            staleness=dict(self.staleness), lags=dict(self.lags), refused=self.refused, reissued=self.reissued,
            moved=self.cursor.moved, loss_scale=None if self.loss_scale is None else self.loss_scale.now,
        )  # fmt: skip

    def observe(self, position: Position) -> None:
        """Take over what the coordinator says of the job, and report the steps since."""
        if position.failure:
            raise NonFiniteGradient(
                f"{position.failure}. None was applied: the model is as after step {position.step}. "
                "Lower the learning rate, or look at the data"
            )
        if position.step < self.step or not position.account:
            return
        steps, before = position.step - self.step, self.account.total
        skipped = position.account.get("steps_skipped", 0) - self.account.steps_skipped
        scale = 0.0 if self.loss_scale is None else self.loss_scale.scale
        self.step, self.account = position.step, Account(**position.account)
        self.step_hooks.run(self.n_applied)
        self.staleness, self.lags = position.staleness, position.lags
        self.refused, self.reissued = position.refused, position.reissued
        self.cursor = Cursor(position.epoch, position.steps_done, position.moved)
        self._load_scale(position.loss_scale)
        if skipped > 0 and scale:
            self._tell_overflow(skipped, scale)
        if steps and self.mode is not None:
            self._report_step(self.account.total - before, position.loss, self.mode.name, position.grad_norm)

    @property
    def n_applied(self) -> int:
        """Steps so far that were not skipped for an overflow."""
        return self.step - self.account.steps_skipped

    @property
    def seconds_since_step(self) -> float:
        """Since this worker saw a step end."""
        return time.perf_counter() - self._ended

    def size_extra(self) -> None:
        """After the world changed: some numbers of each worker travel with a step."""
        size = self.world.size
        of_rows = 0 if self.row_coder is None else row_exchange.N_NUMBERS * size
        of_compression = 0 if self.compression is None else self.compression.n_numbers(size)
        self.dense.resize_extra(_TIMES + size + of_rows + of_compression)

    @property
    def folder(self) -> Path:
        """The job's folder on this host."""
        assert self.tables.memory is not None
        return self.tables.memory.folder

    @property
    def row_lr(self) -> float:
        return float(self._tables_group["lr"])

    @property
    def dense_lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups if group is not self._tables_group]

    def abandon_step(self) -> None:
        """Forget the micro-batches of a step that will be computed again (row gradients held stay: see `elastic`)."""
        self._micro = None
        self.dense.zero_()
        self.dense.clear_total_()
        self.tables.drop_gradients()

    def emit(self, event: Event, only_here: bool = False) -> None:
        """Report an event to all callbacks; rank 0 also logs warnings.

        only_here: no other worker has this event, so it is logged whatever the rank.
        """
        if TRACE is not None:
            TRACE.write("event", kind=event.kind, step=event.step, message=event.message, level=event.level)
        for callback in self.callbacks:
            callback.on_event(event)
        if event.level == "warning" and (only_here or self.world.rank == 0):
            log.warning("[%s] step %d: %s", event.kind.replace("_", " "), event.step, event.message)

    def _tell_of_missing_servers(self) -> None:
        """After a commit, on rank 0 and on the leads of hosts whose servers are not up: what waits for them, if so."""
        waiting = [*self.wishes.waiting, *([] if self.checkpoints is None else self.checkpoints.waiting)]
        waited_s = self._server_patience.word(bool(waiting), time.monotonic())
        if waited_s is None:
            return
        own = "" if self.line is None else self.line.why_not_ready(to_enter=bool(self.wishes.waiting))
        if own or self.world.rank == 0:
            self.emit(missing(self.step, waiting, waited_s, own), only_here=True)

    def tell_decisions(self) -> None:
        """What was decided about compressing since this was told last."""
        for compressor in (self.compression, self.row_coder):
            if compressor is None:
                continue
            while compressor.decisions:  # other threads add to them
                d = compressor.decisions.pop(0)
                data = {"compressor": str(compressor.spec), "compress": d.compress, "bypassed": d.bypassed}
                self.emit(Event("compression", self.step, d.reason, data))

    # -----------------------------------------------------------------------------------------------------------------

    @property
    def _tables_group(self) -> dict[str, Any]:
        return next(g for g in self.optimizer.param_groups if g.get("gba_hvd") == "tables")

    def _bad_of(self, loss: float | None, rows: list[list[RowGrad]], dense: DenseGradients) -> str:
        """What of a micro-batch is not finite; nothing if all is."""
        if loss is not None and not math.isfinite(loss):
            return f"loss {loss}"
        if not math.isfinite(float(dense.flat.sum())) and (name := dense.non_finite(self.names)):
            return f"gradient of {name}"
        for group, grads in enumerate(rows):
            for grad in grads:
                if (key := grad.non_finite()) is not None:
                    table, row = self.tables.layout.locate(key, group)
                    return f"gradient of row {row} of table {table!r}"
        return ""

    def _non_finite(self, agreed: list[float]) -> NonFiniteGradient:
        if self._bad:
            where = f"micro-batch {self._bad_micro}: {self._bad} is not finite"
        elif agreed[_N_BAD] == 1:
            where = f"micro-batch {agreed[_BAD_MICRO]:.0f}, on another worker (its log has more)"
        elif agreed[_N_BAD]:
            where = f"on {agreed[_N_BAD]:.0f} other workers (their logs have more)"
        elif self.compression is not None and self.compression.not_finite:
            where = self.compression.not_finite
        else:
            where = "every micro-batch's gradient is finite, but their sum is not"
        return NonFiniteGradient(
            f"step {self.step + 1} (epoch {self.cursor.epoch}, step {self._step_of_epoch} of it), {where}. "
            f"The step was not applied: the model is as after step {self.step}. "
            "Lower the learning rate, or look at that batch"
        )

    def _load_scale(self, now: Sequence[float] | None) -> None:
        if self.loss_scale is not None:
            self.loss_scale.load(now)

    def _tell_overflow(self, n_steps: int, before: float) -> None:
        """So many steps up to this one were skipped. before: the scale until then."""
        assert self.loss_scale is not None
        now, so_far = self.loss_scale.scale, self.account.steps_skipped
        which = f"step {self.step}" if n_steps == 1 else f"{n_steps} of the steps up to {self.step}"
        text = (
            f"{which} overflowed at loss scale {before:g}: skipped on all workers, its samples count as dropped. "
            f"The scale is {now:g} now; skipped so far: {so_far}"
        )
        if now < 1.0:
            text += ". A scale below 1 means that gradients are too large without it: lower the learning rate"
        data = {"scale": now, "so_far": so_far}
        self.emit(Event("overflow", self.step, text, data, level="warning" if now < 1.0 else "info"))

    def tell_traffic(self) -> None:
        """At the end of an epoch: bytes on this worker's wires since the last one, and what compression left behind."""
        n_bytes = self.traffic.since_last()
        data: dict[str, Any] = {"bytes": n_bytes}
        if self.compression is not None:
            density = self.compression.feedback.thresholds.density
            data["density"] = {n: d for n, d in zip(self.names, density, strict=True) if d}
            data["residual"] = self.compression.feedback.rest_size
        if self.row_coder is not None:
            data |= {"row_density": self.row_coder.density, "row_residual_lost": self.row_coder.lost}
        if n_bytes:
            self.emit(Event("traffic", self.step, traffic.words(n_bytes), data))
            metrics = {f"bytes_{name}": float(n) for name, n in n_bytes.items()}
            for callback in self.callbacks:
                callback.on_metrics(self.step, metrics)

    def _report_step(self, n_samples: int, loss: float | None, mode: str, grad_norm: float | None) -> None:
        for name in self.step_hooks.too_fast(self.step):
            text = (
                f"the scheduler {name!r} stepped more often than global steps were made, so its schedule depends on "
                "the number of workers; call state.on_step(scheduler.step) instead of scheduler.step() in the loop"
            )
            self.emit(Event("scheduler_too_fast", self.step, text, {"scheduler": name}, level="warning"))
        now = time.perf_counter()
        record = StepRecord(
            self.step,
            self.cursor.epoch,
            n_samples,
            self.account.applied,
            now - self._ended,
            self.world.size,
            mode,
            loss,
            grad_norm,
        )
        self._ended = now
        if self.board is not None:
            of_epoch, applied = self._cut.n_steps, self.account.applied
            asked = "" if self.switching is None else self.switching.asked.missing(mode)
            at = (self.step, self.cursor.epoch, self.cursor.steps_done, of_epoch, applied)
            self.board.show(*at, loss, mode, asked, bool(self.wishes.waiting))
        for callback in self.callbacks:
            callback.on_step(record)

    def trace_epoch(self, order: EpochOrder) -> None:
        """The facts that a replay begins with; the dense values only before the first step."""
        if TRACE is not None:
            tables = self.tables
            optimizers = {"dense": spec_of(self.optimizer), "rows": launch.describe_optimizer(tables.optimizer)}
            values = [p.detach().numpy() for p in self.dense.parameters] if not self.step else None
            TRACE.write(
                "epoch", **asdict(order), step=self.step, global_batch=self.global_batch, micro_batch=self.micro_batch,
                tables=tables.layout.describe(), optimizers=optimizers, names=self.names, values=values,
                hosts=1 if tables.local is None else 2,
            )  # fmt: skip

    def _trace_micro_batch(self, micro: Micro) -> None:
        assert TRACE is not None
        if micro.lease is None:
            self._traced.append(micro.index)
            return
        assert isinstance(self.mode, GbaMode)
        TRACE.write(
            "push", generation=self.mode.session.generation, epoch=self.cursor.epoch, micro=micro.index,
            serial=micro.lease.serial, token=micro.lease.token, dense_steps=self.mode.dense_steps, mode=self.mode.name,
            tables=TRACE.rows_used(self.tables),
        )  # fmt: skip

    # --- asynchronous modes, faults ----------------------------------------------------------------------------------

    def _push(
        self, lease: GivenLease, rows: list[list[RowGrad]], loss: float | None, seconds: float, bad: str,
        dense: DenseGradients | None = None,
    ) -> None:  # fmt: skip
        mode = self.mode
        assert isinstance(mode, GbaMode)
        mode.rates = self.step, [*self.dense_lrs, self.row_lr]
        drop = False
        if self.faults is not None and (fault := self.faults.push_fault(self.world.rank, self.step)) is not None:
            time.sleep(fault.seconds or 0.0)
            drop = fault.kind == "drop_push"
        if dense is None:
            refused = mode.push(lease, rows, loss, seconds, bad, drop)
            if refused:
                self.tell_refused(lease.micro, refused)
            self.tell_decisions()
        else:
            assert isinstance(mode, ReplicaMode)
            mode.push(lease, rows, loss, seconds, bad, drop, dense)

    def _tell_other_writers(self) -> None:
        """Name parameters that change between the optimizer's steps; once in a process."""
        if found := self.parameter_watch.written_by_others():
            text = (
                f"{names_in_words(found)}: the values change between the steps of the DistributedOptimizer, step after "
                "step, so another optimizer or the script writes them. Workers do not exchange such changes, and in "
                "asynchronous modes the servers' values overwrite them. Give each parameter to the "
                "DistributedOptimizer alone (groups can have settings of their own); a change that is the same on "
                "every worker, such as a clamp, is kept in allreduce mode only"
            )
            self.emit(Event("parameters_written", self.step, text, {"parameters": found}, level="warning"))

    def tell_refused(self, micro: int, bad: str) -> None:
        """The gradient of a micro-batch was not sent."""
        self._n_refused += 1
        if self._n_refused > 10 and self._n_refused.bit_count() > 1:
            return  # after ten, the 16th, 32nd, ... are told
        text = f"micro-batch {micro} of epoch {self.cursor.epoch}: {bad} is not finite; its gradient is dropped"
        told = {"micro_batch": micro, "what": bad, "so_far": self._n_refused}
        self.emit(Event("refused", self.step, text, told, level="warning"), only_here=True)

    def _took(self, micro: Micro) -> float:
        """Seconds the micro-batch took; planned faults happen here."""
        seconds = time.perf_counter() - micro.started_s
        if self.faults is None:
            return seconds
        rank = self.world.rank
        time.sleep(self.faults.service(rank, self.step, seconds, micro.index))
        for fault in self.faults.due(rank, self.step):
            self.faults.carry_out(fault, self._server_pids(), self.step)
        return time.perf_counter() - micro.started_s

    def _server_pids(self) -> dict[int, int]:
        """This host's companion server, by the number of the host among the servers."""
        pid = launch.pid_of(self.folder, 0)
        if pid is None:
            return {}
        if isinstance(self.mode, GbaMode):
            hosts = list(dict.fromkeys(server.host for server in self.mode.session.servers))
            return {hosts.index(self.mode.host): pid}
        return {0: pid}


def _number(loss: Tensor | float | None) -> float | None:
    return float(loss.detach()) if isinstance(loss, Tensor) else None if loss is None else float(loss)
