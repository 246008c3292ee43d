"""`gba-hvd bench quality-days`: GBA's protocol of days, on a synthetic click log that drifts.

A base model is trained for some days in one mode; then the mode changes, with the same hyper-parameters, and training
continues day by day. The model of each day is tested on the day after. Direction from_sync: synchronous base days, then
each mode. Direction to_sync: base days in each mode, then synchronous ones. Every job is `examples/train_ctr.py` under
horovodrun with three workers; it resumes from the checkpoint of the job before it, as a team does that trains a model
every day. Its days are its epochs. In asynchronous modes one worker takes three times as long, so that gradients
are stale.

As published no update rule corrects late gradients (--rule); rows are averaged by `global` unless --row-average says
otherwise. Rows in the result file are kept and their jobs not run again; a file may have rows of several settings, and
what is shown and drawn is of those that are given. Base models stay in the folder --models until all jobs
that inherit them have rows. `--plot` draws the norms of the steps' gradients by mode, and AUC by day.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gba_hvd.embedding.row_gradients import ROW_AVERAGES

from ..harness import measure, resumable
from ..harness.measure import Row, Subparsers
from ..quality import rule_name
from .chains import (
    AFTER,
    BASE,
    DIRECTIONS,
    GOAL,
    KEY,
    MODES,
    USUAL,
    Chain,
    goal,
    headline,
    missing,
    norms_by_mode,
    of_setting,
    planned,
    quantile,
    rows_of_job,
)
from .plot import draw

CONFIG = measure.EXAMPLES / "configs" / "daily.yaml"
WORKERS = 3
SLOW = {"kind": "slow", "worker": 2, "factor": 3.0}
SEEDS = (2021, 2022, 2023)
MEASURED_ONLY = "1e30"  # train.max_norm: norms are measured, and no step is clipped


def add_parser(subparsers: Subparsers) -> None:
    does = "AUC day by day after a change of mode, in all modes and both directions"
    parser = measure.add_benchmark(subparsers, "quality-days", does, __doc__, run, help="rows in it are kept")
    measure.add_chosen(parser, "--modes", MODES, "MODE", help=", ".join(MODES) + "; sync is always among them")
    measure.add_chosen(parser, "--directions", DIRECTIONS, "DIRECTION", help=", ".join(DIRECTIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), metavar="N")
    parser.add_argument("--base-days", type=int, default=2, metavar="N", help="days before the change")
    parser.add_argument("--days", type=int, default=3, metavar="N", help="days after it")
    parser.add_argument("--samples", type=int, metavar="N", help="training samples of a day (default: the example's)")
    parser.add_argument(
        "--row-average", default=USUAL["row_average"], choices=ROW_AVERAGES, metavar="HOW",
        help=", ".join(ROW_AVERAGES) + ": what a row's gradient is divided by",
    )  # fmt: skip
    parser.add_argument(
        "--rule", default=USUAL["rule"], type=rule_name, metavar="NAME",
        help="of the servers in asynchronous modes, see docs/DELAY.md",
    )  # fmt: skip
    parser.add_argument("--models", type=Path, metavar="DIR", help="base models (default: --out with .models added)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what is there at the end; .svg or .png")
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="start no further job after so long")
    parser.add_argument("--timeout", type=float, default=1200.0, metavar="SECONDS", help="for one job")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    check(args)
    settings = settings_of(args)
    with_command = {"settings": settings | {"command": str(measure.train_ctr(CONFIG, WORKERS))}}

    def more(rows: list[Row]) -> dict[str, Any]:
        found = headline(of_setting(rows, args.row_average, args.rule))
        return {**with_command, "headline": found, "goal": goal(found)}

    results = resumable.Results(args.out, KEY, settings, more)
    rows = results.rows
    models = args.models or args.out.with_name(args.out.name + ".models")
    chains = planned(args.modes, args.directions, args.seeds, args.row_average, args.rule)
    waiting = missing(chains, rows)
    print(f"{len(rows)} rows in {args.out}, {len(waiting)} chains to do", flush=True)

    def write_all() -> None:
        results.write()
        forget_models(models, missing(chains, rows))

    def train_chain(chain: Chain) -> None:
        base = base_model(chain, args, models, rows)
        write_all()
        rows.extend(inherit(chain, args, base))

    until = started + 60 * args.limit_minutes
    resumable.run_each(waiting, train_chain, write_all, results.failures, noun="chains", until=until)
    write_all()
    shown = of_setting(rows, args.row_average, args.rule)
    show(shown)
    if args.plot is not None:
        draw(shown, args.plot)
        print(f"drawn to {args.plot}")
    return results.end()


def check(args: argparse.Namespace) -> None:
    """Raise RunFailed for what would otherwise fail after minutes."""
    if not CONFIG.is_file():
        raise measure.RunFailed(f"{CONFIG} is missing: run this from a clone of the repository")
    measure.require_at_least(args, base_days=1, days=1, samples=1)
    measure.check_plot(args.plot)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What all rows of a file have in common."""
    return {
        "base_days": args.base_days, "days": args.days, "samples": args.samples, "workers": WORKERS,
        "slow_worker": dict(SLOW), "config": CONFIG.read_text(),
    }  # fmt: skip


