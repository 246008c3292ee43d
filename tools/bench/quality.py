"""`gba-hvd bench quality`: what asynchronous training costs in AUC, with the same hyper-parameters in every mode.

Of youtube_dnn, which retrieves, it is the recall@50 instead.

Each run is `examples/train_ctr.py` with three workers (`--workers`), whole epochs, and the switch (if any) in the
middle. Where the mode is asynchronous and there are several workers the last one takes three times as long, so that
gradients are stale. Rows already in the result file are kept and not run again, so a long measurement can be done in
pieces.

`--rules` are update rules of the servers; protocols without late gradients run once, without a rule. `--sgd-lr` is SGD
with momentum 0.9 for the dense part, which every rule goes with; several rates are a grid. `--threads` are those of
each worker on its replica (Hogwild); protocols without replicas run once, with one thread.

Delayed Nesterov discounts gradients by 1 - momentum: with SGD it gets as much more of a learning rate, as in
`bench delay`.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from gba_hvd.embedding.row_gradients import ROW_AVERAGES
from gba_hvd.errors import BadInput
from gba_hvd.mode_names import REPLICA_MODES

from .harness import measure, resumable
from .harness.measure import EXAMPLES, Row, Subparsers, Variant

WORKERS = 3
SLOW = {"kind": "slow", "factor": 3.0}
MOMENTUM = 0.9
SEEDS = (2021, 2022, 2023)
USUAL_AVERAGE = "global"


@dataclass(frozen=True)
class DataSet:
    """One of the example configurations, and what is changed in it for every run alike.

    n_train: samples of an epoch
    metric: of the summary, what is compared; higher is better
    """

    config: str
    epochs: int
    n_train: int
    global_batch: int
    micro_batch: int
    needs_data: bool = False
    metric: str = "auc"

    def steps(self, epochs: int) -> int:
        """Global steps of a run, counted in global batches."""
        return epochs * math.ceil(self.n_train / self.global_batch)


# More micro-batches a step than workers: gradients are then computed with values a fraction of a step old. No early
# stop: all runs see the same samples.
DATASETS = {
    "frappe": DataSet("frappe_deepfm", 16, 202_027, 4096, 512, needs_data=True),
    "synthetic": DataSet("synthetic", 3, 700_000, 2048, 256),
}
USUAL_DATASETS = list(DATASETS)
# Learning rates in these configurations are the best of four or five pairs in sync, with one worker and seed 2021.
# Validation has its best epoch within these epochs; longer runs (6 of din, 7 of dien, 10 of youtube_dnn) gained less
# than .005 in the test. So modes that step more often are not ahead for that alone.
DATASETS |= {
    "din": DataSet("din", 4, 200_000, 1024, 128),
    "dien": DataSet("dien", 5, 200_000, 1024, 128),
    "youtube_dnn": DataSet("youtube_dnn", 5, 200_000, 1024, 128, metric="recall_at_50"),
}


@dataclass(frozen=True)
class Protocol:
    """The mode at the start and, from the middle of training on, another one. settings: others of `switching`.

    steps_alike: a global step is one micro-batch of each worker, as a local step of replicas is one micro-batch
    local_batches: a worker computes its share of a global batch at once, as in synchronous training: G / N samples
    at: global step of the change of mode; None: in the middle
    """

    mode: str
    then: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps_alike: bool = False
    local_batches: bool = False
    at: int | None = None

    @property
    def has_delay(self) -> bool:
        """Whether gradients of the dense part come late, so that a rule has an effect."""
        return bool({self.mode, self.then} - {None, "allreduce", *REPLICA_MODES})

    @property
    def has_replicas(self) -> bool:
        return self.mode in REPLICA_MODES

    def local_batch(self, global_batch: int, workers: int) -> int | None:
        """Samples that a worker computes at once, where these are not a micro-batch."""
        return max(1, global_batch // workers) if self.local_batches else None

    def overrides(self, half: int, micro_batch: int, workers: int = WORKERS) -> list[str]:
        half = half if self.at is None else self.at
        switch = {half: self.then} if self.then else {}
        more = [f"switching.{name}={value}" for name, value in self.settings.items()]
        if self.steps_alike or self.local_batches:
            more.append(f"train.global_batch={workers * micro_batch}")
        then = f"switching.switch_at={json.dumps(switch)}"
        return [f"switching.mode={self.mode}", then, "switching.wait_s=60", *more]

    def faults(self, half: int, workers: int = WORKERS) -> list[dict[str, Any]]:
        """A slow worker while the mode is asynchronous; in allreduce it would change nothing but the time."""
        if workers == 1:
            return []
        slow, half = SLOW | {"worker": workers - 1}, half if self.at is None else self.at
        if self.mode == "allreduce":
            return [slow | {"from_step": half}] if self.then else []
        return [slow | {"to_step": half}] if self.then else [slow]


PROTOCOLS = {
    "sync": Protocol("allreduce"),
    "gba": Protocol("gba"),
    "sync_to_gba": Protocol("allreduce", "gba"),
    "gba_to_sync": Protocol("gba", "allreduce"),
    "async": Protocol("async"),
    "bsp": Protocol("bsp"),
    "hop_bs": Protocol("hop_bs"),
    # Synchronous training that waits for all but the last local batches of a step.
    "hop_bw": Protocol("hop_bw", local_batches=True),
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

    `at` is the step of the change of mode: `sync_to_gba:at=100`. Raises argparse's error for another name.
    """
    known, _, more = name.partition(":")
    if known == "days":
        raise argparse.ArgumentTypeError("the protocol of days is a benchmark of its own: gba-hvd bench quality-days")
    if known not in PROTOCOLS or (more and not all("=" in one for one in more.split(","))):
        raise argparse.ArgumentTypeError(
            f"{name!r}: choose one of {', '.join(PROTOCOLS)}, or one with settings, as in shadow_bmuf:block_rate=1"
        )
    protocol = PROTOCOLS[known]
    settings = dict(one.split("=", 1) for one in more.split(",")) if more else {}
    if (at := settings.pop("at", None)) is not None:
        if not at.isdecimal() or int(at) < 1 or protocol.then is None:
            changes = ", ".join(name for name, one in PROTOCOLS.items() if one.then)
            raise argparse.ArgumentTypeError(f"{name!r}: at= is a step, 1 or more, of {changes}")
        protocol = replace(protocol, at=int(at))
    if "rule" in settings:
        raise argparse.ArgumentTypeError(f"{name!r}: rules have an option of their own, --rules {settings['rule']}")
    return replace(protocol, settings={**protocol.settings, **settings})


