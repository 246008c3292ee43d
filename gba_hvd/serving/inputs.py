"""How a request becomes the input of a model: by fields, which an example of an input names.

An input is a `Batch`, a tensor, a `Bag`, a mapping of these, or a tuple of positional arguments. Each tensor is a
field: a column of a request. A tensor [B] is a column of numbers, one of more dimensions a column of lists, or the
columns `field_0`, `field_1`, ... of a tensor [B, L]. A `Bag` is a column of lists of any length, and its weights are
another one, `field_weights`. Columns of `Batch.dense` may have names, by which a request gives them.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from gba_hvd.batch import Bag, Batch
from gba_hvd.errors import BadInput

Spec = Mapping[str, Any]
"""Plain JSON. "kind": "field" (column, dtype, shape without B, is_bag, has_nan; of `Batch.dense` also the names of its
columns, where they are known; of a `Bag` with weights the field "weights", a bag as well), "batch" (ids, dense),
"mapping" (parts by name), or "arguments" (parts). "order": the names of ids or parts, since a model may read them in
that order, and the keys of stored JSON are sorted."""

_DTYPES = {
    str(dtype)[6:]: dtype
    for dtype in (torch.int64, torch.int32, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool)
}


def spec_of(example: Any, model: nn.Module, dense_names: Sequence[str] = ()) -> Spec:
    """The fields of an input. dense_names: of the columns of `Batch.dense`, in their order.

    Raises BadInput for an input that has other parts, two fields of one name or other numbers of samples, and names
    that do not fit.
    """
    names = [name for name, one in inspect.signature(model.forward).parameters.items() if one.kind < 3]
    spec = _spec(example, names[0] if names else "x", names)
    columns = [field["column"] for field in fields(spec)]
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise BadInput(f"input_example has two fields called {twice[0]!r}: rename one")
    check_samples(spec, example, of_one=True)
    return _with_names(spec, dense_names) if len(dense_names) else spec


def check_samples(spec: Spec, example: Any, *, of_one: bool) -> None:
    """Raises BadInput for fields with other numbers of samples, since each request has one.

    of_one: tensors of a single one may be among others: a model that broadcasts them takes one for each sample as well.
    """
    sizes = {field["column"]: _n_samples(one) for field, one in _fields_of(spec, example)}
    bags = {field["column"] for field in fields(spec) if field["is_bag"]}
    if len({n for name, n in sizes.items() if n != 1 or name in bags or not of_one}) > 1:
        raise BadInput(
            f"input_example: expected one number of samples in all fields, got {sizes}: a request has a value, or a "
            "list, of each field for each sample. Bags as values and offsets: let forward() take each as one "
            "gba_hvd.Bag(values, offsets, weights), and give its parts to nn.EmbeddingBag. What all samples share is "
            "a buffer of the model, or repeated for each. `save_model` without input_example saves the model for "
            "inputs that your own code makes"
        )


def _n_samples(value: Tensor | Bag) -> int:
    return len(value.offsets if isinstance(value, Bag) else value)


def _with_names(spec: Spec, names: Sequence[str]) -> Spec:
    dense = spec.get("dense")
    if isinstance(names, str) or not all(isinstance(one, str) for one in names):
        raise BadInput(f"dense_names must be a list of names, such as ['price', 'age'], got {names!r}")
    if dense is None:
        raise BadInput("dense_names are of the columns of Batch.dense, and input_example is no Batch that has some")
    if len(names) != dense["shape"][0]:
        n_columns = dense["shape"][0]
        raise BadInput(f"dense_names has {len(names)} names, and Batch.dense of input_example {n_columns} columns")
    taken = [*names, *(one for field in fields(spec) for one in columns_for(field))]
    if twice := [name for name in names if taken.count(name) > 1]:
        raise BadInput(f"dense_names: two columns of a request would be called {twice[0]!r}: choose another name")
    return {**spec, "dense": {**dense, "names": list(names)}}


def _spec(value: Any, name: str, names: Sequence[str] = ()) -> Spec:
    if isinstance(value, Batch):
        ids = {key: _spec(one, key) for key, one in value.ids.items()}
        dense = _spec(value.dense, "dense") if value.dense.ndim == 2 and value.dense.shape[1] else None
        return {"kind": "batch", "ids": ids, "order": [*ids], "dense": dense}
    if isinstance(value, tuple):
        given = [*names, *(f"argument_{i}" for i in range(len(names), len(value)))]
        return {"kind": "arguments", "parts": [_spec(one, given[i]) for i, one in enumerate(value)]}
    if isinstance(value, Mapping):
        parts = {str(key): _spec(one, str(key)) for key, one in value.items()}
        return {"kind": "mapping", "parts": parts, "order": [*parts]}
    is_bag = isinstance(value, Bag)
    tensor = value.values if isinstance(value, Bag) else value
    dtype = str(tensor.dtype)[6:] if isinstance(tensor, Tensor) else ""
    if dtype not in _DTYPES or tensor.is_nested or not tensor.ndim:
        what = f"{tensor.dtype} {list(tensor.shape)}" if dtype else type(value).__name__
        raise BadInput(
            f"input_example: {name} is a {what}; requests can be made for a Batch, tensors [B, ...] of numbers, Bags, "
            "mappings of these and tuples of arguments. Without input_example the model is saved, and predicts for "
            "inputs that your own code makes"
        )
    shape = [] if is_bag else list(tensor.shape[1:])
    has_nan = bool(tensor.isnan().any())
    field = {"kind": "field", "column": name, "dtype": dtype, "shape": shape, "is_bag": is_bag, "has_nan": has_nan}
    if isinstance(value, Bag) and value.weights is not None:
        field["weights"] = _spec(Bag(value.weights, value.offsets), f"{name}_weights")
    return field


def fields(spec: Spec) -> Iterator[Spec]:
    match spec["kind"]:
        case "field":
            yield spec
            yield from [spec["weights"]] if "weights" in spec else []
        case "batch":
            for one in spec["ids"].values():
                yield from fields(one)
            yield from [] if spec["dense"] is None else [spec["dense"]]
        case "mapping":
            for part in spec["parts"].values():
                yield from fields(part)
        case "arguments":
            for part in spec["parts"]:
                yield from fields(part)


def lengths_of(spec: Spec, columns: Mapping[str, Any]) -> dict[str, int]:
    """By name of the columns that may be fields, their samples. Raises BadInput for one that is no column."""
    found = {}
    for field in fields(spec):
        for name in columns_for(field):
            if name not in columns:
                continue
            try:
                if isinstance(columns[name], (Mapping, str, bytes)):
                    raise TypeError
                found[name] = len(columns[name])
            except TypeError as error:  # (also of an array without dimensions)
                raise BadInput(
                    f"field {name!r}: expected a column of {described(field)}, got the single value {columns[name]!r}"
                ) from error
    return found


def columns_in(request: Any) -> dict[str, Any]:
    """The columns of a mapping or a pandas `DataFrame` by name. Raises BadInput for anything else, and a name that is
    there twice."""
    names = [str(name) for name in request.keys()] if hasattr(request, "keys") else None  # noqa: SIM118
    if names is None:
        raise BadInput(
            "a request: expected columns by name, a mapping such as {'item': [3, 4]} or a pandas DataFrame, got "
            f"{type(request).__name__}" + " (of rows: pandas.DataFrame(rows))" * isinstance(request, (list, tuple))
        )
    if twice := [(name, n) for name, n in Counter(names).items() if n > 1]:
        raise BadInput(f"column {twice[0][0]!r} is there {twice[0][1]} times: rename one")
    return {str(name): request[name] for name in request.keys()}  # noqa: SIM118  # (of a DataFrame as well)


def refuse_doubtful(spec: Spec, columns: Mapping[str, Any]) -> None:
    """Raises BadInput where a field is given twice, by its column and others, or by more columns than it has."""
    every = {name for field in fields(spec) for name in columns_for(field)}
    own = {field["column"] for field in fields(spec)}
    for field in fields(spec):
        name, shape = field["column"], field["shape"]
        # `RowEncoder.columns` has `dense` beside the raw columns that it is made of, and lines of JSON have it
        # beside the values by name that were in it.
        whole, by_names = columns.get(name), field.get("names", [])
        rank = whole.ndim if isinstance(whole, np.ndarray) else int(isinstance(whole, list))
        is_by_name = rank == 1 and bool(by_names) and any(isinstance(one, Mapping) for one in cast(Any, whole))
        ways = [[name], [] if rank == 2 or is_by_name else by_names, _numbered(field)]
        given = [
            found[0]
            for way in ways
            if (found := [one for one in way if one in columns and (one == name or one not in own)])
        ]
        if len(given) > 1:
            raise BadInput(f"field {name!r}: given as {given[0]!r} and as {given[1]!r}: leave one of them out")
        if len(shape) == 1 and (over := f"{name}_{shape[0]}") in columns and over not in every and name not in columns:
            raise BadInput(f"field {name!r}: expected columns {name}_0 to {name}_{shape[0] - 1}, got {over!r} as well")


def is_missing(value: Any) -> bool:
    """None, or pandas.NA."""
    return value is None or type(value).__name__ == "NAType"


def refuse_single_values(columns: Mapping[str, Any]) -> None:
    """Raises BadInput for a value in place of a column, such as a text, which would count as a column of letters."""
    for name, values in columns.items():
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
            raise BadInput(f"column {name!r}: expected one value for each sample, got the single value {values!r}")


def columns_for(field: Spec) -> list[str]:
    """The column of a field, then those that may take its place, each with one number of its lists."""
    return [field["column"], *_numbered(field), *field.get("names", ())]


def plain_columns(spec: Spec | None) -> set[str]:
    """Columns whose samples are numbers or lists of them, never values by name."""
    found = () if spec is None else fields(spec)
    return {name for field in found for name in columns_for(field) if "names" not in field or name != field["column"]}


def _numbered(field: Spec) -> list[str]:
    """Columns by position."""
    several = field["shape"][0] if len(field["shape"]) == 1 else 0
    return [f"{field['column']}_{i}" for i in range(several)]


def described(field: Spec) -> str:
    """What a request has to give for a field, in words."""
    of = "" if not (field["is_bag"] or field["shape"]) else "lists of " if field["is_bag"] else f"{field['shape']} of "
    return f"{of}{field['dtype']}"


def values_of(spec: Spec, value: Any) -> dict[str, Tensor | Bag]:
    """The fields of an input, by column."""
    return {field["column"]: one for field, one in _fields_of(spec, value)}


def columns_of(spec: Spec, value: Any) -> dict[str, np.ndarray | list[list[Any]]]:
    """The columns of a request for which `input_of` gives this input."""
    columns = (_columns_of(field, one) for field, one in _fields_of(spec, value))
    return {name: values for some in columns for name, values in some.items()}


def _fields_of(spec: Spec, value: Any) -> Iterator[tuple[Spec, Any]]:
    match spec["kind"]:
        case "batch":
            for key, one in spec["ids"].items():
                yield from _fields_of(one, value.ids[key])
            if spec["dense"] is not None:
                yield spec["dense"], value.dense
        case "mapping":
            for key, part in spec["parts"].items():
                yield from _fields_of(part, value[key])
        case "arguments":
            for part, one in zip(spec["parts"], value, strict=True):
                yield from _fields_of(part, one)
        case _:
            yield spec, value
            if "weights" in spec:
                yield spec["weights"], Bag(value.weights, value.offsets)


def _columns_of(field: Spec, value: Any) -> dict[str, np.ndarray | list[list[Any]]]:
    if field["is_bag"]:
        cuts = [*value.offsets.tolist(), len(value.values)]
        numbers = value.values.tolist()
        return {field["column"]: [numbers[a:b] for a, b in pairwise(cuts)]}
    plain = value.detach().cpu()
    plain = plain.float() if plain.dtype in (torch.bfloat16, torch.float16) else plain
    if "names" in field:
        return dict(zip(field["names"], plain.numpy().T, strict=True))
    return {field["column"]: plain.numpy() if plain.ndim == 1 else plain.tolist()}


def input_of(spec: Spec, request: Mapping[str, Any]) -> Any:
    """The input of the model. request: by column, numbers or lists of B samples.

    Raises BadInput naming the field that is missing, has another dtype or shape, another number of samples, or of
    weights.
    """
    read = {field["column"]: _read(field, request) for field in fields(spec)}
    sizes = {name: _n_samples(one) for name, one in read.items()}
    _check_sizes(sizes)
    return value_from(spec, read, next(iter(sizes.values()), 0))


def value_from(spec: Spec, read: Mapping[str, Tensor | Bag], n: int) -> Any:
    """The input of n samples that has these fields, by column."""
    match spec["kind"]:
        case "batch":
            dense = torch.empty(n, 0) if spec["dense"] is None else read[spec["dense"]["column"]]
            assert isinstance(dense, Tensor)
            return Batch({key: _value_of(one, read) for key, one in _in_order(spec, "ids")}, dense, torch.zeros(n))
        case "mapping":
            return {key: value_from(part, read, n) for key, part in _in_order(spec, "parts")}
        case "arguments":
            return tuple(value_from(part, read, n) for part in spec["parts"])
    return _value_of(spec, read)


def _value_of(field: Spec, read: Mapping[str, Tensor | Bag]) -> Tensor | Bag:
    """Raises BadInput where a sample has not as many weights as ids."""
    found = read[field["column"]]
    if "weights" not in field:
        return found
    name = field["weights"]["column"]
    weights = read[name]
    assert isinstance(found, Bag) and isinstance(weights, Bag)
    if len(found.values) != len(weights.values) or not torch.equal(found.offsets, weights.offsets):
        n_ids, n_weights = (np.diff([*one.offsets.tolist(), len(one.values)]) for one in (found, weights))
        at = int((n_ids != n_weights).argmax())
        raise BadInput(
            f"field {name!r}: sample {at}: expected a weight for each of its {n_ids[at]} ids in {field['column']!r}, "
            f"got {n_weights[at]}"
        )
    return Bag(found.values, found.offsets, weights.values)


def _in_order(spec: Spec, of: str) -> Iterator[tuple[str, Spec]]:
    if "order" not in spec:
        raise BadInput(
            "the model was saved by an earlier version, without the order of its fields, on which its predictions may "
            "depend: save or export it again"
        )
    return ((name, spec[of][name]) for name in spec["order"])


def _read(field: Spec, request: Mapping[str, Any]) -> Tensor | Bag:
    name, shape = field["column"], field["shape"]
    if name not in request:
        return _joined(field, request)
    values = request[name]
    if not field["is_bag"] and shape and len(values) and any(isinstance(one, Mapping) for one in list(values)):
        return _joined(field, _unpacked(field, list(values)))
    if field["is_bag"]:
        listed = _listed(field, values)
        lists = [_array(field, one, i) if len(one) else np.empty(0, np.int64) for i, one in enumerate(listed)]
        lengths = np.array([len(one) for one in lists], np.int64)
        flat = np.concatenate([np.empty(0, np.int64), *lists])
        return Bag(_tensor(field, flat), torch.from_numpy(np.cumsum(lengths) - lengths))
    array = _array(field, values)
    if array.ndim == 1 and shape and not array.size:
        array = array.reshape(0, *shape)
    if list(array.shape[1:]) != shape or not array.ndim:
        columns = _or_columns(field, request) if array.ndim == 1 else ""
        raise BadInput(
            f"field {name!r}: expected [B{''.join(f', {n}' for n in shape)}] of {field['dtype']}, got "
            f"{list(array.shape)}" + (f": give it lists of {shape[0]}{columns}" if columns else "")
        )
    return _tensor(field, array)


def _joined(field: Spec, request: Mapping[str, Any]) -> Tensor:
    """A field [B, L] of columns of numbers, by their names or positions. Raises BadInput where some are missing."""
    for columns in (field.get("names", []), _numbered(field)):
        if columns and all(name in request for name in columns):
            return _stacked(
                {name: _tensor({**field, "column": name}, _array(field, request[name])) for name in columns}
            )
    names = field.get("names", [])
    missing = [name for name in names if name not in request]
    there = ", ".join(map(str, request)) or "no columns"
    if 0 < len(missing) < len(names):
        verb = "is" if len(missing) == 1 else "are"
        raise BadInput(
            f"field {field['column']!r}: {', '.join(missing)} {verb} missing: by name the model needs "
            f"{', '.join(names)}; the request has {there}"
        )
    by_name = f", or columns {', '.join(names)}" if names else ""
    raise BadInput(
        f"field {field['column']!r} is missing: the model needs {described(field)} in column {field['column']!r}"
        f"{_or_columns(field, request)}{by_name}; the request has {there}"
    )


def _stacked(columns: Mapping[str, Tensor]) -> Tensor:
    """[B, L] of L columns. Raises BadInput for one that is not [B]."""
    for name, one in columns.items():
        if one.ndim != 1:
            raise BadInput(f"field {name!r}: expected one number for each sample, got {list(one.shape)}")
    _check_sizes({name: len(one) for name, one in columns.items()})
    return torch.stack([*columns.values()], dim=1)


def _check_sizes(sizes: Mapping[str, int]) -> None:
    if len(set(sizes.values())) > 1:
        raise BadInput(f"the fields of a request need one number of samples, got {sizes}")


def _unpacked(field: Spec, samples: Sequence[Any]) -> dict[str, list[Any]]:
    """Columns by name of samples that are mappings of names to numbers. Raises BadInput for other names."""
    names = field.get("names")
    if names is None:
        raise BadInput(
            f"field {field['column']!r}: values by name, and the model was saved without names: give a list of "
            f"{field['shape'][0]}, or save the model with dense_names"
        )
    for i, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise BadInput(f"field {field['column']!r}: sample {i} is {sample!r}, expected values by name as in others")
        if unknown := [name for name in sample if name not in names]:
            near = get_close_matches(str(unknown[0]), names, n=1) or names
            raise BadInput(
                f"field {field['column']!r}: sample {i} has {unknown[0]!r}, which is no name of it; "
                f"nearest: {', '.join(near)}"
            )
        if missing := [name for name in names if name not in sample]:
            raise BadInput(f"field {field['column']!r}: sample {i} has no {', '.join(missing)}")
    return {name: [sample[name] for sample in samples] for name in names}


def _or_columns(field: Spec, request: Mapping[str, Any]) -> str:
    """The columns that may take the place of a column of lists, and which of them are missing; empty for others."""
    if not (names := _numbered(field)):
        return ""
    missing = [name for name in names if name not in request]
    several = f"a column of numbers {names[0]}" if len(names) == 1 else f"columns {names[0]} to {names[-1]}"
    verb = "is" if len(missing) == 1 else "are"
    return f", or {several}" + (f" ({', '.join(missing)} {verb} missing)" if 0 < len(missing) < len(names) else "")


def _listed(field: Spec, values: Any) -> list[Any]:
    found = list(values)
    if any(np.ndim(one) != 1 for one in found):
        raise BadInput(
            f"field {field['column']!r}: expected a list of {field['dtype']} for each sample, got {_kind(found)}"
        )
    return found


def _array(field: Spec, values: Any, sample: int | None = None) -> np.ndarray:
    """Numbers of any type. sample: whose list this is; None: a column."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    try:
        kind = "O" if hasattr(values, "dtype") or not field["dtype"].startswith("int") else "Of"  # (1 and 2**63: f)
        if np.asarray(values).dtype.kind in kind and np.ndim(values):
            _refuse_null_and_large(field, list(values) if sample is None else [values], sample or 0)
        found = np.asarray(values)
        has_boolean = field["dtype"].startswith("int") and _has_boolean(values, found)
        if found.dtype == object and found.ndim:  # a column of lists, or of numbers of which some are null
            found = np.array([_with_nan(one) for one in found])
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(
            f"field {field['column']!r}: expected {described(field)}, got lists of different lengths"
        ) from error
    if has_boolean:
        raise BadInput(f"field {field['column']!r}: expected {field['dtype']}, got bool")
    return found


