"""What troubles a job, in words for `gba-hvd status`: its newest checkpoint, what cannot be done now, its warnings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

_FAILED = ("checkpoint_failed", "checkpoint_late")


def health_facts(report: Mapping[str, Any], now_s: float) -> list[tuple[str, str]]:
    """As (word, sentence). Empty where the job's board has nothing of it."""
    health = report.get("health")
    if not health:
        return []
    lines = [("newest checkpoint", _checkpoint_words(health, now_s))] if report.get("checkpoints") else []
    lines += [("problem", text) for text in health["problems"]]
    if health["n"]:
        of = "so far" if health["chief"] else "of this host's leader so far; rank 0's host shows the job's"
        over = f", {health['over']:,} of them over" if health["over"] else ""
        lines.append(("warnings", f"{health['n']:,}{over}, {of}"))
    if not health["chief"]:  # what ends a warning is reported to rank 0 alone
        return lines
    return lines + [("warning", _warning_words(one)) for one in reversed(health["standing"])]


def _checkpoint_words(health: Mapping[str, Any], now_s: float) -> str:
    newest = health["checkpoint"]
    if newest is None:
        words = "none yet" if health["chief"] else "rank 0's host shows it"
    elif newest["unix_s"] is None:
        words = f"step {newest['step']:,}, which this launch resumed from"
    else:
        ago = f"{max(0.0, now_s - newest['unix_s']):,.0f} s ago"
        words = f"step {newest['step']:,}, saved {ago}"
    failing = [one for one in health["standing"] if one["kind"] in _FAILED]
    if failing and health["chief"]:
        words += f"; none was saved since {moment(min(one['since_unix_s'] for one in failing))}, see the warning"
    return words


def _warning_words(one: Mapping[str, Any]) -> str:
    """`[checkpoint failed] x 30, 12:53:04 to 12:59:31, step 1,586: ...`"""
    first, last = moment(one["since_unix_s"]), moment(one["unix_s"])
    when = f" x {one['n']:,}, {first} to {last}" if one["n"] > 1 else f" {last}"
    return f"[{one['kind'].replace('_', ' ')}]{when}, step {one['step']:,}: {one['message']}"


def moment(unix_s: float) -> str:
    """A time of day, with the date unless it is today's."""
    then = time.localtime(unix_s)
    today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", then)