def _protocol_name(name: str) -> str:
    protocol_of(name)
    return name


def rule_name(name: str) -> str:
    from gba_hvd.update_rules import known_rule

    try:
        return known_rule(name)
    except BadInput as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclass(frozen=True)
class Run:
    """One training to be done."""

    dataset: str
    epochs: int
    micro_batch: int
    protocol: str
    seed: int
    row_average: str = USUAL_AVERAGE
    workers: int = WORKERS
    threads: int = 1
    rule: str = "none"
    sgd_lr: float | None = None
    local_batch: int | None = None

    def __str__(self) -> str:
        return f"{_title(vars(self))}: {label(vars(self))}, seed {self.seed}"

    @property
    def dense_overrides(self) -> list[str]:
        """Of the optimizer of the dense part, where it is not the configuration's."""
        if self.sgd_lr is None:
            return []
        lr = self.sgd_lr / (1 - MOMENTUM) if self.rule == "delayed_nesterov" else self.sgd_lr
        return ["dense.optimizer=sgd", f"dense.momentum={MOMENTUM}", f"dense.lr={lr!r}"]


KEY = tuple(Run.__dataclass_fields__)  # what distinguishes one row from another


def add_parser(subparsers: Subparsers) -> None:
    does = "AUC of every mode, with the same settings"
    parser = measure.add_benchmark(subparsers, "quality", does, __doc__, run, help="rows in it are kept")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="frappe: the folder of train.csv.gz, valid.csv.gz and test.csv.gz (BARS frappe_x1)",
    )
    names: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    of_datasets = f"{', '.join(DATASETS)}"
    parser.add_argument("--datasets", default=USUAL_DATASETS, choices=DATASETS, help=of_datasets, **names)
    parser.add_argument(
        "--protocols", default=USUAL, type=_protocol_name,
        help=", ".join(PROTOCOLS) + "; with other settings as in shadow_bmuf:block_rate=1", **names,
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), metavar="N")
    parser.add_argument(
        "--epochs", type=int, help="instead of " + ", ".join(f"{d.epochs} ({n})" for n, d in DATASETS.items())
    )
    parser.add_argument("--micro-batch", type=int, metavar="N", help="samples; the global batch stays as it is")
    parser.add_argument(
        "--row-average", nargs="+", default=[USUAL_AVERAGE], choices=ROW_AVERAGES, metavar="HOW",
        help=", ".join(ROW_AVERAGES),
    )  # fmt: skip
    number: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "N"}
    parser.add_argument("--workers", default=[WORKERS], **number)
    parser.add_argument("--threads", default=[1], help="of each worker, for protocols with replicas", **number)
    parser.add_argument(
        "--rules", default=["none"], type=rule_name, help="see docs/DELAY.md; for protocols with delay", **names
    )
    parser.add_argument(
        "--sgd-lr", type=float, nargs="+", default=[None], metavar="LR",
        help=f"learning rates of SGD with momentum {MOMENTUM} for the dense part, in place of the configuration's Adam",
    )  # fmt: skip
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="start no further run after so long")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="for one run")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    check(args)
    results = resumable.Results(args.out, KEY, None, more_of, has=["metric"])
    axes = args.row_average, args.workers, args.threads, args.rules, args.sgd_lr
    jobs = planned(args.datasets, args.protocols, args.seeds, args.epochs, args.micro_batch, *axes)

    def train_one(job: Run) -> None:
        row = train(job, args.data, args.timeout)
        results.rows.append(row)
        metric = row["metric"]
        value = "undefined" if row[metric] is None else f"{row[metric]:.5f}"
        print(f"{job}: {title_of(metric)} {value} in {row['seconds']:.0f} s", flush=True)

    results.run_each(results.waiting(jobs), train_one, started + 60 * args.limit_minutes)
    show(results.rows)
    return results.end()


