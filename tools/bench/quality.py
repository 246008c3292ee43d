"""`gba-hvd bench quality`: what asynchronous training costs in AUC, with the same hyper-parameters in every mode.

Each run is `examples/train_ctr.py` with three workers, whole epochs, and the switch (if any) in the middle. Where the
mode is asynchronous one worker takes three times as long, so that gradients are stale. Rows already in the result file
are kept and not run again, so a long measurement can be done in pieces.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from .harness import measure
from .harness.measure import Row, Variant

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

WORKERS = 3
SLOW = {"kind": "slow", "worker": 2, "factor": 3.0}
SEEDS = (2021, 2022, 2023)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KEY = ("dataset", "epochs", "micro_batch", "protocol", "seed")  # what distinguishes one row from another


@dataclass(frozen=True)
class DataSet:
    """One of the example configurations, and what is changed in it for every run alike.

    n_train: samples of an epoch
    """

    config: str
    epochs: int
    n_train: int
    global_batch: int
    micro_batch: int
    needs_data: bool = False

    def steps(self, epochs: int) -> int:
        """Global steps of a run, counted in global batches."""
        return epochs * math.ceil(self.n_train / self.global_batch)


# More micro-batches a step than workers: gradients are then computed with values a fraction of a step old. No early
# stop: all runs see the same samples.
DATASETS = {
    "frappe": DataSet("frappe_deepfm", 16, 202_027, 4096, 512, needs_data=True),
    "synthetic": DataSet("synthetic", 3, 700_000, 2048, 256),
}


@dataclass(frozen=True)
class Protocol:
    """The mode at the start and, from the middle of training on, another one. settings: others of `switching`.

    steps_alike: a global step is one micro-batch of each worker, as a local step of replicas is one micro-batch
    """

    mode: str
    then: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps_alike: bool = False

    def overrides(self, half: int, micro_batch: int) -> list[str]:
        switch = {half: self.then} if self.then else {}
        more = [f"switching.{name}={value}" for name, value in self.settings.items()]
        if self.steps_alike:
            more.append(f"train.global_batch={WORKERS * micro_batch}")
        then = f"switching.switch_at={json.dumps(switch)}"
        return [f"switching.mode={self.mode}", then, "switching.wait_s=60", *more]

    def faults(self, half: int) -> list[dict[str, Any]]:
        """A slow worker while the mode is asynchronous; in allreduce it would change nothing but the time."""
        if self.mode == "allreduce":
            return [SLOW | {"from_step": half}] if self.then else []
        return [SLOW | {"to_step": half}] if self.then else [dict(SLOW)]


PROTOCOLS = {
    "sync": Protocol("allreduce"),
    "gba": Protocol("gba"),
    "sync_to_gba": Protocol("allreduce", "gba"),
    "gba_to_sync": Protocol("gba", "allreduce"),
    "async": Protocol("async"),
    "bsp": Protocol("bsp"),
    "hop_bs": Protocol("hop_bs"),
    "hop_bw": Protocol("hop_bw"),
}
USUAL = list(PROTOCOLS)
# Replicas of the dense parameters, as `bench shadow` compares them: in the background, and every k local steps. They
# step after each micro-batch, so what they are compared with is a step of one micro-batch of each worker, too.
PROTOCOLS["sync_each"] = Protocol("allreduce", steps_alike=True)
PROTOCOLS |= {f"shadow_{name}": Protocol("shadow", settings={"sync": name}) for name in ("easgd", "ma", "bmuf")}
PROTOCOLS |= {
    f"{name}_{every}": Protocol(name, settings={"every": every})
    for name in ("easgd", "ma", "bmuf")
    for every in (5, 30, 100)
}


def protocol_of(name: str) -> Protocol:
    """By its name, with other settings of `switching` behind a colon: `shadow_ma:mixing=difference,elasticity=1`.

    Raises argparse's error for another name.
    """
    known, _, more = name.partition(":")
    if known not in PROTOCOLS or (more and not all("=" in one for one in more.split(","))):
        raise argparse.ArgumentTypeError(
            f"{name!r}: choose one of {', '.join(PROTOCOLS)}, or one with settings, as in shadow_bmuf:block_rate=1"
        )
    protocol = PROTOCOLS[known]
    settings = dict(one.split("=", 1) for one in more.split(",")) if more else {}
    return replace(protocol, settings={**protocol.settings, **settings})


def _protocol_name(name: str) -> str:
    protocol_of(name)
    return name


@dataclass(frozen=True)
class Run:
    """One training to be done."""

    dataset: str
    epochs: int
    micro_batch: int
    protocol: str
    seed: int

    def __str__(self) -> str:
        return f"{self.dataset}, micro-batches of {self.micro_batch}, {self.protocol}, seed {self.seed}"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("quality", help="AUC of every mode, with the same settings", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="rows in it are kept")
    parser.add_argument("--data", type=Path, metavar="DIR", help="frappe: the folder of its files")
    names: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--datasets", default=list(DATASETS), choices=DATASETS, help=", ".join(DATASETS), **names)
    parser.add_argument(
        "--protocols", default=USUAL, type=_protocol_name,
        help=", ".join(PROTOCOLS) + "; with other settings as in shadow_bmuf:block_rate=1", **names,
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), metavar="N")
    parser.add_argument(
        "--epochs", type=int, help="instead of " + ", ".join(f"{d.epochs} ({n})" for n, d in DATASETS.items())
    )
    parser.add_argument("--micro-batch", type=int, metavar="N", help="samples; the global batch stays as it is")
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="start no further run after so long")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="for one run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    try:
        check(args)
        about = measure.machine()
        rows = rows_of(args.out)
    except measure.RunFailed as error:
        print(f"gba-hvd: {error}", file=sys.stderr)
        return 1
    failures: dict[str, str] = {}
    waiting = missing(planned(args.datasets, args.protocols, args.seeds, args.epochs, args.micro_batch), rows)
    print(f"{len(rows)} rows in {args.out}, {len(waiting)} runs to do", flush=True)
    for number, job in enumerate(waiting):
        if time.monotonic() - started > 60 * args.limit_minutes:
            print(f"no time left for {len(waiting) - number} runs; the same command goes on with them")
            break
        try:
            row = train(job, args.data, args.timeout)
        except measure.RunFailed as error:
            failures[str(job)] = str(error)
            print(f"gba-hvd: {job}: {error}", file=sys.stderr, flush=True)
        else:
            rows.append(row)
            auc = "undefined" if row["auc"] is None else f"{row['auc']:.5f}"
            print(f"{job}: AUC {auc} in {row['seconds']:.0f} s", flush=True)
        write(args.out, about, rows, failures)
    write(args.out, about, rows, failures)
    show(rows)
    print(f"written to {args.out}")
    return 1 if failures else 0


def check(args: argparse.Namespace) -> None:
    """Raise RunFailed for what would otherwise fail after minutes."""
    measure.check_writable(args.out)
    if not EXAMPLES.is_dir():
        raise measure.RunFailed(f"{EXAMPLES} is missing: run this from a clone of the repository")
    for name in ("epochs", "micro_batch"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise measure.RunFailed(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name in args.datasets:
        if DATASETS[name].needs_data and (args.data is None or not args.data.exists()):
            raise measure.RunFailed(
                f"{name} needs its files: --data DIR, got {args.data} (or leave it out: --datasets)"
            )


def planned(
    datasets: Sequence[str],
    protocols: Sequence[str],
    seeds: Sequence[int],
    epochs: int | None,
    micro_batch: int | None = None,
) -> list[Run]:
    """Seed by seed, so that what is there when time is over can be compared."""
    return [
        Run(dataset, epochs or of.epochs, micro_batch or of.micro_batch, protocol, seed)
        for seed in seeds
        for dataset, of in ((name, DATASETS[name]) for name in datasets)
        for protocol in protocols
    ]


def missing(runs: Sequence[Run], rows: Sequence[Row]) -> list[Run]:
    """Those that have no row yet."""
    done = {tuple(row[name] for name in KEY) for row in rows}
    return [run for run in runs if tuple(getattr(run, name) for name in KEY) not in done]


def rows_of(path: Path) -> list[Row]:
    """What earlier invocations measured. Raises RunFailed when the file is something else."""
    if not path.exists():
        return []
    try:
        rows: list[Row] = json.loads(path.read_text())["rows"]
        for row in rows:
            _ = [row[name] for name in KEY]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise measure.RunFailed(f"{path} is no result of this benchmark: give --out another name") from error
    return rows


def train(job: Run, data: Path | None, timeout_s: float) -> Row:
    """One run. Raises RunFailed."""
    of = DATASETS[job.dataset]
    protocol, half = protocol_of(job.protocol), of.steps(job.epochs) // 2
    with tempfile.TemporaryDirectory(prefix="gba-hvd-quality-") as scratch:
        faults = Path(scratch) / "faults.json"
        faults.write_text(json.dumps({"faults": protocol.faults(half)}))
        arguments = ["--out", scratch, "--seed", str(job.seed), "--faults", str(faults)]
        if of.needs_data:
            arguments += ["--data", str(data)]
        arguments += [f"train.epochs={job.epochs}", f"train.micro_batch={job.micro_batch}"]
        arguments += ["train.early_stop=0", "mlflow=false"]
        arguments += protocol.overrides(half, job.micro_batch)
        started = time.monotonic()
        measure.launch(variant(of), arguments, log=Path(scratch) / "log", timeout_s=timeout_s)
        seconds = time.monotonic() - started
        try:
            summary = json.loads((Path(scratch) / "summary.json").read_text())
        except FileNotFoundError as error:
            raise measure.RunFailed("ended without a summary") from error
    if summary["status"] != "FINISHED":
        raise measure.RunFailed(f"ended as {summary['status']}: {summary['error']}")
    row = row_of(job, summary, seconds)
    expected = (protocol.mode != "allreduce") + (protocol.then is not None)
    if len(row["switches"]) != expected:
        raise measure.RunFailed(f"{expected} changes of mode were planned, there were {row['switches']}")
    return row


def variant(of: DataSet) -> Variant:
    launcher = (measure.console_script("horovodrun"), "-np", str(WORKERS), "--network-interface", "lo")
    script = (
        sys.executable,
        str(EXAMPLES / "train_ctr.py"),
        "--config",
        str(EXAMPLES / "configs" / f"{of.config}.yaml"),
    )
    return Variant("train_ctr", (*launcher, *script), {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "3"})


def row_of(job: Run, summary: Mapping[str, Any], seconds: float) -> Row:
    """What is kept of a run."""
    kept = (
        "auc",
        "auc_last",
        "logloss",
        "valid_auc",
        "best_epoch",
        "auc_bayes",
        "steps",
        "refused",
        "reissued",
        "switches",
    )
    total, dropped = summary["samples_total"], summary["samples_dropped"]
    return {
        **{name: getattr(job, name) for name in KEY},
        **{name: summary.get(name) for name in kept},
        "samples_total": total,
        "samples_dropped": dropped,
        "dropped_share": dropped / total if total else 0.0,
        "staleness_mean": summary["staleness"]["mean"],
        "staleness_max": summary["staleness"]["max"],
        "staleness": summary["staleness"]["histogram"],
        "seconds": round(seconds, 1),
    }


def headline(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """dataset (with its epochs) -> protocol -> means over the seeds.

    `auc` is that of the epoch with the best validation AUC, `auc_last` that after the last epoch; `vs_sync` is of the
    seeds that both have. A run whose AUC was never defined (it diverged) counts in `diverged` and in no mean.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, protocol, some in _groups(rows):
        sync = [row for row in rows if _title(row) == name and row["protocol"] == "sync"]
        stale = [row["staleness_mean"] for row in some if row["staleness_mean"] is not None]
        found.setdefault(name, {})[protocol] = {
            "seeds": len(some),
            "diverged": sum(row["auc"] is None for row in some),
            **_against(sync, some, "auc", ""),
            **_against(sync, some, "auc_last", "_last"),
            "dropped_share": mean(row["dropped_share"] for row in some),
            "staleness_mean": mean(stale) if stale else None,
            "staleness_max": max(
                (row["staleness_max"] for row in some if row["staleness_max"] is not None), default=None
            ),
        }
    return found


