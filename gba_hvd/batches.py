"""`batches`: the micro-batches of an epoch, each handed out to one worker once.

The order comes from the seed and the epoch. In allreduce mode, which worker computes what comes from the world as it is
at each step; in an asynchronous mode, from the leases the coordinator gives. After a failure, a change of membership or
a switch the loop simply resumes at the job's position.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np

from gba_hvd.batch_keys import BatchKeys, FindIds
from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.way_back import way_back
from gba_hvd.comm.collectives import agree_on
from gba_hvd.elastic import TorchState, job_events
from gba_hvd.elastic.torch_state import checked_state
from gba_hvd.embedding.bags import BagLookups
from gba_hvd.embedding.lookups import IdOutside
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.epoch import EpochOrder, EpochPlan, position_in
from gba_hvd.errors import BadInput, StateMismatch
from gba_hvd.mode_names import MODES
from gba_hvd.ps import launch
from gba_hvd.ps.messages import JobPosition
from gba_hvd.reading import trained_scaling
from gba_hvd.reading.batch_size import check_n_samples, n_samples_of
from gba_hvd.reading.datasets import (
    Dataset,
    LanedDataset,
    LaneOrder,
    MapDataset,
    OrderedDataset,
    SegmentedDataset,
    ShardList,
    TakeRows,
    pinned,
    reads,
)
from gba_hvd.reading.lane_readers import Announce, LaneReaders
from gba_hvd.reading.read_ahead import ReadAhead, Share
from gba_hvd.reading.readers import Readers
from gba_hvd.reading.settings import Collate, ReadSettings
from gba_hvd.reading.trained_vocabularies import digests_of, refuse_other_vocabularies, with_digests
from gba_hvd.shm.layout import digest, table_seed
from gba_hvd.switching import enter_ps, leave_ps
from gba_hvd.switching.requests import switching_of
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.trace import TRACE
from gba_hvd.training.engine import Engine
from gba_hvd.training.left_epoch import LeftEpoch
from gba_hvd.training.mode import CountRun

__all__ = ["Dataset", "MapDataset", "batches"]

_SLOW_COUNT_S = 5.0  # a wait for the counts of a segment that is reported
_OF_SAMPLES = {"n_samples": "samples", "seed": "seed", "shuffle": "shuffle", "own": "order or content of the dataset"}
_OF_SHARDS = {
    "n_shards": "shards",
    "in_segment": "shards in a segment",
    "shards": "digest of their names",
    "seed": "seed",
    "shuffle": "shuffle",
}
_NOT_KNOWN = "what is done and what is not cannot be determined any more. Use the same data"


def batches(
    dataset: Dataset | MapDataset | SegmentedDataset,
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
    n_samples: Callable[[Any], int] | None = None,
) -> Generator[Any, None, None]:
    """The micro-batches of this epoch that this worker computes. Call `optimizer.step()` once for each.

    The epoch is `state.epoch` when the state has one, else the next. An epoch that is partly done resumes where it
    stands. Workers without a share take part in the steps silently.

    dataset: has `take(rows)`, or is a map-style dataset of torch (`__getitem__`, or `__getitems__`). One that has an
    order of its own (`OrderedDataset`) is shuffled in that. Or a `gba_hvd.data.ShardedStream`, whose length is not
    known; the state then needs an `epoch`.
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
    prefetch: batches read ahead of the training by each of these processes, or by one thread (num_workers=0); 2 when
    left out. 0: the training loop reads. In asynchronous modes those that this worker will probably get are read ahead,
    and with 0 a micro-batch is read beside the one before it.
    collate_fn: makes a batch of a list of samples of a map-style dataset; torch's `default_collate` when left out.
    pin_memory: copy the tensors of each batch to pinned memory, for GPUs. worker_init_fn: called with 0 ..
    num_workers - 1 in each reader process before it reads.
    n_samples: how many samples a batch was made of, where the first dimension of its label, its ids or all its tensors
    is another number: where `collate_fn` adds negatives, or time comes first.

    Raises StateMismatch when the workers' datasets or settings differ, or when the epoch was begun with other samples
    or in another order: its position would mean nothing, and a complete one has no batches left for new data; and for a
    prepared dataset in whose vocabularies ids mean other values than in those that the job has trained. Raises
    BadInput for settings that would have no effect and for a dataset that cannot be copied to reader processes;
    ReaderDied (a GbaError) when one of these has ended; BadInput for a batch that has another number of samples than
    were asked for, by `n_samples`, or where its label, its ids or all its tensors show that; and what reading a batch
    raises.
    """
    settings = ReadSettings(num_workers, prefetch, collate_fn, pin_memory, worker_init_fn)
    read = None if isinstance(dataset, SegmentedDataset) else reads(dataset, collate_fn)
    checked_state(state, "batches()").ensure_trains()
    if ids is not None and forward is not None:
        raise BadInput("batches(): `ids` and `forward` both say where ids come from: pass one of them")
    state.check_parameters()
    engine = state.engine
    keys = BatchKeys(engine.model.tables, state.model, ids, forward, lambda: engine.n_threads > 1)
    how = _How(seed, shuffle, settings, keys, n_samples)
    epoch = _epoch_of(state, dataset)
    if state.finished_epoch == epoch:
        warnings.warn(f"epoch {epoch} is done and has no batches left: advance state.epoch", stacklevel=2)
    progress = engine.progress
    _warn_of_skipped_epochs(engine, epoch)
    job_events.left_early(engine, epoch)
    progress.epoch, progress.n_evaluated, progress.epoch_over = epoch, 0, False
    engine.reports.loop_begins()
    try:
        if isinstance(dataset, SegmentedDataset):
            yield from _segments(dataset, state, how, epoch)
        else:
            assert read is not None
            yield from _run(dataset, read, state, how, epoch)
    except GeneratorExit:
        progress.left.newest = _left_of(engine)
        raise
    state.finished_epoch, progress.n_evaluated, progress.epoch_over = epoch, 0, True
    engine.reports.traffic()
    engine.reports.vocabularies(now=True)
    engine.reports.unused_tables()


@dataclasses.dataclass(frozen=True)
class _How:
    """How the user wants samples ordered and read."""

    seed: int
    shuffle: bool
    settings: ReadSettings
    keys: BatchKeys
    n_samples: Callable[[Any], int] | None


def _epoch_of(state: TorchState, dataset: Dataset | MapDataset | SegmentedDataset) -> int:
    """That of the state; where it has none, the one that is partly done or the next."""
    epoch: int | None = getattr(state, "epoch", None)
    if epoch is not None:
        return epoch
    if isinstance(dataset, SegmentedDataset):
        raise BadInput(
            f"batches(): with a {type(dataset).__name__} the state needs an epoch, since whether one is done is not "
            "known before its samples are counted: TorchState(..., epoch=0) and `for state.epoch in range(...)`"
        )
    model, cursor = state.engine.model, state.engine.progress.cursor
    n_steps = EpochPlan(len(dataset), model.global_batch, model.micro_batch).n_steps
    return max(0, cursor.epoch) if cursor.steps_done < n_steps else cursor.epoch + 1


def _segments(dataset: SegmentedDataset, state: TorchState, how: _How, epoch: int) -> Generator[Any, None, None]:
    """The segments of an epoch of unknown length, from the one that the job is in."""
    engine, model = state.engine, state.engine.model
    n_micro, cursor = model.global_batch // model.micro_batch, engine.progress.cursor
    shards = dataset.shard_list(n_micro)
    first, n = cursor.segment if cursor.epoch == epoch else 0, shards.n_segments
    engine.progress.dataset = dataset
    assert engine.mode is not None
    if engine.mode.steps_together:  # before one worker alone refuses its list, or counts other shards than others do
        agree_on(engine.world, "shards", vars(shards), engine.progress.source_names)
    if first or (cursor.epoch == epoch and cursor.steps_done):
        _refuse_other_shards(engine, EpochOrder(0, how.seed, epoch, how.shuffle, 0, first, **vars(shards)), n)
    n_samples = 0
    with contextlib.ExitStack() as reading:
        reading.callback(dataset.end_reading)
        following = dataset.segment(first, how.seed, epoch, n_micro, how.shuffle)
        for number in range(first, n):
            part = following
            assert engine.mode is not None
            steps_together = engine.mode.steps_together and not how.settings.num_workers
            at = engine.world.rank, engine.world.size, model.together
            if steps_together:
                part.count_ahead(*at)
            rank_of = partial(part.rank_of, together=model.together)
            where, began_s = f"epoch {epoch}, segment {number + 1} of {n}", time.perf_counter()
            text = f"{where}: {len(part.shards)} shards are counted before they are trained"
            engine.reports.once(Event("counting", engine.progress.step, text))
            sizes = engine.mode.count(CountRun(epoch, number, len(part.shards), part.count, rank_of))
            _report_slow_count(engine, where, sizes, began_s)
            part.counted(sizes)
            if not steps_together:
                dataset.end_reading()  # of what was counted ahead before a switch, too
            n_samples += sum(sizes)
            if number + 1 < n:
                following = dataset.segment(number + 1, how.seed, epoch, n_micro, how.shuffle)
                if steps_together:
                    following.count_ahead(*at)
            if sum(sizes):
                yield from _run(part, reads(part, how.settings.collate_fn), state, how, epoch, number, shards)
    if first == 0 and not n_samples:
        warnings.warn(f"epoch {epoch}: no shard of the {type(dataset).__name__} has a sample", stacklevel=3)


def _report_slow_count(engine: Engine, where: str, sizes: list[int], began_s: float) -> None:
    waited_s = time.perf_counter() - began_s
    if waited_s >= _SLOW_COUNT_S:
        text = (
            f"{where}: training waited {waited_s:.0f} s until {len(sizes)} shards with {sum(sizes):,} samples were "
            "counted; `count` of the stream, if it can tell without reading, makes that shorter"
        )
        engine.emit(Event("counted", engine.progress.step, text, {"seconds": waited_s, "samples": sum(sizes)}))


def _run(
    dataset: Dataset | MapDataset,
    read: TakeRows,
    state: TorchState,
    how: _How,
    epoch: int,
    segment: int = 0,
    shards: ShardList | None = None,
) -> Generator[Any, None, None]:
    """The batches of an epoch of known length, or of a segment; then `shards` are those of the whole epoch."""
    engine = state.engine
    model, progress = engine.model, engine.progress
    cut = EpochPlan(len(dataset), model.global_batch, model.micro_batch)
    first = progress.cursor.steps_done if progress.cursor.is_in(epoch, segment) else 0
    has_order = hasattr(dataset, "order") and hasattr(dataset, "order_digest")
    own: int = cast(OrderedDataset, dataset).order_digest if has_order else 0
    engine.progress.dataset = dataset
    vocabularies, scaling = digests_of(dataset), trained_scaling.scaling_of(dataset)
    assert engine.mode is not None
    if engine.mode.steps_together:  # else the coordinator checks the same
        facts = {"samples": len(dataset), "seed": how.seed, "epoch": epoch, "order of the dataset": own}
        of_vocabularies = "vocabularies of the dataset"
        facts |= {of_vocabularies: digest(vocabularies) if vocabularies else 0}
        facts |= {"segment": segment, "step of the epoch": first, "step": progress.step}
        if shards is not None:
            facts |= {"shards in a segment": shards.in_segment, "list of shards": shards.shards}
        agree_on(engine.world, "epoch", facts, engine.progress.source_names, {of_vocabularies: vocabularies})
        # Reported, since the last bits of a mean may differ between hosts that have each prepared a store.
        everyone = engine.world.gather_bytes("epoch.scaling", json.dumps(trained_scaling.to_state(scaling)).encode())
        engine.reports.scaling_differs(
            trained_scaling.of_other_workers([trained_scaling.of_state(json.loads(one.tobytes())) for one in everyone])
        )
        _warn_of_idle_workers(cut, engine.world.rank, engine.world.size, model.together)
    engine.reports.not_compared(refuse_other_vocabularies(progress.vocabularies, dataset))
    progress.vocabularies = with_digests(progress.vocabularies, vocabularies)
    engine.model.tables.trained_vocabularies = progress.vocabularies
    if first < cut.n_steps:
        differs = trained_scaling.other_scaling(progress.scaling, scaling, "the dataset that is trained now")
        engine.reports.scaling_differs(differs)
        progress.scaling = trained_scaling.trained_with(progress.scaling, dataset)
    engine.model.tables.trained_scaling = progress.scaling
    order = EpochOrder(
        len(dataset), how.seed, epoch, how.shuffle, own, segment, **({} if shards is None else vars(shards))
    )
    begun = progress.order
    if first and begun is not None and (begun.epoch, begun.segment) == (epoch, segment):
        n_begun = EpochPlan(begun.n_samples, model.global_batch, model.micro_batch).n_steps
        if shards is None and first >= n_begun:
            _refuse_new_data_in(engine, begun, order, n_begun)
        _refuse_another_order(engine, begun, order, _OF_SAMPLES, f"step {first}")
    progress.order = order
    _trace(engine, order)
    if order.own and order.shuffle and segment == 0 and isinstance(dataset, LanedDataset):
        _warn_of_few_groups(engine, dataset.n_groups, cut.n_micro, how.settings.num_workers)
    if engine.mode.steps_together and first < cut.n_steps:
        state.saving.save_the_best()
        _begin_in_the_mode_asked_for(engine)
    finished = first == cut.n_steps
    if finished and segment == 0 and not engine.n_begun:
        progress.complete_before.append(epoch)
    with contextlib.ExitStack() as reading:
        run = _Epoch(len(dataset), state, order, cut, how)
        if not finished:
            run.open(dataset, read, how.settings, reading)
        while not finished:
            finished = yield from engine.mode.micro_batches(run)


class _Epoch:
    """One epoch of one dataset. See `EpochRun` for what is called when."""

    _read: Callable[[Share], Any]
    _ahead: ReadAhead | None = None
    _reader_of: Callable[[Share], int] | None = None

    def __init__(self, n_samples: int, state: TorchState, order: EpochOrder, cut: EpochPlan, how: _How) -> None:
        self.cut, self.epoch, self.segment, self.n_samples = cut, order.epoch, order.segment, n_samples
        self.order_digest = digest(dataclasses.asdict(order))
        self._state, self._order, self._keys, self._count = state, order, how.keys, how.n_samples
        self._rows_at: Callable[[int, int], np.ndarray] = order.rows
        cursor = state.engine.progress.cursor
        self._moved = dict(cursor.moved) if cursor.is_in(order.epoch, order.segment) else {}

    def open(
        self, dataset: Dataset | MapDataset, read: TakeRows, settings: ReadSettings, reading: contextlib.ExitStack
    ) -> None:
        """Before the first micro-batch: start what reads, to be ended with `reading`."""
        order = self._order
        reading.enter_context(self._state.engine.model.tables.naming_samples(self._where_in_this))
        if order.own and order.shuffle:
            own = cast(OrderedDataset, dataset).order(order.seed, order.epoch, self.cut)
            self._rows_at = own.rows
        readers = Readers(dataset, read, settings, self._rows, self._seed, reading)
        takers = readers.take
        if settings.pin_memory:
            takers = [partial(_pinned, take) for take in takers]
        takers = [partial(_prepared, self._state.engine.model.tables, take) for take in takers]
        if order.own and order.shuffle and isinstance(dataset, LanedDataset):
            announce = _announce_to(dataset) if readers.processes is None else readers.processes.will_read
            reading.callback(dataset.end_reading)
            lanes = LaneReaders(cast(LaneOrder, own), len(takers), self._micro_of, announce)
            self._reader_of, takers = lanes.reader_of, [partial(_of_lanes, lanes, take) for take in takers]
        self._read = partial(self._read_here, takers[0])
        self._ahead = readers.ahead(takers, self._reader_of)
        if self._ahead is not None:
            self._read = self._ahead.read

    def expect(self, coming: Iterable[range]) -> None:
        if self._ahead is not None:
            self._ahead.expect((micros[0], len(micros)) for micros in coming)

    def read(self, index: int, n_micro: int = 1) -> Any:
        batch = self._read((index, n_micro))
        micros = range(index, index + n_micro)
        n_samples = sum(self.cut.samples_of_micro(self._micro_of(micro)) for micro in micros)
        where = f"{self._name}, micro-batch {index}" + (f" and {n_micro - 1} more" if n_micro > 1 else "")
        if self._count is not None:
            check_n_samples(self._count(batch), n_samples, where)
        else:
            check_n_samples(n_samples_of(batch, lambda: self._keys.ids_by_function(batch)), n_samples, where)
        if dataclasses.is_dataclass(batch) and not isinstance(batch, type) and hasattr(batch, "index"):
            return dataclasses.replace(batch, index=index)
        return batch

    @property
    def _name(self) -> str:
        return f"epoch {self.epoch}" + (f" segment {self.segment}" if self.segment else "")

    def runs_model(self, batch: Any) -> bool:
        return self._keys.runs_model(batch)

    def _read_here(self, take: Callable[[Share], Any], share: Share) -> Any:
        if self._reader_of is not None:
            self._reader_of(share)
        return take(share)

    def _rows(self, share: Share) -> np.ndarray:
        """int64 [n]: the samples of some neighbouring micro-batches."""
        cut, (index, n_micro) = self.cut, share
        micros = [self._micro_of(micro) for micro in range(index, index + n_micro)]
        rows = [self._rows_at(micro * cut.micro_batch, cut.samples_of_micro(micro)) for micro in micros]
        return rows[0] if n_micro == 1 else np.concatenate(rows)

    def _where_in_this(self, sample: int) -> str:
        """In words, what a sample of the micro-batch that was handed out is."""
        micro = self._state.engine.micro_batch
        return "" if micro is None else self._where((micro.index, micro.n_micro), sample)

    def _where(self, share: Share, sample: int) -> str:
        """The same of a batch of some neighbouring micro-batches."""
        rows, of = self._rows(share), "segment" if self._order.n_shards else "dataset"
        if sample >= len(rows):  # (the forward pass made other samples of them)
            return f" ({self._name}, micro-batch {share[0]})"
        index = share[0] + sample // self.cut.micro_batch
        return f" ({self._name}, micro-batch {index}, sample {rows[sample]} of the {of})"

    def _micro_of(self, index: int) -> int:
        """The micro-batch that stands at an index of the epoch."""
        return self._moved.get(index, index)

    def _seed(self, share: Share) -> int:
        return table_seed(self._order.seed, f"reading micro-batch {share[0]} of {self._name}")

    def keys(self, batches: list[Any]) -> list[np.ndarray]:
        try:
            return self._keys.of(batches)
        except IdOutside as error:
            index = getattr(batches[0], "index", -1)  # of several batches it is not known which one it is
            if len(batches) == 1 and isinstance(index, int) and index >= 0 and error.sample is not None:
                error.where = self._where((index, 1), error.sample)
            raise

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


def _announce_to(dataset: LanedDataset) -> Announce:
    return lambda reader, now, after: dataset.will_read(now, after)


def _of_lanes(lanes: LaneReaders, take: Callable[[Share], Any], share: Share) -> Any:
    lanes.will_read(share)
    return take(share)


def _prepared(tables: EmbeddingTables, read: Callable[[Share], Any], share: Share) -> Any:
    return tables.prepare(read(share))


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


def _refuse_other_shards(engine: Engine, order: EpochOrder, n_segments: int) -> None:
    """Before a segment is counted: segments before it were trained, of these shards. order: of this segment."""
    begun, cursor = engine.progress.order, engine.progress.cursor
    if begun is not None and begun.epoch == order.epoch and begun.shards:  # orders of older versions have none
        _refuse_another_order(engine, begun, order, _OF_SHARDS, f"step {cursor.steps_done} of segment {order.segment}")
    if order.segment >= n_segments:
        raise StateMismatch(
            f"epoch {order.epoch} stands in segment {order.segment}, and the dataset has segments 0 to "
            f"{n_segments - 1} here, of {order.n_shards} shards with {order.in_segment} in each: {_NOT_KNOWN}. "
            f"{_to_train_it_again(engine, order.epoch)}"
        )


def _refuse_new_data_in(engine: Engine, begun: EpochOrder, order: EpochOrder, n_steps: int) -> None:
    """Of an epoch that is complete."""
    if found := _differences(begun, order, _OF_SAMPLES):
        epoch, following = order.epoch, order.epoch + 1
        raise StateMismatch(
            f"epoch {epoch} is complete: all {n_steps} steps of it were trained, with {found}. New data, whose ids "
            "mean the same (of a store: gba-hvd data prepare --like), is a new epoch: set state.epoch = "
            f"{following} before batches(), as `for state.epoch in range({following}, ...)` does. Corrected data of "
            f"epoch {epoch} would then be trained beside what it corrects: to train it instead, "
            f"{way_back(engine, epoch)}"
        )


def _differences(begun: EpochOrder, order: EpochOrder, names: Mapping[str, str]) -> str:
    pairs = {words: (getattr(begun, name), getattr(order, name)) for name, words in names.items()}
    return ", ".join(f"{words} {was}, here {now}" for words, (was, now) in pairs.items() if was != now)


def _refuse_another_order(
    engine: Engine, begun: EpochOrder, order: EpochOrder, names: Mapping[str, str], at: str
) -> None:
    if found := _differences(begun, order, names):
        raise StateMismatch(
            f"epoch {order.epoch} stands at {at} of what was begun with {found}: {_NOT_KNOWN}. "
            f"{_to_train_it_again(engine, order.epoch)}"
        )


def _to_train_it_again(engine: Engine, epoch: int) -> str:
    return f"To train epoch {epoch} from its first batch with the data that it has now, {way_back(engine, epoch)}"


def _warn_of_skipped_epochs(engine: Engine, epoch: int) -> None:
    """Before the epoch that the state names: those between it and the one before that never had a step, and what was
    left of the one before when the launch began."""
    progress = engine.progress
    before = max(progress.cursor.epoch, -1 if progress.epoch is None else progress.epoch)
    stands = position_in(progress.state_dict())
    has_left = stands is not None and stands.steps_done > 0 and not stands.is_complete and stands.n_segments > 0
    if stands is not None and has_left and progress.launched_at == progress.step and stands.epoch < epoch:
        text = (
            f"epoch {epoch} begins, and the launches before left {stands.words}: the rest of it is not trained. To "
            f"train that, start the job with epoch {stands.epoch} and its data first"
        )
        facts = {"before": before, "first": before, "last": before, "epoch": epoch}
        engine.reports.once(Event("epoch_unfinished", progress.step, text, facts, level="warning"))
    if before < 0 or epoch <= before + 1:
        return
    first, last = before + 1, epoch - 1
    which, data = (
        (f"epoch {first} was", "its data") if first == last else (f"epochs {first} to {last} were", "their data")
    )
    text = (
        f"{which} never trained: epoch {epoch} begins after epoch {before}. From now on {data} can be trained as a "
        f"later epoch. To keep the order: go back with `gba-hvd checkpoint rollback` to a checkpoint from before epoch "
        f"{epoch}, and train epoch {first} first"
    )
    facts = {"before": before, "first": first, "last": last, "epoch": epoch}
    engine.reports.once(Event("epoch_skipped", progress.step, text, facts, level="warning"))


def _left_of(engine: Engine) -> LeftEpoch | None:
    """Of the newest epoch, whose loop is left; None: no step of it was to come, or other workers may train the rest,
    and nothing waits for that.
    """
    progress, model, order, mode = engine.progress, engine.model, engine.progress.order, engine.mode
    if order is None or mode is None or not (mode.steps_together or mode.computed_in_step):
        return None
    plan = EpochPlan(order.n_samples, model.global_batch, model.micro_batch)
    done = progress.cursor.steps_done if progress.cursor.is_in(order.epoch, order.segment) else 0
    n_segments = -(-order.n_shards // order.in_segment) if order.n_shards else 1
    if done >= plan.n_steps and order.segment + 1 >= n_segments:
        return None
    return LeftEpoch(
        order.epoch, order.segment if order.n_shards else None, progress.step, done, plan.n_steps,
        min(done * model.global_batch, order.n_samples), order.n_samples,
        mode.computed_in_step, engine.world.size, mode.steps_together,
    )  # fmt: skip


def _warn_of_few_groups(engine: Engine, n_groups: int, n_micro: int, num_workers: int) -> None:
    if n_groups < n_micro and engine.world.size * max(1, num_workers) > 1:
        text = (
            f"the samples are in {n_groups} row groups or shards, and a step has {n_micro} micro-batches: with fewer "
            f"than {n_micro}, several workers (or reader processes) decode the same ones. Write smaller ones, such as "
            "with row_group_size= of pyarrow, or put more shards in a segment"
        )
        engine.reports.once(Event("few_row_groups", engine.progress.step, text, level="warning"))


def _warn_of_idle_workers(cut: EpochPlan, rank: int, size: int, together: int = 1) -> None:
    n_batches, name = cut.n_micro // together, "micro_batch" if together == 1 else "sync_micro_batch"
    if size > n_batches and rank == 0:
        warnings.warn(
            f"{size} workers share {n_batches} {'micro-batches' if together == 1 else 'batches of sync_micro_batch'} "
            f"a step: {size - n_batches} stay idle. "
            f"Use a smaller {name} ({max(1, cut.global_batch // size)} or less), or fewer workers",
            stacklevel=3,
        )