def check(args: argparse.Namespace) -> None:
    """Raise RunFailed for what would otherwise fail after minutes."""
    measure.check_writable(args.out)
    if not EXAMPLES.is_dir():
        raise measure.RunFailed(f"{EXAMPLES} is missing: run this from a clone of the repository")
    measure.require_at_least(args, epochs=1, micro_batch=1)
    measure.require_positive(args, "workers", "threads", "sgd_lr")
    protocols = [protocol_of(name) for name in args.protocols]
    if args.rules != ["none"] and not any(protocol.has_delay for protocol in protocols):
        raise measure.RunFailed(f"--rules: no gradient is late with {' '.join(args.protocols)}; take async, or gba")
    if args.threads != [1] and not any(protocol.has_replicas for protocol in protocols):
        raise measure.RunFailed(
            f"--threads: none of {' '.join(args.protocols)} has replicas; take shadow_easgd, or ma_5"
        )
    if "delayed_nesterov" in args.rules and any(protocol.has_delay and protocol.then for protocol in protocols):
        raise measure.RunFailed("delayed_nesterov has a learning rate of its own, which allreduce would use, too")
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
    row_averages: Sequence[str] = (USUAL_AVERAGE,),
    workers: Sequence[int] = (WORKERS,),
    threads: Sequence[int] = (1,),
    rules: Sequence[str] = ("none",),
    sgd_lrs: Sequence[float | None] = (None,),
) -> list[Run]:
    """Seed by seed, so that what is there when time is over can be compared. What has no effect on a protocol is left
    out of it."""
    runs = [
        Run(
            dataset, epochs or of.epochs, micro_batch or of.micro_batch, name, seed, row_average, n,
            n_threads if protocol_of(name).has_replicas else 1, rule if protocol_of(name).has_delay else "none", sgd_lr,
            protocol_of(name).local_batch(of.global_batch, n),
        )
        for seed in seeds
        for dataset, of in ((name, DATASETS[name]) for name in datasets)
        for n in workers
        for sgd_lr in sgd_lrs
        for name in protocols
        for n_threads in threads
        for rule in rules
        for row_average in row_averages
    ]  # fmt: skip
    return list(dict.fromkeys(runs))