def _against(sync: Sequence[Row], some: Sequence[Row], column: str, suffix: str) -> dict[str, Any]:
    """Mean AUC of some runs, and its distance from synchronous training of the same seeds."""
    good = {row["seed"]: row[column] for row in some if row.get(column) is not None}
    theirs = {row["seed"]: row[column] for row in sync if row.get(column) is not None}
    differences = [auc - theirs[seed] for seed, auc in good.items() if seed in theirs]
    return {
        f"auc{suffix}": mean(good.values()) if good else None,
        f"auc{suffix}_std": stdev(good.values()) if len(good) > 1 else None,
        f"vs_sync{suffix}": mean(differences) if differences else None,
        f"vs_sync{suffix}_worst": min(differences) if differences else None,
    }


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """The rows of each dataset and protocol, protocols in the order of `PROTOCOLS`, then those with other settings."""
    for name in dict.fromkeys(_title(row) for row in rows):
        for protocol in dict.fromkeys([*PROTOCOLS, *(row["protocol"] for row in rows)]):
            some = [row for row in rows if _title(row) == name and row["protocol"] == protocol]
            if some:
                yield name, protocol, some


def _title(row: Row) -> str:
    return f"{row['dataset']}, {row['epochs']} epochs, micro-batches of {row['micro_batch']}"


