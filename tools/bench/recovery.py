"""`gba-hvd bench recovery`: CPR's experiment, emulated: what each way to recover costs and loses in a 56-hour job.

Failures are drawn at random, the costs of a save, a load and a replacement are given, so the overheads follow from
them: they are not measured on this machine. "Production" costs are assumptions, chosen so that full recovery costs a
little over 8 % of training time at 28 hours between failures; `--costs` adds the same experiment with measured ones.

Each contestant meets the same failures. `pls` is CPR's: by the time since the last round of saves ended; `updates_lost`
by rows: each row since it was itself saved, in a model of popularity (Zipf), so it shows what priorities gain. The
closed forms are for a long operation; a job of 56 hours ends before its last round of saves does, and costs a bit less.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import measure

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("recovery", help="full against partial recovery, emulated", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--costs", type=Path, metavar="FILE.json", help="measured costs: save_s, load_s, ...")
    parser.add_argument("--traces", type=int, default=300, help="random sequences of failures (%(default)s)")
    parser.add_argument("--shape", type=float, default=1.0, help="of their gamma law (%(default)s)")
    parser.add_argument("--r", type=float, default=0.125, help="share of rows of a priority save (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from recovery.planner import Costs

    from ..plan_command import read_costs
    from . import cpr

    try:
        measure.check_writable(args.out)
    except measure.RunFailed as error:
        print(f"gba-hvd: {error}", file=sys.stderr)
        return 1
    platforms = {"production": cpr.PRODUCTION}
    if args.costs:
        platforms["measured"] = Costs.of_mapping(
            {"reschedule_s": cpr.PRODUCTION.reschedule_s, **read_costs(args.costs)}
        )
    found: dict[str, dict[str, Any]] = {}
    for name, costs in platforms.items():
        found[name] = {"costs": asdict(costs), "figures": {}}
        for mean_h in cpr.MEANS_H:
            outcomes = cpr.emulated(costs, mean_h, args.traces, args.shape, args.r, args.seed)
            found[name]["figures"][f"{mean_h}h"] = {key: cpr.figures(of_key) for key, of_key in outcomes.items()}
            show(name, mean_h, found[name]["figures"][f"{mean_h}h"])
        print("formula: the closed form; lost: share of row updates; written: in tables")
        found[name]["verdict"] = cpr.verdict(found[name]["figures"], costs)
        print("\n".join(found[name]["verdict"]))
    measure.write_json(
        args.out,
        {
            "settings": {
                "hours": cpr.HOURS,
                "servers": cpr.SERVERS,
                "target_pls": cpr.TARGET_PLS,
                "r": args.r,
                "shape": args.shape,
                "traces": args.traces,
                "seed": args.seed,
                "rows": asdict(cpr.row_model()),
                "contestants": cpr.CONTESTANTS,
            },
            "overhead_pct": cpr.by_mean_time(found["production"]["figures"], "overhead_pct"),
            "pls": cpr.by_mean_time(found["production"]["figures"], "pls"),
            "updates_lost": cpr.by_mean_time(found["production"]["figures"], "updates_lost"),
            "platforms": found,
        },
    )
    print(f"written to {args.out}")
    return 0


def show(platform: str, mean_h: float, found: Mapping[str, Any]) -> None:
    from . import cpr

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
        f"{platform} costs, {mean_h} h between failures, {cpr.HOURS} h, {cpr.SERVERS} servers", columns, table
    )
