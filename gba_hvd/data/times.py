"""Times of clicks to features: the hour of the day and the day of the week.

Hours are those written in the input; Unix times count as UTC.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from gba_hvd.data.recipe import Part

UNIX, UNIX_MS, ISO = "unix", "unix_ms", "iso"
_PATTERNS = {8: ("%y%m%d%H", "%Y%m%d"), 10: ("%Y%m%d%H",), 14: ("%Y%m%d%H%M%S",)}
_SECONDS = {UNIX: 1, UNIX_MS: 1000}
_FIRST_S, _LAST_S = 0, 4_102_444_800  # 1970 to 2100: what else is taken for a Unix time is none


def format_of(values: Sequence[str]) -> str | None:
    """How times are written, from some of them: unix, unix_ms, iso or a pattern of `strptime`; None if not known.

    Ten digits such as 2014102100 are a date and an hour where all values can be, else Unix seconds.
    """
    if not values:
        return None
    lengths = {len(value) for value in values}
    if all(value.isdigit() for value in values):
        for pattern in _PATTERNS.get(lengths.pop(), ()) if len(lengths) == 1 else ():
            if all(_parses(value, pattern) for value in values):
                return pattern
        for name, per_second in _SECONDS.items():
            if all(_FIRST_S < int(value) / per_second < _LAST_S for value in values):
                return name
        return None
    return ISO if all(_is_iso(value) for value in values) else None


def part_of(column: pa.Array, format: str, part: Part, report: Callable[[int, str], None]) -> pa.Array:
    """int64 [n]: hours 0 to 23, or days of the week 0 (Monday) to 6. What is no time is reported and becomes null.

    column: strings, numbers, or a type of time that Parquet knows
    """
    if not pa.types.is_timestamp(column.type) and not pa.types.is_date(column.type):
        strings = pc.cast(column, pa.string())
        column = convert(strings, lambda some: _times(some, format), lambda at, value: report(at, repr(value.as_py())))
    column = pc.cast(column, pa.timestamp("us"), safe=False) if not pa.types.is_timestamp(column.type) else column
    found = pc.hour(column) if part == "hour" else pc.day_of_week(column)
    return pc.cast(found, pa.int64())


def convert(
    column: pa.Array, to: Callable[[pa.Array], pa.Array], report: Callable[[int, pa.Scalar], None], start: int = 0
) -> pa.Array:
    """`to(column)`, which raises pa.ArrowInvalid for a value it cannot take: that one is reported and becomes null.

    Halves the array around such values, which are few.
    """
    try:
        return to(column)
    except pa.ArrowInvalid:
        if len(column) == 1:
            report(start, column[0])
            return pa.nulls(1, to(column[:0]).type)
    half = len(column) // 2
    left = convert(column[:half], to, report, start)
    return pa.concat_arrays([left, convert(column[half:], to, report, start + half)])


def _times(strings: pa.Array, format: str) -> pa.Array:
    """Timestamps. Raises pa.ArrowInvalid when one of them is none."""
    if strings.null_count:
        raise pa.ArrowInvalid("a missing time")
    if format in _SECONDS:
        seconds = pc.divide(pc.cast(strings, pa.int64()), _SECONDS[format])
        return pc.cast(pc.multiply(seconds, 1_000_000), pa.timestamp("us"))
    if format == ISO:
        # The hour as written: a zone behind it does not move it.
        local = pc.replace_substring_regex(strings, r"(Z|[+-]\d{2}(:?\d{2})?)$", "")
        local = pc.if_else(pc.less_equal(pc.binary_length(local), 10), strings, local)
        local = pc.replace_substring_regex(local, r"(\.\d{6})\d+$", r"\1")  # nanoseconds
        return pc.cast(local, pa.timestamp("us"))
    return pc.cast(pc.strptime(strings, format=format, unit="s"), pa.timestamp("us"))


def _parses(value: str, pattern: str) -> bool:
    try:
        datetime.strptime(value, pattern)
    except ValueError:
        return False
    return True


def _is_iso(value: str) -> bool:
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return len(value) >= 10
