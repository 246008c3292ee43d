"""Tables and figures of the report, as plain values; the templates make HTML of them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_LONGEST_WORD = 41  # a word of so many characters may be broken; the name of a manifest has 29


@dataclass(frozen=True)
class Cell:
    """A text; before it a swatch of a colour, or instead of it a bar of so many percent."""

    text: str = ""
    colour: str | None = None
    bar: float | None = None


@dataclass(frozen=True)
class Table:
    """side: "r" of columns of numbers, else "l". marked: rows that stand out."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    sides: str
    marked: frozenset[int] = frozenset()
    note: str = ""


def table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[Any]],
    sides: str,
    marked: Iterable[int] = (),
    note: str = "",
) -> Table | None:
    """None without rows: a section with nothing to say is left out."""
    cells = [[cell if isinstance(cell, Cell) else Cell(str(cell)) for cell in row] for row in rows]
    return Table(title, headings, cells, sides, frozenset(marked), note) if cells else None


def breakable(text: str) -> list[tuple[str, bool]]:
    """Parts of a cell's text, and whether a line may break within: in long names of files only."""
    parts = re.split(rf"(\S{{{_LONGEST_WORD},}})", text)
    return [(part, bool(i % 2)) for i, part in enumerate(parts) if part]


def counted(n: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def figure(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def date(ms: float) -> str:
    """With the zone: a report may be made in another one than the run's."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(ms / 1000))


def time_of_day(unix_s: float) -> str:
    return time.strftime("%H:%M", time.localtime(unix_s))


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
