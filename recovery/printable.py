"""Texts of others on a terminal and in a log: control characters are shown, not carried out."""

from __future__ import annotations

import re

# C0 without tab and newline, DEL, C1, and what changes the direction of text or ends a line for some readers
_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]")


def printable(text: str) -> str:
    """`text` with control characters as `\\x1b`. Further lines are indented: none looks like another record."""
    return re.sub(r"\n(?=\S)", "\n  ", _escaped(text))


def one_line(text: str) -> str:
    """As `printable`, with newlines as `\\n`: for a name or a value within a line."""
    return _escaped(text).replace("\n", "\\n")


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1] if ord(found[0]) < 256 else f"\\u{ord(found[0]):04x}", text)
