"""`open_checkpoint`: one checkpoint of a location, read without a job. No claim, nothing written.

Which checkpoint is opened is decided here; rows are read by `inspect.read_rows`, in the format that a restore reads.
A job that still writes there may delete the checkpoint meanwhile: what is read then says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recovery import state_codec
from recovery.catalog.best import BestCheckpoint, best_chain, unsaved_best
from recovery.catalog.chains import Chain, Skipped, chains
from recovery.errors import BadInput, Damaged, NotFound
from recovery.format.manifest import to_json
from recovery.format.row_codec import checksum
from recovery.hashed_ids import ids_of, keys_of_ids, newest_rows, shared_rows_of
from recovery.restore.inspect import read_rows, read_state, verify
from recovery.rows import KEY, NO_KEY, USES, Table
from recovery.storage.open import open_store
from recovery.storage.store import Store

log = logging.getLogger("recovery")
_CHECKS = ("state", "bytes")
_LISTINGS = 5  # a job that deletes what was listed before it could be opened has saved a newer one


@dataclass(frozen=True)
class TableInfo:
    """One table of a checkpoint.

    n_rows: rows; of a hashed table (`is_hashed`), records, of which `ids` says how many ids have one.
    dim: float32 weights of a row. slots: of the optimizer, name -> numbers a row. shared_rows: of a hashed table, the
    rows of ids that have none of their own; such an id is the sum of shared_hashes of them.
    """

    n_rows: int
    dim: int
    dtype: str
    slots: Mapping[str, int]
    shared_rows: int = 0
    shared_hashes: int = 1

    @property
    def is_hashed(self) -> bool:
        return self.shared_rows > 0


class OpenCheckpoint:
    """One checkpoint, open for reading. Made by `open_checkpoint`. Rows are read when they are asked for.

    name, step, samples, n_shards: of the checkpoint. tables: by name. skipped: newer ones that were passed over, and
    why. best: where it was opened as that of the best model: what was measured, and a better one that was not saved.
    checksum: of its manifest, which has the checksums of all that it consists of; a job reports the same one.
    """

    def __init__(self, store: Store, chain: Chain, state: bytes | None, skipped: tuple[Skipped, ...]) -> None:
        self._store, self._chain, self._state = store, chain, state
        self.skipped = skipped
        self.best: BestCheckpoint | None = None
        self.name, self.step, self.samples = chain.newest.name, chain.newest.step, chain.newest.samples
        self.checksum = checksum([to_json(chain.newest)])
        self._number = {table.name: number for number, table in enumerate(chain.newest.schema.tables)}
        self._keys: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.n_shards = shards = chain.newest.schema.n_shards
        self.tables: Mapping[str, TableInfo] = MappingProxyType({
            table.name: TableInfo(
                table.n_rows, table.columns[0].width, "float32",
                {column.name: column.width for column in table.columns[1:] if not column.exact},
                shards * table.shared_rows, table.shared_hashes,
            )
            for table in chain.newest.schema.tables
        })  # fmt: skip

    @property
    def url(self) -> str:
        """Of the store, without credentials."""
        return self._store.url

    def rows(self, name: str, ids: Any = None, what: str | None = None) -> np.ndarray:
        """Weights of a table, float32 [n, dim], verified.

        ids: whole numbers [n], in any order, also repeated; None: all rows, in the order of `ids(name)`. An id of a
        hashed table that has no row of its own gives the sum of those that it shares, as in training. what: the name of
        an optimizer slot, in place of the weights.

        Raises BadInput for an unknown table or slot and an id that the table does not have, Damaged where a row was
        never saved or is not what was saved, NotFound where the job has deleted the checkpoint meanwhile.
        """
        table = self._table(name)
        wanted = None if ids is None else _checked_ids(name, ids)
        if not table.is_keyed:
            if wanted is None:
                return self._read(name, None, what)
            outside = np.flatnonzero((wanted < 0) | (wanted >= table.n_rows))
            if len(outside):
                raise BadInput(
                    f"table {name!r} has rows 0 to {table.n_rows - 1}, got id {wanted[outside[0]]} at position "
                    f"{outside[0]} of the ids"
                )
            return self._some(name, wanted, what)
        keys, rows = self._vocabulary(name)
        if wanted is None:
            return self._some(name, rows[np.argsort(ids_of(keys), kind="stable")], what)
        if (wanted == NO_KEY).any():
            raise BadInput(f"table {name!r}: id {NO_KEY} has no row")
        asked = keys_of_ids(wanted)
        at = np.minimum(np.searchsorted(keys, asked), max(0, len(keys) - 1))
        own = keys[at] == asked if len(keys) else np.zeros(len(asked), np.bool_)
        first, *more = table.n_rows - self.tables[name].shared_rows + self._shared_rows_of(name, asked)
        first[own] = rows[at[own]]
        found = self._some(name, first, what)
        for shared in more:
            found[~own] += self._some(name, shared[~own], what)
        return found

    def ids(self, name: str) -> np.ndarray:
        """int64 [n], ascending: the ids that have a row of their own."""
        table = self._table(name)
        if not table.is_keyed:
            return np.arange(table.n_rows)
        return np.sort(ids_of(self._vocabulary(name)[0]))

    def shared_rows(self, name: str) -> np.ndarray:
        """float32 [n, dim] of a hashed table. Which of them an id without one is the sum of: see
        `recovery.hashed_ids.shared_rows_of`.

        Raises BadInput for a table that is not hashed.
        """
        table, n = self._table(name), self.tables[name].shared_rows
        if not table.is_keyed:
            raise BadInput(f"table {name!r} is not hashed: its ids are 0 to {table.n_rows - 1}")
        return self._some(name, np.arange(table.n_rows - n, table.n_rows), None)

    def dense(self) -> dict[str, Tensor]:
        """What is not a row, by the names of the model's `state_dict()`: parameters and buffers, on the CPU.

        Raises BadInput where the job saved a state of a format of its own, which `state()` gives as bytes.
        """
        if self._state is None:
            return {}
        try:
            state = state_codec.decode(self._state)
        except Exception as error:  # the caller's own bytes, in a format that only the caller knows
            raise BadInput(
                f"{self.name}: what was saved beside the rows is in a format of the job's own; state() has the bytes"
            ) from error
        return dense_of_state(state, self.name)

    def state(self) -> bytes | None:
        """What was saved beside the rows, as bytes; None: nothing was."""
        return self._state

    def to_torch(self, model: nn.Module) -> nn.Module:
        """Load rows and dense part into a plain model: its `nn.Embedding` and `nn.EmbeddingBag` weights are the tables.

        A table has the name of a parameter, or of the module whose `weight` it is (as `gba_hvd.convert` calls it).
        Returns the model. Raises BadInput, naming what does not fit; the model is then unchanged.
        """
        parameters = dict(model.named_parameters())
        goal = {name: parameters.get(name, parameters.get(f"{name}.weight")) for name in self.tables}
        for name, weight in goal.items():
            about = self.tables[name]
            if weight is None or about.is_hashed:
                what = "is hashed" if about.is_hashed else f"is no parameter of {type(model).__name__}"
                raise BadInput(
                    f"table {name!r} {what}: to_torch() fills the weights of nn.Embedding and nn.EmbeddingBag; rows() "
                    "gives the rows to other models"
                )
            if tuple(weight.shape) != (about.n_rows, about.dim):
                raise BadInput(
                    f"table {name!r} has {about.n_rows} rows of {about.dim}, the parameter is {list(weight.shape)}"
                )
        dense = self.dense()
        own = {id(weight) for weight in goal.values()}
        expected = {key for key, value in model.state_dict(keep_vars=True).items() if id(value) not in own}
        if expected != dense.keys():
            missing, more = sorted(expected - dense.keys()), sorted(dense.keys() - expected)
            raise BadInput(f"{self.name} is of another model: it lacks {missing}, and has {more} more")
        rows = {name: self.rows(name) for name in goal}
        model.load_state_dict(dense, strict=False)
        with torch.no_grad():
            for name, weight in goal.items():
                assert weight is not None
                weight.copy_(torch.from_numpy(rows[name]))
        return model

    # -----------------------------------------------------------------------------------------------------------------

    def _table(self, name: str) -> Table:
        if name not in self._number:
            raise BadInput(f"{self.name} has no table {name!r}; its tables are {', '.join(self._number)}")
        return self._chain.newest.schema.tables[self._number[name]]

    def _some(self, name: str, rows: np.ndarray, what: str | None) -> np.ndarray:
        only, index = np.unique(rows, return_inverse=True)
        found: np.ndarray = self._read(name, only, what)[index]
        return found

    def _read(self, name: str, only: np.ndarray | None, what: str | None) -> np.ndarray:
        """float32 [n, width] of some rows (int64 [n], ascending and distinct), or all."""
        table = self._table(name)
        slots = [column.name for column in table.columns[1:] if not column.exact]
        if what is not None and what not in slots:
            raise BadInput(f"table {name!r} has no slot {what!r}; its slots are {', '.join(slots) or 'none'}")
        number = 0 if what is None else 1 + slots.index(what)
        n = table.n_rows if only is None else len(only)
        columns: list[np.ndarray | None] = [None] * len(table.columns)
        columns[number] = out = np.zeros((n, table.columns[number].width), np.float32)
        if not n:
            return out
        there = self._read_columns(name, columns, only)
        if not there.all():
            at = int(np.flatnonzero(~there)[0])
            raise Damaged(
                f"{self.name}: row {at if only is None else only[at]} of table {name!r} was never saved, as "
                f"{int((~there).sum())} of the {n} that were asked for"
            )
        return out

    def _read_columns(self, name: str, columns: list[np.ndarray | None], only: np.ndarray | None) -> np.ndarray:
        try:
            return read_rows(self._store, self._chain, self._number[name], columns, only=only)
        except Damaged as error:
            gone = [one.name for one in self._chain.manifests if _is_deleted(self._store, one.name)]
            if not gone:
                raise
            raise NotFound(
                f"{self.url}: {gone[0]} was deleted while it was read: the job that saves there keeps its newest "
                "checkpoints (keep_last). Open the newest one again"
            ) from error

    def _shared_rows_of(self, name: str, keys: np.ndarray) -> np.ndarray:
        about, n_shards = self.tables[name], self.n_shards
        return shared_rows_of(keys, about.shared_rows, n_shards, about.shared_hashes)

    def _vocabulary(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(keys int64 [n], ascending, the row of each). Of a key that two rows have, the one used last counts."""
        if name not in self._keys:
            table = self._table(name)
            if any(one.schema != self._chain.newest.schema for one in self._chain.manifests):
                raise BadInput(f"{self.name}: its chain has keyed tables of several sizes; none of it can be used")
            keys = np.full(table.n_rows, NO_KEY, np.int64)
            uses = np.zeros((table.n_rows, 2), np.uint32)
            columns: list[np.ndarray | None] = [None] * len(table.columns)
            columns[table.columns.index(KEY)] = keys[:, None].view(np.float32)
            columns[table.columns.index(USES)] = uses.view(np.float32)
            there = self._read_columns(name, columns, None)
            n_own = table.n_rows - self.tables[name].shared_rows
            mine = np.flatnonzero(there[:n_own] & (keys[:n_own] != NO_KEY))
            self._keys[name] = newest_rows(keys[mine], uses[mine, 1], mine)
        return self._keys[name]


