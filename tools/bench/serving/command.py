"""`gba-hvd bench serving`: latency, samples/s, load time and size of saved models, one thread.

dlrm    26 tables, one id each, and the dense part of `bench allreduce`
din     a user, a candidate and a history of 50 items with their categories; attention to the candidate
large   dlrm with --large-rows rows, which is only loaded

`--rows` rows of 16 in all, ids drawn uniformly, each request with others. Every run is a fresh process that loads the
model, from a warm page cache, and then answers requests of each size; runs of the systems alternate, and figures are
medians. All answer with the same logits, or the run fails. Rows in the result file are kept and their runs not done
again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..harness import measure, peer_environments, resumable
from ..harness.measure import Row, Subparsers, Variant

KEY = ("model", "system", "run")
MODELS = ("dlrm", "din", "large")
SYSTEMS = {
    "ours": "load_for_inference, tables in memory",
    "ours_mmap": "load_for_inference(tables='mmap')",
    "ours_remote": "load_for_inference(tables='remote'), a store whose reads take 20 ms; figures with a warm cache",
    "torch": "nn.Embedding, torch.load of a state_dict",
    "torchrec": "TorchRec's quantised collections with float32 weights (fbgemm), from the same state_dict",
    "mlflow": "mlflow.pytorch, the same torch module pickled; predict of mlflow.pyfunc",
    "dense": "the dense part of torch on rows that are there: no lookup makes a model faster than that",
}
_FILES = {"ours": "ours", "ours_mmap": "ours", "ours_remote": "ours", "mlflow": "mlflow"}  # the others: torch.pt
SPEED_GOAL, TAIL_GOAL, LOAD_GOAL_S = 1.5, 2.0, 1.0


@dataclass(frozen=True)
class Run:
    model: str
    system: str
    run: int

    def __str__(self) -> str:
        return f"{self.model}, {self.system}, {self.run}"


def add_parser(subparsers: Subparsers) -> None:
    does = "latency, samples/s and load time of saved models"
    parser = measure.add_benchmark(subparsers, "serving", does, __doc__, run, help="rows in it are kept")
    parser.add_argument("--rows", type=int, default=10_000_000, help="of all tables of dlrm and din")
    parser.add_argument("--large-rows", type=int, default=31_250_000, help="of all tables of large (64 bytes each)")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 64, 1024], help="of a request")
    parser.add_argument("--seconds", type=float, default=1.0, help="time of each measurement")
    parser.add_argument("--runs", type=int, default=5, help="launches of each system with each model")
    measure.add_chosen(parser, "--models", MODELS, "MODEL")
    measure.add_chosen(parser, "--systems", SYSTEMS, "SYSTEM", help=", ".join(SYSTEMS))
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="for one run")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    settings = {name: getattr(args, name) for name in ("rows", "large_rows", "samples", "seconds")}
    environments = {name: _environment(name) for name in args.systems}
    absent = {name: "not installed" for name, env in environments.items() if env is None}

    def more(rows: list[Row]) -> dict[str, Any]:
        return {"systems": SYSTEMS, "not_run": absent, "summary": summary(rows)}

    results = resumable.Results(args.out, KEY, settings, more, packages=("torch", "mlflow", "numpy"))
    for model in args.models:
        planned = [Run(model, name, number) for number in range(args.runs) for name in args.systems]
        waiting = resumable.missing([one for one in planned if one.system not in absent], results.rows, KEY)
        if not waiting:
            continue
        with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
            launches = Launches(Path(scratch), model, args)

            def one_run(one: Run, launches: Launches = launches) -> None:
                results.rows.append(launches.run(one, environments[one.system] or {}))

            results.run_each(waiting, one_run)
    results.failures |= different(results.rows)
    results.write()
    show(summary(results.rows), absent)
    return results.end()


class Launches:
    """Runs of one model, which is written once, into `folder`."""

    def __init__(self, folder: Path, model: str, args: argparse.Namespace) -> None:
        from . import ours

        self._folder, self._args = folder, args
        self._n_rows = args.large_rows if model == "large" else args.rows
        self._samples = [] if model == "large" else args.samples
        self._dense = "dlrm" if model == "large" else model
        print(f"{model}: writing {self._n_rows:,} rows", flush=True)
        ours.write(folder, self._dense, self._n_rows)

    def run(self, one: Run, env: Mapping[str, str]) -> Row:
        command = (sys.executable, "-W", "ignore", "-m", f"{__package__}.worker", one.system)
        more = ["--folder", self._folder, "--model", self._dense, "--rows", self._n_rows]
        more += ["--seconds", self._args.seconds, *(["--samples", *self._samples] if self._samples else [])]
        variant = Variant(one.system, command, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **env})
        found = measure.result_of(variant, more, self._folder, self._args.timeout)
        speeds = "".join(f", {n}: {f['samples_per_s']:,.0f} samples/s" for n, f in found["sizes"].items())
        for n, cold in found.get("cold", {}).items():
            print(f"{one}: {n} samples, empty cache: {cold['p50_ms']:.1f} / {cold['p99_ms']:.1f} ms (p50 / p99)")
        print(f"{one}: loaded in {found['load_s']:.2f} s{speeds}", flush=True)
        row = {"model": one.model, "system": one.system, "run": one.run, **found}
        return {**row, "n_bytes": _n_bytes(self._folder / _FILES.get(one.system, "torch.pt"))}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians: model -> system -> load_s, n_bytes, and figures by size of a request; and the goals."""
    loads = measure.by_groups(rows, "model", "system", ("load_s", "n_bytes"))
    flat = [{**row, "size": n, **sizes} for row in rows for n, sizes in row["sizes"].items()]
    models: dict[str, Any] = {}
    for model, systems in loads.items():
        of_model = measure.by_groups(
            [row for row in flat if row["model"] == model], "system", "size", ("p50_ms", "p99_ms", "samples_per_s")
        )
        models[model] = {name: {**found, "sizes": of_model.get(name, {})} for name, found in systems.items()}
    return {"models": models, "goals": goals(models)}


