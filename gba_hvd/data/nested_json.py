"""Columns of JSON lines whose values are objects, and the jq program that makes plain columns of them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gba_hvd.data.json_lines import names_in

_MOST = 12  # new columns in one program: objects with many keys seldom mean a column for each
_LISTS = "a list of lists"
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def nested_columns(
    rows: Sequence[Mapping[str, Any]], *, first_line: int = 1, may_ignore: bool = True
) -> dict[str, str]:
    """By column whose first value is an object or a list of objects: where that is, and how to flatten it. An empty
    list is none.

    may_ignore: whether it can be left out with --ignore. Then lists of lists count, too: a model may take those, and a
    prepared dataset has none
    """
    found: dict[str, str] = {}
    for name in names_in(rows):
        numbered = enumerate(rows, first_line)
        at, first = next(((i, row[name]) for i, row in numbered if row.get(name) not in (None, [])), (0, None))
        kind = _kind(first)
        if kind and (may_ignore or kind != _LISTS):
            remedy = _remedy(rows, name, isinstance(first, list), may_ignore)
            found[name] = f"column {name!r} is {kind} on line {at}: {remedy}"
    return found


def _kind(value: Any) -> str:
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        return "a list of objects" if dict in kinds else _LISTS if list in kinds else ""
    return "an object" if isinstance(value, dict) else ""


def _remedy(rows: Sequence[Mapping[str, Any]], name: str, is_list: bool, may_ignore: bool) -> str:
    values = [value for row in rows for value in _items(row.get(name)) if isinstance(value, (dict, list))]
    paths = list(dict.fromkeys(path for value in values for path in _paths(value, ())))
    if not paths:
        what = "its lists are empty" if is_list else "the object is empty"
        return what + "; leave it out with --ignore" * may_ignore
    inner = f"{_of((name,))}[]?" if is_list else _of((name,))
    taken = {path: f"[{inner} | .{_of(path).lstrip('.')}?]" if is_list else inner + _of(path) for path in paths[:_MOST]}
    made = ", ".join(f"{_key('_'.join(map(str, (name, *path))))}: {value}" for path, value in taken.items())
    program = shlex.quote(f". + {{{made}}} | del({_of((name,))})")
    several = f" (the first {_MOST} of {len(paths)} keys)" if len(paths) > _MOST else ""
    return f"flatten it, for instance jq -c {program}{several}" + ", or leave it out with --ignore" * may_ignore


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else (value,)


def _paths(value: Mapping[str, Any] | list[Any], before: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Of the values that are no objects."""
    if isinstance(value, list):
        yield from ((i,) for i in range(len(value)))
        return
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _paths(inner, (*before, key))
        else:
            yield (*before, key)


def _key(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name)


def _of(path: Sequence[str | int]) -> str:
    """The path in jq's words: .device.os, .device."app-version", [0] of a list."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{_key(key)}" for key in path)
