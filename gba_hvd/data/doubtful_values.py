"""Values that a reader may have made of a text that is an id: the number 7 of "007", NaN of "NA".

Readers that guess types, such as pandas for CSV, do so. It matters where a vocabulary has such texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_NUMBER = r"^ *[+-]?[0-9]+(\.[0-9]*)? *$"
_AS_PRINTED = r"^(-?0|-?[1-9][0-9]*|-?(0|[1-9][0-9]*)\.[0-9]*[1-9])$"
_MISSING = (
    "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL",
    "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip


def _numbers(texts: pa.Array) -> Any:
    as_printed = pc.match_substring_regex(texts, _AS_PRINTED)
    return pc.and_not(pc.match_substring_regex(texts, _NUMBER), as_printed)


_TEXTS: dict[str, Callable[[pa.Array], Any]] = {
    "number": _numbers,
    "boolean": lambda texts: pc.is_in(texts, pa.array(["True", "TRUE", "False", "FALSE"], texts.type)),
    "NaN": lambda texts: pc.is_in(texts, pa.array(_MISSING, texts.type)),
}
_DTYPES = {"number": "iuf", "boolean": "b", "NaN": "f"}  # kinds of numpy
_VALUES: dict[str, Callable[[pa.Array], Any]] = {
    "number": lambda texts: pc.cast(pc.utf8_trim(texts, " +"), pa.float64()),
    "boolean": lambda texts: pc.cast(pc.is_in(texts, pa.array(["True", "TRUE"], texts.type)), pa.float64()),
    "NaN": lambda texts: pa.nulls(len(texts), pa.float64()),
}


@dataclass(frozen=True, slots=True)
class TextsReadAs:
    """The texts of a vocabulary that a reader takes for values of a kind, and that no such value is printed as.

    kind: "number", "boolean" or "NaN"
    values: float64 [n], sorted: what a reader makes of each text (of a boolean 0 or 1)
    texts: [n]
    """

    kind: str
    values: npt.NDArray[np.float64]
    texts: pa.Array

    @classmethod
    def of(cls, kind: str, vocabulary: pa.Array) -> TextsReadAs:
        texts = vocabulary.filter(_TEXTS[kind](vocabulary))
        values = _VALUES[kind](texts).to_numpy(zero_copy_only=False)
        order = np.argsort(values, kind="stable")
        return cls(kind, values[order], texts.take(pa.array(order)))

    def first_in(self, column: Any) -> tuple[Any, str] | None:
        """The first value of a column that is one of these, and its text; None if there is none."""
        if not len(self.texts):
            return None
        found = _of_kind(self.kind, column)
        wanted = np.fromiter(map(_as_float, found), np.float64) if isinstance(found, list) else found.astype(np.float64)
        at = np.searchsorted(self.values, wanted).clip(max=len(self.values) - 1)
        is_one = (self.values[at] == wanted) | (np.isnan(self.values[at]) & np.isnan(wanted))
        for i in np.flatnonzero(is_one):
            value = found[i]
            return value.item() if isinstance(value, np.generic) else value, str(self.texts[int(at[i])])
        return None


def _of_kind(kind: str, column: Any) -> list[Any] | npt.NDArray[Any]:
    """The values of this kind; NaN may be among numbers."""
    if isinstance(column, (pa.Array, pa.ChunkedArray)):
        column = column.drop_null().to_numpy(zero_copy_only=False) if _kind_of_type(column.type) == kind else []
    dtype = getattr(column, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind in "iufb":
        return np.asarray(column) if dtype.kind in _DTYPES[kind] else []
    return [value for value in column if _kind(value) == kind]


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf


def _kind_of_type(type: pa.DataType) -> str:
    if pa.types.is_boolean(type):
        return "boolean"
    return "number" if pa.types.is_integer(type) or pa.types.is_floating(type) else ""


def _kind(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "boolean"
    if isinstance(value, (float, np.floating)) and math.isnan(value):
        return "NaN"
    return "number" if isinstance(value, (int, float, np.integer, np.floating)) else ""
