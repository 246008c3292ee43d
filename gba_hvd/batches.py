"""`batches`: the micro-batches of an epoch, each handed out to one worker once.

The order comes from the seed and the epoch; which worker computes what comes from the world as it is at each step.
After a failure or a change of membership the loop simply goes on where the job stands.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from gba_hvd.batch import Bag
from gba_hvd.collectives import World
from gba_hvd.elastic import TorchState
from gba_hvd.errors import BadInput, GbaError, StateMismatch
from gba_hvd.order import Cut, EpochOrder
from gba_hvd.tables import EmbeddingTables

Ids = Mapping[str, Tensor | Bag]


class Dataset(Protocol):
    """Samples that can be read by number."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> Any:
        """The samples `rows` (int64 [n], any order) as one batch with an `ids` mapping, e.g. a `gba_hvd.Batch`."""


def batches(
    dataset: Dataset, state: TorchState, *, seed: int = 0, shuffle: bool = True, ids: Callable[[Any], Ids] | None = None
) -> Iterator[Any]:
    """The micro-batches of this epoch that this worker computes. Call `optimizer.step()` once for each.

    The epoch is `state.epoch` when the state has one, else the next. An epoch that is partly done goes on where it
    stands. Workers without a share take part in the steps silently.

    ids: how to find the table ids in a batch, when it has no `ids` attribute.
    Raises StateMismatch when the workers' datasets or settings differ.
    """
    state.ensure_synced()
    engine, find_ids = state.engine, ids or ids_of
    cut = Cut(len(dataset), engine.global_batch, engine.micro_batch)
    epoch = getattr(state, "epoch", None)
    if epoch is None:
        epoch = max(0, engine.cursor.epoch) if engine.cursor.steps_done < cut.n_steps else engine.cursor.epoch + 1
    first = engine.cursor.steps_done if engine.cursor.epoch == epoch else 0
    agree_on(
        engine.world,
        "epoch",
        {"samples": len(dataset), "seed": seed, "epoch": epoch, "step of the epoch": first, "step": engine.step},
    )
    _warn_of_idle_workers(cut, engine.world.rank, engine.world.size)
    if state.finished_epoch == epoch:
        warnings.warn(f"epoch {epoch} is done and has no batches left: advance state.epoch", stacklevel=2)
    order = EpochOrder(len(dataset), seed, epoch, shuffle)
    for step in range(first, cut.n_steps):
        state.stop_if_interrupted()
        share = cut.micro_of_step(step)[engine.world.rank :: engine.world.size]
        engine.begin_step(cut, epoch, step)
        assert engine.mode is not None
        read: Iterator[Any] = (_read(dataset, order, cut, index) for index in share)
        if engine.mode.several_hosts:
            read = iter(loaded := list(read))
            engine.mode.pull(keys_by_group(engine.tables, [find_ids(batch) for batch in loaded]))
        for index, batch in zip(share, read, strict=True):
            engine.begin_micro(index, is_last=index == share[-1])
            yield batch
            engine.check_stepped()
        if not share:
            engine.close_step()
        if engine.cursor.steps_done != step + 1:
            raise GbaError(f"step {engine.step + 1} was not applied: leave the loop over batches when a step raises")
    state.finished_epoch = epoch


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


def _read(dataset: Dataset, order: EpochOrder, cut: Cut, index: int) -> Any:
    batch = dataset.take(order.rows(index * cut.micro_batch, cut.samples_of_micro(index)))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type) and hasattr(batch, "index"):
        return dataclasses.replace(batch, index=index)
    return batch


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


def _warn_of_idle_workers(cut: Cut, rank: int, size: int) -> None:
    if size > cut.n_micro and rank == 0:
        warnings.warn(
            f"{size} workers share {cut.n_micro} micro-batches a step: {size - cut.n_micro} stay idle. "
            f"Use a smaller micro_batch ({max(1, cut.global_batch // size)} or less), or fewer workers",
            stacklevel=3,
        )
