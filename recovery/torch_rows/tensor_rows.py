"""The rows of a plain PyTorch model: weights and optimizer slots are where torch put them, nothing is copied.

Here is decided which rows a step has changed. For each table, in this order: those that `touched` named; those that its
gradient has, when the gradient is sparse, or when a row without gradient stays as it is; else all of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recovery.errors import BadInput
from recovery.rows import Column, Schema, Table
from recovery.selection.sampled_accesses import SampledAccesses
from recovery.torch_rows.row_memory import RowMemory, share_


@dataclass(frozen=True)
class RowParts:
    """One table, as tensors.

    weight: float32 [n, dim]
    slots:  name -> float32 [n, w], or [n] for a number per row
    moves_all: a step changes rows without a gradient, too (momentum, weight decay)
    """

    weight: Tensor
    slots: Mapping[str, Tensor] = field(default_factory=dict)
    moves_all: bool = True


class TensorRows(RowMemory):
    """A `RowSource` of torch tensors on the CPU, with counters of its own (4 bytes a row).

        rows = of_optimizer(model, optimizer)            # or TensorRows({"user": Parts(weight, {"sum": ...})})
        with Checkpointer("s3://bucket/job", rows) as checkpoints:
            report = checkpoints.restore()
            if report is not None:
                rows.continue_from(report.step)
                load_dense_state(model, optimizer, rows, decode(report.state))
            for step, batch in enumerate(batches, rows.last_step + 1):
                loss(model(batch)).backward()
                with rows.step():                        # the only place where rows change
                    optimizer.step()
                optimizer.zero_grad()
                if step % 1000 == 0:
                    checkpoints.save(step, step * batch_size, dense_state(model, optimizer, rows))

    One thread trains; any number of others may read through `consistent_read`.
    """

    def __init__(
        self,
        tables: Mapping[str, RowParts],
        n_shards: int = 1,
        first_step: int = 0,
        current: Callable[[], Mapping[str, RowParts]] | None = None,
        shared: bool = False,
    ) -> None:
        """current: where the tensors are found again, to notice that one was replaced by another.
        shared: move them to memory that a `ProcessCheckpointer` can map."""
        if not tables or n_shards < 1:
            raise BadInput(f"expected at least one table and one shard, got {list(tables)}, n_shards={n_shards}")
        self.tables = dict(tables)
        self._current = current or (lambda: self.tables)
        schema = Schema(tuple(_table(name, parts) for name, parts in tables.items()), n_shards)
        counts = [torch.zeros(len(parts.weight), dtype=torch.int32) for parts in tables.values()]
        step_marks = torch.full((2,), first_step, dtype=torch.int64)
        columns = [_tensors(parts) for parts in tables.values()]
        if shared:
            share_([*itertools.chain(*columns), *counts, step_marks])
        super().__init__(schema, columns, counts, step_marks)
        self._number = {name: number for number, name in enumerate(tables)}
        self._rng = np.random.default_rng()
        self._accessed: dict[str, list[np.ndarray]] = {}

    @property
    def last_step(self) -> int:
        """The last step that was finished; -1 or the restored step before the first."""
        return self.finished

    @contextlib.contextmanager
    def step(self) -> Iterator[int]:
        """Around all that changes rows; gives the step's number.

        When the body raises, the step stays unfinished: rows may be half changed, and are not saved before the next
        step is over.
        """
        self._check()
        self.begun = step = self.finished + 1
        for name, parts in self.tables.items():
            for rows in self._changed(name, parts):
                self._count(name, rows)
        yield step
        self.finished = step

    def touched(self, table: str, ids: Tensor | np.ndarray) -> None:
        """Say which rows the coming step changes (or the one in flight). A row that is named n times had n accesses.

        ids: int64 [n]: those that the batch looks up, repeated ones included. Given before the step, it is counted when
        the step begins: a count marks a change, and a save between the two would take the row for saved.
        """
        if table not in self.tables:
            raise BadInput(f"no table {table!r}; there are {sorted(self.tables)}")
        rows = ids.detach().cpu().numpy().ravel() if isinstance(ids, Tensor) else np.ravel(ids)
        n_rows = len(self.tables[table].weight)
        if len(rows) and not (rows.dtype.kind in "iu" and rows.min() >= 0 and rows.max() < n_rows):
            raise BadInput(
                f"table {table!r} has rows 0 to {n_rows - 1}, got {rows.min()} to {rows.max()} ({rows.dtype})"
            )
        if self.begun != self.finished:
            self._count(table, rows.astype(np.int64))
        else:
            self._accessed.setdefault(table, []).append(rows.astype(np.int64))

    def continue_from(self, step: int) -> None:
        """The rows are as of this step: what follows a restore."""
        self.begun = self.finished = step

    def sampled_accesses(
        self, capacities: Sequence[int], period: int, rng: np.random.Generator | None = None
    ) -> Mapping[tuple[int, int], SampledAccesses]:
        """See `SampledRowSource`. From the first call on, each step's accesses are sampled."""
        self._rng = rng or self._rng
        return super().sampled_accesses(capacities, period)

    def _changed(self, name: str, parts: RowParts) -> list[np.ndarray]:
        """Which rows the coming step changes: int64, repeated for each access where the accesses are known."""
        accessed, gradient = self._accessed.pop(name, None), parts.weight.grad
        if accessed is not None:
            return accessed
        if gradient is None:
            return []  # torch leaves such a parameter alone
        if parts.moves_all:
            return [np.arange(len(parts.weight))]
        if gradient.is_sparse:
            rows: np.ndarray = gradient._indices()[0].numpy()
            return [rows]
        return [np.flatnonzero(gradient.ne(0).any(dim=1).numpy())]

    def _count(self, name: str, rows: np.ndarray) -> None:
        number = self._number[name]
        np.add.at(self.counts[number], rows, np.uint32(1))
        n_shards = self.schema.n_shards
        for (table, shard), listed in () if self.sampled is None else self.sampled.lists.items():
            if table == number:
                listed.add(rows[rows % n_shards == shard] // n_shards, self._rng)

    def _check(self) -> None:
        now = self._current()
        for name, parts in self.tables.items():
            for mine, theirs in zip(_tensors(parts), _tensors(now[name]), strict=True):
                if mine.data_ptr() != theirs.data_ptr():
                    raise BadInput(
                        f"table {name!r}: a tensor was replaced by another one (load_state_dict() of an optimizer and "
                        "model.to() do that); build the rows again afterwards"
                    )


def of_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tables: Sequence[str] | None = None,
    n_shards: int = 1,
    *,
    shared: bool = False,
) -> TensorRows:
    """The rows of a model's embeddings, with the slots that the optimizer has for them.

    tables: names of parameters, as in model.named_parameters(); by default those of every nn.Embedding and
    nn.EmbeddingBag. A slot is what the optimizer keeps per row or per weight; what it makes at its first step only is
    made now, as zeros. shared: move all of it to memory that a `ProcessCheckpointer` can map; parameters and slots stay
    the same objects.
    """
    parameters = dict(model.named_parameters())
    if tables is None:
        kinds = (nn.Embedding, nn.EmbeddingBag)
        tables = [f"{name}.weight".lstrip(".") for name, part in model.named_modules() if isinstance(part, kinds)]
    if unknown := [name for name in tables if name not in parameters]:
        raise BadInput(f"the model has no parameters {unknown}; it has {sorted(parameters)}")

    def current() -> dict[str, RowParts]:
        return {name: _parts(name, parameters[name], optimizer) for name in tables}

    return TensorRows(current(), n_shards, current=current, shared=shared)


