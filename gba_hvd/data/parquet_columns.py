"""Columns of a Parquet row group as the arrays of a batch, and what is refused: missing values, other types.

ids -> int64, lists apart; dense, labels -> float32
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from gba_hvd.batch import Bag
from gba_hvd.data.hashing import hash_strings, is_text
from gba_hvd.data.list_columns import flattened, is_list, one_array
from gba_hvd.data.parquet_files import ParquetFile
from gba_hvd.errors import BadInput

_WHOLE_IN_FLOAT32 = 1 << 24  # whole numbers up to this one
_FILL_IN = "Fill them in, or use gba-hvd data prepare, which has a substitute for them"
_FILL_IN_NUMBERS = "Fill them in, or give missing_becomes= a number for this column"
_WITHOUT_LABEL = "Leave these samples out, or use gba-hvd data prepare, which reports them as malformed"

Ids = np.ndarray | tuple[np.ndarray, np.ndarray]


def type_of(schema: pa.Schema, column: str, url: str) -> pa.DataType:
    """Raises BadInput for a column that is not there."""
    if column not in schema.names:
        in_path = f"; {column}=... in its path is no column here" if f"/{column}=" in url else ""
        raise BadInput(f"ParquetStream: {url} has no column {column!r}; it has {', '.join(schema.names)}{in_path}")
    return schema.field(column).type


def check_ids(schema: pa.Schema, column: str, url: str, hashed: bool) -> None:
    kind = type_of(schema, column, url)
    value = kind.value_type if is_list(kind) else kind
    if hashed and not is_text(value):
        raise BadInput(
            f"ParquetStream: {url}: column {column!r} of hashed= has {kind}, expected strings (or lists of them). "
            "Whole numbers are ids as they are: leave it out of hashed"
        )
    if not hashed and not pa.types.is_integer(value):
        raise BadInput(
            f"ParquetStream: {url}: column {column!r} has {kind}, and ids are whole numbers (or lists of them). "
            f"{_instead(value, column)}"
        )


def _instead(kind: pa.DataType, column: str) -> str:
    if is_text(kind):
        return (
            f"hashed=[{column!r}] makes 64-bit ids of strings, for a table with keys='hash64'; gba-hvd data prepare "
            "makes ids below the rows of a table, by vocabulary or hash"
        )
    if pa.types.is_floating(kind):
        return (
            "pandas makes floats of whole numbers where some are missing: fill those in and write the column as int64 "
            "(floats have changed numbers above 2**53), or use gba-hvd data prepare, where a missing id is id 0"
        )
    return "Write the column as int64"


def check_numbers(schema: pa.Schema, column: str, url: str, *, may_be_missing: bool = False) -> None:
    kind = type_of(schema, column, url)
    if may_be_missing and pa.types.is_null(kind):  # all are
        return
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise BadInput(
            f"ParquetStream: {url}: column {column!r} has {kind}, expected numbers. Write it as float32, or "
            "use gba-hvd data prepare, which also reads times (--timestamp)"
        )


def refuse_nulls(file: ParquetFile, column: str, role: Literal["ids", "dense", "label"]) -> None:
    """Raises BadInput where the file's footer says that values of a column are missing; lists may be."""
    if is_list(type_of(file.schema, column, file.url)) or (found := file.first_null(column)) is None:
        return
    group, n_missing = found
    where = f"{file.url}, row group {group}, column {column!r}"
    what_to_do = {"ids": _FILL_IN, "dense": _FILL_IN_NUMBERS, "label": _WITHOUT_LABEL}[role]
    raise BadInput(_missing(where, n_missing, file.group_sizes[group], what_to_do))


def _missing(where: str, n_missing: int, n: int, what_to_do: str) -> str:
    return f"{where}: {n_missing} of {n} values are missing. {what_to_do}"


def ids_of(column: pa.ChunkedArray, where: str) -> Ids:
    """int64 [n]; of lists (values int64 [v], starts int64 [n + 1]), where a list that is null is empty.

    A string becomes its hash (`hash_strings`). An unsigned 64-bit id, as hashes are, is the signed one of the same
    bits. Raises BadInput for a null.
    """
    if not is_list(column.type):
        return _int64(_without_nulls(column, where))
    values, starts = flattened(one_array(column))
    return _int64(_without_nulls(pa.chunked_array([values]), where)), starts


def floats_of(column: pa.ChunkedArray, where: str, missing_becomes: float | None = None) -> np.ndarray:
    """float32 [n]. Raises BadInput for a value that is not finite in float32, and for a null.

    missing_becomes: what stands in place of a null or NaN
    """
    exact = _filled(column, missing_becomes) if missing_becomes is not None else _present(column, where)
    with np.errstate(over="ignore"):
        values: np.ndarray = exact.astype(np.float32)
    if len(bad := np.flatnonzero(~np.isfinite(values))):
        raise BadInput(
            f"{where}: {len(bad)} of {len(values)} values are NaN, infinite or beyond float32 (the first, at row "
            f"{bad[0]} of the row group, is {exact[bad[0]]}), and so would be the loss. Replace them in the file"
            + ("; for NaN missing_becomes= has a substitute" if np.isnan(values).any() else "")
        )
    return values