def train(job: Run, data: Path | None, timeout_s: float) -> Row:
    """One run. Raises RunFailed."""
    of = DATASETS[job.dataset]
    protocol, half = protocol_of(job.protocol), of.steps(job.epochs) // 2
    with tempfile.TemporaryDirectory(prefix="gba-hvd-quality-") as scratch:
        faults = Path(scratch) / "faults.json"
        faults.write_text(json.dumps({"faults": protocol.faults(half, job.workers)}))
        arguments = ["--seed", str(job.seed), "--faults", str(faults)]
        if of.needs_data:
            arguments += ["--data", str(data)]
        at_once = job.local_batch or job.micro_batch
        arguments += [f"train.epochs={job.epochs}", f"train.micro_batch={at_once}"]
        arguments += [f"train.row_average={job.row_average}", "train.early_stop=0"]
        arguments += [*protocol.overrides(half, at_once, job.workers), *job.dense_overrides]
        arguments += [f"train.threads={job.threads}"] if job.threads > 1 else []
        if protocol.settings.get("staleness") != "gap_aware":  # that is a rule itself
            arguments += [f"switching.rule={job.rule}"]  # also "none": the default of gba is another
        started, file = time.monotonic(), Path(scratch) / "summary.json"
        try:
            summary = measure.summary_of(variant(of, job.workers), arguments, Path(scratch), timeout_s)
        except measure.RunFailed:
            summary = json.loads(file.read_text()) if file.exists() else {}
            if not diverged(summary):
                raise
            return row_of(job, summary, time.monotonic() - started) | {of.metric: None, f"{of.metric}_last": None}
    row = row_of(job, summary, time.monotonic() - started)
    expected = (protocol.mode != "allreduce") + (protocol.then is not None)
    if len(row["switches"]) != expected:
        raise measure.RunFailed(f"{expected} changes of mode were planned, there were {row['switches']}")
    return row


def diverged(summary: Mapping[str, Any]) -> bool:
    """Whether a job that failed did so because gradients or values were not finite, after its first epoch began."""
    return "not finite" in (summary.get("error") or "") and "samples_total" in summary


def variant(of: DataSet, workers: int = WORKERS) -> Variant:
    return measure.train_ctr(EXAMPLES / "configs" / f"{of.config}.yaml", workers)


def row_of(job: Run, summary: Mapping[str, Any], seconds: float) -> Row:
    """What is kept of a run."""
    metric = DATASETS[job.dataset].metric
    kept = (
        metric,
        f"{metric}_last",
        *(["logloss"] if metric == "auc" else []),
        f"valid_{metric}",
        "best_epoch",
        f"{metric}_bayes",
        "steps",
        "refused",
        "reissued",
        "switches",
    )
    total, dropped, age = summary["samples_total"], summary["samples_dropped"], summary.get("dense_age") or {}
    return {
        **vars(job),
        "metric": metric,
        **{name: summary.get(name) for name in kept},
        "samples_total": total,
        "samples_dropped": dropped,
        "dropped_share": dropped / total if total else 0.0,
        "staleness_mean": summary["staleness"]["mean"],
        "staleness_max": summary["staleness"]["max"],
        "staleness": summary["staleness"]["histogram"],
        "dense_age_mean": age.get("mean"),
        "dense_age": age.get("histogram"),
        f"valid_{metric}_by_epoch": [epoch.get(f"valid_{metric}") for epoch in summary.get("by_epoch", [])],
        "samples_per_s": total / summary["seconds"] if summary.get("seconds") else None,
        "seconds": round(seconds, 1),
    }


