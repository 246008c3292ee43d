"""What share `auto` has of the better fixed mode: over a whole run, and in its worst minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .measure import Row

FIXED = ("allreduce", "gba")  # what auto chooses between
LEAST_MINUTES, FIRST_MINUTES = 4, 2  # of a run that is compared by minute; of it, those that do not count
GOAL_SHARE, GOAL_MINUTE = 0.98, 0.95


def compared(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """By scenario, for each run of auto and of both fixed modes that is long enough.

    share: of the samples/s of `better`, the fixed mode that was better over the run; worst_minute: the least share in
    a minute after the first two (`minute`, from 1), of those of `better_in_it`; of minutes in which either made steps
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for scenario, number in dict.fromkeys((row["scenario"], row["run"]) for row in rows):
        run = {row["mode"]: row for row in rows if (row["scenario"], row["run"]) == (scenario, number)}
        if not {"auto", *FIXED} <= run.keys() or len(run["auto"]["by_minute"]) < LEAST_MINUTES:
            continue
        better = max(FIXED, key=lambda mode: run[mode]["samples_per_s"])
        minutes = []
        for minute, rate in enumerate(run["auto"]["by_minute"][FIRST_MINUTES:], FIRST_MINUTES):
            in_it = max(FIXED, key=lambda mode: run[mode]["by_minute"][minute])
            if better_rate := run[in_it]["by_minute"][minute]:
                minutes.append((rate / better_rate, minute + 1, in_it))
        if not minutes:
            continue
        worst, minute, in_it = min(minutes)
        found.setdefault(scenario, []).append({
            "run": number, "share": run["auto"]["samples_per_s"] / run[better]["samples_per_s"], "better": better,
            "worst_minute": worst, "minute": minute, "better_in_it": in_it,
        })  # fmt: skip
    return found


def show(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    for scenario, runs in found.items():
        for one in runs:
            print(
                f"{scenario} run {one['run'] + 1}: auto has {one['share']:.3f} of {one['better']} over the whole run "
                f"(goal {GOAL_SHARE}); worst minute: {one['minute']}, {one['worst_minute']:.3f} of "
                f"{one['better_in_it']} (goal {GOAL_MINUTE})"
            )
