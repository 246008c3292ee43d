"""`gba-hvd bench reader`: what a slow reader costs, with reading ahead and without.

Two workers train on micro-batches that take `--step-ms` to compute, emulated by a pause as of an accelerator. Reading
one waits `--read` of that time, as for a disk or an object store: `take` waits in each call, `parquet` is a real
`ParquetStream` that waits for each row group, as long as for its micro-batches together. Measured after the first
steps: the time between two micro-batches of the chief, against that of the same data without a wait (`fast`). `loop`
reads in the training loop (prefetch=0), `ahead` as by default, `processes` has num_workers=2. The runs alternate: fast,
loop, ahead, processes, and again.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..harness import measure
from ..harness.measure import Row, RunFailed, Subparsers, Variant

WORKERS, N_MICRO, MICRO_BATCH, ROW_GROUP = 2, 8, 32, 512
READING: dict[str, dict[str, int]] = {"fast": {}, "loop": {"prefetch": 0}, "ahead": {}, "processes": {"num_workers": 2}}
MODES, DATA = ("allreduce", "gba"), ("take", "parquet")
_TIMEOUT_S = 600.0


def add_parser(subparsers: Subparsers) -> None:
    does = "what a slow reader costs, with reading ahead and without"
    parser = measure.add_benchmark(subparsers, "reader", does, __doc__, run)
    measure.add_chosen(parser, "--modes", MODES, "MODE")
    measure.add_chosen(parser, "--data", DATA, "DATA")
    parser.add_argument("--step-ms", type=float, default=50.0, help="of a micro-batch")
    parser.add_argument("--read", type=float, default=0.8, help="of --step-ms, for each micro-batch")
    parser.add_argument("--micro-batches", type=int, default=96, help="of each worker, that are measured in each run")
    parser.add_argument("--rounds", type=int, default=3, help="of all runs, alternating; 3 or more")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    if args.rounds < 3:
        raise RunFailed(f"--rounds {args.rounds}: equal runs differ, so a ratio of fewer than 3 each says nothing")
    with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:

        def one(variant: Variant, round_: int) -> Row:
            mode, data, reading = variant.name.split()
            found = measure.result_of(variant, ["--scratch", scratch], Path(scratch), _TIMEOUT_S)
            print(f"{mode:10} {data:8} {reading:10} {1000 * found['seconds']:7.1f} ms", flush=True)
            return {"mode": mode, "data": data, "reading": reading, "round": round_, **found}

        rows = measure.interleave(variants(args), args.rounds, one)
    load, found = os.getloadavg()[1], ratios(rows)
    about = {"step_ms": args.step_ms, "read": args.read, "micro_batches": args.micro_batches, "workers": WORKERS}
    result = {"about": measure.machine(), "load of the last 5 minutes": load, **about, "ratios": found, "rows": rows}
    measure.write_json(args.out, result)
    shown = [[*key.split(), *(f"{of[name]:.3f}x" for name in READING)] for key, of in found.items()]
    title = f"time of a micro-batch, against fast; load of this machine {load:.1f}, {os.cpu_count()} cores"
    measure.print_table(title, ["mode", "data", *READING], shown)
    return 0


def variants(args: argparse.Namespace) -> list[Variant]:
    found = []
    for mode in args.modes:
        for data in args.data:
            for name, how in READING.items():
                read_s = 0.0 if name == "fast" else args.step_ms / 1000 * args.read
                flags = ["--mode", mode, "--data", data, "--reading", json.dumps(how), "--read-s", str(read_s)]
                flags += ["--step-s", str(args.step_ms / 1000), "--micro-batches", str(args.micro_batches)]
                found.append(measure.horovodrun(f"{mode} {data} {name}", WORKERS, "bench.reader.worker", *flags))
    return found


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By mode and data: of each way of reading the median of its runs, over that of `fast`."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        of = seconds.setdefault(f"{row['mode']} {row['data']}", {})
        of.setdefault(row["reading"], []).append(row["seconds"])
    return {key: {name: median(all_) / median(of["fast"]) for name, all_ in of.items()} for key, of in seconds.items()}