def base_model(chain: Chain, args: argparse.Namespace, models: Path, rows: list[Row]) -> Path:
    """The folder of the base that a chain inherits: trained first if it is not there; its rows replace earlier ones.

    Raises RunFailed. The folder gets its name when it is complete.
    """
    folder = models / chain.base_name
    if (folder / "summary.json").exists():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    days = range(args.base_days)
    with tempfile.TemporaryDirectory(prefix=".training-", dir=models) as scratch:
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        summary, seconds = train(chain.base, chain, days, args, fresh)
        new_rows = rows_or_failure(BASE, chain, days, summary, None)
        (fresh / "summary.json").write_text(json.dumps(summary))
        fresh.rename(folder)
    names = ("phase", "base", "seed", *USUAL)
    own = {tuple(row[name] for name in names) for row in new_rows}
    rows[:] = [row for row in rows if tuple(row[name] for name in names) not in own]
    rows += new_rows
    say(f"base {chain.base_name}", new_rows, seconds)
    return folder


def inherit(chain: Chain, args: argparse.Namespace, base: Path) -> list[Row]:
    """The rows of the days after the base. Raises RunFailed. The base stays as it is."""
    days = range(args.base_days, args.base_days + args.days)
    with tempfile.TemporaryDirectory(prefix=".training-", dir=base.parent) as scratch:
        own = Path(scratch) / "model"
        shutil.copytree(base, own)
        before = json.loads((own / "summary.json").read_text())
        (own / "summary.json").unlink()
        summary, seconds = train(chain.then, chain, days, args, own)
    rows = rows_or_failure(AFTER, chain, days, summary, before)
    say(str(chain), rows, seconds)
    return rows


def train(mode: str, chain: Chain, days: range, args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], float]:
    """One job, whose checkpoint is in `folder`: its summary, and how long it took. Raises RunFailed."""
    faults = folder / "faults.json"
    is_async = MODES[mode] != "allreduce"
    faults.write_text(json.dumps({"faults": [SLOW] if is_async else []}))
    words = ["--seed", str(chain.seed), "--faults", str(faults)]
    words += [f"train.epochs={days.stop}", f"train.max_norm={MEASURED_ONLY}", f"switching.mode={MODES[mode]}"]
    words += [f"switching.rule={chain.rule_of(mode)}", f"train.row_average={chain.row_average}"]
    words += [
        "switching.wait_s=120",
        f"switching.required={str(is_async).lower()}",
        f"data.synthetic.seed={chain.seed}",
    ]
    words += [f"checkpoint.url={folder / 'checkpoint'}", "checkpoint.every_steps=1000000000", "checkpoint.policy=full"]
    if args.samples is not None:
        words.append(f"data.synthetic.train={args.samples}")
    started = time.monotonic()
    summary = measure.summary_of(measure.train_ctr(CONFIG, WORKERS), words, folder, args.timeout)
    return summary, time.monotonic() - started


def rows_or_failure(*of_job: Any) -> list[Row]:
    try:
        return rows_of_job(*of_job)
    except ValueError as error:
        raise measure.RunFailed(str(error)) from error


def forget_models(models: Path, waiting: Sequence[Chain]) -> None:
    """Remove the bases that no chain waits for."""
    needed = {chain.base_name for chain in waiting}
    for folder in models.iterdir() if models.is_dir() else ():
        if folder.name not in needed and not folder.name.startswith("."):
            shutil.rmtree(folder)
    if models.is_dir() and not any(models.iterdir()):
        models.rmdir()


def say(what: str, rows: Sequence[Row], seconds: float) -> None:
    aucs = ", ".join(f"{row['auc']:.5f}" for row in rows)
    print(f"{what}: AUC by day {aucs} in {seconds:.0f} s", flush=True)


def show(rows: Sequence[Row]) -> None:
    found = headline(rows)
    shown = {
        "mode": "{mode}", "seeds": "{seeds}", "first day": "{first:.5f}", "last": "{last:.5f}", "mean": "{mean:.5f}",
        "mean vs sync": "{vs_sync_mean:+.5f}", "worst seed": "{vs_sync_worst:+.5f}", "best": "{vs_sync_best:+.5f}",
        "below Bayes": "{below_bayes:.5f}", "dropped": "{dropped_share:.2%}", "stale": "{staleness_mean:.2f}",
    }  # fmt: skip
    for direction, modes in found.items():
        title = f"{direction}: AUC of a day's model on the day after, days after the change, {WORKERS} workers"
        measure.print_figures(title, shown, [{"mode": mode, **columns} for mode, columns in modes.items()])
    for direction, result in goal(found).items():
        words = "met" if result["is_met"] else f"missed by {abs(result['difference']) - GOAL:.5f}"
        print(f"{direction}: gba is {result['difference']:+.5f} from sync in the mean; goal, within {GOAL}: {words}")
    norms = norms_by_mode(rows)
    if norms:
        shares = {"5 %": 0.05, "median": 0.5, "95 %": 0.95}
        table = [
            (mode, f"{sum(counts.values()):,}", *(f"{quantile(counts, share):.3g}" for share in shares.values()))
            for mode, counts in norms.items()
        ]
        measure.print_table("norm of a step's gradient, days after synchronous ones", ("mode", "steps", *shares), table)
