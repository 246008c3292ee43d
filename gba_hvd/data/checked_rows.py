"""Raw rows to checked rows: labels are there, numbers finite, identity ids in range; other rows are malformed.

Nothing is fitted here and nothing depends on other rows; ids of vocabularies and hashes are made in `encoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gba_hvd.data import times
from gba_hvd.data.bad_rows import BadRows
from gba_hvd.data.list_columns import flattened, is_list
from gba_hvd.data.raw_rows import RawRows
from gba_hvd.data.recipe import Categorical, Identity, Part, Recipe
from gba_hvd.errors import BadInput

_ONE, _ZERO = ("1", "1.0", "true", "True"), ("0", "0.0", "false", "False")
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Values:
    """Values of one categorical column.

    flat:    a string array without nulls, missing is ""; for an identity field int64 [m], the ids
    lengths: int64 [n] values per row of a multi-valued column, which sum to m; None when each row has one
    """

    flat: pa.Array | npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64] | None = None

    def missing(self) -> npt.NDArray[np.bool_]:
        """bool [n]: rows that have no value."""
        mask: npt.NDArray[np.bool_]
        if self.lengths is not None:
            mask = self.lengths == 0
        elif isinstance(self.flat, np.ndarray):  # an identity field: a row without an id is malformed
            mask = np.zeros(len(self.flat), dtype=bool)
        else:
            mask = _to_numpy(pc.equal(pc.binary_length(self.flat), 0))
        return mask

    def keep(self, mask: npt.NDArray[np.bool_]) -> Values:
        of_values = mask if self.lengths is None else np.repeat(mask, self.lengths)
        flat = self.flat[of_values] if isinstance(self.flat, np.ndarray) else self.flat.filter(pa.array(of_values))
        return Values(flat, None if self.lengths is None else self.lengths[mask])


@dataclass(frozen=True)
class CheckedRows:
    """n sound rows. label: uint8 [n], 0 or 1, or float32 [n, labels]. numeric: float64 [n] by column, NaN: missing."""

    positions: npt.NDArray[np.int64]
    label: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    numeric: dict[str, npt.NDArray[np.float64]]
    categorical: dict[str, Values]

    def __len__(self) -> int:
        return len(self.label)

    def keep(self, mask: npt.NDArray[np.bool_]) -> CheckedRows:
        numeric = {name: values[mask] for name, values in self.numeric.items()}
        categorical = {name: values.keep(mask) for name, values in self.categorical.items()}
        return CheckedRows(self.positions[mask], self.label[mask], numeric, categorical)


def check_rows(raw: RawRows, recipe: Recipe, bad: BadRows) -> CheckedRows:
    """Rows with a flaw are reported once, with their first flaw, and left out."""
    flaws: dict[int, str] = {}
    rows = _convert(raw, recipe, flaws)
    if not flaws:
        return rows
    sound = raw.without(flaws, bad)
    bad.check()
    return _convert(sound, recipe, {})


def _convert(raw: RawRows, recipe: Recipe, flaws: dict[int, str]) -> CheckedRows:
    labels = []
    for name in recipe.labels:
        with _column(raw, name):
            labels.append(_label(raw.columns[name], name, recipe, flaws))
    label = labels[0] if recipe.is_plain_label else np.stack([one.astype(np.float32) for one in labels], axis=1)
    return CheckedRows(raw.positions, label, *features_of(raw, recipe, flaws))


def features_of(
    raw: RawRows, recipe: Recipe, flaws: dict[int, str]
) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, Values]]:
    """(`CheckedRows.numeric`, its `categorical`). What is wrong in which row is added to `flaws`."""
    numeric, categorical = {}, {}
    for n in recipe.numeric:
        with _column(raw, n.name):
            numeric[n.name] = _numbers(raw.columns[n.name], n.name, flaws)
    for c in recipe.categorical:
        with _column(raw, c.column):
            categorical[c.name] = _values(raw, c, flaws)
    return numeric, categorical


@contextmanager
def _column(raw: RawRows, name: str) -> Iterator[None]:
    """A Parquet column may have any type; what Arrow cannot convert is an error that names it."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        found = f"column {name!r} is of type {raw.columns[name].type}, which cannot be used"
        raise BadInput(
            f"{raw.file}: {found} ({error}); expected text or numbers, or in a --multi field lists of them"
        ) from error


def _label(column: pa.Array, name: str, recipe: Recipe, flaws: dict[int, str]) -> npt.NDArray[Any]:
    if recipe.label_from is not None or name in recipe.ratings:
        numbers = _numbers(column, f"label {name}", flaws)
        for row in np.flatnonzero(np.isnan(numbers)):
            flaws.setdefault(int(row), f"label {name} is missing, expected a number")
        if name in recipe.ratings or recipe.label_from is None:
            return numbers
        return (numbers >= recipe.label_from).astype(np.uint8)
    strings = _strings(column)
    ones = _to_numpy(pc.is_in(strings, pa.array(_ONE)))
    zeros = _to_numpy(pc.is_in(strings, pa.array(_ZERO)))
    expected = (
        f"expected 0 or 1, or false or true; of -1 and 1 --label-from 1 makes them; write other words as these first "
        f"(of ratings --label-from N makes it; --rating {name} keeps the number)"
    )
    for row in np.flatnonzero(~(ones | zeros)):
        shown = _shown(strings[row]) if strings[row].as_py() else "missing"
        flaws.setdefault(int(row), f"label {name} is {shown}, {expected}")
    return ones.astype(np.uint8)