def dense_state(model: nn.Module, optimizer: torch.optim.Optimizer, rows: TensorRows) -> dict[str, Any]:
    """All other state of the two: what `Checkpointer.save` takes beside the rows."""
    saved = optimizer.state_dict()
    slots = {id(slot) for parts in rows.tables.values() for slot in parts.slots.values()}
    state = {i: {k: v for k, v in one.items() if id(v) not in slots} for i, one in saved["state"].items()}
    dense = {name: value for name, value in model.state_dict().items() if name not in rows.tables}
    return {"model": dense, "optimizer": {**saved, "state": state}}


def load_dense_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, rows: TensorRows, state: Mapping[str, Any]
) -> None:
    """The inverse of `dense_state`, into a model whose rows were restored."""
    missing, unexpected = model.load_state_dict(state["model"], strict=False)
    if unexpected or (missing := [name for name in missing if name not in rows.tables]):
        raise BadInput(f"a checkpoint of another model: it has {unexpected} more, and lacks {missing}")
    slots = optimizer.state_dict()["state"]
    merged = {i: {**slots.get(i, {}), **one} for i, one in state["optimizer"]["state"].items()}
    optimizer.load_state_dict({**state["optimizer"], "state": merged})


def _parts(name: str, weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> RowParts:
    group = next((g for g in optimizer.param_groups if any(p is weight for p in g["params"])), None)
    if group is None:
        raise BadInput(f"the optimizer has no parameter {name!r}: pass it model.parameters(), or name the other tables")
    state, kind = optimizer.state[weight], type(optimizer)
    if kind is torch.optim.SparseAdam and not state:
        state.update(step=0, exp_avg=torch.zeros_like(weight.data), exp_avg_sq=torch.zeros_like(weight.data))
    if kind is torch.optim.SGD and group["momentum"] and state.get("momentum_buffer") is None:
        if group["dampening"]:
            raise BadInput(f"{name!r}: with dampening, the first momentum is not zero; take one step of SGD first")
        state["momentum_buffer"] = torch.zeros_like(weight.data)
    elif not state and kind not in (torch.optim.SGD, torch.optim.SparseAdam):
        raise BadInput(
            f"{kind.__name__} has no state for {name!r} yet: take one step first, or name the slots in Parts"
        )
    slots = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() and len(v) == len(weight)}
    still = kind is torch.optim.SparseAdam or (
        kind in (torch.optim.SGD, torch.optim.Adagrad) and not group.get("momentum") and not group["weight_decay"]
    )
    return RowParts(weight, slots, moves_all=not still)


def _tensors(parts: RowParts) -> tuple[Tensor, ...]:
    return (parts.weight, *parts.slots.values())


def _table(name: str, parts: RowParts) -> Table:
    columns = []
    for column, tensor in (("weight", parts.weight), *parts.slots.items()):
        good = tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()
        if not good or tensor.dim() not in (1, 2) or len(tensor) != len(parts.weight):
            raise BadInput(
                f"table {name!r}, {column}: expected a contiguous float32 tensor [{len(parts.weight)}, w] or "
                f"[{len(parts.weight)}] on the CPU, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
        columns.append(Column(column, tensor[0].numel() if len(tensor) else 0))
    return Table(name, len(parts.weight), tuple(columns))
