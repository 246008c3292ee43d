"""`gba-hvd bench shadow`: what synchronising replicas costs, in the background and in the foreground, by worker count.

1, 2, 4 and 8 emulated accelerators (`emulated_accelerators.py`) train one small click model: replicas that never meet,
ShadowSync with its three algorithms, their counterparts every 5, 30 and 100 local steps, and allreduce. Speed is
against replicas that never meet. Runs of the contestants alternate. With `--threads` workers also train each replica in
several threads (`gba_hvd.hogwild`), each with an emulated accelerator of its own. AUC on real data takes hours and is
the business of `gba-hvd bench quality`: `--quality` takes its result over. Rows already in the result file are kept and
not run again, so a long measurement can be done in pieces.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import quality
from .harness import emulated_accelerators as emulated
from .harness import measure, resumable
from .harness.measure import Row, Subparsers, Variant
from .stragglers import command as gba

ALGORITHMS = ("easgd", "ma", "bmuf")
EVERY = (5, 30, 100)
NO_SYNC = "no_sync"
WORKERS = (1, 2, 4, 8)
TARGET = 0.98  # of the speed without synchronisation
TIMEOUT_S = 240.0  # for one run, beyond its measured time
# name -> (mode, other settings of GBACallback)
FOREGROUND: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}_{every}": (name, {"every": every}) for name in ALGORITHMS for every in EVERY
}
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    NO_SYNC: ("shadow", {"sync": "none"}),
    **{f"shadow_{name}": ("shadow", {"sync": name}) for name in ALGORITHMS},
    **FOREGROUND,
    "allreduce": ("allreduce", {}),
}
KEY = ("workers", "mode", "run")  # what distinguishes one row from another
COLUMNS = (
    "samples_per_s", "ideal_share", "auc", "seconds_per_round", "rounds_per_s", "steps_per_round", "spread",
    "rounds_dropped",
)  # fmt: skip


def add_parser(subparsers: Subparsers) -> None:
    does = "replicas synchronised in the background"
    parser = measure.add_benchmark(subparsers, "shadow", does, __doc__, run, help="rows in it are kept")
    parser.add_argument("--service-ms", type=float, default=100.0, help="time of a micro-batch on the emulated device")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured time of a run")
    parser.add_argument("--runs", type=int, default=1, help="launches of each contestant with each number of workers")
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), metavar="N")
    parser.add_argument("--threads", type=int, nargs="+", default=[], metavar="N", help="more than 1, of each worker")
    measure.add_chosen(parser, "--contestants", CONTESTANTS, "NAME", help=", ".join(CONTESTANTS))
    parser.add_argument("--quality", type=Path, metavar="FILE.json", help="a result of `gba-hvd bench quality`")


@dataclass(frozen=True)
class Run:
    """One launch to be done."""

    workers: int
    mode: str
    run: int
    variant: Variant

    def __str__(self) -> str:
        return f"{self.mode}, {self.workers} workers, run {self.run}"


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    check(args.workers, args.contestants, args.threads)
    commands: dict[str, str] = {}
    auc = auc_by_protocol(args.quality) if args.quality else {}
    results = resumable.Results(
        args.out, KEY, settings(args), lambda rows: {"commands": commands, **headline(rows, auc)}
    )
    commands |= results.before.get("commands", {})
    auc |= {} if args.quality else results.before.get("auc", {})
    variants = {n: list(variants_of(args.contestants, n, args.threads)) for n in args.workers}
    commands |= {f"{v.name}, {n} workers": str(v) for n, some in variants.items() for v in some}
    planned = [Run(n, v.name, number, v) for n, some in variants.items() for number in range(args.runs) for v in some]
    waiting = results.waiting(planned)
    if waiting:
        scenarios = {n: emulated.even(args.service_ms / 1000, args.seconds, n) for n in args.workers}
        counts = [n * threads for n in args.workers for threads in (1, *args.threads)]
        most = emulated.even(args.service_ms / 1000, args.seconds, max(counts))
        with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
            launches = gba.Launches(Path(scratch), args.service_ms / 1000, args.seconds, [most], TIMEOUT_S)

            def launch(one: Run) -> None:
                row = launches.run(scenarios[one.workers], [], one.variant, one.run)
                results.rows.append(row | {"workers": one.workers, "bayes_auc": launches.bayes_auc})

            results.run_each(waiting, launch)
    results.write()
    show(results.rows, headline(results.rows, auc))
    return results.end()


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What rows of one file have in common."""
    return {
        "service_s": args.service_ms / 1000,
        "measured_s": args.seconds,
        "micro_batch": emulated.MICRO_BATCH,
        "global_batch": emulated.N_MICRO * emulated.MICRO_BATCH,
        "contestants": {name: {"mode": mode, **more} for name, (mode, more) in CONTESTANTS.items()},
    }


