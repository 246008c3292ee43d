"""`gba-hvd bench recovery`: CPR's experiment, emulated: what each way to recover costs and loses in a 56-hour job.

Failures are drawn at random, the costs of a save, a load and a replacement are given, so the overheads follow from
them: they are not measured on this machine. "Production" costs are assumptions, chosen so that full recovery costs a
little over 8 % of training time at 28 hours between failures; `--costs` adds the same experiment with measured ones.

Each contestant meets the same failures. `pls` is CPR's portion of lost samples, each row from its own last save,
whether or not it was accessed since; `updates_lost` is the portion of accesses that are lost, in a model of popularity
(Zipf), so it shows what priorities gain. E[PLS] is for saves of all rows and for a job of this length; the closed forms
of the cost are for a long operation: a job of 56 hours ends before its last round of saves does, and costs a bit less.

--grid has r, the number of servers and the mean time between failures vary instead, at the production costs; `least` is
the closed form's bound: what any policy costs that keeps the expected PLS within the target.

With --accuracy, models are also really trained, lose servers, and get rows back: what that costs in AUC, for all
strategies, or with --experiments over one setting: `pls` (the curve of AUC over the portion lost; --plot draws it),
`r`, `servers`, `mtbf`. Trainings and cells of the grid that are in the file already are kept and not done again, so a
long measurement can be done in pieces.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recovery.errors import BadInput
from recovery.schedule.planner import Costs

from ..harness import measure, resumable
from ..harness.measure import Subparsers

EXPERIMENTS = ("pls", "r", "servers", "mtbf")


def add_parser(subparsers: Subparsers) -> None:
    parser = measure.add_benchmark(subparsers, "recovery", "full against partial recovery, emulated", __doc__, run)
    parser.add_argument("--costs", type=Path, metavar="FILE.json", help="measured costs: save_s, load_s, ...")
    parser.add_argument("--traces", type=int, default=300, help="random sequences of failures; 0: none")
    parser.add_argument("--shape", type=float, default=1.0, help="of their gamma law")
    parser.add_argument("--r", type=float, default=0.125, help="share of rows of a priority save")
    parser.add_argument("--seed", type=int, default=0)
    names = ("frappe", "synthetic")
    parser.add_argument(
        "--accuracy", nargs="+", default=[], choices=names, metavar="NAME", help="train " + ", ".join(names)
    )
    parser.add_argument(
        "--counting", action="store_true", help="compare the rows that mfu takes by accesses and by steps with one"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="frappe: the folder of its files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2021, 2022, 2023], metavar="N", help="of --accuracy")
    parser.add_argument("--epochs", type=int, help="of --accuracy, instead of 12 (frappe), 1 (synthetic)")
    parser.add_argument("--samples", type=int, help="of --accuracy synthetic, instead of 1,000,000")
    parser.add_argument(
        "--experiments", nargs="+", default=[], choices=EXPERIMENTS, help="of --accuracy, instead of all strategies"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="of --experiments pls: draw the curve")
    parser.add_argument("--grid", action="store_true", help="emulate other r, servers and mean times instead")
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="start no further training after so long")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    document = resumable.read(args.out)
    _refuse_idle(args)
    if args.grid:
        measure_grid(args, document)
    elif args.traces:
        document |= emulate(args)
        measure.write_whole(args.out, document)
    if args.counting:
        from . import counting

        document["counting"] = counting.compared(args.r, args.seed)
        measure.write_whole(args.out, document)
        title = f"r = {args.r:g} of {counting.N_ROWS:,} rows, {counting.N_STEPS} steps between two saves"
        measure.print_figures(title, counting.COLUMNS, document["counting"])
    if args.accuracy:
        measure_accuracy(args, document, started)
    print(f"written to {args.out}")
    return 0


def _refuse_idle(args: argparse.Namespace) -> None:
    """Raise RunFailed for options that the others make void, and for numbers that are none."""
    measure.require_at_least(args, epochs=1, samples=1)
    if args.samples is not None and "synthetic" not in args.accuracy:
        raise measure.RunFailed("--samples is of --accuracy synthetic: give it, or leave --samples out")
    if args.experiments and not args.accuracy:
        raise measure.RunFailed("--experiments are of --accuracy: say which data, --accuracy synthetic, frappe or both")
    if args.plot is not None and "pls" not in args.experiments:
        raise measure.RunFailed("--plot draws the curve of --experiments pls: give it, or leave --plot out")
    if args.grid and not args.traces:
        raise measure.RunFailed("--grid needs random failures: --traces 1 or more")
    if args.grid and (args.costs or args.r != 0.125):
        raise measure.RunFailed("--grid is at the production costs and has r of its own: leave --costs and --r out")
    if args.experiments and args.r != 0.125:
        raise measure.RunFailed("--experiments vary one setting, with r = 0.125 in the others: leave --r out")


def measure_grid(args: argparse.Namespace, document: dict[str, Any]) -> None:
    """Emulate the cells that the document lacks; it is written after each."""
    from . import emulation, grid

    rows: list[dict[str, Any]] = document.setdefault("grid", [])
    wanted = grid.cells(args.traces, args.shape, args.seed)
    waiting = resumable.missing(wanted, rows, grid.KEY)
    print(f"{len(wanted) - len(waiting)} of {len(wanted)} cells in {args.out}", flush=True)
    for cell in waiting:
        rows.append(grid.emulated(cell, emulation.PRODUCTION))
        measure.write_whole(args.out, document)
    keys = {tuple(getattr(cell, name) for name in grid.KEY) for cell in wanted}
    mine = [row for row in rows if tuple(row[name] for name in grid.KEY) in keys]
    for mean_h in grid.MEANS_H:
        title = f"{mean_h} h between failures, {emulation.HOURS} h, production costs, {args.traces} traces"
        measure.print_figures(f"{title}, {emulation.SERVERS} servers", grid.columns("r"), grid.by_r(mine, mean_h))
        measure.print_figures(f"{title}, r = {grid.R:g}", grid.columns("servers"), grid.by_servers(mine, mean_h))
        print(emulation.bound(emulation.PRODUCTION, mean_h))
    print("least: of any policy within the target PLS; written: in tables")
    print(grid.agreement(mine))


def measure_accuracy(args: argparse.Namespace, document: dict[str, Any], started: float) -> None:
    """Train what is not in the document yet; it is written after each training."""
    import torch

    from . import accuracy, experiments

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = document.setdefault("accuracy", [])
    settings = [setting for name in args.experiments for setting in experiments.EXPERIMENTS[name]]
    settings = settings or accuracy.comparison(args.r)
    runs = accuracy.planned(args.accuracy, args.seeds, args.epochs, args.samples, settings)
    waiting = resumable.missing(runs, rows, accuracy.KEY)
    print(f"{len(rows)} trainings in {args.out}, {len(waiting)} to do", flush=True)
    logs = {
        name: accuracy.opened(name, args.data, args.samples) for name in dict.fromkeys(run.dataset for run in waiting)
    }

    def train(run: accuracy.AccuracyRun) -> None:
        row = accuracy.train(run, logs[run.dataset])
        rows.append(row)
        document["auc"] = accuracy.headline(rows, args.r)
        print(f"{run}: AUC {row['auc']:.5f} in {row['seconds']:.0f} s", flush=True)

    def write() -> None:
        measure.write_whole(args.out, document)

    until = started + 60 * args.limit_minutes
    failures: dict[str, str] = {}
    resumable.run_each(waiting, train, write, failures, noun="trainings", until=until)
    if failures:
        raise BadInput(
            f"{len(failures)} of {len(waiting)} trainings failed, the first: {next(iter(failures.values()))}"
        )
    if args.experiments:
        for name in args.experiments:
            show_experiment(name, rows, args.plot)
        return
    show_accuracy(document.get("auc", {}))
    print("\n".join(accuracy.verdict(document.get("auc", {}))))


def show_experiment(name: str, rows: Sequence[Mapping[str, Any]], plot: Path | None) -> None:
    """All that the file has of it."""
    from . import accuracy, experiments

    found = experiments.table(name, rows)
    varied, title = experiments.TITLES[name]
    for of_log, lines in found.items():
        columns = {varied: "{varied:g}", **experiments.COLUMNS}
        measure.print_figures(f"test AUC on {of_log}: {title}", columns, lines)
        if name == "pls":
            for recovery in ("cpr_full", "cpr_mfu"):
                print(f"{recovery}: {experiments.slope(lines, recovery):.5f} of AUC for a PLS of 1 (least squares)")
        if over := experiments.no_more_than(accuracy.TARGET_LOSS, lines):
            print(f"more than {accuracy.TARGET_LOSS} below no failure: {', '.join(over)}")
    if name == "pls" and plot is not None and found:
        experiments.draw(found, plot)
        print(f"drawn to {plot}")


def show_accuracy(found: Mapping[str, Any]) -> None:
    for title, by_mean in found.items():
        for mean_h, of in by_mean.items():
            columns = {
                "recovery": "{name}", "seeds": "{seeds}", "AUC": "{auc:.5f}", "vs none": "{vs_none:+.5f}",
                "worst": "{vs_none_worst:+.5f}", "failures": "{failures:.0f}", "PLS": "{pls:.4f}",
            }  # fmt: skip
            table = [{"name": name, **row} for name, row in of.items()]
            measure.print_figures(f"test AUC on {title}, {mean_h[:-1]} h between failures", columns, table)


def emulate(args: argparse.Namespace) -> dict[str, Any]:
    """Overheads and losses by strategy: what the result file says of them."""
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
        print("formula: the closed form; E[PLS]: of saves of all rows; lost: share of accesses; written: in tables")
        found[name]["verdict"] = [
            *emulation.pls_agreement(found[name]["figures"]),
            *emulation.verdict(found[name]["figures"], costs),
        ]
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

    columns = {
        "recovery": "{name}", "every": "{round_h:.1f} h", "cost %": "{overhead_pct[mean]:.3f}",
        "+- %": "{overhead_pct[standard_error]:.3f}", "formula": "{closed_form_overhead_pct:.3f}",
        "PLS": "{pls[mean]:.4f}", "+-": "{pls[standard_error]:.4f}", "E[PLS]": "{expected:.4f}",
        "lost": "{updates_lost[mean]:.4f}", "written": "{written_tables:.2f}",
    }  # fmt: skip
    has_form = ("naive", "cpr_full")
    table = [
        {"name": name, **row, "expected": row["closed_form_pls"] if name in has_form else None}
        for name, row in found.items()
    ]
    title = f"{platform} costs, {mean_h} h between failures, {emulation.HOURS} h, {emulation.SERVERS} servers"
    measure.print_figures(title, columns, table)
