"""Durations and sizes in words, each in the unit that shows it."""

from __future__ import annotations

_DURATIONS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))  # powers of 1000, as disks and networks count


def duration(seconds: float) -> str:
    """`28.0 h`, `3.0 min`, `7.2 s`, `40 ms`."""
    number, unit = _in(seconds)
    return f"{number} {unit}"


def durations(low_s: float, high_s: float) -> str:
    """`15.3 to 71.2 h`, or `3.0 min to 1.4 h` where the units differ."""
    (low, unit), (high, its) = _in(low_s), _in(high_s)
    return f"{low} to {high} {its}" if unit == its else f"{low} {unit} to {high} {its}"


def size(n_bytes: float) -> str:
    """`1.2 TB`, `31.0 MB`, `7.2 kB`, `40 B`."""
    for scale, unit in _SIZES:
        if round(n_bytes / scale, 3) >= 1:
            return f"{n_bytes / scale:,.1f} {unit}"
    return f"{n_bytes:.0f} B"


def _in(seconds: float) -> tuple[str, str]:
    if 0 < seconds < 0.0005:
        return "under 1", "ms"
    for scale, unit in _DURATIONS:
        if round(seconds / scale, 3) >= 1:
            return f"{seconds / scale:,.1f}", unit
    return (f"{1000 * seconds:.0f}", "ms") if seconds > 0 else ("0", "s")