def headline(rows: Sequence[Row], auc: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The figures people ask for. auc: see `auc_by_protocol`."""
    ratios = throughput_vs_nosync(rows)
    return {
        "throughput_vs_nosync": ratios,
        "below_target": below_target(ratios),
        "auc": auc,
        "auc_vs_best_foreground": auc_vs_best_foreground(auc),
        "by_workers": by_workers(rows),
    }


def check(workers: Sequence[int], contestants: Sequence[str], threads: Sequence[int] = ()) -> None:
    """Raise RunFailed for what would be of no use, or fail after minutes."""
    if min(workers) < 1 or max(workers) > emulated.N_MICRO:
        raise measure.RunFailed(f"--workers must be from 1 to {emulated.N_MICRO}, got {list(workers)}")
    if threads and min(threads) < 2:
        raise measure.RunFailed(f"--threads: each worker has one anyway; from 2 on, got {list(threads)}")
    if NO_SYNC not in contestants:
        raise measure.RunFailed(f"--contestants needs {NO_SYNC}: speed is measured against it")


def variants_of(contestants: Sequence[str], workers: int, threads: Sequence[int]) -> Iterator[Variant]:
    """Each contestant, and those with replicas also with several threads of each worker."""
    for name in contestants:
        yield variant(name, workers)
        if name != "allreduce":
            yield from (variant(name, workers, n) for n in threads)


def variant(name: str, workers: int, threads: int = 1) -> Variant:
    mode, settings = CONTESTANTS[name]
    more = ("--settings", json.dumps(settings)) if settings else ()
    if threads > 1:
        name, more = f"{name}, {threads} threads", (*more, "--threads", str(threads))
    return measure.horovodrun(name, workers, "bench.stragglers.ours", "--mode", mode, *more)


def by_workers(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over the runs: workers -> contestant -> column."""
    return measure.by_groups(rows, "workers", "mode", COLUMNS)


def throughput_vs_nosync(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """contestant -> workers -> samples/s, divided by those of replicas that never meet. Medians over the runs."""
    speed = measure.medians(rows, ("workers", "mode"), "samples_per_s")
    ratios: dict[str, dict[str, float]] = {}
    for (workers, name), value in speed.items():
        if name != NO_SYNC and (workers, NO_SYNC) in speed:
            ratios.setdefault(name, {})[str(workers)] = value / speed[workers, NO_SYNC]
    return ratios


def below_target(ratios: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What synchronises in the background and costs more than the target: "contestant, n workers" -> ratio."""
    return {
        f"{name}, {workers} workers": ratio
        for name, by_count in ratios.items()
        for workers, ratio in by_count.items()
        if name.startswith("shadow_") and ratio < TARGET
    }


def auc_by_protocol(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """contestant (and `sync`, `sync_each`) -> data set -> seeds, mean AUC, its distance from sync; of `quality`.

    Raises RunFailed when the file is something else.
    """
    if not path.exists():
        raise measure.RunFailed(f"--quality {path}: there is no such file; `gba-hvd bench quality` writes it")
    kept = ("seeds", "diverged", "auc", "auc_std", "vs_sync", "vs_sync_worst", "auc_last", "vs_sync_last")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for dataset, protocols in quality.headline(resumable.earlier(path, (*quality.KEY, "metric"))["rows"]).items():
        for name, columns in protocols.items():
            known = name in CONTESTANTS or name in ("sync", "sync_each")
            if known and columns["metric"] == "auc":  # a retrieval has recall
                found.setdefault(name, {})[dataset] = {column: columns[column] for column in kept}
    return found


def auc_vs_best_foreground(auc: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """contestant in the background -> data set -> its mean AUC minus that of the best one in the foreground.

    At any interval: none in the foreground exchanges replicas more often than the background does. Each mean is
    over the seeds that the quality benchmark ran of it.
    """
    found: dict[str, dict[str, float]] = {}
    for name in (f"shadow_{algorithm}" for algorithm in ALGORITHMS):
        for dataset, columns in auc.get(name, {}).items():
            rivals = [auc[rival][dataset]["auc"] for rival in FOREGROUND if dataset in auc.get(rival, {})]
            best = max((value for value in rivals if value is not None), default=None)
            if best is not None and columns["auc"] is not None:
                found.setdefault(name, {})[dataset] = columns["auc"] - best
    return found


def show(rows: Sequence[Row], result: Mapping[str, Any]) -> None:
    """Print a table for each number of workers, and AUC."""
    ratios = result["throughput_vs_nosync"]
    columns = {
        "contestant": "{name}", "samples/s": "{samples_per_s:,.0f}", "of the ideal": "{ideal_share:.3f}",
        "AUC": "{auc:.4f}", "ms a round": "{ms:.1f}", "rounds/s": "{rounds_per_s:.1f}",
        "steps a round": "{steps_per_round:.1f}", "vs no sync": "{ratio:.3f}",
    }  # fmt: skip
    for workers, contestants in by_workers(rows).items():
        table = []
        for name, found in contestants.items():
            ms = 1000 * found["seconds_per_round"] if "seconds_per_round" in found else None
            table.append({"name": name, **found, "ms": ms, "ratio": ratios.get(name, {}).get(workers)})
        measure.print_figures(f"{workers} workers", columns, table)
    print(f"below_target: {json.dumps(result['below_target'])}")
    for name, by_dataset in result["auc_vs_best_foreground"].items():
        for dataset, difference in by_dataset.items():
            seeds = result["auc"][name][dataset]["seeds"]
            print(f"{name}, AUC minus that of the best in the foreground: {difference:+.5f} ({dataset}, {seeds} seeds)")