def _refuse_null_and_large(field: Spec, column: list[Any], first: int) -> None:
    """Raises BadInput for nulls among whole numbers, and for numbers beyond 64 bits."""
    is_whole = field["dtype"].startswith("int") and not any(isinstance(one, bool) for one in _leaves(column))
    if is_whole and all(map(is_missing, column)):
        raise BadInput(f"field {field['column']!r} is missing: expected {described(field)}, got null in every sample")
    for i, sample in enumerate(column, first):
        for one in _leaves([sample]):
            if is_missing(one) and is_whole:
                raise BadInput(f"field {field['column']!r}: sample {i} is missing, or has a null: expected "
                               f"{described(field)}")  # fmt: skip
            if isinstance(one, int) and not -(2**63) <= one < (2**63 if is_whole else 2**64):
                raise BadInput(f"field {field['column']!r}: sample {i}: {one} does not fit into {field['dtype']}")


def _has_boolean(values: Any, found: np.ndarray) -> bool:
    """Whether a boolean is among these values, also where numpy made numbers of all, `found`."""
    if found.dtype.kind not in "iufO" or not found.ndim or (found.dtype != object and hasattr(values, "dtype")):
        return found.dtype.kind == "b"
    return any(
        isinstance(one, bool) or getattr(getattr(one, "dtype", None), "kind", "") == "b" for one in _leaves(values)
    )


