"""`batches`: the micro-batches of an epoch, each handed out to one worker once.

The order comes from the seed and the epoch. In allreduce mode, which worker computes what comes from the world as it is
at each step; in an asynchronous mode, from the leases the coordinator gives. After a failure, a change of membership or
a switch the loop simply goes on where the job stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from gba_hvd.batch import Bag
from gba_hvd.comm.collectives import World
from gba_hvd.elastic import TorchState
from gba_hvd.embedding.tables import EmbeddingTables, RemoteRows
from gba_hvd.epoch import Cut, EpochOrder
from gba_hvd.errors import BadInput, GbaError, StateMismatch
from gba_hvd.mode_names import MODES
from gba_hvd.modes.allreduce_exchange import AllreduceMode
from gba_hvd.modes.parameter_server import GbaMode
from gba_hvd.ps.messages import Given
from gba_hvd.ps.worker.lease_prefetch import Ahead
from gba_hvd.switching import handover
from gba_hvd.training.engine import Cursor

Ids = Mapping[str, Tensor | Bag]


class Dataset(Protocol):
    """Samples that can be read by number."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> Any:
        """The samples `rows` (int64 [n], any order) as one batch with an `ids` mapping, e.g. a `gba_hvd.Batch`."""


def batches(
    dataset: Dataset, state: TorchState, *, seed: int = 0, shuffle: bool = True, ids: Callable[[Any], Ids] | None = None
) -> Generator[Any, None, None]:
    """The micro-batches of this epoch that this worker computes. Call `optimizer.step()` once for each.

    The epoch is `state.epoch` when the state has one, else the next. An epoch that is partly done goes on where it
    stands. Workers without a share take part in the steps silently.

    ids: how to find the table ids in a batch, when it has no `ids` attribute.
    Raises StateMismatch when the workers' datasets or settings differ, or when an epoch that is partly done was begun
    with other samples or in another order: its position would mean nothing.
    """
    state.ensure_synced()
    engine, find_ids = state.engine, ids or ids_of
    cut = Cut(len(dataset), engine.global_batch, engine.micro_batch)
    epoch = getattr(state, "epoch", None)
    if epoch is None:
        epoch = max(0, engine.cursor.epoch) if engine.cursor.steps_done < cut.n_steps else engine.cursor.epoch + 1
    first = engine.cursor.steps_done if engine.cursor.epoch == epoch else 0
    if isinstance(engine.mode, AllreduceMode):  # the coordinator checks the same in asynchronous modes
        facts = {"samples": len(dataset), "seed": seed, "epoch": epoch, "step of the epoch": first, "step": engine.step}
        agree_on(engine.world, "epoch", facts)
        _warn_of_idle_workers(cut, engine.world.rank, engine.world.size)
    order = EpochOrder(len(dataset), seed, epoch, shuffle)
    if first:
        _refuse_another_order(engine.order, order, first)
    engine.order = order
    engine.trace_epoch(order)
    if isinstance(engine.mode, AllreduceMode) and first < cut.n_steps:
        _begin_in_the_mode_asked_for(state)
    if state.finished_epoch == epoch:
        warnings.warn(f"epoch {epoch} is done and has no batches left: advance state.epoch", stacklevel=2)
    engine.n_evaluated, engine.epoch_over = 0, False
    moved = dict(engine.cursor.moved) if engine.cursor.epoch == epoch else {}
    source = _Source(dataset, order, cut, epoch, find_ids, moved)
    finished = first == cut.n_steps
    while not finished:
        if isinstance(engine.mode, GbaMode):
            finished = yield from _leases(source, state, engine.mode)
        else:
            finished = yield from _steps(source, state)
    state.finished_epoch, engine.n_evaluated, engine.epoch_over = epoch, 0, True
    engine.tell_traffic()


