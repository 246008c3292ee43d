"""Values that a reader may have made of a text that is an id: the number 7 of "007", NaN of "NA".

Readers that guess types, such as pandas for CSV, do so. It matters where a vocabulary has such texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
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


def text_read_as(kind: str, vocabulary: pa.Array) -> str | None:
    """The first text of a vocabulary that a reader takes for such a value, and that no such value is printed as.

    kind: "number", "boolean" or "NaN"
    """
    at = pc.index(_TEXTS[kind](vocabulary), True).as_py()
    return None if at < 0 else str(vocabulary[at])


def first_of(kind: str, values: Any) -> Any:
    """The first value of this kind in a column, None if there is none."""
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        values = values.drop_null().to_pylist() if _kind_of_type(values.type) == kind else []
    return next((one for one in values if _kind(one) == kind), None)


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