def open_checkpoint(
    url: str | Path | Store, step: int | str = "newest", *, check: str = "bytes", **storage_options: Any
) -> OpenCheckpoint:
    """Open a checkpoint for reading: it takes no claim and writes nothing, and works while the job that saves lives.

        checkpoint = recovery.open_checkpoint("s3://bucket/job")
        checkpoint.tables                               # {"user": TableInfo(n_rows=..., dim=16, ...), ...}
        checkpoint.rows("user", [3, 17])                # float32 [2, 16]
        checkpoint.dense()                              # {"mlp.0.weight": tensor, ...}

    step: "newest": the newest one that is whole; those passed over are in `skipped` with the reason, and logged as
    warnings. A number: the newest checkpoint of this step. "best": the one that `CheckpointCallback(keep_best=)` keeps.
    check: "bytes": every byte of the checkpoint and of those it is based on is read and compared with its checksum
    now, so a damaged one is passed over. "state": sizes, and the state's checksum; rows are verified when they are
    read. It is faster where few rows are wanted.
    storage_options: see `open_store`.

    Raises BadInput where there is no checkpoint, or none of this step; Damaged where none is whole, or the one of this
    step is not; StoreError when the store fails.
    """
    if check not in _CHECKS:
        raise BadInput(f"check must be one of {', '.join(_CHECKS)}, got {check!r}")
    if step not in ("newest", "best") and (isinstance(step, bool) or not isinstance(step, int)):
        raise BadInput(f"step must be a number, 'newest' or 'best', got {step!r}")
    store = open_store(url, **storage_options) if isinstance(url, str | Path) else url
    best = _best(store) if step == "best" else None
    wanted = step if best is None else best.manifest.name
    found, skipped, steps = _find(store, wanted, check)
    for _ in range(_LISTINGS):
        if found is not None or not any(_is_deleted(store, one.name) for one in skipped):
            break  # else the job has deleted some since they were listed: there are newer ones by now
        found, skipped, steps = _find(store, wanted, check)
    if found is not None:
        for one in skipped:
            log.warning("%s: a checkpoint is passed over: %s", store.url, one.words)
        if best is not None and best.unsaved is not None:
            log.warning("%s: %s. This is the best one that is saved: %s", store.url, best.unsaved.words, best.words)
        found.best = best
        return found
    flaws = "; ".join(one.why for one in skipped)
    if step != "newest" and (steps or not skipped):
        there = f"it has steps {', '.join(map(str, steps))}" if steps else "it has none"
        kind = Damaged if skipped else BadInput
        which = f"step {step}" if best is None else f"the best model, of step {best.manifest.step}"
        raise kind(f"{store.url} has no whole checkpoint of {which}: {there}{'; passed over: ' * bool(flaws)}{flaws}")
    if skipped:
        raise Damaged(f"{store.url} has no checkpoint that is whole: {flaws}")
    raise BadInput(f"{store.url} has no checkpoints: is it the `url` of the job's CheckpointCallback?")


