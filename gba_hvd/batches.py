"""`batches`: the micro-batches of an epoch, each handed out to one worker once.

The order comes from the seed and the epoch. In allreduce mode, which worker computes what comes from the world as it is
at each step; in an asynchronous mode, from the leases the coordinator gives. After a failure, a change of membership or
a switch the loop simply resumes at the job's position.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, cast

import numpy as np

from gba_hvd.batch_keys import BatchKeys, FindIds
from gba_hvd.comm.collectives import agree_on
from gba_hvd.elastic import TorchState
from gba_hvd.embedding.bags import BagLookups
from gba_hvd.epoch import EpochOrder, EpochPlan
from gba_hvd.errors import BadInput, StateMismatch
from gba_hvd.mode_names import MODES
from gba_hvd.ps import launch
from gba_hvd.ps.messages import JobPosition
from gba_hvd.reading.datasets import Dataset, MapDataset, OrderedDataset, TakeRows, pinned, reads
from gba_hvd.reading.read_ahead import ReadAhead, Share
from gba_hvd.reading.reader_processes import ReaderProcesses
from gba_hvd.reading.settings import Collate, ReadSettings
from gba_hvd.shm.layout import table_seed
from gba_hvd.switching import enter_ps, leave_ps
from gba_hvd.switching.requests import switching_of
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.trace import TRACE
from gba_hvd.training.engine import Engine

__all__ = ["Dataset", "MapDataset", "batches"]


def batches(
    dataset: Dataset | MapDataset,
    state: TorchState,
    *,
    seed: int = 0,
    shuffle: bool = True,
    ids: FindIds | None = None,
    forward: Callable[[Any], Any] | None = None,
    num_workers: int = 0,
    prefetch: int | None = None,
    collate_fn: Collate | None = None,
    pin_memory: bool = False,
    worker_init_fn: Callable[[int], None] | None = None,
) -> Generator[Any, None, None]:
    """The micro-batches of this epoch that this worker computes. Call `optimizer.step()` once for each.

    The epoch is `state.epoch` when the state has one, else the next. An epoch that is partly done resumes where it
    stands. Workers without a share take part in the steps silently.

    dataset: has `take(rows)`, or is a map-style dataset of torch (`__getitem__`, or `__getitems__`). One that has an
    order of its own (`OrderedDataset`) is shuffled in that.
    ids: how to find the table ids in a batch, when it has neither an attribute `ids` nor a key "ids": a mapping, or a
    `KeyedJaggedTensor` of TorchRec, as the tables take them.
    forward: how the loop calls the model, such as `lambda batch: model(batch[0])`; default `model(batch)`. With several
    hosts the rows of a batch are fetched before the loop computes it. Where the ids are only known inside the model
    (one that `convert` changed, or batches without `ids`), this forward pass runs once more before that, to record
    them: with rows of zeros, without gradients, and up to the last lookup as soon as 20 passes made equally many.
    Random state and buffers of the state's model are put back. With one host it is never called.
    num_workers: processes of this worker that read; 0: it reads itself. They are forked from a process that has only
    imported torch, get a copy of the dataset in each epoch, and end with the epoch. Before each batch the generators of
    `random`, `numpy.random` and torch are seeded there by seed, epoch and micro-batch.
    prefetch: batches read ahead of the training by each of these processes (2 when left out), or by one thread
    (num_workers=0; none when left out). In asynchronous modes a micro-batch is read beside the one before it, always.
    collate_fn: makes a batch of a list of samples of a map-style dataset; torch's `default_collate` when left out.
    pin_memory: copy the tensors of each batch to pinned memory, for GPUs. worker_init_fn: called with 0 ..
    num_workers - 1 in each reader process before it reads.

    Raises StateMismatch when the workers' datasets or settings differ, or when an epoch that is partly done was begun
    with other samples or in another order: its position would mean nothing. Raises BadInput for settings that would
    have no effect and for a dataset that cannot be copied to reader processes; ReaderDied (a GbaError) when one of
    these has ended; and what reading a batch raises.
    """
    settings = ReadSettings(num_workers, prefetch, collate_fn, pin_memory, worker_init_fn)
    read = reads(dataset, collate_fn)
    state.ensure_synced()
    if ids is not None and forward is not None:
        raise BadInput("batches(): `ids` and `forward` both say where ids come from: pass one of them")
    engine = state.engine
    model, progress = engine.model, engine.progress
    cut = EpochPlan(len(dataset), model.global_batch, model.micro_batch)
    epoch = getattr(state, "epoch", None)
    if epoch is None:
        done = progress.cursor.steps_done
        epoch = max(0, progress.cursor.epoch) if done < cut.n_steps else progress.cursor.epoch + 1
    first = progress.cursor.steps_done if progress.cursor.epoch == epoch else 0
    has_order = shuffle and hasattr(dataset, "order") and hasattr(dataset, "order_digest")
    own: int = cast(OrderedDataset, dataset).order_digest if has_order else 0
    assert engine.mode is not None
    if engine.mode.steps_together:  # else the coordinator checks the same
        facts = {"samples": len(dataset), "seed": seed, "epoch": epoch, "order of the dataset": own}
        agree_on(engine.world, "epoch", {**facts, "step of the epoch": first, "step": progress.step})
        _warn_of_idle_workers(cut, engine.world.rank, engine.world.size, model.together)
    order = EpochOrder(len(dataset), seed, epoch, shuffle, own)
    if first:
        _refuse_another_order(progress.order, order, first)
    progress.order = order
    _trace(engine, order)
    if engine.mode.steps_together and first < cut.n_steps:
        _begin_in_the_mode_asked_for(engine)
    if state.finished_epoch == epoch:
        warnings.warn(f"epoch {epoch} is done and has no batches left: advance state.epoch", stacklevel=2)
    progress.n_evaluated, progress.epoch_over = 0, False
    keys = BatchKeys(model.tables, state.model, ids, forward, lambda: engine.n_threads > 1)
    finished = first == cut.n_steps
    with contextlib.ExitStack() as reading:
        run = _Epoch(len(dataset), state, order, cut, epoch, keys)
        if not finished:
            run.open(dataset, read, settings, reading)
        while not finished:
            finished = yield from engine.mode.micro_batches(run)
    state.finished_epoch, progress.n_evaluated, progress.epoch_over = epoch, 0, True
    engine.reports.traffic()
    engine.reports.vocabularies(now=True)


class _Epoch:
    """One epoch of one dataset. See `EpochRun` for what is called when."""

    _read: Callable[[Share], Any]
    _ahead: ReadAhead | None = None

    def __init__(
        self,
        n_samples: int,
        state: TorchState,
        order: EpochOrder,
        cut: EpochPlan,
        epoch: int,
        keys: BatchKeys,
    ) -> None:
        self.cut, self.epoch, self.n_samples = cut, epoch, n_samples
        self._state, self._order, self._keys = state, order, keys
        self._rows_at: Callable[[int, int], np.ndarray] = order.rows
        cursor = state.engine.progress.cursor
        self._moved = dict(cursor.moved) if cursor.epoch == epoch else {}

    def open(
        self, dataset: Dataset | MapDataset, read: TakeRows, settings: ReadSettings, reading: contextlib.ExitStack
    ) -> None:
        """Before the first micro-batch: start what reads, to be ended with `reading`."""
        order = self._order
        if order.own:
            self._rows_at = cast(OrderedDataset, dataset).order(order.seed, order.epoch).rows
        takers: list[Callable[[Share], Any]] = [lambda share: read(self._rows(share))]
        if settings.num_workers:
            processes = ReaderProcesses(dataset, settings.collate_fn, settings.num_workers, settings.worker_init_fn)
            reading.enter_context(processes)
            takers = [partial(self._read_there, processes, number) for number in range(settings.num_workers)]
        if settings.pin_memory:
            takers = [partial(_pinned, take) for take in takers]
        self._read = takers[0]
        if settings.depth:
            self._ahead = reading.enter_context(ReadAhead(takers, settings.depth))
            self._read = self._ahead.read
        if settings.num_workers:
            reading.callback(processes.close)  # first, so that no thread waits for a process that hangs

    def expect(self, coming: Iterable[range]) -> None:
        if self._ahead is not None:
            self._ahead.expect((micros[0], len(micros)) for micros in coming)

    def read(self, index: int, n_micro: int = 1) -> Any:
        batch = self._read((index, n_micro))
        if dataclasses.is_dataclass(batch) and not isinstance(batch, type) and hasattr(batch, "index"):
            return dataclasses.replace(batch, index=index)
        return batch

    def runs_model(self, batch: Any) -> bool:
        return self._keys.runs_model(batch)

    def _read_there(self, processes: ReaderProcesses, number: int, share: Share) -> Any:
        return processes.take(number, self._rows(share), self._seed(share))

    def _rows(self, share: Share) -> np.ndarray:
        """int64 [n]: the samples of some neighbouring micro-batches."""
        cut, (index, n_micro) = self.cut, share
        micros = [self._moved.get(micro, micro) for micro in range(index, index + n_micro)]
        rows = [self._rows_at(micro * cut.micro_batch, cut.samples_of_micro(micro)) for micro in micros]
        return rows[0] if n_micro == 1 else np.concatenate(rows)

    def _seed(self, share: Share) -> int:
        return table_seed(self._order.seed, f"reading micro-batch {share[0]} of epoch {self.epoch}")

    def keys(self, batches: list[Any]) -> list[np.ndarray]:
        return self._keys.of(batches)

    def bags(self, batches: list[Any]) -> BagLookups | None:
        return self._keys.bags_of(batches)

    def between_steps(self) -> None:
        state = self._state
        state.check_memory()
        state.stop_if_interrupted()
        state.saving.save_if_due()
        state.saving.keep_state()

    def change_mode(self) -> bool:
        signals = self._state.engine.signals
        assert signals.requested_mode is not None
        (mode, reason), signals.requested_mode = signals.requested_mode, None
        return enter_ps.enter(self._state.engine, mode, reason, self.n_samples)

    def steps_done(self) -> None:
        self._state.saving.keep_state()

    def leases_begin(self) -> None:
        self.expect(())  # which micro-batch comes is known when it is leased
        self._state.saving.epoch_begins()
        self._state.late_joiners.start_rejoin()

    def lease_came(self) -> None:
        self._state.late_joiners.report()
        self._state.late_joiners.report_wait()

    def before_micro_batch(self) -> None:
        state = self._state
        state.check_memory()
        state.saving.save_asynchronously_if_due()
        state.saving.leave_asynchronously_if_preempted()

    def leases_end(self) -> None:
        self._state.late_joiners.report()  # this worker may be rank 0 by now

    def leave_mode(self, position: JobPosition) -> None:
        leave_ps.leave(self._state.engine, position)


def _pinned(read: Callable[[Share], Any], share: Share) -> Any:
    return pinned(read(share))


def _begin_in_the_mode_asked_for(engine: Engine) -> None:
    """The mode rank 0 is configured for, unless it decides by measurements. A collective."""
    switching, signals = switching_of(engine), engine.signals
    if switching is None:
        return
    assert engine.mode is not None
    server, is_chief = engine.host.server, engine.world.rank == 0
    pending, signals.requested_mode = signals.requested_mode, None  # late joiners have none: rank 0's counts for all
    if is_chief and pending is None and switching.mode != "auto":  # a switch that failed is not tried again so soon
        pending = switching.mode_request(engine.progress.step, engine.mode.name)
    code = -1 if pending is None else MODES.index(pending[0])
    row = [code, server is not None and not server.is_ready(to_enter=True), switching.waits]
    everyone = engine.world.gather("mode", np.array(row, dtype=np.int64))
    code, not_ready, waits = int(everyone[0][0]), int(everyone[:, 1].sum()), bool(everyone[0][2])
    if code < 0 or MODES[code] == engine.mode.name or (not_ready and not waits):
        return  # allreduce continues, and the chief requests it with each commit
    known = pending is not None and pending[0] == MODES[code]
    signals.requested_mode = pending if known else (MODES[code], f"mode {MODES[code]!r} was asked for")


def _trace(engine: Engine, order: EpochOrder) -> None:
    """The facts that a replay begins with; the dense values only before the first step."""
    if TRACE is None:
        return
    model = engine.model
    optimizers: dict[str, Any] = {"dense": spec_of(model.optimizer)}
    optimizers["rows"] = launch.describe_optimizer(model.tables.optimizer)
    if own := model.tables.optimizers.own:
        optimizers["own_rows"] = [launch.describe_optimizer(one) for one in own]
    values = [p.detach().numpy() for p in model.dense.parameters] if not engine.progress.step else None
    TRACE.write(
        "epoch", **dataclasses.asdict(order), step=engine.progress.step, global_batch=model.global_batch,
        micro_batch=model.micro_batch, tables=model.tables.layout.describe(), optimizers=optimizers, names=model.names,
        values=values, hosts=1 if model.tables.local is None else 2, row_average=model.row_average,
    )  # fmt: skip


def _refuse_another_order(begun: EpochOrder | None, order: EpochOrder, steps_done: int) -> None:
    if begun is None or begun.epoch != order.epoch or begun == order:
        return
    names = {"n_samples": "samples", "seed": "seed", "shuffle": "shuffle", "own": "order of the dataset"}
    pairs = {words: (getattr(begun, name), getattr(order, name)) for name, words in names.items()}
    found = ", ".join(f"{words} {was}, here {now}" for words, (was, now) in pairs.items() if was != now)
    raise StateMismatch(
        f"epoch {order.epoch} stands at step {steps_done} of what was begun with {found}: what is done and what is not "
        "cannot be determined any more. Use the same data, or start over (resume=False, or another url for checkpoints)"
    )


def _warn_of_idle_workers(cut: EpochPlan, rank: int, size: int, together: int = 1) -> None:
    n_batches, name = cut.n_micro // together, "micro_batch" if together == 1 else "sync_micro_batch"
    if size > n_batches and rank == 0:
        warnings.warn(
            f"{size} workers share {n_batches} {'micro-batches' if together == 1 else 'batches of sync_micro_batch'} "
            f"a step: {size - n_batches} stay idle. "
            f"Use a smaller {name} ({max(1, cut.global_batch // size)} or less), or fewer workers",
            stacklevel=3,
        )