def headline(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """dataset (with its epochs, workers and so on) -> protocol (with its rule and threads) -> means over the seeds.

    `elp`: example-level parallelism, samples that are computed on at once; micro-batch x threads x workers.
    `samples_per_s`: of the training with its evaluations, on this machine. `auc` is that of the epoch with the best
    validation AUC, `auc_last` that after the last epoch; `vs_sync` is of the seeds that both have. A run whose AUC was
    never defined (it diverged) counts in `diverged` and in no mean. Rows of a retrieval have `recall_at_50` instead.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, protocol, some in _groups(rows):
        sync = [row for row in rows if _title(row) == name and row["protocol"] == "sync"]
        found.setdefault(name, {})[protocol] = {
            "elp": (some[0]["local_batch"] or some[0]["micro_batch"]) * some[0]["threads"] * some[0]["workers"],
            "seeds": len(some),
            "metric": some[0]["metric"],
            "diverged": sum(row[row["metric"]] is None for row in some),
            **_against(sync, some, ""),
            **_against(sync, some, "_last"),
            "dropped_share": mean(row["dropped_share"] for row in some),
            **{name: _mean_of(some, name) for name in ("staleness_mean", "dense_age_mean", "samples_per_s")},
            "staleness_max": max(
                (row["staleness_max"] for row in some if row["staleness_max"] is not None), default=None
            ),
        }
    return found


def title_of(metric: str) -> str:
    """As a person reads it."""
    return "AUC" if metric == "auc" else metric.replace("_at_", "@")


def _against(sync: Sequence[Row], some: Sequence[Row], suffix: str) -> dict[str, Any]:
    """Mean AUC (or recall) of some runs, and its distance from synchronous training of the same seeds."""
    metric = some[0]["metric"]
    column = f"{metric}{suffix}"
    good = {row["seed"]: row[column] for row in some if row.get(column) is not None}
    theirs = {row["seed"]: row[column] for row in sync if row.get(column) is not None}
    differences = [auc - theirs[seed] for seed, auc in good.items() if seed in theirs]
    return {
        column: mean(good.values()) if good else None,
        f"{column}_std": stdev(good.values()) if len(good) > 1 else None,
        f"vs_sync{suffix}": mean(differences) if differences else None,
        f"vs_sync{suffix}_worst": min(differences) if differences else None,
    }


def _mean_of(rows: Sequence[Row], column: str) -> float | None:
    known = [row[column] for row in rows if row.get(column) is not None]
    return mean(known) if known else None


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """The rows of each dataset and protocol, protocols in the order of `PROTOCOLS`, then those with other settings."""
    for name in dict.fromkeys(_title(row) for row in rows):
        for protocol in dict.fromkeys([*PROTOCOLS, *map(label, rows)]):
            some = [row for row in rows if _title(row) == name and label(row) == protocol]
            if some:
                yield name, protocol, some


def _title(row: Row, workers: bool = True) -> str:
    """What runs have in common that are compared."""
    how, lr, n = row["row_average"], row["sgd_lr"], row["workers"]
    rows = "" if how == USUAL_AVERAGE else f", row_average {how}"
    dense = "" if lr is None else f", dense SGD with momentum {MOMENTUM} and learning rate {lr:g}"
    people = f", {n} worker{'s' * (n != 1)}" if workers else ""
    return f"{row['dataset']}, {row['epochs']} epochs, micro-batches of {row['micro_batch']}{rows}{dense}{people}"


def label(row: Row) -> str:
    """What is compared: the protocol, with its rule and its threads where these are not the usual ones."""
    rule, threads = str(row["rule"]), int(row["threads"])
    return str(row["protocol"]) + f", {rule}" * (rule != "none") + f", {threads} threads" * (threads > 1)


def more_of(rows: Sequence[Row]) -> dict[str, Any]:
    """What a result file says beside its rows."""
    settings = {
        "slow_worker": SLOW | {"worker": "the last of several"},
        "command": {
            f"{name}, {n} workers": str(variant(of, n))
            for name, of in DATASETS.items()
            for n in sorted({WORKERS, *(row["workers"] for row in rows)})
        },
    }
    return {"settings": settings, "headline": headline(rows)}


def show(rows: Sequence[Row]) -> None:
    for metric in dict.fromkeys(row["metric"] for row in rows):
        show_metric(metric, [row for row in rows if row["metric"] == metric])
    show_parallelism(rows)
    for line in [*best_rules(rows), *best_rates(rows)]:
        print(line)


def show_metric(metric: str, rows: Sequence[Row]) -> None:
    columns = {
        "protocol": "{protocol}", "seeds": "{seeds}{gone}", title_of(metric): f"{{{metric}:.5f}}",
        "vs sync": "{vs_sync:+.5f}", "worst": "{vs_sync_worst:+.5f}", "last": f"{{{metric}_last:.5f}}",
        "vs sync, last": "{vs_sync_last:+.5f}", "dropped": "{dropped_share:.2%}", "stale": "{staleness_mean:.2f}",
        "most": "{staleness_max:d}", "age": "{dense_age_mean:.2f}",
    }  # fmt: skip
    for name, protocols in headline(rows).items():
        table = [
            {"protocol": protocol, **found, "gone": f", {found['diverged']} diverged" if found["diverged"] else ""}
            for protocol, found in protocols.items()
        ]
        measure.print_figures(f"test {title_of(metric)} on {name}", columns, table)


def show_parallelism(rows: Sequence[Row]) -> None:
    """AUC and speed against example-level parallelism, of protocols with replicas."""
    tables: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
    for _, protocol, some in _groups([row for row in rows if protocol_of(row["protocol"]).has_replicas]):
        (one,), found = some[:1], next(iter(headline(some).values()))[protocol]
        metric = one["metric"]
        cells = [(metric, ".5f"), (f"{metric}_last", ".5f"), ("samples_per_s", ",.0f")]
        values = ("-" if found[key] is None else format(found[key], how) for key, how in cells)
        line = one["protocol"], *map(str, (one["workers"], one["threads"], found["elp"], found["seeds"])), *values
        tables.setdefault(_title(one, workers=False), []).append((found["elp"], line))
    columns = ("protocol", "workers", "threads", "ELP", "seeds", "AUC or recall", "last", "samples/s")
    for title, lines in tables.items():
        table = [line for _, line in sorted(lines)]
        measure.print_table(f"replicas by example-level parallelism, {title}", columns, table)


def best_rules(rows: Sequence[Row]) -> Iterator[str]:
    """Which rule has the best mean AUC after the last epoch, where several were tried, over the seeds all have."""
    yield from _best(((f"{_title(row)}, {row['protocol']}", row["rule"], row) for row in rows), "rule")


def best_rates(rows: Sequence[Row]) -> Iterator[str]:
    """Which learning rate of a grid has the best mean AUC after the last epoch, over the seeds all have."""
    tried = [row for row in rows if row["sgd_lr"] is not None]
    of = ((f"{_title({**row, 'sgd_lr': None})}, {label(row)}", f"{row['sgd_lr']:g}", row) for row in tried)
    yield from _best(of, "learning rate of SGD")


def _best(rows: Iterable[tuple[str, str, Row]], what: str) -> Iterator[str]:
    """rows: what is alike, the candidate, and its row. A candidate that diverged with a seed has no mean."""
    found: dict[tuple[str, str], dict[str, dict[int, float | None]]] = {}
    for alike, candidate, row in rows:
        of_alike = found.setdefault((alike, title_of(row["metric"])), {})
        of_alike.setdefault(candidate, {})[row["seed"]] = row.get(f"{row['metric']}_last")
    for (of, title), candidates in found.items():
        seeds = set.intersection(*map(set, candidates.values()))
        means: dict[str, float] = {}
        for name, by_seed in candidates.items():
            here = [auc for seed in seeds if (auc := by_seed[seed]) is not None]
            if seeds and len(here) == len(seeds):
                means[name] = mean(here)
        if len(candidates) > 1 and seeds:
            listed = [f"{name} {means[name]:.5f}" for name in sorted(means, key=lambda name: -means[name])]
            listed += [f"{name} diverged" for name in candidates if name not in means]
            n = f"{len(seeds)} seed{'s' * (len(seeds) != 1)}"
            yield f"{of}: best {what}, {title} after the last epoch, {n}: {', '.join(listed)}"
