"""What many schedules found, by kind of fault."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class SummaryLine:
    """Counts of one kind: planned and fired, schedules with it that ended well (survived) of those that fired it.

    lost: samples lost in schedules that fired it; wait_s: longest time without a step in them
    """

    planned: int = 0
    fired: int = 0
    schedules: int = 0
    survived: int = 0
    ended: int = 0  # of those that survived: the job ended with an error that it reported
    lost: int = 0
    wait_s: float = 0.0


def summarise(results: Iterable[Mapping[str, Any]]) -> dict[str, SummaryLine]:
    """By kind, and "all" for all schedules that ran."""
    lines: dict[str, SummaryLine] = {"all": SummaryLine()}
    for result in results:
        if result["skipped"]:
            continue
        record = result["record"]
        plan, well = record["plan"], not result["wrong"]
        lost = 0 if record["result"] is None else record["result"]["lost"]
        planned = [f["kind"] for f in (*plan["inside"], *plan["outside"]) if f["kind"] != "serve"]
        planned += [plan["tracking"]] if str(plan["tracking"]).startswith("tracking_") else []
        fired = [fault["kind"] for fault in record["fired"]]
        fired += [kind for kind in planned if kind == "slow"]  # it lasts, and leaves no record
        for kind in planned:
            lines.setdefault(kind, SummaryLine()).planned += 1
        for kind in fired:
            lines.setdefault(kind, SummaryLine()).fired += 1
        for line in (lines["all"], *(lines[kind] for kind in set(fired))):
            line.schedules += 1
            line.survived += well
            line.ended += well and record["exit_code"] != 0
            line.lost += lost
            line.wait_s = max(line.wait_s, result["standstill"]["seconds"])
        lines["all"].planned += len(planned)
        lines["all"].fired += len(fired)
    return lines


def table(lines: Mapping[str, SummaryLine]) -> str:
    """Markdown."""
    rows = ["| fault | planned | fired | schedules | survived | samples lost | longest time without a step |"]
    rows.append("|---|---|---|---|---|---|---|")
    for kind in sorted(lines, key=lambda kind: (kind == "all", kind)):
        line = lines[kind]
        survived = f"{line.survived}" + (f" ({line.ended} by ending with an error)" if line.ended else "")
        rows.append(
            f"| {kind} | {line.planned} | {line.fired} | {line.schedules} | {survived} | {line.lost} "
            f"| {line.wait_s:.1f} s |"
        )
    return "\n".join(rows)


def load(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((out / "results").glob("*.json"))]


def report(out: Path) -> str:
    """The table, and what failed."""
    results = load(out)
    replays = [r["record"]["replay"] for r in results if r["record"]["replay"]]
    done = [replay for replay in replays if replay.get("replayed") and "wrong" not in replay]
    text = [table(summarise(results)), ""]
    worst = max((replay["worst"] for replay in done), default=0.0)
    text.append(f"{len(done)} of {len(replays)} traces were computed again, off by {worst:.1e} at most.")
    skipped = [r for r in results if r["skipped"]]
    if skipped:
        text.append(f"{len(skipped)} were skipped: {skipped[0]['skipped']}.")
    text += [f"seed {r['seed']} failed: {'; '.join(r['wrong'])}" for r in results if r["wrong"]]
    return "\n".join(text)
