"""The dense part of a model as a program of `torch.export`, or ONNX: looked-up rows and other fields in, outputs out.

For servers that have neither this package nor the model's class: they look rows up in the shards, pool them, and run
the program (`docs/FORMAT.md`). The model's lookups are recorded on its example, and replaced by the program's inputs.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gba_hvd.batch import Bag
from gba_hvd.convert import is_converted
from gba_hvd.embedding.module_placement import evaluating
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import BadInput, refuse_unknown
from gba_hvd.serving import inputs
from gba_hvd.serving.manifest import StoredLookup
from gba_hvd.serving.module import tables_in
from gba_hvd.serving.onnx_program import OnnxFile, onnx_of, require_onnx

FORMATS = ("torch", "onnx")
Values = Mapping[str, Tensor | Bag]


@dataclass(frozen=True)
class DensePrograms:
    """lookups: what the rows are that a program takes. torch: as `torch.export.save` writes it; None: not asked for"""

    lookups: tuple[StoredLookup, ...]
    torch: bytes | None
    onnx: OnnxFile | None


def formats_of(dense_program: bool | str | Sequence[str]) -> tuple[str, ...]:
    """The formats that are asked for. Raises BadInput for another one, MissingPackage."""
    if isinstance(dense_program, bool):
        return ("torch",) * dense_program
    found = (dense_program,) if isinstance(dense_program, str) else tuple(dense_program)
    for one in found:
        refuse_unknown("dense_program", one, FORMATS)
    if "onnx" in found:
        require_onnx()
    return found


def exported_dense_part(model: nn.Module, example: Any, formats: Sequence[str] = ("torch",)) -> DensePrograms:
    """The program in these formats; its batch size is free, and so is L of ids [B, L] where the model's code allows it.

    It takes two mappings: rows by feature, [B, ...] as the tables return them; and by column the fields that are
    tensors, ids included. example: an input of at least two samples. Raises BadInput for a model that cannot be split
    so: lookups of ids that are no field of the input, converted modules, what `torch.export` cannot trace.
    """
    check_splits(model, example)
    spec = inputs.spec_of(example, model)
    values = inputs.values_of(spec, example)
    fields = {name: one for name, one in values.items() if isinstance(one, Tensor)}
    with evaluating(model):
        rows, lookups = _recorded(model, spec, values, example)
        program = _DensePart(model, spec, {name: one for name, one in values.items() if isinstance(one, Bag)})
        exported = _traced(program, rows, fields, {one.column for one in lookups})
        onnx = onnx_of(exported, rows, fields, program(rows, fields)) if "onnx" in formats else None
    file = io.BytesIO()
    if "torch" in formats:
        torch.export.save(exported, file)
    return DensePrograms(lookups, file.getvalue() or None, onnx)


def _traced(
    program: _DensePart, rows: dict[str, Tensor], fields: dict[str, Tensor], ids: Set[str]
) -> torch.export.ExportedProgram:
    """ids: the columns of lookups. Raises BadInput."""
    several = any(one.ndim > 2 for one in rows.values()) or any(fields[name].ndim > 1 for name in ids & fields.keys())
    for positions in (torch.export.Dim.AUTO, None) if several else (None,):
        try:
            with warnings.catch_warnings():  # a GRU or LSTM sets its weights once more; they are parameters as before
                warnings.filterwarnings("ignore", r"The tensor attributes? .*_flat_weights\[", UserWarning)
                shapes = _free_sizes(rows, fields, ids, positions)
                return torch.export.export(program, (rows, fields), dynamic_shapes=shapes, strict=False)
        except Exception as error:  # any error of the compiler or of the model under it
            failed = error
    name = type(program.model).__name__
    raise BadInput(f"dense_program: torch.export cannot trace {name}: {failed}") from failed


def _free_sizes(
    rows: Mapping[str, Tensor], fields: Mapping[str, Tensor], ids: Set[str], positions: Any
) -> tuple[dict[str, dict[int, Any]], dict[str, dict[int, Any]]]:
    """B of each, and `positions` for L of ids [B, L, ...] and of rows [B, L, ..., dim] that are not pooled."""
    samples = torch.export.Dim("samples")
    n_ids = {name: one.ndim if name in ids else 1 for name, one in fields.items()}
    return (
        {name: {0: samples, **dict.fromkeys(range(1, one.ndim - 1), positions)} for name, one in rows.items()},
        {name: {0: samples, **dict.fromkeys(range(1, n), positions)} for name, n in n_ids.items()},
    )


def check_splits(model: nn.Module, example: Any) -> None:
    """Raises BadInput for converted modules, and an example of fewer than two samples. The rows do not matter."""
    if any(is_converted(module) for module in model.modules()):
        raise BadInput("dense_program: a converted model looks rows up inside its modules; only models that call "
                       "EmbeddingTables can be split")  # fmt: skip
    spec = inputs.spec_of(example, model)
    values = inputs.values_of(spec, example)
    if weighted := [one["column"] for one in inputs.fields(spec) if "weights" in one]:
        raise BadInput(f"dense_program: {weighted[0]!r} is a Bag with weights, which a program's lookups do not have")
    n = min(len(one.offsets) if isinstance(one, Bag) else len(one) for one in values.values())
    if n < 2:
        raise BadInput(f"dense_program: input_example has {n} samples, at least 2 are needed to keep their number free")


def _recorded(
    model: nn.Module, spec: inputs.Spec, values: Values, example: Any
) -> tuple[dict[str, Tensor], tuple[StoredLookup, ...]]:
    """What the tables returned on the example, by feature, and which column each feature's ids were."""
    columns = {id(one): name for name, one in values.items()}
    rows: dict[str, Tensor] = {}
    lookups: dict[str, StoredLookup] = {}

    def record(tables: EmbeddingTables, ids: Any) -> dict[str, Tensor]:
        found = EmbeddingTables.forward(tables, ids)
        for name, one in ids.items():
            if id(one) not in columns or found[name].is_nested:
                raise BadInput(f"dense_program: the ids of feature {name!r} are no field of input_example as it is")
            feature = tables.features[name]
            about = tables.tables[feature.table]
            padding = None if about.padding_idx is None else about.padding_idx % about.n_rows
            lookups[name] = StoredLookup(name, columns[id(one)], feature.table, feature.pooling, padding)
        rows.update(found)
        return found

    with _replaced(model, record):
        model(*example) if isinstance(example, tuple) else model(example)
    return rows, tuple(lookups.values())