def write(path: Path, about: Mapping[str, Any], rows: Sequence[Row], failures: Mapping[str, str]) -> None:
    settings = {
        "workers": WORKERS,
        "slow_worker": SLOW,
        "command": {name: str(variant(of)) for name, of in DATASETS.items()},
    }
    found = {"machine": about, "settings": settings, "headline": headline(rows), "failures": failures}
    measure.write_whole(path, {**found, "rows": list(rows)})


def show(rows: Sequence[Row]) -> None:
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "AUC": ("auc", "{:.5f}".format),
        "vs sync": ("vs_sync", "{:+.5f}".format),
        "worst": ("vs_sync_worst", "{:+.5f}".format),
        "last": ("auc_last", "{:.5f}".format),
        "vs sync, last": ("vs_sync_last", "{:+.5f}".format),
        "dropped": ("dropped_share", "{:.2%}".format),
        "stale": ("staleness_mean", "{:.2f}".format),
        "most": ("staleness_max", str),
    }
    for name, protocols in headline(rows).items():
        table = []
        for protocol, found in protocols.items():
            seeds = str(found["seeds"]) + (f", {found['diverged']} diverged" if found["diverged"] else "")
            values = ("-" if found[key] is None else how(found[key]) for key, how in columns.values())
            table.append((protocol, seeds, *values))
        measure.print_table(f"test AUC on {name}, {WORKERS} workers", ("protocol", "seeds", *columns), table)
