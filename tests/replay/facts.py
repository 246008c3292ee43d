"""Reading a trace: which steps there were, what each was made of, and why a job cannot be replayed."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What leaves values that no log of facts explains: rows that went down or came from a checkpoint, a step cut in two.
NOT_REPLAYED = ("rows_lost", "rows_restored", "resumed", "shard_steps_missed", "dense_state_old", "memory_left")

Run = tuple[int, int]
"""An epoch, and the segment of it: 0, but of streams of shards."""


class NotReplayable(Exception):
    """The job had something that a replay does not cover."""


class Wrong(AssertionError):
    """The trace contradicts itself, or what was promised."""


@dataclass
class Step:
    """One applied step.

    members:    (run, micro-batch, weight, the push or None in allreduce)
    generation: of the asynchronous mode that it was applied in; None in allreduce
    ahead:      workers read the values after it plus so many times the step
    """

    number: int
    scale: float
    lrs: list[float]
    row_lr: float
    members: list[tuple[Run, int, float, dict[str, Any] | None]]
    generation: int | None = None
    ahead: float = 0.0


@dataclass
class Facts:
    """Of one job: its first epoch's line, the line of each run, steps in order."""

    begin: dict[str, Any]
    orders: dict[Run, dict[str, Any]]
    steps: list[Step] = field(default_factory=list)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of all processes, in the order of time."""
    found = []
    for path in folder.glob("*.jsonl"):
        whole, _, _ = path.read_text().rpartition("\n")
        found += [json.loads(line) for line in whole.splitlines()]
    return sorted(found, key=lambda line: float(line["at"]))


def read(folder: Path) -> Facts:
    """Raises NotReplayable saying why, or Wrong."""
    lines = lines_of(folder)
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        by_kind[line["is"]].append(line)
    for event in by_kind["event"]:
        if event["kind"] in NOT_REPLAYED:
            raise NotReplayable(f"{event['kind']} at step {event['step']}: {event['message']}")
    if any(line["hosts"] > 1 for line in by_kind["epoch"]):
        raise NotReplayable("rows travel between several hosts, and are read before their step is known")
    begins = [line for line in by_kind["epoch"] if line["values"] is not None]
    if not begins:
        raise NotReplayable("nobody wrote down the first values")
    if any(line["values"] != begins[0]["values"] for line in begins):
        raise Wrong("workers begin with different dense values")
    orders = {run_of(line): line for line in by_kind["epoch"]}
    steps = {**_allreduce_steps(by_kind, begins[0], orders)}
    for number, step in _asynchronous_steps(by_kind).items():
        if number in steps:
            raise Wrong(f"step {number} was applied in two modes")
        steps[number] = step
    if sorted(steps) != list(range(1, len(steps) + 1)):
        missing = sorted(set(range(1, max(steps, default=0))) - set(steps))
        raise Wrong(f"steps {missing[:5]} are in no line of the trace, the last one is {max(steps, default=0)}")
    return Facts(begins[0], orders, [steps[number] for number in sorted(steps)])


def run_of(line: dict[str, Any]) -> Run:
    return line["epoch"], line.get("segment", 0)


def _allreduce_steps(
    by_kind: dict[str, list[dict[str, Any]]], begin: dict[str, Any], orders: dict[Run, dict[str, Any]]
) -> dict[int, Step]:
    """The newest world that saw a step committed counts: an earlier one may have died before."""
    commits = {line["step"]: line for line in by_kind["commit"]}
    brought: dict[tuple[int, Run], list[int]] = defaultdict(list)
    for line in by_kind["attempt"]:
        if line["step"] in commits and commits[line["step"]]["world"] == line["world"]:
            brought[line["step"], run_of(line)] += line["micros"]
    steps = {}
    for (number, run), micros in brought.items():
        n_of_run = orders[run]["n_samples"]
        size, of_step = begin["micro_batch"], begin["global_batch"] // begin["micro_batch"]
        first = commits[number]["order"] * of_step
        n_samples = min(begin["global_batch"], n_of_run - first * size)
        expected = list(range(first, first + -(-n_samples // size)))
        if sorted(micros) != expected:
            raise Wrong(f"step {number} was made of micro-batches {sorted(micros)}, its own are {expected}")
        members = [(run, m, min(size, n_of_run - m * size) / size, None) for m in expected]
        line = commits[number]
        steps[number] = Step(number, size / n_samples, line["lrs"], line["row_lr"], members)
    return steps


def _asynchronous_steps(by_kind: dict[str, list[dict[str, Any]]]) -> dict[int, Step]:
    pushes = {(line["generation"], line["micro"], line["serial"]): line for line in by_kind["push"]}
    ended = {(line["step"], line["server"]): line for line in by_kind["applied"]}
    dropped = {(line["generation"], line["step"]): line["dropped"] for line in by_kind["decided"]}
    steps = {}
    for line in by_kind["apply"]:
        end = ended.get((line["step"], line["server"]))
        if end is None or end["missed"] or end["failed"] or line["missed"]:
            raise NotReplayable(f"step {line['step']} was cut in two by the death of its server")
        members = []
        of_weight_0 = [(micro, serial, 0.0) for micro, serial in dropped[line["generation"], line["step"]]]
        for micro, serial, weight in [*line["members"], *of_weight_0]:
            push = pushes.get((line["generation"], micro, serial))
            if push is None:
                raise Wrong(f"step {line['step']} has a push of micro-batch {micro} that nobody made")
            if push["mode"] != "gba":
                raise NotReplayable(f"mode {push['mode']} is not replayed")
            members.append((run_of(push), micro, weight, push))
        steps[line["step"]] = Step(
            line["step"], line["scale"], line["lrs"], line["row_lr"], members, line["generation"], _ahead(line)
        )
    return steps


def _ahead(line: dict[str, Any]) -> float:
    """Of a server's line; older ones name no rule."""
    rule: str = line.get("rule", "none")
    if rule not in ("none", "look_ahead"):
        raise NotReplayable(f"rule {rule} is not replayed")
    return float(line["rule_settings"].get("steps", 0.9)) if rule == "look_ahead" else 0.0
