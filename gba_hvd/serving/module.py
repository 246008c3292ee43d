"""The module of a model: which tables it looks up, what of it is not a row, and how one is put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from gba_hvd.convert import ConvertedEmbedding, convert_without_rows, is_converted
from gba_hvd.embedding.initial_rows import InitialRows
from gba_hvd.embedding.module_placement import FollowsModule
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import BadInput
from gba_hvd.serving.block_cache import BlockCache
from gba_hvd.serving.frozen_rows import FrozenRows, RowReader
from gba_hvd.serving.manifest import ConvertedModule, StoredTable
from recovery import state_codec
from recovery.restore.open_checkpoint import OpenCheckpoint

_PADDING_ROW = "padding_row of "


def tables_in(model: nn.Module) -> list[EmbeddingTables]:
    """The `EmbeddingTables` among the modules of a model, and those of its converted modules, each once."""
    found: dict[int, EmbeddingTables] = {}
    for module in model.modules():
        tables = module if isinstance(module, EmbeddingTables) else getattr(module, "tables", None)
        if isinstance(tables, EmbeddingTables) and (tables is module or is_converted(module)):
            found[id(tables)] = tables
    return list(found.values())


def converted_in(model: nn.Module) -> tuple[ConvertedModule, ...]:
    found = []
    for path, module in model.named_modules():
        if is_converted(module):
            feature, tables = cast(Any, module).feature, cast(Any, module).tables
            found.append(ConvertedModule(path, feature, tables.features[feature].table))
    return tuple(found)


def dense_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by the names of `state_dict()`, and the padding rows of converted modules."""
    found = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise BadInput(f"{name} of the model's state_dict() is a {type(value).__name__}, expected a tensor")
        found[name] = value
    for path, module in model.named_modules():
        row = getattr(module, "padding_row", None) if is_converted(module) else None
        if isinstance(row, Tensor):
            found[_PADDING_ROW + path] = row
    return found


PaddingRows = Callable[[ConvertedModule, int], Tensor | None]
"""What positions with this `padding_idx` return, [dim], in one converted module; None: zeros."""


def padding_rows_of(dense: Mapping[str, Tensor]) -> PaddingRows:
    """Of what `dense_of` gave."""
    return lambda one, _: dense.get(_PADDING_ROW + one.path)


def padding_rows_in(checkpoint: OpenCheckpoint) -> PaddingRows:
    """Of the training state; of the tables, where a checkpoint is of an earlier version or of no job."""

    @cache
    def stored() -> Mapping[str, Tensor] | None:
        state = state_codec.decode(checkpoint.state() or state_codec.encode({}))
        return cast("Mapping[str, Tensor] | None", state.get("snapshot", state).get("padding_rows"))

    def row(one: ConvertedModule, padding_idx: int) -> Tensor | None:
        if (found := stored()) is not None:
            return found.get(one.table)
        of_table = torch.from_numpy(checkpoint.rows(one.table, np.array([padding_idx]))[0])
        return of_table if of_table.any() else None

    return row


def older_buffers(model: nn.Module, checkpoint: OpenCheckpoint) -> str:
    """Which buffers are as of the start of an epoch, where parameters are of a later step; empty: none are.

    Of a checkpoint that servers made without workers: they have no buffers.
    """
    state = state_codec.decode(checkpoint.state() or state_codec.encode({}))
    first = state.get("snapshot")
    names = [name for name, buffer in model.named_buffers() if name in model.state_dict()]
    if first is None or not names or "buffers_step" in first or first["position"]["step"] >= checkpoint.step:
        return ""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"{checkpoint.name}: buffers ({shown}) are those of step {first['position']['step']:,}, the start of an epoch, "
        f"and parameters and rows those of step {checkpoint.step:,}: the servers made this checkpoint when the workers "
        "had ended, and servers have no buffers. Where workers made it they are a few steps apart at most"
    )


def lookup_dtypes_of(model: nn.Module) -> dict[str, str]:
    """By path, the dtype of what each `EmbeddingTables` and converted module among the modules returns."""
    return {path: str(one.dtype)[6:] for path, one in model.named_modules() if isinstance(one, FollowsModule)}


