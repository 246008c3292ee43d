"""Ids and numbers back to values as an input has them: an example of raw rows for those who have the encoded ones.

What an encoding forgets is made up: the text of a hash, the date of an hour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from gba_hvd.data import times
from gba_hvd.data.encoding import Encoders, Scaler, VocabularyEncoder
from gba_hvd.data.recipe import Categorical, Identity, Part, Recipe
from gba_hvd.errors import BadInput

_MONDAY = datetime(2024, 1, 1)


def decoded_columns(recipe: Recipe, encoders: Encoders, columns: Mapping[str, Any], n: int) -> dict[str, list[Any]]:
    """Raw columns of n samples. columns: some of the fields' ids, and `dense` or its columns by name."""
    found: dict[str, list[Any]] = {}
    for field in recipe.categorical:
        ids = columns.get(field.name, [[] if field.multi_valued else 0] * n)
        if field.part is None:
            found[field.name] = [_raw(field, encoders, one) for one in ids]
        elif field.time_column not in found:
            parts = {one.part: columns.get(one.name, [0] * n) for one in recipe.categorical
                     if one.time_column == field.time_column}  # fmt: skip
            found[field.time_column] = [
                _time({part: int(ids[i]) for part, ids in parts.items() if part is not None}, field.time_format)
                for i in range(n)
            ]
    for i, number in enumerate(recipe.numeric):
        dense = columns.get("dense")
        values = columns.get(number.name, [0.0] * n if dense is None else _of_dense(dense, i, number.name))
        found[number.name] = [_number(encoders.numeric[number.name], float(one)) for one in values]
    return found


def _of_dense(dense: Any, i: int, name: str) -> list[Any]:
    if narrow := [len(row) for row in dense if len(row) <= i]:
        raise BadInput(f"encoder: {name!r} is column {i} of dense, and the example has {narrow[0]} columns there")
    return [row[i] for row in dense]


def _raw(field: Categorical, encoders: Encoders, ids: Any) -> Any:
    if not field.multi_valued:
        return _value(field, encoders, int(ids))
    values = [_value(field, encoders, int(one)) for one in ids]
    return values if field.separator is None else field.separator.join(map(str, values))


def _value(field: Categorical, encoders: Encoders, number: int) -> str | int:
    if isinstance(field.encoding, Identity):
        return number + field.encoding.offset
    if number == 0:
        return ""
    encoder = encoders.tables[field.of_table]
    if isinstance(encoder, VocabularyEncoder) and number >= encoder.rows:
        raise BadInput(
            f"encoder: its table {field.of_table!r} has {encoder.rows:,} ids, and the example has id {number:,}: it is "
            "of other data than the model was trained on"
        )
    return str(encoder.values[number - 1]) if isinstance(encoder, VocabularyEncoder) else f"text_{number}"


def _number(scaler: Scaler, encoded: float) -> float:
    """With no more digits than its encoding needs: many near 0, where the mean of a fitted column is."""
    value = encoded * scaler.std + scaler.mean
    value = math.expm1(value) if scaler.column.transform == "log" else value
    for digits in (6, 9, 12):
        short = float(f"{value:.{digits}g}")
        if abs(float(scaler.encode(np.array([short]))[0]) - encoded) <= 1e-5 * abs(encoded):
            return short
    return value


def _time(parts: Mapping[Part, int], written: str) -> str | int:
    time = _MONDAY + timedelta(days=parts.get("weekday", 0), hours=parts.get("hour", 0))
    if written == times.ISO:
        return time.isoformat()
    if written in (times.UNIX, times.UNIX_MS):
        seconds = int(np.datetime64(time, "s").astype(np.int64))
        return seconds * (1 if written == times.UNIX else 1000)
    return time.strftime(written)