@dataclass(frozen=True)
class _Source:
    """The micro-batches of one epoch."""

    dataset: Dataset
    order: EpochOrder
    cut: Cut
    epoch: int
    find_ids: Callable[[Any], Ids]
    moved: Mapping[int, int]  # as of `engine.Cursor`

    def read(self, index: int) -> Any:
        cut, place = self.cut, self.moved.get(index, index)
        batch = self.dataset.take(self.order.rows(place * cut.micro_batch, cut.samples_of_micro(place)))
        if dataclasses.is_dataclass(batch) and not isinstance(batch, type) and hasattr(batch, "index"):
            return dataclasses.replace(batch, index=index)
        return batch


def _steps(source: _Source, state: TorchState) -> Generator[Any, None, bool]:
    """Allreduce mode: this worker's share of each step. Returns whether the epoch is over; if not, the mode changed."""
    engine, cut = state.engine, source.cut
    first = engine.cursor.steps_done if engine.cursor.epoch == source.epoch else 0
    for step in range(first, cut.n_steps):
        state.check_memory()
        state.stop_if_interrupted()
        state.saving.save_if_due()
        state.saving.keep_state()
        if engine.switch_to is not None:
            (mode, reason), engine.switch_to = engine.switch_to, None
            if engine.cursor.epoch != source.epoch:
                engine.cursor = Cursor(source.epoch, step)
            if handover.to_servers(engine, mode, reason, len(source.dataset)):
                return False
        mode_now = engine.mode
        assert isinstance(mode_now, AllreduceMode)
        share = cut.micro_of_step(step)[engine.world.rank :: engine.world.size]
        engine.begin_step(cut, source.epoch, step)
        read: Iterator[Any] = (source.read(index) for index in share)
        if mode_now.several_hosts:
            read = iter(loaded := list(read))
            mode_now.pull(keys_by_group(engine.tables, [source.find_ids(batch) for batch in loaded]))
        for index, batch in zip(share, read, strict=True):
            engine.begin_micro(index, is_last=index == share[-1])
            yield batch
            engine.check_stepped()
        if not share:
            engine.close_step()
        if engine.cursor.steps_done != step + 1:
            raise GbaError(f"step {engine.step + 1} was not applied: leave the loop over batches when a step raises")
    state.saving.keep_state()
    return True


def _leases(source: _Source, state: TorchState, mode: GbaMode) -> Generator[Any, None, bool]:
    """An asynchronous mode: one lease after the other. Returns whether the epoch is over; if not, the mode changed."""
    engine = state.engine

    def fetch() -> tuple[Given, Any, list[RemoteRows | None]]:
        lrs = [*engine.dense_lrs, engine.row_lr]
        given = mode.ask(source.epoch, len(source.dataset), lrs, engine.step, lambda: ahead.is_closed)
        if given.lease is None:
            return given, None, []
        batch = source.read(given.lease.micro)
        rows = mode.fetch_rows(keys_by_group(engine.tables, [source.find_ids(batch)])) if mode.several_hosts else []
        return given, batch, rows

    state.saving.epoch_begins(mode)
    state.newcomers.watch()
    engine.leases = ahead = Ahead(fetch)
    try:
        while True:
            asked_s = time.perf_counter()
            given, batch, rows = ahead.next()
            if given.lease is None:
                break
            if rows:
                mode.use_rows(rows)
            got_s = time.perf_counter()
            state.newcomers.tell()
            state.newcomers.tell_of_the_wait()
            engine.observe(mode.position)
            state.check_memory()
            # Before the micro-batch begins: whoever waits here for a checkpoint takes part in the rounds of the others.
            state.saving.save_asynchronously_if_due()
            state.saving.leave_asynchronously_if_told()
            begun_s = time.perf_counter()
            engine.begin_lease(given.lease, source.cut, source.epoch)
            engine.wishes.follow(time.perf_counter() - begun_s + got_s - asked_s)
            yield batch
            engine.check_stepped()
    except GeneratorExit:  # the user left the loop; the model is to be as the servers have it
        ahead.close()
        with contextlib.suppress(Exception):  # whatever fails here will be told where the servers are asked next
            handover.take_dense_state(engine, mode, leaving=False, ended=False)
        raise
    finally:
        engine.leases = None
        ahead.close()
    if given.instead == "finished":
        state.newcomers.tell()  # this worker may be rank 0 by now
        handover.take_dense_state(engine, mode, leaving=False)
        engine.observe(given.position)
        return True
    handover.to_workers(engine, given.position)
    return False


