"""`gba-hvd bench switch`: how long a switch takes, by the size of the tables, in both directions.

Four workers with emulated accelerators train one click model; the job switches every so many steps on request. Measured
on the chief: from the end of the step after which the switch was decided to the end of the first step in the new mode,
in seconds and in steps (of the mode it leaves). One whole step is in it, so 1 would be a switch that costs nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ..harness import emulated_accelerators as emulated
from ..harness import measure
from ..harness.measure import Row, Subparsers

BYTES = (10_000_000, 100_000_000, 1_000_000_000, 4_000_000_000)
WARM_UP = 60  # steps until the first switch: the server, started beside the training, is up by then
EVERY = 15  # steps between switches
SWITCHES = 6  # three in each direction


def add_parser(subparsers: Subparsers) -> None:
    parser = measure.add_benchmark(subparsers, "switch", "seconds and steps a switch takes", __doc__, run)
    parser.add_argument("--bytes", type=int, nargs="+", default=list(BYTES), help="sizes of the tables")
    parser.add_argument("--service-ms", type=float, default=50.0, help="time of a micro-batch on the emulated device")
    parser.add_argument("--runs", type=int, default=2, help="launches at each size")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="for one run")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    about = measure.machine()
    ours = measure.horovodrun("ours", emulated.N_WORKERS, "bench.switch.worker")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        for number in range(args.runs):
            for n_bytes in args.bytes:
                rows += launch(ours, Path(scratch), n_bytes, number, args.service_ms / 1000, args.timeout)
    settings = {
        **emulated.SETTINGS, "service_s": args.service_ms / 1000, "steps_before_the_first_switch": WARM_UP,
        "steps_between_switches": EVERY,
    }  # fmt: skip
    whole = {"machine": about, "commands": {"ours": str(ours)}, "settings": settings, **headline(rows), "rows": rows}
    measure.write_json(args.out, whole)
    show(rows)
    return 0


def launch(
    ours: measure.Variant, folder: Path, n_bytes: int, number: int, service_s: float, timeout_s: float
) -> list[Row]:
    """One job with all its switches, each a row. Raises RunFailed."""
    seen = measure.result_of(ours, ["--bytes", n_bytes, "--service-s", service_s], folder, timeout_s)
    found = switches([SwitchStep(*step) for step in seen["steps"]])
    if len(found) != SWITCHES:
        raise measure.RunFailed(f"ours: {len(found)} switches at {n_bytes} bytes, expected {SWITCHES}")
    for row in found:
        took = f"{row['seconds']:6.3f} s  {row['steps']:.2f} steps"
        print(f"run {number + 1}  {n_bytes:13,d} bytes  to {row['to']:9s} {took}", flush=True)
    return [{"bytes": n_bytes, "run": number, "table_bytes": seen["table_bytes"], **row} for row in found]


@dataclass(frozen=True)
class SwitchStep:
    """A step as the chief saw it end."""

    step: int
    mode: str
    at_s: float


def switches(steps: Sequence[SwitchStep], every: int = EVERY) -> list[Row]:
    """Each change of mode: the seconds since the decision, and how many steps of the old mode that is.

    The decision falls at the end of every `every`-th step (`WARM_UP` is a multiple). Steps the chief saw together count
    as one interval each.
    """
    found: list[Row] = []
    for old, new in pairwise(steps):
        if old.mode == new.mode:
            continue
        # The newest planned step the old mode did: a mode may finish what is on its way before it ends.
        decided = next((s for s in reversed(steps[: steps.index(new)]) if s.step % every == 0), old)
        before = [s for s in steps if decided.step - every < s.step <= decided.step and s.mode == old.mode][1:]
        step_s = (before[-1].at_s - before[0].at_s) / (before[-1].step - before[0].step)
        seconds = new.at_s - decided.at_s
        found.append({
            "from": old.mode, "to": new.mode, "step": decided.step, "seconds": seconds, "steps": seconds / step_s,
            "step_s": step_s, "steps_until": new.step - decided.step,
        })  # fmt: skip
    return found


def headline(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians by table bytes and direction, and the worst."""
    result: dict[str, Any] = {}
    for column in ("steps", "seconds"):
        for mode in ("gba", "allreduce"):
            of_mode = [row for row in rows if row["to"] == mode]
            name = f"to_{mode}_{column}"
            result[name] = {str(n): value for (n,), value in measure.medians(of_mode, ("bytes",), column).items()}
            result[f"{name}_worst"] = max((row[column] for row in of_mode), default=None)
    return result


def show(rows: Sequence[Row]) -> None:
    table = []
    for n_bytes in dict.fromkeys(row["bytes"] for row in rows):
        for mode in ("gba", "allreduce"):
            some = [row for row in rows if row["bytes"] == n_bytes and row["to"] == mode]
            if some:
                seconds, steps = [row["seconds"] for row in some], [row["steps"] for row in some]
                figures = (f"{median(seconds):.3f}", f"{median(steps):.2f}", f"{max(steps):.2f}")
                table.append((f"{n_bytes:,d}", f"to {mode}", *figures))
    measure.print_table("switch, medians", ("table bytes", "", "seconds", "steps", "most steps"), table)
