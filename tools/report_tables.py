"""Tables and figures of the page that `gba-hvd report` writes. Every text is escaped here, unless it is `Html`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


class Html(str):
    """Text that is HTML already."""


def section(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], sides: str) -> str:
    rows = list(rows)
    if not rows:
        return ""
    kinds = [' class="n"' if side == "r" else "" for side in sides]
    head = "".join(f"<th{kind}>{escape(text)}</th>" for text, kind in zip(headings, kinds, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{_cell(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f"<section><h2>{escape(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></section>"
    )


def figure(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def _cell(text: Any) -> str:
    return text if isinstance(text, Html) else escape(str(text))


def date(ms: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ms / 1000))


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