@contextlib.contextmanager
def _replaced(model: nn.Module, look_up: Any) -> Iterator[None]:
    """Lookups of a model's tables are calls of look_up(tables, ids)."""
    tables = tables_in(model)
    try:
        for one in tables:
            one.forward = lambda ids, one=one: look_up(one, ids)  # type: ignore[method-assign, misc]
            one.stacked = lambda ids, one=one: torch.stack(list(look_up(one, ids).values()), 1)  # type: ignore[method-assign, misc]
        yield
    finally:
        for one in tables:
            del one.forward, one.stacked


class _DensePart(nn.Module):
    """The model with its lookups replaced by the rows that it is given."""

    def __init__(self, model: nn.Module, spec: inputs.Spec, bags: Values) -> None:
        super().__init__()
        self.model, self._spec, self._bags = model, spec, bags

    def forward(self, rows: dict[str, Tensor], fields: dict[str, Tensor]) -> Any:
        def given(tables: EmbeddingTables, ids: Any) -> dict[str, Tensor]:
            return {name: rows[name].to(tables.dtype) for name in ids}

        n = next(iter({**rows, **fields}.values())).shape[0]
        value = inputs.value_from(self._spec, {**self._bags, **fields}, n)
        with _replaced(self.model, given):
            return self.model(*value) if isinstance(value, tuple) else self.model(value)