def _numbers(column: pa.Array, name: str, flaws: dict[int, str]) -> npt.NDArray[np.float64]:
    def expect_number(row: int, value: str) -> None:
        flaws.setdefault(row, f"{name} is {value}, expected a number or nothing")

    numbers = _cast(_null_if_empty(column), pa.float64(), expect_number)
    values: npt.NDArray[np.float64] = numbers.to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(np.abs(values) > _LARGEST):
        expect_number(int(row), _shown(column[row]))
    return values


def _values(raw: RawRows, field: Categorical, flaws: dict[int, str]) -> Values:
    column = raw.columns[field.column]
    if field.part is not None:
        return _part(column, field, field.part, flaws)
    where = f"{raw.file}: column {field.name!r}"
    if is_list(column.type) != field.is_list:
        raise BadInput(f"{where} {_how_to_take(field, is_list(column.type))}")
    if field.separator is not None:
        column = pc.split_pattern(_id_texts(column, where), field.separator)
    lengths: npt.NDArray[np.int64] | None = None
    if field.multi_valued:
        column, starts = flattened(column)
        lengths = np.diff(starts)
        if not field.is_list:
            column, lengths = _without_empty_ends(column, lengths)
    if isinstance(field.encoding, Identity):
        return _identity(column, lengths, field, field.encoding, flaws)
    return Values(_id_texts(column, where), lengths)


def _without_empty_ends(values: pa.Array, lengths: npt.NDArray[np.int64]) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Of cells that were cut: "" has no value, "a|b|" two, and "a||b" three, of which one is missing."""
    ends = np.cumsum(lengths) - 1
    is_empty = _to_numpy(pc.equal(pc.binary_length(values), 0))[ends]
    kept = np.ones(len(values), dtype=bool)
    kept[ends[is_empty]] = False
    return values.filter(pa.array(kept)), lengths - is_empty


def _how_to_take(field: Categorical, is_list: bool) -> str:
    name = field.name
    if is_list:
        without = "" if field.separator is None else ", without a separator"
        return f"has lists: --multi {name} takes them{without} (in Python: Categorical({name!r}, is_list=True))"
    return (
        f"has single values, not lists: --multi '{name}=|' cuts text at each '|' (or what else stands between the "
        f"values), --categorical {name} takes each value whole"
    )


def _part(column: pa.Array, field: Categorical, part: Part, flaws: dict[int, str]) -> Values:
    def expect_time(row: int, value: str) -> None:
        flaws.setdefault(row, f"{field.column} is {value}, expected a time ({field.time_format})")

    parts = times.part_of(_null_if_empty(column), field.time_format, part, expect_time)
    for row in np.flatnonzero(_to_numpy(pc.is_null(parts))):
        expect_time(int(row), "missing")
    return Values(_to_numpy(pc.fill_null(parts, 0)).astype(np.int64))


def _identity(
    column: pa.Array,
    lengths: npt.NDArray[np.int64] | None,
    field: Categorical,
    encoding: Identity,
    flaws: dict[int, str],
) -> Values:
    of_row = np.arange(len(column)) if lengths is None else np.repeat(np.arange(len(lengths)), lengths)
    column = _null_if_empty(column)
    lowest, highest = encoding.offset, encoding.offset + encoding.rows - 1

    def expect_id(at: int, value: str) -> None:
        flaws.setdefault(int(of_row[at]), f"{field.name} is {value}, expected an integer from {lowest} to {highest}")

    integers = _cast(column, pa.int64(), expect_id)
    for at in np.flatnonzero(_to_numpy(pc.is_null(integers))):
        expect_id(int(at), _shown(column[at]))
    values = _to_numpy(pc.fill_null(integers, lowest))
    for at in np.flatnonzero((values < lowest) | (values > highest)):
        expect_id(int(at), str(values[at]))
    return Values(values - encoding.offset, lengths)


def _cast(column: pa.Array, type: pa.DataType, report: Callable[[int, str], None]) -> pa.Array:
    """Cast; what cannot be cast is reported and becomes null."""
    return times.convert(column, lambda some: pc.cast(some, type), lambda at, value: report(at, _shown(value)))


def _id_texts(column: pa.Array, where: str) -> pa.Array:
    """The text of each id, "" where it is missing. A whole float has the text of the integer, so a column has the same
    ids where some are missing and a writer makes floats of it. NaN is missing.

    Raises BadInput for a whole number that the type may have rounded.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not pa.types.is_floating(column.type):
        return _strings(column)
    numbers = _to_numpy(column)
    whole = np.isfinite(numbers) & (np.trunc(numbers) == numbers)
    bits = np.finfo(numbers.dtype).nmant + 1
    if (rounded := numbers[whole & (np.abs(numbers) >= 2.0**bits)]).size:  # 2**53 may have been 2**53 + 1
        raise BadInput(
            f"{where}: ids are floats, which have changed whole numbers from 2**{bits} on (here "
            f"{float(rounded[0]):.17g}): give them as int64 (pandas: Int64, where some are missing) or as text"
        )
    integers = pa.array(np.where(whole, numbers, 0).astype(np.int64))
    others = pa.array(numbers, mask=np.isnan(numbers))
    return _strings(pc.if_else(pa.array(whole), pc.cast(integers, pa.string()), pc.cast(others, pa.string())))


def _strings(column: pa.Array) -> pa.Array:
    if column.type != pa.string():
        column = pc.cast(column, pa.string())
    return pc.fill_null(column, "") if column.null_count else column


def _null_if_empty(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        empty = pc.equal(pc.binary_length(column), 0)
        return pc.if_else(empty, pa.scalar(None, column.type), column)
    return column


def _shown(value: pa.Scalar) -> str:
    text = repr(value.as_py())
    return text if len(text) <= 40 else text[:37] + "..."


def _to_numpy(column: pa.Array) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return array