def _leaves(values: Any) -> Iterator[Any]:
    """The single values of a list, or of lists in it."""
    for one in values:
        if isinstance(one, (list, tuple)) or (isinstance(one, np.ndarray) and one.dtype == object):
            yield from _leaves(one)
        else:
            yield one


def _with_nan(value: Any) -> np.ndarray:
    """A number or a list of numbers, with NaN in the place of null."""
    found = np.asarray(value)
    if found.dtype == object:
        numbers = [math.nan if is_missing(one) else one for one in found.reshape(-1).tolist()]
        found = np.array(numbers).reshape(found.shape)
    return found


def _tensor(field: Spec, array: np.ndarray) -> Tensor:
    name, dtype = field["column"], _DTYPES[field["dtype"]]
    good = "iub" if dtype.is_floating_point or dtype == torch.bool else "iu"
    good += "f" if dtype.is_floating_point else ""
    if array.size and array.dtype.kind not in good:
        hint = ""
        if array.dtype.kind in "OUS" and good == "iu":
            hashes = "gba_hvd.data.hashing.hash_strings(...).view(numpy.int64)"
            hint = f" (strings of a hashed table as hashes: {hashes})"
            if all(isinstance(one, str) and re.fullmatch("-?[0-9]+", one) for one in array.reshape(-1).tolist()):
                hint = f" (numbers without quotes; or, where they were strings in the training, their hashes: {hashes})"
        if array.dtype.kind == "f":
            hint = " (a column of whole numbers with missing values becomes one of floats)" * bool(
                np.isnan(array).any()
            )
        raise BadInput(f"field {name!r}: expected {field['dtype']}, got {array.dtype}{hint}")
    if dtype in (torch.int32, torch.int64) and array.size:
        about = torch.iinfo(dtype)
        if int(array.min()) < about.min or int(array.max()) > about.max:
            is_hash = dtype == torch.int64 and array.dtype == np.uint64
            hint = " (view hashes of a hashed table as int64: array.view(numpy.int64))" * is_hash
            at = int(array.argmax() if int(array.max()) > about.max else array.argmin())
            where = _sample_of(field, array, at)
            raise BadInput(f"field {name!r}: {where}{array.flat[at]} does not fit into {field['dtype']}{hint}")
    wide = np.float64 if array.dtype.kind == "f" else np.int64
    given = torch.from_numpy(np.ascontiguousarray(array.astype(wide)))
    found = given.to(dtype)
    if dtype.is_floating_point:
        if not field.get("has_nan") and found.isnan().any():
            raise BadInput(
                f"field {name!r}: NaN, and the example that the model was saved with has none: "
                f"{_sample_of(field, array, int(np.isnan(array).argmax()))}expected a number, got NaN or nothing; fill "
                "it in, or save the model with an example that has one"
            )
        if len(over := given[found.isinf() & ~given.isinf()]):
            raise BadInput(f"field {name!r}: {over[0].item()} does not fit into {field['dtype']}")
        if len(infinite := found[found.isinf()]):
            raise BadInput(f"field {name!r}: expected finite numbers, got {infinite[0].item()}")
    return found


def _sample_of(field: Spec, array: np.ndarray, at: int) -> str:
    """The sample with value `at` of an array, in words; empty for bags, whose lists are one array."""
    return "" if field["is_bag"] else f"sample {np.unravel_index(at, array.shape)[0]}: "


def _kind(values: Sequence[Any]) -> str:
    return type(next((one for one in values if np.ndim(one) != 1), None)).__name__


def to_json(columns: Mapping[str, Any]) -> bytes:
    """A request as JSON: columns of numbers or lists."""
    plain = {name: one.tolist() if isinstance(one, np.ndarray) else one for name, one in columns.items()}
    return json.dumps(plain, separators=(",", ":")).encode()