def assemble(
    model: nn.Module,
    stored: Mapping[str, StoredTable],
    converted: tuple[ConvertedModule, ...],
    dense: Mapping[str, Tensor],
    padding_rows: PaddingRows,
    lookup_dtypes: Mapping[str, str],
) -> list[EmbeddingTables]:
    """Give a module that was just built the dense part, and make the modules lookups that the saved model's are.

    lookup_dtypes: where they are known (`lookup_dtypes_of`). Returns its tables, which have no rows yet. Raises
    BadInput, naming what does not fit.
    """
    state = {name: value for name, value in dense.items() if not name.startswith(_PADDING_ROW)}
    by_path = dict(model.named_modules())
    missing = [one for one in converted if not is_converted(by_path.get(one.path, nn.Identity()))]
    if missing:
        convert_without_rows(model, {one.path: (one.feature, one.table) for one in missing})
    _take_dtypes(model, state, lookup_dtypes)
    mine = model.state_dict()
    for name in sorted(mine.keys() | state.keys()):
        if name not in mine or name not in state:
            where = "the built module has no such tensor" if name in state else "the saved model has no such tensor"
            raise BadInput(f"{name}: {where}: another class, or other arguments, build the model")
        if mine[name].shape != state[name].shape:
            raise BadInput(
                f"{name} is {list(state[name].shape)} in the saved model, and {list(mine[name].shape)} in the built one"
            )
    model.load_state_dict(state)
    tables = tables_in(model)
    check_tables(tables, stored)
    take_padding_rows(model, padding_rows)
    return tables


def freeze(
    model: nn.Module, tables: list[EmbeddingTables], readers: Mapping[str, RowReader], cache: BlockCache | None = None
) -> None:
    """Let the tables look up rows of these readers, and the model predict: evaluation mode, no gradients."""
    for one in tables:
        one.memory = cast(Any, FrozenRows(one.layout, readers, cache))
        one.initial_rows = InitialRows(one.tables, one.layout.init_std)  # values that a builder assigned are of no use
        one.is_frozen = True
    model.eval()
    model.requires_grad_(False)


def _take_dtypes(model: nn.Module, state: Mapping[str, Tensor], lookup_dtypes: Mapping[str, str]) -> None:
    """A model that was trained in bfloat16, or in part, computes in it."""
    saved = {value.dtype for value in state.values() if value.is_floating_point()}
    built = {value.dtype for value in model.state_dict().values() if value.is_floating_point()}
    if len(saved) == 1 and saved != built:
        model.to(saved.pop())  # with what is not in the state: buffers that are not persistent, and lookups
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in state and tensor.dtype != state[name].dtype:
            tensor.data = tensor.data.to(state[name].dtype)
    for path, dtype in lookup_dtypes.items():
        if isinstance(module := dict(model.named_modules()).get(path), FollowsModule):
            module.dtype = getattr(torch, dtype)


def take_padding_rows(model: nn.Module, padding_rows: PaddingRows) -> None:
    """Also of modules that the builder has converted: its rows of padding are as fresh as all its rows."""
    for one in converted_in(model):
        module = model.get_submodule(one.path)
        if isinstance(module, ConvertedEmbedding) and module.padding_idx is not None:
            row = padding_rows(one, module.padding_idx)
            module.padding_row = None if row is None else row.to(module.dtype)


def check_tables(tables: list[EmbeddingTables], stored: Mapping[str, StoredTable]) -> None:
    """Raises BadInput where a built module has other tables than those that were saved."""
    mine = {name: (one, table) for one in tables for name, table in one.tables.items()}
    if more := sorted(stored.keys() - mine.keys()):
        raise BadInput(
            f"the saved model has a table {more[0]!r}, the built module has {', '.join(mine) or 'none'}: build "
            "EmbeddingTables with all tables, also with those that the module does not look up, or the complete model, "
            "with a `forward` of one part"
        )
    for name, (_, table) in mine.items():
        if name not in stored:
            raise BadInput(f"table {name!r} is missing in the saved model, which has {', '.join(stored) or 'none'}")
        about = stored[name]
        shapes = [f"{n if n else 'hashed'} x {dim}" for n, dim in ((table.n_rows, table.dim), _shape(about))]
        if shapes[0] != shapes[1]:
            raise BadInput(f"table {name!r} is {shapes[0]} in the built module, and {shapes[1]} in the saved model")


def _shape(table: StoredTable) -> tuple[int, int]:
    return (0 if table.is_hashed else table.n_rows), table.dim
