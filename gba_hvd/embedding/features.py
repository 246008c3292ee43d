"""What a model looks up: tables, and the features that index them. Pure; no ids and no memory here.

A *table* is rows; a *feature* is a field of a batch whose ids are rows of one table. Several features may share a
table: what was clicked, what is shown now, and what was bought are all items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gba_hvd.embedding.row_optimizers import RowOptimizer, TableOptimizers
from gba_hvd.errors import BadInput

POOLINGS = ("sum", "mean", "max")


@dataclass(frozen=True)
class Table:
    """An embedding table of `n_rows` rows of `dim` float32 weights.

    optimizer: of these rows; None: that of `EmbeddingTables(optimizer=)`. Its learning rate is scheduled with that
    one's, or with the first table's where there is none, in proportion.
    init: where rows start. None: normal(0, `init_std` of the tables); a float: normal(0, init); a function of ids,
    numpy int64 [n] -> float32 [n, dim], numpy or a tensor. It depends on the ids only, and runs on the hosts that hold
    them.
    padding_idx: a row that stands for "no value" (negative: counted from the end, as in `nn.Embedding`). It is never
    fetched and gets no gradient: it gives zeros where rows are not pooled, and is absent from the sum, the mean's count
    and the maximum where they are.

    `EmbeddingTables` raises BadInput for a table that cannot be: n_rows or dim below 1, a padding_idx out of range.
    """

    n_rows: int
    dim: int
    optimizer: RowOptimizer | None = None
    init: float | Callable[[np.ndarray], Any] | None = None
    padding_idx: int | None = None


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


def _table_of(name: str, table: Any) -> Table:
    if not isinstance(table, Table):
        if not isinstance(table, (tuple, list)) or len(table) != 2:
            raise BadInput(f"table {name!r}: expected (rows, dim) or gba_hvd.Table(rows, dim, ...), got {table!r}")
        table = Table(*table)
    if not (_is_whole(table.n_rows) and _is_whole(table.dim)):
        raise BadInput(f"table {name!r}: rows and dim must be whole numbers, got {table.n_rows!r} and {table.dim!r}")
    n_rows, dim, padding = int(table.n_rows), int(table.dim), table.padding_idx
    if padding is not None:
        if not _is_whole(padding) or not -n_rows <= padding < n_rows:
            raise BadInput(
                f"table {name!r}: padding_idx must be one of its rows, {-n_rows} to {n_rows - 1}, got {padding!r}"
            )
        padding = int(padding) % n_rows
    if not (table.optimizer is None or callable(getattr(table.optimizer, "update_", None))):
        raise BadInput(
            f"table {name!r}: optimizer must be a row optimizer, such as gba_hvd.Adam(1e-3), got {table.optimizer!r}"
        )
    init = table.init
    is_std = isinstance(init, (int, float)) and not isinstance(init, bool) and 0 <= init < math.inf
    if not (init is None or is_std or callable(init)):
        raise BadInput(
            f"table {name!r}: init must be a standard deviation of at least 0, or a function of ids, got {init!r}"
        )
    return Table(n_rows, dim, table.optimizer, init, padding)


def _is_whole(value: Any) -> bool:
    """Of Python or numpy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


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

    Raises BadInput where some have none.
    """
    if given is not None:
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
