"""Several `EmbeddingTables` as one, the check before an optimizer takes them, and the keys that batches look up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gba_hvd.embedding.features import Feature, Table
from gba_hvd.embedding.lookups import Ids
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import BadInput


def join_tables(parts: Sequence[EmbeddingTables]) -> EmbeddingTables:
    """Tables with all tables and features of the parts, which look up in them from now on.

    The first part's optimizer and `init_std` are those of the whole; tables of others keep theirs.
    Raises BadInput for names that two parts have, and parts that differ in what is one for all tables.
    """
    is_list = isinstance(parts, (list, tuple)) and bool(parts)
    if not is_list or not all(isinstance(part, EmbeddingTables) for part in parts):
        raise BadInput(f"expected EmbeddingTables, or a list of them, got {parts!r}")
    first = parts[0]
    if len(parts) == 1:
        return first
    tables: dict[str, Table] = {}
    features: dict[str, Feature] = {}
    for part in parts:
        if part.memory is not None or part.part_of:
            raise BadInput("these EmbeddingTables belong to an optimizer already: give all of them to one optimizer")
        for what, named, all_named in (("table", part.tables, tables), ("feature", part.features, features)):
            if twice := [name for name in named if name in all_named]:
                raise BadInput(
                    f"two EmbeddingTables have a {what} named {twice[0]!r}: rename one of them, which for those of "
                    "gba_hvd.convert is its prefix="
                )
        mine, theirs = (
            {"seed": one.layout.seed, "n_shards": one.layout.n_shards, "shard_dir": str(one.config.shard_dir)}
            for one in (first, part)
        )
        for what, value in theirs.items():
            if value != mine[what]:
                raise BadInput(
                    f"EmbeddingTables of one model share their memory, and need one {what}: got {mine[what]!r} and "
                    f"{value!r}"
                )
        for name, table in part.tables.items():
            init = part.layout.init_std if table.init is None else table.init
            tables[name] = replace(table, optimizer=table.optimizer or part.optimizer, init=init)
        features |= part.features
    whole = EmbeddingTables(
        tables, first.optimizer, features=features, seed=first.layout.seed, init_std=first.layout.init_std,
        n_shards=first.config.n_shards, shard_dir=first.config.shard_dir, hot_rows=sum(one.hot_rows for one in parts),
    )  # fmt: skip
    whole.device = first.device
    whole.parts = tuple(parts)
    for part in parts:
        whole.initial_rows.take_over(part.initial_rows)
        whole.looks_up_inside = whole.looks_up_inside or part.looks_up_inside
        part.part_of = (whole,)
    return whole


def refuse_unused_hot_rows(tables: EmbeddingTables) -> None:
    """Raises BadInput for `hot_rows` where no device will keep any."""
    when = tables.config.device_rows
    if not tables.hot_rows or when == "on" or (when == "auto" and tables.device.type != "cpu"):
        return
    why = "GBA_HVD_DEVICE_ROWS=off keeps rows from the GPU" if when == "off" else "the tables are on the CPU"
    raise BadInput(
        f"hot_rows asks for copies in a GPU's memory, and {why}: move the model, with the tables in it, "
        'to the GPU (model.to("cuda")) before gba_hvd.DistributedOptimizer, or leave hot_rows out'
    )


def keys_by_group(tables: EmbeddingTables, ids: Sequence[Ids]) -> list[np.ndarray]:
    """Per group of tables, all keys that some batches look up: int64 [n]. Names that are no feature are left out."""
    keys: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in tables.layout.groups]
    for by_name in ids:
        for one in tables.lookups(by_name):
            keys[one.source.group].append(one.keys)
    return [np.concatenate(some) for some in keys]
