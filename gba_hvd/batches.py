"""`batches`: the micro-batches of an epoch, each handed out to one worker once.

The order comes from the seed and the epoch. In allreduce mode, which worker computes what comes from the world as it is
at each step; in an asynchronous mode, from the leases the coordinator gives. After a failure, a change of membership or
a switch the loop simply resumes at the job's position.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Generator
from typing import Any, Protocol

import numpy as np

from gba_hvd.comm.collectives import agree_on
from gba_hvd.elastic import TorchState
from gba_hvd.embedding.tables import Ids, keys_by_group
from gba_hvd.epoch import EpochOrder, EpochPlan
from gba_hvd.errors import BadInput, StateMismatch
from gba_hvd.mode_names import MODES
from gba_hvd.ps import launch
from gba_hvd.ps.messages import JobPosition
from gba_hvd.switching import enter_ps, leave_ps
from gba_hvd.switching.requests import switching_of
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.trace import TRACE
from gba_hvd.training.engine import Engine


class Dataset(Protocol):
    """Samples that can be read by number."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> Any:
        """The samples `rows` (int64 [n], any order) as one batch with an `ids` mapping, e.g. a `gba_hvd.Batch`."""


def batches(
    dataset: Dataset, state: TorchState, *, seed: int = 0, shuffle: bool = True, ids: Callable[[Any], Ids] | None = None
) -> Generator[Any, None, None]:
    """The micro-batches of this epoch that this worker computes. Call `optimizer.step()` once for each.

    The epoch is `state.epoch` when the state has one, else the next. An epoch that is partly done resumes where it
    stands. Workers without a share take part in the steps silently.

    ids: how to find the table ids in a batch, when it has no `ids` attribute.
    Raises StateMismatch when the workers' datasets or settings differ, or when an epoch that is partly done was begun
    with other samples or in another order: its position would mean nothing.
    """
    state.ensure_synced()
    engine, find_ids = state.engine, ids or ids_of
    model, progress = engine.model, engine.progress
    cut = EpochPlan(len(dataset), model.global_batch, model.micro_batch)
    epoch = getattr(state, "epoch", None)
    if epoch is None:
        done = progress.cursor.steps_done
        epoch = max(0, progress.cursor.epoch) if done < cut.n_steps else progress.cursor.epoch + 1
    first = progress.cursor.steps_done if progress.cursor.epoch == epoch else 0
    assert engine.mode is not None
    if engine.mode.servers is None:  # else the coordinator checks the same
        facts = {"samples": len(dataset), "seed": seed, "epoch": epoch}
        agree_on(engine.world, "epoch", {**facts, "step of the epoch": first, "step": progress.step})
        _warn_of_idle_workers(cut, engine.world.rank, engine.world.size)
    order = EpochOrder(len(dataset), seed, epoch, shuffle)
    if first:
        _refuse_another_order(progress.order, order, first)
    progress.order = order
    _trace(engine, order)
    if engine.mode.servers is None and first < cut.n_steps:
        _begin_in_the_mode_asked_for(engine)
    if state.finished_epoch == epoch:
        warnings.warn(f"epoch {epoch} is done and has no batches left: advance state.epoch", stacklevel=2)
    progress.n_evaluated, progress.epoch_over = 0, False
    run = _Epoch(dataset, state, order, cut, epoch, find_ids)
    finished = first == cut.n_steps
    while not finished:
        finished = yield from engine.mode.micro_batches(run)
    state.finished_epoch, progress.n_evaluated, progress.epoch_over = epoch, 0, True
    engine.reports.traffic()


class _Epoch:
    """One epoch of one dataset. See `EpochRun` for what is called when."""

    def __init__(
        self,
        dataset: Dataset,
        state: TorchState,
        order: EpochOrder,
        cut: EpochPlan,
        epoch: int,
        find_ids: Callable[[Any], Ids],
    ) -> None:
        self.cut, self.epoch, self.n_samples = cut, epoch, len(dataset)
        self._dataset, self._state, self._order, self._find_ids = dataset, state, order, find_ids
        cursor = state.engine.progress.cursor
        self._moved = dict(cursor.moved) if cursor.epoch == epoch else {}

    def read(self, index: int) -> Any:
        cut, place = self.cut, self._moved.get(index, index)
        batch = self._dataset.take(self._order.rows(place * cut.micro_batch, cut.samples_of_micro(place)))
        if dataclasses.is_dataclass(batch) and not isinstance(batch, type) and hasattr(batch, "index"):
            return dataclasses.replace(batch, index=index)
        return batch

    def keys(self, batches: list[Any]) -> list[np.ndarray]:
        return keys_by_group(self._state.engine.model.tables, [self._find_ids(batch) for batch in batches])

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
        self._state.saving.epoch_begins()
        self._state.late_joiners.start_rejoin()

    def lease_came(self) -> None:
        self._state.late_joiners.tell()
        self._state.late_joiners.tell_of_the_wait()

    def before_micro_batch(self) -> None:
        state = self._state
        state.check_memory()
        state.saving.save_asynchronously_if_due()
        state.saving.leave_asynchronously_if_told()

    def leases_end(self) -> None:
        self._state.late_joiners.tell()  # this worker may be rank 0 by now

    def leave_mode(self, position: JobPosition) -> None:
        leave_ps.leave(self._state.engine, position)


def _begin_in_the_mode_asked_for(engine: Engine) -> None:
    """The mode rank 0 is configured for, unless it decides by measurements. A collective."""
    switching, signals = switching_of(engine), engine.signals
    if switching is None:
        return
    assert engine.mode is not None
    server, is_chief = engine.host.server, engine.world.rank == 0
    pending, signals.requested_mode = signals.requested_mode, None  # late joiners have none: rank 0's counts for all
    if is_chief and pending is None and switching.mode != "auto":  # a switch that failed is not tried again so soon
        pending = switching.wish(engine.progress.step, engine.mode.name)
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
    optimizers = {"dense": spec_of(model.optimizer), "rows": launch.describe_optimizer(model.tables.optimizer)}
    values = [p.detach().numpy() for p in model.dense.parameters] if not engine.progress.step else None
    TRACE.write(
        "epoch", **dataclasses.asdict(order), step=engine.progress.step, global_batch=model.global_batch,
        micro_batch=model.micro_batch, tables=model.tables.layout.describe(), optimizers=optimizers, names=model.names,
        values=values, hosts=1 if model.tables.local is None else 2,
    )  # fmt: skip


def ids_of(batch: Any) -> Ids:
    try:
        ids: Ids = batch.ids
    except AttributeError as error:
        raise BadInput(
            f"a batch of type {type(batch).__name__} has no `ids`: tell gba_hvd.batches where the table ids are, "
            "with ids=lambda batch: ..."
        ) from error
    return ids


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


def _warn_of_idle_workers(cut: EpochPlan, rank: int, size: int) -> None:
    if size > cut.n_micro and rank == 0:
        warnings.warn(
            f"{size} workers share {cut.n_micro} micro-batches a step: {size - cut.n_micro} stay idle. "
            f"Use a smaller micro_batch ({max(1, cut.global_batch // size)} or less), or fewer workers",
            stacklevel=3,
        )
