"""What a model looks up: tables, and the features that index them. Pure; no ids and no memory here.

A *table* is rows; a *feature* is a field of a batch whose ids are rows of one table. Several features may share a
table: what was clicked, what is shown now, and what was bought are all items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gba_hvd.embedding.row_optimizers import RowOptimizer, TableOptimizers
from gba_hvd.errors import BadInput
from gba_hvd.shm import init_functions
from gba_hvd.shm.layout import NO_KEY, HashedSpec
from recovery.hashed_ids import HASHES

POOLINGS = ("sum", "mean", "max")
_HASHED_ONLY = ("capacity", "admit_after", "evict", "evict_after_steps", "fallback_rows", "fallback_hashes")
_MOST_ADMIT_AFTER = 255


@dataclass(frozen=True)
class Table:
    """An embedding table of `n_rows` rows of `dim` float32 weights, or a hashed one, whose vocabulary grows:

        Table(dim=16, keys="hash64", capacity=10**8, admit_after=3, evict="lfu")

    optimizer: of these rows; None: that of `EmbeddingTables(optimizer=)`. Its learning rate is scheduled with that
    one's, or with the first table's where there is none, in proportion.
    init: where rows start. None: normal(0, `init_std` of the tables); a float: normal(0, init); a function of ids,
    numpy int64 [n] -> float32 [n, dim], numpy or a tensor. It depends on the ids only, and runs on the hosts that hold
    them; of a hashed table it gets any ids, when they are admitted, and stands at the top level of a module that
    servers can import. Shared rows of a hashed table that has a function are normal(0, `init_std`).
    padding_idx: a row that stands for "no value" (negative: counted from the end, as in `nn.Embedding`). It is never
    fetched and gets no gradient: it gives zeros where rows are not pooled, and is absent from the sum, the mean's count
    and the maximum where they are.

    keys: "hash64": ids are any int64 but -2**63, such as raw ids or hashes of strings (int32 ones do as well). An id
    gets a row of its own after the step in which it was looked up for training the `admit_after`-th time (lookups of
    long ago count less). Until then it is the sum of `fallback_hashes` rows, 1 or 2, that it shares with others that
    have none, each chosen by another hash. Its own row starts with the initial values of row `id`.
    With it, in place of `n_rows`:
    capacity: how many ids may have a row, of all hosts together; rounded up to 16 a shard. From 90 % on some new ids
    find no room. admit_after: 1 to 255. fallback_rows: shared by ids without a row; rounded up to `fallback_hashes` a
    shard; None: a hundredth of `capacity`, with evict="lfu" as many (half as many with one hash).
    evict: which id makes room for a new one. None: none does, new ids keep the shared rows. "lfu": of 32, the one that
    was looked up least, if the new one was looked up more often; lookups of long ago count less. "ttl": one that was
    not looked up for more than `evict_after_steps` steps; such ids also go while there is room.
    Which ids have a row depends on the data alone, not on the number of workers.

    `EmbeddingTables` raises BadInput for a table that cannot be: n_rows or dim below 1, a padding_idx out of range,
    options that do not go together.
    """

    n_rows: int = 0
    dim: int = 0
    optimizer: RowOptimizer | None = None
    init: float | Callable[[np.ndarray], Any] | None = None
    padding_idx: int | None = None
    keys: str | None = None
    capacity: int | None = None
    admit_after: int = 1
    evict: str | None = None
    evict_after_steps: int | None = None
    fallback_rows: int | None = None
    fallback_hashes: int = 2

    def hashed_spec(self, n_shards: int) -> HashedSpec | None:
        """What a hashed table has in each shard."""
        if self.keys is None:
            return None
        assert self.capacity is not None and self.fallback_rows is not None
        init = init_functions.name_of(self.init) if callable(self.init) else ""
        std = None if self.init is None or callable(self.init) else float(self.init)
        return HashedSpec.of(
            self.capacity, self.fallback_rows, n_shards, admit_after=self.admit_after, evict=self.evict or "",
            evict_after_steps=self.evict_after_steps or 0, std=std, init=init, fallback_hashes=self.fallback_hashes,
        )  # fmt: skip


@dataclass(frozen=True)
class Feature:
    """A field of a batch whose ids are rows of `table`.

    pooling: how the ids of a sample become one row of the result: "sum", "mean" or "max", as in `nn.EmbeddingBag`;
    a sample without ids gives zeros. None: they do not, every id has a row of its own, as in `nn.Embedding`.

    `EmbeddingTables` raises BadInput for an unknown table or pooling.
    """

    table: str
    pooling: str | None = "sum"


def tables_of(tables: Mapping[str, Table | tuple[int, int]]) -> dict[str, Table]:
    """The tables by name, with padding rows counted from 0. Raises BadInput for what is neither."""
    if not tables:
        raise BadInput("EmbeddingTables needs at least one table: {'name': (rows, dim)}")
    return {name: _table_of(name, table) for name, table in tables.items()}


def _table_of(name: str, given: Any) -> Table:
    if not isinstance(given, Table):
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise BadInput(f"table {name!r}: expected (rows, dim) or gba_hvd.Table(rows, dim, ...), got {given!r}")
        given = Table(*given)
    table = _hashed_or_plain(name, given)
    if not (is_whole(table.n_rows) and is_whole(table.dim)):
        raise BadInput(f"table {name!r}: rows and dim must be whole numbers, got {table.n_rows!r} and {table.dim!r}")
    n_rows, dim, padding = int(table.n_rows), int(table.dim), table.padding_idx
    if padding is not None and table.keys is None:
        if not is_whole(padding) or not -n_rows <= padding < n_rows:
            raise BadInput(
                f"table {name!r}: padding_idx must be one of its rows, {-n_rows} to {n_rows - 1}, got {padding!r}"
            )
        padding %= n_rows
    if table.optimizer is not None:
        _refuse_no_row_optimizer(table.optimizer, f"table {name!r}")
    init = table.init
    is_std = isinstance(init, (int, float)) and not isinstance(init, bool) and 0 <= init < math.inf
    if not (init is None or is_std or callable(init)):
        raise BadInput(
            f"table {name!r}: init must be a standard deviation of at least 0, or a function of ids, got {init!r}"
        )
    return replace(table, n_rows=n_rows, dim=dim, padding_idx=None if padding is None else int(padding))


def _hashed_or_plain(name: str, table: Table) -> Table:
    """With the number of fallback rows, where it is hashed. Raises BadInput for options that do not go together."""
    given = {one: getattr(table, one) for one in _HASHED_ONLY if getattr(table, one) != getattr(Table, one)}
    if table.keys is None:
        if given:
            raise BadInput(f"table {name!r}: {', '.join(given)} would have no effect without keys='hash64'")
        return table
    if table.keys != "hash64":
        raise BadInput(f"table {name!r}: keys must be 'hash64', or left out for ids from 0 to n_rows - 1")
    if table.n_rows:
        raise BadInput(
            f"table {name!r}: with keys='hash64' give dim and capacity, and no n_rows; got n_rows={table.n_rows!r}"
        )
    if not table.dim:
        raise BadInput(f"table {name!r}: give dim, how many numbers a row has")
    if table.capacity is None:
        raise BadInput(f"table {name!r}: keys='hash64' needs capacity=, the number of ids that have a row")
    if not is_whole(table.capacity, 1):
        raise BadInput(
            f"table {name!r}: capacity, the number of ids that have a row, must be a whole number of at least 1, got "
            f"{table.capacity!r}"
        )
    if not is_whole(table.admit_after, 1) or table.admit_after > _MOST_ADMIT_AFTER:
        raise BadInput(
            f"table {name!r}: admit_after must be a whole number from 1 to {_MOST_ADMIT_AFTER}, got "
            f"{table.admit_after!r}"
        )
    if table.evict not in (None, "lfu", "ttl"):
        raise BadInput(f"table {name!r}: evict must be 'lfu', 'ttl' or None, got {table.evict!r}")
    if table.evict == "ttl" and not is_whole(table.evict_after_steps, 1):
        raise BadInput(
            f"table {name!r}: evict='ttl' needs evict_after_steps=, a whole number of at least 1, got "
            f"{table.evict_after_steps!r}"
        )
    if table.evict != "ttl" and table.evict_after_steps is not None:
        raise BadInput(f"table {name!r}: evict_after_steps would have no effect without evict='ttl'")
    if table.fallback_rows is not None and not is_whole(table.fallback_rows, 1):
        raise BadInput(
            f"table {name!r}: fallback_rows must be a whole number of at least 1, got {table.fallback_rows!r}"
        )
    if not is_whole(table.fallback_hashes) or table.fallback_hashes not in HASHES:
        raise BadInput(
            f"table {name!r}: fallback_hashes must be 1 or 2, the shared rows whose sum an id without a row is, got "
            f"{table.fallback_hashes!r}"
        )
    if table.fallback_rows is not None and table.fallback_rows < table.fallback_hashes:
        raise BadInput(
            f"table {name!r}: fallback_rows={table.fallback_rows} is too few for fallback_hashes="
            f"{table.fallback_hashes}, with which an id without a row is the sum of two of them: give more, or "
            "fallback_hashes=1"
        )
    if callable(table.init) and not init_functions.name_of(table.init):
        raise BadInput(
            f"table {name!r}: init of a table with keys='hash64' runs where ids are admitted, in asynchronous modes in "
            "servers, which import it: it must be a function at the top level of a module other than the script, got "
            f"{table.init!r}. Move it to a file beside the script and import it from there; or give a standard "
            "deviation, and set the rows of ids that are known with tables.assign"
        )
    padding = table.padding_idx
    if padding is not None and not (is_whole(padding, NO_KEY + 1) and padding < -NO_KEY):
        raise BadInput(f"table {name!r}: padding_idx must be an id, an int64 other than -2**63, got {padding!r}")
    capacity, after = int(table.capacity), table.evict_after_steps
    n_shared = max(1, capacity // 100) if table.evict != "lfu" else max(1, capacity * table.fallback_hashes // 2)
    return replace(
        table, capacity=capacity, admit_after=int(table.admit_after),
        fallback_rows=int(table.fallback_rows or n_shared),
        fallback_hashes=int(table.fallback_hashes),
        evict_after_steps=None if after is None else int(after),
    )  # fmt: skip


def is_whole(value: Any, least: int | None = None) -> bool:
    """Of Python or numpy; `least` or more."""
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_whole and (least is None or value >= least)


def features_of(
    tables: Mapping[str, Table], features: Mapping[str, Feature | str] | None, poolings: Mapping[str, str]
) -> dict[str, Feature]:
    """The features by name: those given, and one of its own name for each table that none of them looks up.

    poolings: by table, of features that are given as the name of their table, and of those that are not given.
    Raises BadInput for a feature of an unknown table, an unknown pooling, and a table whose name a feature of another
    table has.
    """
    found: dict[str, Feature] = {}
    for name, given in (features or {}).items():
        if not isinstance(given, (Feature, str)):
            raise BadInput(
                f"feature {name!r}: expected the name of a table or gba_hvd.Feature(table, pooling=...), got {given!r}"
            )
        table = given if isinstance(given, str) else given.table
        if table not in tables:
            raise BadInput(f"feature {name!r}: no table named {table!r}; the tables are {', '.join(tables)}")
        feature = Feature(table, poolings[table]) if isinstance(given, str) else given
        if feature.pooling is not None and feature.pooling not in POOLINGS:
            raise BadInput(
                f"feature {name!r}: pooling must be 'sum', 'mean', 'max', or None for a row for every id, "
                f"got {feature.pooling!r}"
            )
        found[name] = feature
    used = {feature.table for feature in found.values()}
    for name in tables:
        if name in found and found[name].table != name:
            raise BadInput(
                f"feature {name!r} is of table {found[name].table!r}, and has the name of another table: rename one"
            )
        if name not in used:
            found[name] = Feature(name, poolings[name])
    return found


def poolings_of(tables: Mapping[str, Table], mode: str | Mapping[str, str]) -> dict[str, str]:
    """By table. mode: one for all, or by table; default "sum"."""
    if not isinstance(mode, str) and (unknown := [name for name in mode if name not in tables]):
        raise BadInput(f"mode: no table named {unknown[0]!r}; the tables are {', '.join(tables)}")
    poolings = {name: mode if isinstance(mode, str) else mode.get(name, "sum") for name in tables}
    for name, pooling in poolings.items():
        if pooling not in POOLINGS:
            raise BadInput(f"table {name!r}: mode must be 'sum', 'mean' or 'max', got {pooling!r}")
    return poolings


def default_optimizer(given: RowOptimizer | None, tables: Mapping[str, Table]) -> RowOptimizer:
    """That of the tables that name none: the one given, else the first table's where all name their own.

    Raises BadInput where some have none, and for what is no optimizer of rows.
    """
    if given is not None:
        _refuse_no_row_optimizer(given, "EmbeddingTables")
        return given
    without = [name for name, table in tables.items() if table.optimizer is None]
    if without:
        raise BadInput(
            f"no optimizer for table {', '.join(map(repr, without))}: pass EmbeddingTables(optimizer=...) for tables "
            "that name none, such as gba_hvd.RowAdagrad(lr=0.05), or gba_hvd.Table(rows, dim, optimizer=...) for each"
        )
    first = next(iter(tables.values())).optimizer
    assert first is not None
    return first


def _refuse_no_row_optimizer(given: object, where: str) -> None:
    if isinstance(given, type) or not callable(getattr(given, "update_", None)):
        got = f"the class {given.__qualname__}" if isinstance(given, type) else f"one of {type(given)}"
        raise BadInput(
            f"{where}: optimizer must be a row optimizer, such as gba_hvd.Adam(1e-3), got {got}; those of torch.optim "
            "train dense parameters only"
        )


def optimizers_of(default: RowOptimizer, tables: Mapping[str, Table]) -> tuple[TableOptimizers, dict[str, int]]:
    """The distinct optimizers, and by table the number of its own where it is not the default."""
    own: list[RowOptimizer] = []
    numbers = {}
    for name, table in tables.items():
        if table.optimizer is None or table.optimizer == default:
            continue
        if table.optimizer not in own:
            own.append(table.optimizer)
        numbers[name] = 1 + own.index(table.optimizer)
    return TableOptimizers(default, tuple(own)), numbers


def refuse_unused_modes(features: Mapping[str, Feature | str] | None, mode: str | Mapping[str, str]) -> None:
    """Raises BadInput for a mode by table, where all features of the table name their own pooling."""
    for table in () if isinstance(mode, str) else mode:
        given = [one for one in (features or {}).values() if (one if isinstance(one, str) else one.table) == table]
        if given and not any(isinstance(one, str) for one in given):
            raise BadInput(f"mode for table {table!r}: its features name their own pooling; leave one of the two out")
