"""Writes a checkpoint as one file of plain tensors: safetensors, or a `state_dict` for torch.load.

Names are those of the model: a table's weights have its own name, its slots are `TABLE/SLOT`. A hashed table has its
ids beside that, `TABLE/id`, -2**63 for rows that belong to no id or are shared. What was saved beside the
rows and is a tensor comes along: the model's under its name, all other under `state/...`. With weights only, a table of
a model that `gba_hvd.convert` changed has the names of the weights that it holds, so the plain model loads the file.
Tables are read one after the other, straight into the mapped file, so that none has to fit into memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gba_hvd.shm.layout import ids_of
from recovery import state_codec
from recovery.catalog.chains import Chain
from recovery.errors import BadInput, StoreError
from recovery.format.manifest import Manifest
from recovery.restore.inspect import read_rows, read_state
from recovery.restore.open_checkpoint import dense_of_state
from recovery.rows import FILTER, KEY, NO_KEY, USES
from recovery.storage.store import Store

OwnNames = dict[str, list[str]]  # table -> what its weight is called in the plain model

# As safetensors calls them.
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip

_OF_ROWS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.int64),
    2: np.dtype(np.float32),
}  # columns, by their number of dimensions: ids, numbers


@dataclass(frozen=True)
class ExportedFiles:
    """not_saved: rows that the checkpoint does not have, by table; they are zero. left_out: of the state, and why."""

    n_tensors: int
    n_bytes: int
    not_saved: dict[str, int]
    left_out: str


def export(
    store: Store,
    chain: Chain,
    out: Path,
    form: str,
    *,
    weights_only: bool = False,
    on_bytes: Callable[[int], object] = lambda n: None,
) -> ExportedFiles:
    """Write the file, all or nothing. Raises Damaged when the checkpoint is, BadInput when the file cannot be made."""
    dense, left_out, own_names = dense_tensors(store, chain.newest, weights_only)
    columns, again = column_names(chain.newest), list[tuple[str, str]]()
    for names in columns:
        names[0], *more = own_names.get(names[0], names[:1])
        again += [(names[0], name) for name in more]
    shapes = {
        name: (table.n_rows,) if column == KEY else (table.n_rows, column.width)
        for table, names in zip(chain.newest.schema.tables, columns, strict=True)
        for place, (name, column) in enumerate(zip(names, table.columns, strict=True))
        if (place == 0 or not weights_only or column == KEY) and column not in (FILTER, USES)
    }
    shapes |= {name: shapes[first] for first, name in again}
    if twice := sorted(shapes.keys() & dense.keys()):
        raise BadInput(f"a table's column and a tensor of the state are both called {twice[0]!r}; nothing was written")
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        arrays = _mapped(fresh, shapes, dense)
        not_saved = {}
        for number, table in enumerate(chain.newest.schema.tables):
            into: list[np.ndarray | None] = [arrays.get(name) for name in columns[number]]
            if table.is_keyed:
                ids = arrays[columns[number][-2]]
                into[-2] = ids[:, None].view(np.float32)
            there = read_rows(store, chain, number, into, on_bytes=on_bytes)
            if table.is_keyed:
                ids[:] = np.where(there, ids_of(ids), NO_KEY)
            if not there.all():
                not_saved[table.name] = int((~there).sum())
        for first, name in again:
            arrays[name][:] = arrays[first]
        if form == "state_dict":
            _replace_by_state_dict(fresh, arrays, dense)
        del arrays, into
        os.replace(fresh, out)
    except StoreError:
        raise
    except OSError as error:
        raise BadInput(f"{out} cannot be written: {error.strerror or error}; name another file with --out") from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
    return ExportedFiles(len(shapes) + len(dense), out.stat().st_size, not_saved, left_out)


def column_names(manifest: Manifest) -> list[list[str]]:
    """What the columns of each table are called in the file."""
    return [
        [table.name, *(f"{table.name}/{'id' if column == KEY else column.name}" for column in table.columns[1:])]
        for table in manifest.schema.tables
    ]


def dense_tensors(store: Store, manifest: Manifest, weights_only: bool) -> tuple[dict[str, Tensor], str, OwnNames]:
    """The tensors of the state, a sentence about what is not among them, and the names of weights that tables hold."""
    data = read_state(store, manifest)
    if data is None:
        return {}, "", {}
    try:
        state = state_codec.decode(data)
    except Exception:  # the caller's own bytes, in a format that only the caller knows
        return {}, f"the state: {len(data):,} bytes in a format of the job's own", {}
    first = state.get("snapshot", state) if isinstance(state, dict) else None
    if not isinstance(first, dict) or not isinstance(first.get("model"), dict):
        return ({}, "the state", {}) if weights_only else (dict(_tensors(state, "state")), "", {})
    if not weights_only:
        if first is not state:
            return dict(_tensors(state, "state")), "", {}
        others = {key: value for key, value in state.items() if key != "model"}
        return _model_tensors(first["model"]) | dict(_tensors(others, "state")), "", {}
    found = _model_tensors(first["model"] if first is state else dense_of_state(state, manifest.name))
    own_names: OwnNames = {}
    for name, table in first.get("row_parameters", {}).items():
        own_names.setdefault(table, []).append(name)
    return found, "all but weights", own_names


def _model_tensors(model: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor for key, value in model.items() for name, tensor in _tensors(value, str(key))}


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, np.ndarray) and value.dtype.name in _DTYPES:
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor) and str(value.dtype)[6:] in _DTYPES:
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(part, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _tensors(part, f"{name}/{number}")


def _mapped(path: Path, shapes: Mapping[str, Sequence[int]], dense: Mapping[str, Tensor]) -> dict[str, np.memmap]:
    """A safetensors file that has the dense tensors, and the others as mapped arrays, zero.

    The format: length of the header (uint64), header (JSON), all tensors without gaps.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype, n_bytes in [
        *(  # first: they are aligned
            (name, shape, _DTYPES[_OF_ROWS[len(shape)].name], _OF_ROWS[len(shape)].itemsize * math.prod(shape))
            for name, shape in shapes.items()
        ),
        *((n, t.shape, _DTYPES[str(t.dtype)[6:]], t.numel() * t.element_size()) for n, t in dense.items()),
    ]:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    raw = json.dumps(header).encode()
    raw = raw.ljust(-(-len(raw) // 8) * 8)
    start = 8 + len(raw)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        os.posix_fallocate(file.fileno(), 0, start + max(end, 1))  # a full disk is reported now, not in a mapped write
        file.truncate(start + end)
        for name, tensor in dense.items():
            file.seek(start + header[name]["data_offsets"][0])
            if tensor.numel():
                file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    offsets = {name: start + header[name]["data_offsets"][0] for name in shapes}
    found: dict[str, np.memmap] = {}
    for name, shape in shapes.items():
        found[name] = np.memmap(path, _OF_ROWS[len(shape)], "r+", offsets[name], tuple(shape))
    return found


def _replace_by_state_dict(path: Path, arrays: Mapping[str, np.memmap], dense: Mapping[str, Tensor]) -> None:
    saved = path.with_name(path.name + ".pt")
    try:
        torch.save({**{name: torch.from_numpy(array) for name, array in arrays.items()}, **dense}, saved)
        os.replace(saved, path)
    finally:
        saved.unlink(missing_ok=True)
