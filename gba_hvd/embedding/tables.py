"""`EmbeddingTables`: how a model sees the tables in shard memory.

A forward pass numbers the distinct rows a micro-batch touches, fetches each once, and pools. The fetched rows are an
autograd leaf, so the backward pass leaves one merged gradient per distinct row, ready to be sent. Which process serves
a row, and who applies gradients, is the mode's concern, not decided here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gba_hvd import kernels
from gba_hvd.batch import Bag
from gba_hvd.config import Config
from gba_hvd.embedding.row_gradients import RowGrad, distinct
from gba_hvd.embedding.row_optimizers import RowOptimizer
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.shm.layout import Group, Layout
from gba_hvd.shm.shard_memory import ShardMemory

_NO_WEIGHTS = np.empty(0, dtype=np.float32)
Ids = Mapping[str, Tensor | Bag]


@dataclass(frozen=True)
class PulledRows:
    """Rows of one group fetched from other hosts for the micro-batches ahead.

    keys: int64 [n]; slots: their hash table (`kernels.find_keys`); values: float32 [n, dim]
    """

    keys: np.ndarray
    slots: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Captured:
    """The rows one forward pass used, as the autograd leaf that collects their gradient."""

    group: int
    keys: np.ndarray
    rows: Tensor


@dataclass
class Passes:
    """What forward passes find, and what they leave for backward passes.

    remote: rows of other hosts, by group
    """

    remote: list[PulledRows | None]
    captured: list[Captured] = field(default_factory=list)


class EmbeddingTables(nn.Module):
    """Named embedding tables that live in shard memory, trained by a row optimizer.

    Called like a keyed `nn.EmbeddingBag`:

        tables = EmbeddingTables({"user": (10_000_000, 16), "item": (2_000_000, 16)}, optimizer=RowAdagrad(lr=0.05))
        out = tables({"user": user_ids, "item": Bag(item_ids, offsets)})       # {"user": [B, 16], "item": [B, 16]}
        out = tables.stacked({"user": user_ids, "item": item_ids})             # [B, 2, 16]

    The tables are no `nn.Parameter`s: they are shared by all workers of a host and are not in `state_dict()`.
    `mode` ("sum" or "mean") pools multi-valued fields, one for all or by table. Initial rows are normal(0, init_std)
    and depend on (seed, table, row) only.
    """

    def __init__(
        self,
        tables: Mapping[str, tuple[int, int]],
        optimizer: RowOptimizer,
        *,
        seed: int = 0,
        init_std: float = 0.01,
        mode: str | Mapping[str, str] = "sum",
        n_shards: int | None = None,
        shard_dir: Any = None,
    ) -> None:
        super().__init__()
        self.config = Config.from_env(n_shards=n_shards, shard_dir=shard_dir)
        self.optimizer = optimizer
        self.layout = Layout.of(tables, optimizer.slots, self.config.n_shards, seed, init_std)
        self.mode = {name: mode if isinstance(mode, str) else mode.get(name, "sum") for name in tables}
        for name, pooling in self.mode.items():
            if pooling not in ("sum", "mean"):
                raise BadInput(f"table {name!r}: mode must be 'sum' or 'mean', got {pooling!r}")
        self.memory: ShardMemory | None = None
        self.local: np.ndarray | None = None  # bool [S]: shards of this host; None when all are
        self._common = Passes([None] * len(self.layout.groups))
        self._apart: dict[int, Passes] = {}  # by thread, of those that keep theirs to themselves

    def extra_repr(self) -> str:
        return ", ".join(f"{t.name}: {t.n_rows:,} x {t.dim}" for t in self.layout.tables)

    def __getstate__(self) -> dict[str, Any]:
        """Neither `copy.deepcopy` nor pickle can copy memory that other processes write."""
        if self.memory is not None:
            raise GbaError(
                "the tables live in memory shared by all workers and are not copied with the model: "
                "keep model.state_dict() for the dense part, and tables.rows(name, ids) for rows"
            )
        return dict(self.__dict__)

    # --- threads ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def apart(self) -> Iterator[Passes]:
        """While this lasts, this thread's passes and gradients are its own, and no other thread's."""
        me = threading.get_ident()
        self._apart[me] = Passes([None] * len(self.layout.groups))
        try:
            yield self._apart[me]
        finally:
            del self._apart[me]

    @property
    def _passes(self) -> Passes:
        return self._apart.get(threading.get_ident(), self._common) if self._apart else self._common

    @property
    def remote(self) -> list[PulledRows | None]:
        """Rows of other hosts for the micro-batches ahead, by group."""
        return self._passes.remote

    @remote.setter
    def remote(self, rows: list[PulledRows | None]) -> None:
        self._passes.remote = rows

    # --- forward ---------------------------------------------------------------------------------------------------

    def forward(self, ids: Mapping[str, Tensor | Bag]) -> dict[str, Tensor]:
        """Pooled embeddings float32 [B, dim] by table name, for the tables named in `ids`.

        ids: by table, int64 [B] or a `Bag` of B samples.
        Raises BadInput for an unknown table, an id outside its table, and offsets that do not cut the values.
        """
        _refuse_tracing()
        out: dict[str, Tensor] = {}
        for number, group in enumerate(self.layout.groups):
            names = [t.name for t in group.tables if t.name in ids]
            if names:
                bags = {name: _bag_of(name, ids[name]) for name in names}
                rows, index = self._fetch(number, [(name, bags[name].values) for name in names])
                at = 0
                for name in names:
                    bag, n = bags[name], bags[name].values.numel()
                    offsets = np.append(bag.offsets.numpy(), n)
                    mean = self.mode[name] == "mean"
                    out[name] = _Pool.apply(rows, bag.weights, index[at : at + n], offsets, mean)  # type: ignore[no-untyped-call]
                    at += n
        if len(out) != len(ids):
            self._unknown_tables(ids)
        return {name: out[name] for name in ids}

    def stacked(self, ids: Mapping[str, Tensor | Bag]) -> Tensor:
        """Embeddings float32 [B, F, dim] of the F fields in `ids`, in that order; all of one dimension.

        The fast path for single-valued fields: one gather for all. A `Bag` is pooled as `mode` says.
        """
        _refuse_tracing()
        groups = {self.layout.place_of_table[name][0] for name in ids if name in self.layout.place_of_table}
        columns = [(name, column) for name, column in ids.items() if isinstance(column, Tensor)]
        self._unknown_tables(ids)
        if len(groups) != 1:
            dims = {t.name: t.dim for t in self.layout.tables if t.name in ids}
            raise BadInput(
                f"stacked() takes fields of tables of one dimension, got {dims}; call tables(ids) for others"
            )
        if len(columns) != len(ids):
            pooled = self(ids)
            lengths = [len(pooled[name]) for name in ids]
            if len(set(lengths)) > 1:
                raise BadInput(f"stacked(): all fields need {lengths[0]} samples, got {lengths}")
            return torch.stack([pooled[name] for name in ids], dim=1)
        rows, index = self._fetch(groups.pop(), columns)
        batch = len(columns[0][1])
        if any(len(column) != batch for _, column in columns):
            raise BadInput(f"stacked(): all fields need {batch} ids, got {[len(c) for _, c in columns]}")
        stacked: Tensor = _Stack.apply(rows, index, len(columns), batch)  # type: ignore[no-untyped-call]
        return stacked

    def keys_of(self, group: int, columns: list[tuple[str, Tensor]]) -> np.ndarray:
        """int64 keys of ids, column after column. Raises BadInput naming table, id and position of a bad id."""
        for name, column in columns:
            if not isinstance(column, Tensor):
                raise BadInput(f"table {name!r}: ids must be an int64 tensor or a Bag, got {type(column).__name__}")
        keys = np.empty(sum(c.numel() for _, c in columns), dtype=np.int64)
        at = 0
        for name, column in columns:
            if column.dtype != torch.int64 or column.ndim != 1:
                raise BadInput(f"table {name!r}: ids must be int64 [n], got {column.dtype} {list(column.shape)}")
            ids = column.numpy()
            n_rows = next(t.n_rows for t in self.layout.groups[group].tables if t.name == name)
            base = self.layout.place_of_table[name][1]
            bad = kernels.fill_keys(np.ascontiguousarray(ids), base, n_rows, keys[at : at + len(ids)])
            if bad >= 0:
                raise BadInput(
                    f"table {name!r} has rows 0 to {n_rows - 1}, got id {ids[bad]} at position {bad} of the "
                    "micro-batch; make the table larger or map the id (gba-hvd data prepare does)"
                )
            at += len(ids)
        return keys

    def _fetch(self, group_number: int, columns: list[tuple[str, Tensor]]) -> tuple[Tensor, np.ndarray]:
        """The distinct rows of some ids as a leaf [d, dim], and each id's number among them int32 [n]."""
        if self.memory is None:
            raise GbaError(
                "the tables have no memory yet: iterate gba_hvd.batches(dataset, state), or call state.sync() first"
            )
        group = self.layout.groups[group_number]
        keys, index, _ = distinct(self.keys_of(group_number, columns))
        rows = torch.empty(len(keys), group.dim)
        self._read_rows(group, group_number, keys, rows.numpy())
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._passes.captured.append(Captured(group_number, keys, rows))
        return rows, index

    def _read_rows(self, group: Group, group_number: int, keys: np.ndarray, out: np.ndarray) -> None:
        assert self.memory is not None
        layout = self.layout
        if self.local is None:
            kernels.gather_rows(self.memory.flat, layout.places(keys, group), 0, out)
            return
        here = self.local[keys % layout.n_shards]
        near, far = np.flatnonzero(here), np.flatnonzero(~here)
        rows = np.empty((len(near), group.dim), dtype=np.float32)
        kernels.gather_rows(self.memory.flat, layout.places(keys[near], group), 0, rows)
        out[near] = rows
        if len(far):
            remote, index = self.remote[group_number], np.empty(len(far), dtype=np.int32)
            missing = 0 if remote is None else kernels.find_keys(keys[far], remote.slots, remote.keys, index)
            if remote is None or missing >= 0:
                table, row = layout.locate(int(keys[far][max(missing, 0)]), group_number)
                raise GbaError(
                    f"row {row} of table {table!r} lives on another host and was not fetched: ids must come from the "
                    "batch's `ids` (pass ids=... to gba_hvd.batches when your batches keep them elsewhere)"
                )
            out[far] = remote.values[index]

    def _unknown_tables(self, ids: Mapping[str, Any]) -> None:
        unknown = [name for name in ids if name not in self.layout.place_of_table]
        if unknown:
            raise BadInput(
                f"no table named {unknown[0]!r}; the tables are {', '.join(t.name for t in self.layout.tables)}"
            )

    # --- backward --------------------------------------------------------------------------------------------------

    def take_gradients(self) -> list[list[RowGrad]]:
        """The gradients captured since the last call, per group one for each forward pass."""
        passes = self._passes
        captured, passes.captured = passes.captured, []
        grads: list[list[RowGrad]] = [[] for _ in self.layout.groups]
        for c in captured:
            if c.rows.grad is not None:
                grads[c.group].append(RowGrad(c.keys, c.rows.grad.numpy()))
        return grads

    @property
    def captured(self) -> Sequence[Captured]:
        """The rows of the forward passes since gradients were taken last."""
        return self._passes.captured

    def scale_gradients_(self, factor: float) -> None:
        """Multiply the gradients captured since they were last taken."""
        for c in self._passes.captured:
            if c.rows.grad is not None:
                c.rows.grad.mul_(factor)

    def zero_gradients(self) -> None:
        """Clear the gradients of the forward passes so far; a backward pass may still follow."""
        for c in self._passes.captured:
            c.rows.grad = None

    def drop_gradients(self) -> None:
        self._passes.captured = []

    # --- a look inside ---------------------------------------------------------------------------------------------

    def rows(self, table: str, ids: Any, what: str = "weights") -> np.ndarray:
        """A copy of some rows of this host's memory: float32 [n, dim], or [n] for a slot with one number per row.

        what: "weights" or the name of an optimizer slot. For tests, export and curiosity.
        """
        assert self.memory is not None
        g, _ = self.layout.place_of_table[table]
        group, layout = self.layout.groups[g], self.layout
        keys = self.keys_of(g, [(table, torch.as_tensor(ids, dtype=torch.int64))])
        slots = {slot.name: (slot.per_row, at) for slot, at in zip(layout.slots, group.slots, strict=True)}
        per_row, offset = slots.get(what, (False, 0))
        out = np.empty((len(keys), 1 if per_row else group.dim), dtype=np.float32)
        kernels.gather_rows(self.memory.flat, layout.places(keys, group), offset, out)
        return out[:, 0] if per_row else out


