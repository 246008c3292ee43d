"""What the notes of workers and follower say: lag by step, samples/s, and whether what was served was published."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .published import Published

FULL_LOADS = ("a follower started", "the job saved under a new claim", "the job began a new base")


def steps_in(notes: Path) -> dict[int, float]:
    """When each step was applied (monotonic, s): on the first worker that noted it."""
    found: dict[int, float] = {}
    for path in notes.iterdir():
        if not path.name.isdigit():
            continue
        for line in path.read_text().split("\n")[:-1]:  # what is not a whole line is not there yet
            step, at = line.split()
            found[int(step)] = min(float(at), found.get(int(step), math.inf))
    return found


def samples_per_s(steps: Mapping[int, float], began_s: float, until_s: float, global_batch: int) -> float:
    """Of the steps that were applied between these times; nan where there are fewer than two."""
    times = sorted(at for at in steps.values() if began_s <= at <= until_s)
    return global_batch * (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else math.nan


def lags(
    steps: Mapping[int, float], updates: Sequence[Mapping[str, Any]], began_s: float, until_s: float
) -> np.ndarray:
    """Seconds from a step until the follower has applied an update of it or of a later one; of steps between the times.

    updates: ascending in time. Of steps that no update has, inf.
    """
    reached = np.maximum.accumulate([update["step"] for update in updates]) if updates else np.empty(0, np.int64)
    served = np.array([*(update["at"] for update in updates), math.inf])
    mine = [(step, at) for step, at in sorted(steps.items()) if began_s <= at <= until_s]
    first = np.searchsorted(reached, [step for step, _ in mine])
    found: np.ndarray = served[first] - np.array([at for _, at in mine])
    return found


def spread(seconds: np.ndarray) -> dict[str, float]:
    if not len(seconds):
        return {}
    p50, p95 = np.percentile(seconds, [50, 95])
    return {"p50_s": float(p50), "p95_s": float(p95), "max_s": float(seconds.max())}


def full_loads(updates: Sequence[Mapping[str, Any]], claim_of: Callable[[str], int]) -> dict[str, int]:
    """Updates that read all rows, by their cause. claim_of: which claim of the job made a checkpoint, by its name"""
    found = dict.fromkeys(FULL_LOADS, 0)
    before: Mapping[str, Any] = {}
    for update in updates:
        if update["is_full"] and update["pid"] != before.get("pid"):
            found["a follower started"] += 1
        elif update["is_full"] and claim_of(update["name"]) != claim_of(before["name"]):
            found["the job saved under a new claim"] += 1
        elif update["is_full"]:
            found["the job began a new base"] += 1
        before = update
    return found


def flaws_of(
    checkpoints: Collection[Published], updates: Sequence[Mapping[str, Any]], answers: Mapping[str, int], trained: str
) -> dict[str, str]:
    """What is wrong with what was served, by kind; {}: nothing.

    answers: requests by digest of their answer. trained: digest of the state that the job ended with
    """
    found: dict[str, str] = {}
    by_name = {one.name: one for one in checkpoints}
    if unread := [one for one in checkpoints if one.flaw]:
        found["checkpoints that cannot be opened"] = "; ".join(f"{one.name}: {one.flaw}" for one in unread)
    other = [update["name"] for update in updates if by_name[update["name"]].state != update["state"]]
    if other:
        found["updates whose state is not that of their checkpoint"] = ", ".join(other)
    steps: dict[str, set[int]] = {}
    for one in checkpoints:
        steps.setdefault(one.answer, set()).add(one.step)
    if mixed := {answer: n for answer, n in answers.items() if answer not in steps}:
        found["answers of no checkpoint"] = f"{sum(mixed.values())} of {sum(answers.values())} requests"
    if several := [answer for answer in answers if len(steps.get(answer, ())) > 1]:
        found["answers that several steps give"] = str(len(several))
    newest = next(iter(checkpoints), None)
    if newest is None or newest.state != trained:
        found["lost"] = "the newest checkpoint is not the state that the job ended with"
    if not updates or newest is None or updates[-1]["name"] != newest.name:
        found["behind"] = "the follower did not end with the newest checkpoint"
    return found