def goals(models: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Value, goal and whether it is met, of what was measured."""
    found: dict[str, dict[str, Any]] = {}
    for model, systems in models.items():
        for name in ("ours", "ours_mmap"):
            mine = systems.get(name, {}).get("sizes", {})
            theirs = systems.get("torch", {}).get("sizes", {})
            if "1024" in mine and "1024" in theirs:
                ratio = mine["1024"]["samples_per_s"] / theirs["1024"]["samples_per_s"]
                about = {"value": ratio, "goal": SPEED_GOAL, "is_met": ratio >= SPEED_GOAL}
                if "dense" in systems:
                    limit = systems["dense"]["sizes"]["1024"]["samples_per_s"] / theirs["1024"]["samples_per_s"]
                    about["without_lookups"] = limit
                found[f"{model}, {name} / torch, samples/s at 1,024"] = about
            if "1" in mine:
                tail = mine["1"]["p99_ms"] / mine["1"]["p50_ms"]
                about = {"value": tail, "goal": TAIL_GOAL, "is_met": tail < TAIL_GOAL}
                found[f"{model}, {name}, p99 / p50 at 1"] = about
        if model == "large" and "ours_mmap" in systems:
            seconds = systems["ours_mmap"]["load_s"]
            found["large, ours_mmap, seconds to load"] = {
                "value": seconds, "goal": LOAD_GOAL_S, "is_met": seconds < LOAD_GOAL_S,
            }  # fmt: skip
    return found


def different(rows: Sequence[Row]) -> dict[str, str]:
    """Runs whose logits are not those of the first run of the model, within rounding."""
    found: dict[str, str] = {}
    first: dict[str, list[float]] = {}
    for row in rows:
        if "logits" not in row:
            continue
        mine, expected = row["logits"], first.setdefault(row["model"], row["logits"])
        if any(abs(a - b) > 1e-4 * (1 + abs(b)) for a, b in zip(mine, expected, strict=True)):
            name = f"{row['model']}, {row['system']}, {row['run']}"
            found[name] = f"logits {mine}, another system has {expected}"
    return found


def show(found: Mapping[str, Any], absent: Mapping[str, str]) -> None:
    for model, systems in found["models"].items():
        lines = []
        for name, about in systems.items():
            size = f"{about['n_bytes'] / 1e6:,.0f}"
            start = [name, f"{about['load_s']:.2f}", size]
            for n, one in (about["sizes"] or {"-": None}).items():
                figures = ["-"] * 3
                if one is not None:
                    figures = [f"{one['p50_ms']:.2f}", f"{one['p99_ms']:.2f}", f"{one['samples_per_s']:,.0f}"]
                lines.append([*start, n, *figures])
                start = ["", "", ""]
        lines += [[name, why, *["-"] * 5] for name, why in absent.items()]
        columns = ["system", "load s", "MB", "samples", "p50 ms", "p99 ms", "samples/s"]
        measure.print_table(f"{model}, one thread, medians", columns, lines)
    for name, goal in found["goals"].items():
        print(f"{name}: {goal['value']:.2f}, goal {goal['goal']:g}: {_verdict(goal)}")


def _verdict(goal: Mapping[str, Any]) -> str:
    if goal["is_met"]:
        return "met"
    limit = f"; the dense part alone: {goal['without_lookups']:.2f}" if "without_lookups" in goal else ""
    return f"missed by {abs(goal['value'] / goal['goal'] - 1):.0%}{limit}"


def _environment(system: str) -> dict[str, str] | None:
    """What its process needs; None: it is not installed."""
    return peer_environments.torchrec_environment() if system == "torchrec" else {}


def _n_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return sum(one.stat().st_size for one in files)
