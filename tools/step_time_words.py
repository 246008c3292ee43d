"""What `gba-hvd status` shows of the time of steps in allreduce mode: who is the slowest, and what the others wait for.

The numbers are of the board of the host that is asked, see `gba_hvd.training.step_times`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

_SILENT_S, _SILENT_STEPS = 10.0, 5  # a step that takes longer than this, and than so many usual ones


def times_of(report: Mapping[str, Any], now_s: float | None = None) -> list[dict[str, Any]]:
    """By rank: {"rank", "seconds" per micro-batch, "micro_batches", "computing_s", "reading_s"} of a step; or none.

    "pid" is there of workers of the host that is asked. None of steps that were made long ago. now_s: default: now
    """
    times, now_s = report.get("step_times") or {}, time.time() if now_s is None else now_s
    if report.get("mode") != "allreduce" or _is_long(now_s - times.get("unix_s", now_s), times):
        return []
    pids = times.get("pids") or {}
    return [
        {"rank": rank, "seconds": computing_s / n if n else 0.0, "micro_batches": n, "computing_s": computing_s,
         "reading_s": reading_s, **({"pid": pids[str(rank)]} if str(rank) in pids else {})}
        for rank, n, computing_s, reading_s in sorted(times.get("by_rank") or ())
    ]  # fmt: skip


def step_time_facts(report: Mapping[str, Any], now_s: float) -> list[tuple[str, str]]:
    """As (word, sentence): that training stands still, or what a step in allreduce mode takes, where that is known."""
    listed, times = times_of(report, now_s), report.get("step_times") or {}
    lines = []
    silent_s = now_s - report.get("step_unix_s", now_s)
    if why := report.get("stands_still"):
        text = f"{why}, and a new world of workers forms; the last step was {silent_s:.0f} s ago"
        lines.append(("stands still", text))
    elif report.get("mode") == "allreduce" and report.get("step") and _is_long(silent_s, times):
        text = f"{silent_s:.0f} s ago: an evaluation, a pause, or a worker that hangs; the workers' logs say more"
        lines.append(("last step", text))
    if listed:
        lines += [
            ("step time", _whole(times)),
            ("waits for", _slowest(times, listed)),
            (f"rank {times['rank']}", _own(times)),
        ]
    return lines


def _is_long(seconds: float, times: Mapping[str, Any]) -> bool:
    usual_s: float = times.get("step_s", 0.0)
    return seconds > max(_SILENT_S, _SILENT_STEPS * usual_s)


def _whole(times: Mapping[str, Any]) -> str:
    n = times["steps"]
    mean = f", the mean of {n:,}" if n > 1 else ""
    return f"{_ms(times['step_s'])}{mean}; {times['samples_per_s']:,.0f} samples/s while steps are made"


def _slowest(times: Mapping[str, Any], listed: list[dict[str, Any]]) -> str:
    """What the whole step consists of, the largest part first."""
    exchange_s = max(0.0, times["step_s"] - times["slowest_s"])
    parts = [(exchange_s, f"{_ms(exchange_s)} the exchange and the update")]
    if len(listed) == 1:
        parts.append((times["slowest_s"], f"{_ms(times['slowest_s'])} the only worker{_reading(listed[0])}"))
    else:
        busy = {one["rank"]: one["computing_s"] + one["reading_s"] for one in listed}
        last = max(listed, key=lambda one: busy[one["rank"]])
        text = (
            f"{_ms(times['slowest_s'])} the slowest worker of each step, most of all rank {last['rank']} "
            f"({_ms(busy[last['rank']])}{_reading(last)}; the median worker {_ms(median(busy.values()))})"
        )
        parts.append((times["slowest_s"], text))
    return ", ".join(text for _, text in sorted(parts, reverse=True))


def _reading(worker: Mapping[str, Any]) -> str:
    return f", of which {_ms(worker['reading_s'])} waiting for batches" if worker["reading_s"] >= 0.0001 else ""


def _own(times: Mapping[str, Any]) -> str:
    """This worker's time in a step. Its wait for slower ones is in the first exchange after its part."""
    waiting_s = min(times["waiting_s"], times["rows_s"] + times["sum_s"])
    rows_s = max(0.0, times["rows_s"] - waiting_s)
    sum_s = times["sum_s"] - max(0.0, waiting_s - times["rows_s"])
    own_s = times["slowest_s"] - times["waiting_s"] - times["reading_s"]
    found = {
        "computing": own_s, "waiting for batches": times["reading_s"], "waiting for slower workers": waiting_s,
        "rows of other hosts": rows_s, "the sum of dense gradients": sum_s,
    }  # fmt: skip
    return ", ".join(f"{_ms(seconds)} {what}" for what, seconds in found.items() if seconds >= 0.0001)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