def _refuse_tracing() -> None:
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise GbaError(
            "torch.jit.trace would bake the rows of its example input into the traced model as constants: trace "
            "the dense part by itself, with looked-up rows as its input"
        )


def _bag_of(table: str, ids: Tensor | Bag) -> Bag:
    """A field as a bag whose offsets cut its values; the kernels rely on it."""
    if not isinstance(ids, Bag):
        return Bag(ids, torch.arange(len(ids)))
    offsets, n, weights = ids.offsets.numpy(), ids.values.numel(), ids.weights
    if offsets.dtype != np.int64 or offsets.ndim != 1:
        raise BadInput(f"table {table!r}: offsets must be int64 [B], got {ids.offsets.dtype} {list(offsets.shape)}")
    if len(offsets) and (offsets[0] != 0 or offsets[-1] > n or (np.diff(offsets) < 0).any()):
        raise BadInput(
            f"table {table!r}: offsets must start at 0, never fall, and end at {n}, the number of values, or before; "
            f"got {offsets[0]} to {offsets[-1]}"
        )
    if weights is not None and (weights.dtype != torch.float32 or weights.shape != (n,)):
        raise BadInput(f"table {table!r}: weights must be float32 [{n}], got {weights.dtype} {list(weights.shape)}")
    return ids


