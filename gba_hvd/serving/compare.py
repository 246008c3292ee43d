"""Whether the objects of a saved model are what was saved, and how two versions differ."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np
import torch

from gba_hvd.serving.manifest import ModelManifest, RowShards, StoredObject, StoredTable
from gba_hvd.serving.row_shards import shard_arrays
from gba_hvd.serving.stored_bytes import get_verified
from gba_hvd.serving.tensor_file import decode_tensors
from recovery.errors import Damaged
from recovery.storage.store import Store

_READERS = 4
_SHOWN = 5  # values of a part of a manifest
_Path = tuple[str, ...]


def verify_model(
    store: Store, manifest: ModelManifest, on_bytes: Callable[[int], object] = lambda n: None
) -> list[str]:
    """Read and check every object of a version; a sentence for each that is not what was saved.

    on_bytes: called with how many more bytes were checked. Raises StoreError when the store fails.
    """

    def check(one: StoredObject) -> str:
        try:
            get_verified(store, one)
        except Damaged as error:
            return str(error)
        on_bytes(one.n_bytes)
        return ""

    with ThreadPoolExecutor(_READERS, "verify-model") as pool:
        return [flaw for flaw in pool.map(check, {one.name: one for one in manifest.objects()}.values()) if flaw]


@dataclass(frozen=True)
class TableDifference:
    """Between an old and a new version of a table. changed, added, removed: rows. shared: its shared rows that changed.

    new_shards: that the old version has not, of n_shards; new_bytes: of them. note: why rows were not compared
    """

    table: str
    n_rows: int
    changed: int = 0
    added: int = 0
    removed: int = 0
    shared: int = 0
    new_shards: int = 0
    n_shards: int = 0
    new_bytes: int = 0
    note: str = ""


@dataclass(frozen=True)
class ModelDifference:
    """tensors: by name, what changed: "changed (largest 0.5)", "added", "removed", or its shapes. other: sentences."""

    tables: tuple[TableDifference, ...]
    tensors: dict[str, str]
    other: tuple[str, ...]


@dataclass(frozen=True)
class _Stores:
    """Where the objects of both versions are."""

    old: Store
    new: Store


def diff_models(
    store: Store, old: ModelManifest, new: ModelManifest, new_store: Store | None = None
) -> ModelDifference:
    """How two versions differ. Only the shards that differ are read, two at a time.

    store: of both; new_store: of the new version, where that is another one
    Raises Damaged when one of them is not what was saved.
    """
    stores = _Stores(store, store if new_store is None else new_store)
    by_name = {table.name: table for table in old.tables}
    tables = [_table(stores, by_name.pop(table.name, None), table) for table in new.tables]
    gone = [TableDifference(name, table.n_rows, note="only in the old version") for name, table in by_name.items()]
    return ModelDifference((*tables, *gone), _tensors(stores, old, new), tuple(_other(old, new)))


def _table(stores: _Stores, old: StoredTable | None, new: StoredTable) -> TableDifference:
    if old is None:
        return TableDifference(new.name, new.n_rows, note="only in the new version")
    if (old.dim, old.keys) != (new.dim, new.keys) or old.initial != new.initial:
        return TableDifference(new.name, new.n_rows, note="its dimension, kind of ids or initial rows differ")
    pairs = list(zip_longest(old.parts, new.parts))
    cuts = [(a.rows_per_bucket, a.bucket_bits) == (b.rows_per_bucket, b.bucket_bits) for a, b in pairs]
    known = {shard.sha256 for part in old.parts for shard in part.shards}
    shards = [shard for part in new.parts for shard in part.shards]
    fresh = {shard.sha256: shard.n_bytes for shard in shards if shard.sha256 not in known}
    sizes = len(fresh), len({shard.sha256 for shard in shards}), sum(fresh.values())
    if not all(cuts):
        note = "its shards are cut in another way, so rows were not compared"
        return TableDifference(new.name, new.n_rows, 0, 0, 0, 0, *sizes, note)
    (changed, added, removed), *more = (_rows(stores, (old, a), (new, b)) for a, b in pairs)
    return TableDifference(new.name, new.n_rows, changed, added, removed, sum(map(sum, more)), *sizes)


def _rows(
    stores: _Stores, old: tuple[StoredTable, RowShards], new: tuple[StoredTable, RowShards]
) -> tuple[int, int, int]:
    """(rows that changed, that only the new version has, that only the old one has)"""
    changed = added = removed = 0
    a, b = ({shard.bucket: shard for shard in part.shards} for _, part in (old, new))
    for bucket in sorted(a.keys() | b.keys()):
        mine, theirs = b.get(bucket), a.get(bucket)
        if mine is None or theirs is None:
            added, removed = added + (mine.n_rows if mine else 0), removed + (theirs.n_rows if theirs else 0)
        elif mine.sha256 != theirs.sha256:
            keys, rows = shard_arrays(get_verified(stores.old, theirs), theirs, *old)
            new_keys, new_rows = shard_arrays(get_verified(stores.new, mine), mine, *new)
            both, at, new_at = np.intersect1d(keys, new_keys, assume_unique=True, return_indices=True)
            changed += int((rows[at].view(np.uint32) != new_rows[new_at].view(np.uint32)).any(axis=1).sum())
            added, removed = added + len(new_keys) - len(both), removed + len(keys) - len(both)
    return changed, added, removed


def _tensors(stores: _Stores, old: ModelManifest, new: ModelManifest) -> dict[str, str]:
    if old.dense.sha256 == new.dense.sha256:
        return {}
    a, b = (
        decode_tensors(bytes(get_verified(store, one)), one.name)
        for store, one in ((stores.old, old.dense), (stores.new, new.dense))
    )
    found = {name: "removed" for name in a.keys() - b.keys()} | {name: "added" for name in b.keys() - a.keys()}
    for name in a.keys() & b.keys():
        if a[name].shape != b[name].shape or a[name].dtype != b[name].dtype:
            shapes = [f"{str(one.dtype)[6:]} {list(one.shape)}" for one in (a[name], b[name])]
            found[name] = f"{shapes[0]} before, {shapes[1]} now"
        elif not torch.equal(a[name], b[name]):
            found[name] = f"changed, by {float((a[name].double() - b[name].double()).abs().max()):.6g} at most"
    return dict(sorted(found.items()))


def _other(old: ModelManifest, new: ModelManifest) -> Iterator[str]:
    before, after = old.builder.code, new.builder.code
    if (before and before.sha256) != (after and after.sha256):
        yield "builder: another code file"
    for what in ("builder.target", "builder.arguments", "input", "activation", "converted", "versions"):
        get = operator.attrgetter(what)
        yield from _changes(what, *(dict(_leaves((what,), msgspec.to_builtins(get(one)))) for one in (old, new)))


def _changes(what: str, before: dict[_Path, str], after: dict[_Path, str]) -> Iterator[str]:
    changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    for path in changed[:_SHOWN]:
        yield f"{'.'.join(path)}: {before.get(path, 'absent')} before, {after.get(path, 'absent')} now"
    if len(changed) > _SHOWN:
        yield f"{what}: {len(changed) - _SHOWN} more values differ"


def _leaves(path: _Path, value: Any) -> Iterator[tuple[_Path, str]]:
    """The values of nested mappings and lists in words, each with where it stands."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    if not parts or not value:
        yield path, reprlib.repr(value)
    for name, part in parts:
        yield from _leaves((*path, str(name)), part)
