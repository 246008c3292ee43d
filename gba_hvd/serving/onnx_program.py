"""The dense part of a model as an ONNX file: for runtimes that have neither this package nor PyTorch.

It is made from the program of `dense_program`, and compared with it before anything is written: on the example, on one
with another number of samples, and on one with more positions, where they are free. Inputs that the graph does not use
are left out.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils._sympy.numbers import int_oo

from gba_hvd.errors import BadInput
from gba_hvd.extras import extra

log = logging.getLogger("gba_hvd")
ABSOLUTE, RELATIVE = 1e-5, 1e-4  # how far an output may be off, of a model in float32
_HALF = 2e-2  # both, of a model with an output in half precision
_MOST_BYTES = (1 << 31) - 1  # of a protobuf message
_OPERATOR = re.compile(r"\b(?:aten|prims|torchvision|gba_hvd)(?:::|\.)\w+(?:\.\w+)?")

_COLOUR = re.compile(r"\x1b\[\d+m")


@dataclass(frozen=True)
class OnnxFile:
    """data: the file. rows: by feature, fields: by column, names of the inputs that the graph has. outputs: names"""

    data: bytes
    rows: Mapping[str, str]
    fields: Mapping[str, str]
    outputs: tuple[str, ...]


def require_onnx() -> None:
    """Raises MissingPackage."""
    for package in ("onnx", "onnxscript"):
        with extra("onnx", package, "the ONNX format of the dense part needs"):
            __import__(package)


def onnx_of(
    exported: torch.export.ExportedProgram, rows: Mapping[str, Tensor], fields: Mapping[str, Tensor], outputs: Any
) -> OnnxFile:
    """exported: takes (rows, fields); outputs: what it returned on them.

    Raises MissingPackage; and BadInput where an operator has no ONNX form, naming it and the modules that use it, or
    the file computes something else.
    """
    require_onnx()
    program = _converted(exported)
    graph = program.model.graph
    places = [*(("rows", name) for name in rows), *(("fields", name) for name in fields)]
    if len(graph.inputs) != len(places):
        raise BadInput(f"onnx: the graph has {len(graph.inputs)} inputs, the dense part {len(places)}: report this")
    flat = _named(outputs, "score")
    names = [_input_name(kind, name, rows, flat) for kind, name in places]
    _rename_within(graph, {*names, *flat})
    found: dict[str, dict[str, str]] = {"rows": {}, "fields": {}}
    sizes = _sizes(exported, rows, fields)
    for value, (kind, name), unique, size in zip(list(graph.inputs), places, names, sizes, strict=True):
        for i, n in enumerate(size):
            if n is not None:
                value.shape[i] = n
        if not value.uses():
            graph.inputs.remove(value)
            continue
        value.name = found[kind][name] = unique
    if len(flat) != len(graph.outputs):
        raise BadInput(f"onnx: the graph has {len(graph.outputs)} outputs, the model returns {len(flat)} tensors")
    for value, name in zip(graph.outputs, flat, strict=True):
        value.name = name
    data = program.model_proto.SerializeToString()
    if len(data) > _MOST_BYTES:
        raise BadInput(
            f"onnx: the dense part has {len(data):,} bytes, an ONNX file without external data 2 GiB at most"
        )
    made = OnnxFile(data, found["rows"], found["fields"], tuple(flat))
    _check(made, exported, rows, fields)
    return made


def _input_name(kind: str, name: str, rows: Mapping[str, Tensor], outputs: Collection[str]) -> str:
    """That of the feature or column, unless another input or an output has it."""
    if kind == "fields" and name in rows:
        return f"{name}.ids"
    return f"{name}.{kind}" if name in outputs else name


def _sizes(
    exported: torch.export.ExportedProgram, rows: Mapping[str, Tensor], fields: Mapping[str, Tensor]
) -> list[list[int | None]]:
    """Of each input, None where it is free: samples, and positions of which the program takes any number.

    A graph has no form for a program's conditions on sizes, and the converter calls free what such a one has fixed.
    """
    traced = {node.name: node.meta["val"].shape for node in exported.graph.nodes if node.op == "placeholder"}
    names = [name for name in exported.graph_signature.user_inputs if isinstance(name, str)]
    given = [*rows.values(), *fields.values()]
    sizes = [
        [None if not i or _is_free(traced[name][i], exported) else n for i, n in enumerate(one.shape)]
        for name, one in zip(names, given, strict=True)
    ]
    if any(None in size[1:] for size in sizes):
        module = exported.module()
        try:
            for more in (1, 2, 3):
                module(*_longer(rows, fields, sizes, 0, more))
        except Exception:  # any error of the model
            return [[n if i else None for i, n in enumerate(one.shape)] for one in given]
    return sizes


def _is_free(size: Any, exported: torch.export.ExportedProgram) -> bool:
    if is_concrete_int(size):
        return False
    bounds = exported.range_constraints.get(size.node.expr)
    return bounds is not None and bool(bounds.lower <= 2) and bounds.upper is int_oo


def _rename_within(graph: Any, taken: set[str]) -> None:
    """Names of inputs and outputs are those of the model; a value within that has one of them gets another."""
    values = [value for node in graph.all_nodes() for value in node.outputs]
    names = {value.name for value in [*values, *graph.inputs, *graph.initializers.values()]} | taken
    for value in [*graph.initializers.values(), *values]:
        if value.name in taken and not value.is_graph_output():
            name = next(one for i in itertools.count(1) if (one := f"{value.name}.{i}") not in names)
            names.add(name)
            value.name = name


def _converted(exported: torch.export.ExportedProgram) -> Any:
    try:
        with _quiet():
            program = torch.onnx.export(exported, dynamo=True, verbose=False, optimize=True)
    except Exception as error:  # any error of the converter
        operators = _operators(" ".join(str(one) for one in _chain(error)))
        users = _users(exported, operators)
        what = f"{', '.join(operators) or 'a part of it'}" + (f" (in {', '.join(users)})" if users else "")
        raise BadInput(
            f"the dense part has no ONNX form: {what} cannot be converted. Nothing was written. Compute it with other "
            "operators, or save the model with dense_program='torch' alone, whose program has any operator of PyTorch. "
            f"The converter said: {_first_line(list(_chain(error))[-1])}"
        ) from error
    assert program is not None
    return program


def _check(
    made: OnnxFile, exported: torch.export.ExportedProgram, rows: Mapping[str, Tensor], fields: Mapping[str, Tensor]
) -> None:
    """Raises BadInput where the file does not compute what the program computes."""
    import onnx

    onnx.checker.check_model(made.data)
    try:
        import onnxruntime
    except ModuleNotFoundError:
        log.warning(
            "the ONNX file was checked for its form, not compared with the model: onnxruntime is not installed "
            "(pip install onnxruntime)"
        )
        return
    try:
        session = onnxruntime.InferenceSession(made.data, providers=["CPUExecutionProvider"])
    except Exception as error:  # of the runtime, which has no common base
        raise BadInput(
            f"the ONNX file cannot be run by onnxruntime, nothing was written: {_first_line(error)}"
        ) from error
    module = exported.module()
    sizes = _sizes(exported, rows, fields)
    for samples, positions in ((0, 0), (3, 0), (3, 3)):
        some = _longer(rows, fields, sizes, samples, positions)
        with torch.no_grad():
            expected = _named(module(*some), "score")
        given = {name: _array(some[0][feature]) for feature, name in made.rows.items()}
        given |= {name: _array(some[1][column]) for column, name in made.fields.items()}
        try:
            outputs = session.run(None, given)
        except Exception as error:
            raise BadInput(f"the ONNX file fails in onnxruntime, nothing was written: {_first_line(error)}") from error
        for (name, mine), theirs in zip(expected.items(), outputs, strict=True):
            half = mine.dtype in (torch.bfloat16, torch.float16)
            a, b = mine.detach().float().cpu().numpy(), np.asarray(theirs, np.float32)
            absolute, relative = (_HALF, _HALF) if half else (ABSOLUTE, RELATIVE)
            if a.shape != b.shape or not np.allclose(b, a, relative, absolute, equal_nan=True):
                off = (
                    f"off by {np.abs(a - b).max():.3g}"
                    if a.shape == b.shape
                    else f"{list(b.shape)}, not {list(a.shape)}"
                )
                raise BadInput(
                    f"output {name!r} of the ONNX file is {off} in a batch of {len(a)} samples (allowed: {absolute:g} "
                    f"plus {relative:g} of the value), nothing was written: save the model with dense_program='torch'"
                )


def _longer(
    rows: Mapping[str, Tensor],
    fields: Mapping[str, Tensor],
    sizes: Sequence[Sequence[int | None]],
    samples: int,
    positions: int,
) -> list[dict[str, Tensor]]:
    """Rows and fields with more samples, and more of what else is free."""
    size = iter(sizes)
    return [
        {name: _extended(one, next(size), samples, positions) for name, one in some.items()} for some in (rows, fields)
    ]


def _extended(one: Tensor, size: Sequence[int | None], samples: int, positions: int) -> Tensor:
    for i, n in enumerate(size):
        more = 0 if n is not None else positions if i else samples
        one = torch.cat([one, *[one.narrow(i, 0, 1)] * more], i)
    return one


def _array(one: Tensor) -> np.ndarray:
    array: np.ndarray = one.detach().cpu().contiguous().numpy()
    return array


def _named(value: Any, name: str) -> dict[str, Tensor]:
    """Tensors of an output in the order of the graph's: `score`, or `score_0` ... of a tuple, or a mapping's names."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        return {k: v for key, one in value.items() for k, v in _named(one, str(key)).items()}
    return {k: v for i, one in enumerate(value) for k, v in _named(one, f"{name}_{i}").items()}


def _operators(text: str) -> list[str]:
    """Those that a text names, without the overload."""
    return sorted({".".join(re.split(r"::|\.", one)[:2]) for one in _OPERATOR.findall(text)})


def _users(exported: torch.export.ExportedProgram, operators: Sequence[str]) -> list[str]:
    """The modules of the model whose operators these are, as the converter takes them apart."""
    nodes = list(exported.graph.nodes)
    if operators:
        with _quiet():
            nodes += exported.run_decompositions(dict(decomposition_table)).graph.nodes
    found = []
    for node in nodes:
        if node.op == "call_function" and ".".join(str(node.target).split(".")[:2]) in operators:
            stack = list(node.meta.get("nn_module_stack", {}).values())
            path, kind = stack[-1][:2] if stack else ("", "")
            found.append(f"{path.removeprefix('model.') or 'the model'}: {str(kind).rpartition('.')[2]}")
    return sorted(set(found))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return next(iter(_COLOUR.sub("", str(error)).strip().splitlines()), type(error).__name__)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The converter warns of what its own libraries will do away with."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
