"""JSON lines: an object a line, its values as the text they are in the file, or lists of such.

From here on they are columns like those of a CSV or Parquet file. A name that a line lacks is a missing value, as null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

_MOST_SHOWN = 40  # characters of a value in an error


class NumberText(str):
    """A number as it is written: 7 and 7.0 are two ids, and a large one loses no digit."""

    __slots__ = ()


def parse(data: bytes, wanted: Mapping[str, bool]) -> tuple[dict[str, pa.Array], dict[int, str]]:
    """Columns of whole lines, and what is wrong in which line, from 0. A line with a flaw has some row all the same.

    wanted: by column, whether lists are expected
    """
    rows, flaws = objects(data)
    n_not_json = len(flaws)
    columns = columns_of(rows, wanted, flaws)
    if len(flaws) > n_not_json:  # again, for errors with numbers as they are written
        rows, flaws = objects(data, number=NumberText)
        columns = columns_of(rows, wanted, flaws)
    return columns, flaws


def objects(data: bytes, *, number: Callable[[str], Any] | None = str) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The objects of whole lines, and what is wrong in which line; such a line has an empty object.

    number: makes a value of the text of a number, such as `str` or `NumberText`; None: a number of Python's
    """
    flaws: dict[int, str] = {}
    how: dict[str, Any] = (
        {} if number is None else dict.fromkeys(("parse_int", "parse_float", "parse_constant"), number)
    )
    decode = json.JSONDecoder(**how).decode
    return [_row(line, i, decode, flaws) for i, line in enumerate(data.split(b"\n")[:-1])], flaws


def columns_of(
    rows: Sequence[Mapping[str, Any]], wanted: Mapping[str, bool], flaws: dict[int, str]
) -> dict[str, pa.Array]:
    """Columns of objects. Adds to `flaws` the rows with a value that is not of its column's kind."""
    return {name: _column(rows, name, lists, flaws) for name, lists in wanted.items()}


def with_numbers(value: Any) -> Any:
    """A value of a line with numbers in place of `NumberText`."""
    if isinstance(value, NumberText):
        return json.loads(value)
    if isinstance(value, list):
        return [with_numbers(one) for one in value]
    return {name: with_numbers(one) for name, one in value.items()} if isinstance(value, dict) else value


def names_in(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names in these objects, in the order in which they come."""
    return tuple(dict.fromkeys(name for row in rows for name in row))


def _row(line: bytes, i: int, decode: Callable[[str], Any], flaws: dict[int, str]) -> dict[str, Any]:
    try:
        row = decode(line.decode("utf-8"))
        if rb"\u" in line:  # half a surrogate pair is no text
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        flaws[i] = f"not JSON: {error}"
        return {}
    if not isinstance(row, dict):
        flaws[i] = "not a JSON object with names and values"
        return {}
    return row


def _column(rows: Sequence[Mapping[str, Any]], name: str, lists_expected: bool, flaws: dict[int, str]) -> pa.Array:
    """Text, or lists of text where that is expected or nothing else comes. Values of the other kind are flaws."""
    values = [row.get(name) for row in rows]
    are_lists = [type(value) is list for value in values if value is not None]
    is_list = (any if lists_expected else all)(are_lists) if are_lists else lists_expected
    texts: list[str | list[str | None] | None] = []
    for i, value in enumerate(values):
        if value is None:
            texts.append(None)
        elif not is_list and type(value) in _TEXT:
            texts.append(_TEXT[type(value)](value))
        elif is_list and type(value) is list and all(item is None or type(item) in _TEXT for item in value):
            texts.append([None if item is None else _TEXT[type(item)](item) for item in value])
        else:
            texts.append(None)
            expected = "a list of values" if is_list else "one value"
            flaws.setdefault(i, f"{name} is {_shown(value)}, expected {expected}")
    return pa.array(texts, pa.list_(pa.string()) if is_list else pa.string())


def _shown(value: Any) -> str:
    """The beginning of a value as JSON, with the text of numbers that are `NumberText`."""
    return text if len(text := _as_json(value)) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _as_json(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_as_json, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(name)}: {_as_json(one)}' for name, one in value.items())}}}"
    return value if isinstance(value, NumberText) else json.dumps(value)


_TEXT: dict[type, Any] = {str: str, NumberText: str, bool: lambda value: "true" if value else "false"}