class _Stack(torch.autograd.Function):
    """rows [d, dim], index int32 [F * B] -> [B, F, dim]"""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: np.ndarray, n_fields: int, batch: int) -> Tensor:
        ctx.index, ctx.shape, ctx.n_fields, ctx.batch = index, rows.shape, n_fields, batch
        out = torch.empty(batch, n_fields, rows.shape[1])
        kernels.stack_rows(rows.detach().numpy(), index, n_fields, batch, out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        out = torch.zeros(ctx.shape)
        kernels.stack_rows_backward(grads[0].contiguous().numpy(), ctx.index, ctx.n_fields, ctx.batch, out.numpy())
        return out, None, None, None


class _Pool(torch.autograd.Function):
    """rows [d, dim], weights [n] or None, index int32 [n], offsets int64 [B + 1] -> [B, dim]"""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor | None, index: np.ndarray, offsets: np.ndarray, mean: bool
    ) -> Tensor:
        ctx.index, ctx.offsets, ctx.mean = index, offsets, mean
        ctx.save_for_backward(rows, weights)
        out = torch.empty(len(offsets) - 1, rows.shape[1])
        factor = _NO_WEIGHTS if weights is None else weights.detach().contiguous().numpy()
        kernels.pool_rows(rows.detach().numpy(), index, offsets, factor, mean, out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        rows, weights = ctx.saved_tensors
        grad = grads[0].contiguous().numpy()
        out = torch.zeros(rows.shape)
        factor = _NO_WEIGHTS if weights is None else weights.detach().contiguous().numpy()
        kernels.pool_rows_backward(grad, ctx.index, ctx.offsets, factor, ctx.mean, out.numpy())
        grad_weights = None
        if weights is not None and ctx.needs_input_grad[1]:
            grad_weights = torch.empty(len(factor))
            kernels.pool_weights_backward(
                grad, rows.detach().numpy(), ctx.index, ctx.offsets, ctx.mean, grad_weights.numpy()
            )
        return out, grad_weights, None, None, None


def keys_by_group(tables: EmbeddingTables, ids: Sequence[Ids]) -> list[np.ndarray]:
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
