"""`gba-hvd bench membership`: how long the survivors stand still when a worker is killed and another takes its place.

Three elastic workers with emulated accelerators train one click model: ours in gba mode, ours in allreduce mode, and
plain Horovod elastic with a commit every step. One is killed, and `horovodrun` starts another. A pause is the longest
time between the ends of two micro-batches of a survivor, from the kill until the late joiner has computed its first
micro-batch, less the usual time between them. The longer pause of the two survivors is the run's.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ..harness import emulated_accelerators as emulated
from ..harness import measure
from ..harness.elastic_job import ElasticJob, discovery, elastic_variant, memory_folder
from ..harness.measure import NAMES, Row, Subparsers, Variant

CONTESTANTS = ("gba", "allreduce", "horovod")
N_MICRO = 6  # micro-batches of a global step: three workers do 2 each, two do 3
WARM = 20  # micro-batches of every worker before one is killed


def add_parser(subparsers: Subparsers) -> None:
    does = "how long a change of workers stops the others"
    parser = measure.add_benchmark(subparsers, "membership", does, __doc__, run)
    measure.add_chosen(parser, "--contestants", CONTESTANTS, "NAME")
    parser.add_argument("--service-ms", type=float, default=50.0, help="time of a micro-batch on the emulated device")
    parser.add_argument("--runs", type=int, default=3, help="kills of each contestant; each kills another rank")
    parser.add_argument("--timeout", type=float, default=120, metavar="SECONDS", help="for anything that is waited for")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    rows: list[Row] = []
    about = measure.machine()
    settings = {
        "workers": len(NAMES),
        "micro_batch": emulated.MICRO_BATCH,
        "global_batch": N_MICRO * emulated.MICRO_BATCH,
        "service_s": args.service_ms / 1000,
        "micro_batches_before": WARM,
    }
    with memory_folder() as scratch:
        contestants = [variant(name, discovery(scratch)) for name in args.contestants]
        try:
            launches = partial(launch, rows, scratch, args.service_ms / 1000, args.timeout)
            measure.interleave(contestants, args.runs, launches)
        finally:  # what was measured before a failure is kept
            if rows:
                found, commands = headline(rows), {variant.name: str(variant) for variant in contestants}
                whole = {"machine": about, "commands": commands, "settings": settings, **found, "rows": rows}
                measure.write_json(args.out, whole)
                show(found)
    return 0


def variant(name: str, script: Path) -> Variant:
    n = len(NAMES)
    return elastic_variant(name, script, "bench.membership.worker", "--contestant", name, workers=n, least=n - 1)


# --- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    """What a worker noted: its rank when it began, and the end of each of its micro-batches (monotonic, s)."""

    pid: int
    rank: int
    ends: tuple[float, ...]


def launch(rows: list[Row], scratch: Path, service_s: float, timeout_s: float, contestant: Variant, number: int) -> Row:
    """One job, one kill; its row is added to `rows`. Raises RunFailed."""
    folder = scratch / f"{contestant.name}-{number}"
    (folder / "marks").mkdir(parents=True)
    victim = (number + 1) % len(NAMES)
    with ElasticJob(contestant, folder, ["--marks", folder / "marks", "--service-s", service_s]) as job:
        job.wait("three workers", timeout_s, lambda: ready(read(folder)))
        dying = next(w for w in read(folder).values() if w.rank == victim)
        before = set(read(folder))
        killed_s = time.monotonic()
        os.kill(dying.pid, signal.SIGKILL)
        joined_s: float = job.wait("the late joiner", timeout_s, lambda: joined(read(folder), before))
        survivors = before - {dying.pid}
        job.wait("the survivors", timeout_s, lambda: all(read(folder)[pid].ends[-1] > joined_s for pid in survivors))
        seen = read(folder)
    found = [pause([*seen[pid].ends], killed_s, joined_s) for pid in survivors]
    row = {
        "contestant": contestant.name,
        "run": number,
        "killed_rank": victim,
        "pause_s": max(p.pause_s for p in found),
        "pauses_s": [p.pause_s for p in found],
        "usual_s": [p.usual_s for p in found],
        "joined_after_s": joined_s - killed_s,
        "work_share": sum(p.n for p in found) / sum((joined_s - killed_s) / p.usual_s for p in found),
    }
    rows.append(row)
    took = f"pause {row['pause_s']:6.3f} s  late joiner after {row['joined_after_s']:5.1f} s"
    print(f"run {number + 1}  {contestant.name:10s} {took}  {row['work_share']:.0%} of the work done", flush=True)
    return row


def read(folder: Path) -> dict[int, Worker]:
    """The workers that have computed a micro-batch, by pid."""
    found = {}
    for path in (folder / "marks").iterdir():
        rank, *ends = path.read_text().split("\n")[:-1] or ["0"]  # what is not a whole line is not there yet
        if ends:
            found[int(path.name)] = Worker(int(path.name), int(rank), tuple(map(float, ends)))
    return found


def ready(workers: Mapping[int, Worker]) -> bool:
    return len(workers) == len(NAMES) and all(len(w.ends) >= WARM for w in workers.values())


def joined(workers: Mapping[int, Worker], before: set[int]) -> float | None:
    """When a worker that was not there before ended its first micro-batch."""
    return min((w.ends[0] for pid, w in workers.items() if pid not in before), default=None)


# --- what was found --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pause:
    """A survivor's pause: the longest, the usual time between ends, and its micro-batches, in the window."""

    pause_s: float
    usual_s: float
    n: int


def pause(ends: Sequence[float], killed_s: float, joined_s: float) -> Pause:
    """The longest gap between ends that reaches into [killed_s, joined_s], less the median gap of the `WARM` before."""
    gaps = list(pairwise(ends))
    usual_s = median(b - a for a, b in [gap for gap in gaps if gap[1] <= killed_s][-WARM:])
    longest_s = max(b - a for a, b in gaps if b > killed_s and a < joined_s)
    return Pause(max(0.0, longest_s - usual_s), usual_s, sum(killed_s < end <= joined_s for end in ends))


def headline(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians over the runs by contestant, and the longest pause of all."""
    columns = ("pause_s", "joined_after_s", "work_share")
    result: dict[str, Any] = {
        column: {name: value for (name,), value in measure.medians(rows, ("contestant",), column).items()}
        for column in columns
    }
    result["pause_s_worst"] = {
        name: max(row["pause_s"] for row in rows if row["contestant"] == name) for name in result["pause_s"]
    }
    return result


def show(found: Mapping[str, Any]) -> None:
    columns = {
        "": "{name}", "pause, s": "{pause_s:.3f}", "longest, s": "{pause_s_worst:.3f}",
        "late joiner after, s": "{joined_after_s:.1f}", "work done meanwhile": "{work_share:.0%}",
    }  # fmt: skip
    table = [{"name": name, **{key: of[name] for key, of in found.items()}} for name in found["pause_s"]]
    measure.print_figures("one of three workers killed and replaced, medians", columns, table)
