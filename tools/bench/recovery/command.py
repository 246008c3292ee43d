"""`gba-hvd bench recovery`: CPR's experiment, emulated: what each way to recover costs and loses in a 56-hour job.

Failures are drawn at random, the costs of a save, a load and a replacement are given, so the overheads follow from
them: they are not measured on this machine. "Production" costs are assumptions, chosen so that full recovery costs a
little over 8 % of training time at 28 hours between failures; `--costs` adds the same experiment with measured ones.

Each contestant meets the same failures. `pls` is CPR's: by the time since the last round of saves ended; `updates_lost`
by rows: each row since it was itself saved, in a model of popularity (Zipf), so it shows what priorities gain. The
closed forms are for a long operation; a job of 56 hours ends before its last round of saves does, and costs a bit less.

With --accuracy, models are also really trained, lose servers, and get rows back: what that costs in AUC. Trainings
that are in the file already are kept and not done again, so a long measurement can be done in pieces.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..harness import measure

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("recovery", help="full against partial recovery, emulated", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--costs", type=Path, metavar="FILE.json", help="measured costs: save_s, load_s, ...")
    parser.add_argument("--traces", type=int, default=300, help="random sequences of failures (%(default)s; 0: none)")
    parser.add_argument("--shape", type=float, default=1.0, help="of their gamma law (%(default)s)")
    parser.add_argument("--r", type=float, default=0.125, help="share of rows of a priority save (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    names = ("frappe", "synthetic")
    parser.add_argument(
        "--accuracy", nargs="+", default=[], choices=names, metavar="NAME", help="train " + ", ".join(names)
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="frappe: the folder of its files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2021, 2022, 2023], metavar="N", help="of --accuracy")
    parser.add_argument("--epochs", type=int, help="of --accuracy, instead of 12 (frappe), 1 (synthetic)")
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="start no further training after so long")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    try:
        measure.check_writable(args.out)
        document = json.loads(args.out.read_text()) if args.out.exists() and args.out.stat().st_size else {}
        if not isinstance(document, dict):
            raise measure.RunFailed(f"{args.out} is no result of this benchmark: give --out another name")
        if args.epochs is not None and args.epochs < 1:
            raise measure.RunFailed(f"--epochs must be at least 1, got {args.epochs}")
    except (measure.RunFailed, ValueError) as error:
        print(f"gba-hvd: {error}", file=sys.stderr)
        return 1
    if args.traces:
        document |= emulate(args)
        measure.write_json(args.out, document)
    if args.accuracy:
        measure_accuracy(args, document, started)
    print(f"written to {args.out}")
    return 0


def measure_accuracy(args: argparse.Namespace, document: dict[str, Any], started: float) -> None:
    """Train what is not in the document yet; it is written after each training."""
    import torch

    from . import accuracy, emulation

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = document.setdefault("accuracy", [])
    done = {tuple(row.get(name) for name in accuracy.KEY) for row in rows}
    runs = accuracy.planned(args.accuracy, emulation.MEANS_H, args.seeds, args.epochs)
    waiting = [run for run in runs if tuple(getattr(run, name) for name in accuracy.KEY) not in done]
    print(f"{len(rows)} trainings in {args.out}, {len(waiting)} to do", flush=True)
    logs = {name: accuracy.opened(name, args.data) for name in dict.fromkeys(run.dataset for run in waiting)}
    for number, run in enumerate(waiting):
        if time.monotonic() - started > 60 * args.limit_minutes:
            print(f"no time left for {len(waiting) - number} trainings; the same command goes on with them")
            break
        row = accuracy.train(run, logs[run.dataset], args.r)
        rows.append(row)
        document["auc"] = accuracy.headline(rows)
        measure.write_json(args.out, document)
        print(f"{run}: AUC {row['auc']:.5f} in {row['seconds']:.0f} s", flush=True)
    show_accuracy(document.get("auc", {}))
    print("\n".join(accuracy.verdict(document.get("auc", {}))))


def show_accuracy(found: Mapping[str, Any]) -> None:
    for title, by_mean in found.items():
        for mean_h, of in by_mean.items():
            table = [
                (
                    name,
                    str(row["seeds"]),
                    f"{row['auc']:.5f}",
                    "-" if row["vs_none"] is None else f"{row['vs_none']:+.5f}",
                    "-" if row["vs_none_worst"] is None else f"{row['vs_none_worst']:+.5f}",
                    f"{row['failures']:.0f}",
                    f"{row['pls']:.4f}",
                )
                for name, row in of.items()
            ]
            columns = ("recovery", "seeds", "AUC", "vs none", "worst", "failures", "PLS")
            measure.print_table(f"test AUC on {title}, {mean_h[:-1]} h between failures", columns, table)


def emulate(args: argparse.Namespace) -> dict[str, Any]:
    """Overheads and losses by strategy: what the result file says of them."""
    from recovery.schedule.planner import Costs

    from ...plan.measured_costs import read_costs
    from . import emulation

    platforms = {"production": emulation.PRODUCTION}
    if args.costs:
        platforms["measured"] = Costs.of_mapping(
            {"reschedule_s": emulation.PRODUCTION.reschedule_s, **read_costs(args.costs)}
        )
    found: dict[str, dict[str, Any]] = {}
    for name, costs in platforms.items():
        found[name] = {"costs": asdict(costs), "figures": {}}
        for mean_h in emulation.MEANS_H:
            outcomes = emulation.emulated(costs, mean_h, args.traces, args.shape, args.r, args.seed)
            found[name]["figures"][f"{mean_h}h"] = {key: emulation.figures(of_key) for key, of_key in outcomes.items()}
            show(name, mean_h, found[name]["figures"][f"{mean_h}h"])
        print("formula: the closed form; lost: share of row updates; written: in tables")
        found[name]["verdict"] = emulation.verdict(found[name]["figures"], costs)
        print("\n".join(found[name]["verdict"]))
    return {
        "settings": {
            "hours": emulation.HOURS,
            "servers": emulation.SERVERS,
            "target_pls": emulation.TARGET_PLS,
            "r": args.r,
            "shape": args.shape,
            "traces": args.traces,
            "seed": args.seed,
            "rows": asdict(emulation.row_model()),
            "contestants": emulation.CONTESTANTS,
        },
        "overhead_pct": emulation.by_mean_time(found["production"]["figures"], "overhead_pct"),
        "pls": emulation.by_mean_time(found["production"]["figures"], "pls"),
        "updates_lost": emulation.by_mean_time(found["production"]["figures"], "updates_lost"),
        "platforms": found,
    }


def show(platform: str, mean_h: float, found: Mapping[str, Any]) -> None:
    from . import emulation

    columns = ("recovery", "every", "cost %", "+-", "formula", "PLS", "lost", "written")
    table = [
        (
            name,
            f"{row['round_h']:.1f} h",
            f"{row['overhead_pct']['mean']:.3f}",
            f"{row['overhead_pct']['standard_error']:.3f}",
            f"{row['closed_form_overhead_pct']:.3f}",
            f"{row['pls']['mean']:.4f}",
            f"{row['updates_lost']['mean']:.4f}",
            f"{row['written_tables']:.2f}",
        )
        for name, row in found.items()
    ]
    measure.print_table(
        f"{platform} costs, {mean_h} h between failures, {emulation.HOURS} h, {emulation.SERVERS} servers",
        columns,
        table,
    )