def _present(column: pa.ChunkedArray, where: str) -> np.ndarray:
    found: np.ndarray = _without_nulls(column, where, _FILL_IN_NUMBERS).to_numpy(zero_copy_only=False)
    return found


def _filled(column: pa.ChunkedArray, missing_becomes: float) -> np.ndarray:
    array = one_array(column)
    is_number = not (pa.types.is_boolean(array.type) or pa.types.is_null(array.type))
    numbers = array if is_number else array.cast(pa.float32())
    exact: np.ndarray = numbers.to_numpy(zero_copy_only=False)  # NaN for null
    if exact.dtype == np.float16:
        exact = exact.astype(np.float32)  # which the substitute may need
    return np.where(np.isnan(exact), missing_becomes, exact) if exact.dtype.kind == "f" else exact


def label_of(column: pa.ChunkedArray, where: str, is_rating: bool) -> np.ndarray:
    """float32 [n]. Raises BadInput for a null and for NaN; of ratings for what is not finite in float32, or a whole
    number that float32 does not hold, of others for what is not 0 or 1."""
    exact: np.ndarray = _without_nulls(column, where, _WITHOUT_LABEL).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        values: np.ndarray = exact.astype(np.float32)
    if (n_nan := int(np.isnan(values).sum())) > 0:
        raise BadInput(
            f"{where}: {n_nan} of {len(values)} labels are NaN, which is a value that is missing. {_WITHOUT_LABEL}"
        )
    if not is_rating:
        _refuse_no_clicks(exact, where)
        return values
    if len(bad := np.flatnonzero(np.isinf(values))):
        raise BadInput(
            f"{where}: {len(bad)} of {len(values)} labels are infinite or beyond float32 (the first, at row {bad[0]} "
            f"of the row group, is {exact[bad[0]]}). Correct them, or leave these samples out"
        )
    large = exact[np.abs(values) >= _WHOLE_IN_FLOAT32] if pa.types.is_integer(column.type) else exact[:0]
    if lost := [number for number in large.tolist() if int(np.float32(number)) != number]:
        raise BadInput(
            f"{where}: labels are float32, which has all whole numbers to {_WHOLE_IN_FLOAT32} only, and one is "
            f"{lost[0]}. An id belongs into `ids`; scale other numbers to a smaller range"
        )
    return values


def _refuse_no_clicks(labels: np.ndarray, where: str) -> None:
    if len(bad := np.flatnonzero((labels != 0) & (labels != 1))):
        raise BadInput(
            f"{where}: {len(bad)} of {len(labels)} labels are not 0 or 1 (the first, at row {bad[0]} of the row group, "
            f"is {labels[bad[0]]}). Correct them, or leave these samples out; a label that is any number, such as "
            "stars or a count, is named in ratings="
        )


def joined(parts: list[tuple[Ids, np.ndarray]], back: np.ndarray) -> Tensor | Bag:
    """Ids of one feature: of each part the samples `inside`, all brought into the order `back`."""
    if not isinstance(parts[0][0], tuple):
        return torch.from_numpy(np.concatenate([values[inside] for values, inside in parts])[back])
    taken, lengths = [], []
    for (values, starts), inside in parts:
        n = starts[inside + 1] - starts[inside]
        taken.append(values[_spans(starts[inside], n)])
        lengths.append(n)
    n = np.concatenate(lengths)
    begin, n = (np.cumsum(n) - n)[back], n[back]
    together = np.concatenate(taken)[_spans(begin, n)]
    return Bag(torch.from_numpy(together), torch.from_numpy(np.cumsum(n) - n))


def _without_nulls(column: pa.ChunkedArray, where: str, what_to_do: str = _FILL_IN) -> pa.Array:
    array = one_array(column)
    if array.null_count:
        raise BadInput(_missing(where, array.null_count, len(array), what_to_do))
    return array


def _int64(array: pa.Array) -> np.ndarray:
    values: Any = hash_strings(array) if is_text(array.type) else array.to_numpy(zero_copy_only=False)
    signed: np.ndarray = values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64)
    return signed


def _spans(begin: np.ndarray, n: np.ndarray) -> np.ndarray:
    """int64: begin[0], begin[0] + 1, ... n[0] of them, then those of begin[1], and so on."""
    spans: np.ndarray = np.arange(int(n.sum())) + np.repeat(begin - (np.cumsum(n) - n), n)
    return spans