def _best(store: Store) -> BestCheckpoint:
    """The checkpoint of the best model; another one may be of the same step."""
    found = list(chains(store))
    best = best_chain(found)
    if best is None and (unsaved := unsaved_best([one.newest for one in found if isinstance(one, Chain)])) is not None:
        raise BadInput(
            f"{store.url} has no checkpoint of the best model: {unsaved.words}. Take the newest one, or one by its "
            "step, that `gba-hvd checkpoint ls` lists"
        )
    if best is None:
        raise BadInput(
            f"{store.url} has no checkpoint of the best model: CheckpointCallback(keep_best=METRIC) keeps it, once the "
            "script reports this metric"
        )
    return best


def _find(store: Store, wanted: int | str, check: str) -> tuple[OpenCheckpoint | None, list[Skipped], list[int]]:
    """(the newest whole one that is asked for, newer ones that were passed over, steps of others that are whole).

    wanted: "newest", a step, or the name of a manifest
    """
    skipped, steps = list[Skipped](), list[int]()
    for chain in chains(store):
        if isinstance(chain, Skipped):
            skipped.append(chain)
            continue
        newest = chain.newest
        if wanted not in ("newest", newest.step, newest.name):
            steps.append(newest.step)
            continue
        try:
            flaws = [flaw for one in chain.manifests for flaw in verify(store, one)] if check == "bytes" else []
            if not flaws:
                return OpenCheckpoint(store, chain, read_state(store, newest), tuple(skipped)), skipped, steps
        except (Damaged, NotFound) as error:
            flaws = [str(error)]
        skipped.append(Skipped(newest.name, "; ".join(flaws[:3]), newest.step))
    return None, skipped, steps