def _begin_in_the_mode_asked_for(state: TorchState) -> None:
    """The mode that rank 0 is told to be in, unless it decides by measurements. A collective."""
    engine = state.engine
    if engine.switching is None:
        return
    assert engine.mode is not None
    switching, line, is_chief = engine.switching, engine.line, engine.world.rank == 0
    pending, engine.switch_to = engine.switch_to, None  # newcomers have none: rank 0's counts for all
    if is_chief and pending is None and switching.mode != "auto":  # a switch that failed is not tried again so soon
        pending = switching.wish(engine.step, engine.mode.name)
    code = -1 if pending is None else MODES.index(pending[0])
    row = [code, line is not None and not line.is_ready(to_enter=True), switching.waits]
    told = engine.world.gather("mode", np.array(row, dtype=np.int64))
    code, not_ready, waits = int(told[0][0]), int(told[:, 1].sum()), bool(told[0][2])
    if code < 0 or MODES[code] == engine.mode.name or (not_ready and not waits):
        return  # allreduce goes on, and the chief says its wish with each commit
    known = pending is not None and pending[0] == MODES[code]
    engine.switch_to = pending if known else (MODES[code], f"mode {MODES[code]!r} was asked for")


def keys_by_group(tables: EmbeddingTables, ids: list[Ids]) -> list[np.ndarray]:
    """All keys of some batches' ids: per group of tables int64 [n]."""
    keys: list[np.ndarray] = []
    for number, group in enumerate(tables.layout.groups):
        columns = [
            (name, column.values if isinstance(column, Bag) else column)
            for by_name in ids
            for name, column in by_name.items()
            if any(table.name == name for table in group.tables)
        ]
        keys.append(tables.keys_of(number, columns))
    return keys


def ids_of(batch: Any) -> Ids:
    try:
        ids: Ids = batch.ids
    except AttributeError as error:
        raise BadInput(
            f"a batch of type {type(batch).__name__} has no `ids`: tell gba_hvd.batches where the table ids are, "
            "with ids=lambda batch: ..."
        ) from error
    return ids


def agree_on(world: World, name: str, facts: dict[str, int]) -> None:
    """All workers must be about to do the same thing."""
    everyone = world.gather(name, np.array(list(facts.values()), dtype=np.int64))
    for column, what in enumerate(facts):
        values = everyone[:, column].tolist()
        if len(set(values)) > 1:
            raise StateMismatch(
                f"the workers disagree about the {what}: by rank {values}; "
                "they must run the same script on the same data"
            )


def _refuse_another_order(begun: EpochOrder | None, order: EpochOrder, steps_done: int) -> None:
    if begun is None or begun.epoch != order.epoch or begun == order:
        return
    names = {"n_samples": "samples", "seed": "seed", "shuffle": "shuffle"}
    pairs = {words: (getattr(begun, name), getattr(order, name)) for name, words in names.items()}
    found = ", ".join(f"{words} {was}, here {now}" for words, (was, now) in pairs.items() if was != now)
    raise StateMismatch(
        f"epoch {order.epoch} stands at step {steps_done} of what was begun with {found}: what is done and what is not "
        "cannot be told any more. Use the same data, or start anew (resume=False, or another url for checkpoints)"
    )


def _warn_of_idle_workers(cut: Cut, rank: int, size: int) -> None:
    if size > cut.n_micro and rank == 0:
        warnings.warn(
            f"{size} workers share {cut.n_micro} micro-batches a step: {size - cut.n_micro} stay idle. "
            f"Use a smaller micro_batch ({max(1, cut.global_batch // size)} or less), or fewer workers",
            stacklevel=3,
        )
