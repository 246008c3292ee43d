"""`gba-hvd chaos run | show | summary`."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from gba_hvd.errors import BadInput

_OUT = "runs/chaos"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "chaos", help="random schedules of faults against a small job, and what did not hold"
    )
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    run = commands.add_parser("run", help="carry out schedules; those that have a result in DIR are not run again")
    which = run.add_mutually_exclusive_group(required=True)
    which.add_argument("--seeds", type=seeds, metavar="A:B", help="seeds A to B - 1")
    which.add_argument("--seed", type=int, metavar="N", help="this one, whether it has a result or not")
    which.add_argument("--plan", type=Path, metavar="FILE", help="the schedule in this file")
    run.add_argument("--out", type=Path, default=Path(_OUT), metavar="DIR", help=f"of the runs (default: {_OUT})")
    run.add_argument("--keep", action="store_true", help="keep the jobs' folders; those of failures are kept anyway")
    mode = "asynchronous mode instead of the drawn one"
    run.add_argument("--mode", default="", choices=("gba", "shadow"), help=mode)
    _add_rule(run)
    run.set_defaults(run=_run)
    show = commands.add_parser("show", help="the schedule of a seed; nothing runs")
    show.add_argument("seed", type=int, metavar="SEED", help="as in `run --seed`")
    show.add_argument("--json", action="store_true", help="only what `run --plan` reads")
    show.add_argument("--mode", default="", choices=("gba", "shadow"), help=mode)
    _add_rule(show)
    show.set_defaults(run=_show)
    summary = commands.add_parser("summary", help="a table of faults by kind, from the results in DIR")
    summary.add_argument("out", type=Path, metavar="DIR", help="the folder that `run --out` named")
    summary.set_defaults(run=_summary)


def _add_rule(parser: argparse.ArgumentParser) -> None:
    rules = ("none", "look_ahead", "gap_aware", "dana_zero", "dana_slim")
    parser.add_argument("--rule", default="", choices=rules, help="update rule instead of the drawn one")


def seeds(text: str) -> range:
    """0:200 -> range(0, 200)"""
    first, colon, end = text.partition(":")
    try:
        found = range(int(first), int(end))
    except ValueError:
        found = range(0)
    if not colon or not found or found[0] < 0:
        raise argparse.ArgumentTypeError(f"expected A:B with 0 <= A < B, such as 0:200, got {text!r}")
    return found


def _run(args: argparse.Namespace) -> int:
    from .plan import FaultPlan, plan_of
    from .run import run_plans

    began = time.monotonic()
    if args.plan is not None:
        if args.mode or args.rule:
            raise BadInput(f"--mode and --rule choose among drawn schedules, {args.plan} has its own: leave them out")
        chosen = {args.plan.stem: FaultPlan.load(args.plan)}
    else:
        numbers = args.seeds if args.seed is None else [args.seed]
        chosen = {f"{seed:05d}": plan_of(seed, args.mode, args.rule) for seed in numbers}
    if os.pathsep in str(args.out.resolve()):
        raise BadInput(
            f"--out {args.out}: jobs have a folder in it on PYTHONPATH, so its path may have no {os.pathsep!r}"
        )
    n_failed = run_plans(chosen, args.out, args.keep, again=args.seeds is None)
    print(f"{len(chosen)} schedules, {n_failed} failed, {time.monotonic() - began:.0f} s; results in {args.out}")
    return 1 if n_failed else 0


def _show(args: argparse.Namespace) -> int:
    from .plan import KINDS, plan_of

    plan = plan_of(args.seed, args.mode, args.rule)
    print(json.dumps(asdict(plan), indent=2))
    for kind in () if args.json else dict.fromkeys(plan.kinds):
        print(f"# {kind}: {KINDS[kind]}")
    return 0


def _summary(args: argparse.Namespace) -> int:
    from .summary import report

    if not (args.out / "results").is_dir():
        raise BadInput(f"{args.out} has no results: gba-hvd chaos run --seeds 0:20 --out {args.out} makes some")
    print(report(args.out))
    return 0