def _is_deleted(store: Store, manifest: str) -> bool:
    try:
        store.get(manifest, 0, 1)
    except NotFound:
        return True
    return False


def dense_of_state(state: Any, name: str) -> dict[str, Tensor]:
    """The tensors of a model out of what a job saves beside rows, by their names in its `state_dict()`.

    A job in allreduce mode, and `dense_state`, save `model`. One in an asynchronous mode saves `snapshot`, whose
    `model` is as of the epoch's start, and `dense`: the newest values by the names of the servers, which
    `parameter_names` of the snapshot translates.
    """
    first = state.get("snapshot", state) if isinstance(state, dict) else None
    model = first.get("model") if isinstance(first, dict) else None
    if not isinstance(first, dict) or not isinstance(model, dict):
        raise BadInput(f"{name}: what was saved beside the rows has no `model`: it is of no job, nor of dense_state()")
    found = {str(key): value for key, value in model.items() if isinstance(value, Tensor)}
    names = first.get("parameter_names", {})
    for key, tensor in state["dense"].items() if first is not state else ():
        own = names.get(key, key)
        if own not in found:
            raise BadInput(
                f"{name}: the servers call a parameter {key!r}, and the model has none of this name: it was saved by "
                "an earlier version without named_parameters= of DistributedOptimizer; resume the job and save again"
            )
        values = torch.from_numpy(np.array(tensor["values"]))
        found[own] = values.view(found[own].shape).to(found[own].dtype)
    return found


def _checked_ids(name: str, ids: Any) -> np.ndarray:
    """int64 [n]"""
    found = np.asarray(ids.numpy() if isinstance(ids, Tensor) else ids)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise BadInput(f"table {name!r}: ids must be whole numbers [n], got {found.dtype} {list(found.shape)}")
    return found.astype(np.int64)
