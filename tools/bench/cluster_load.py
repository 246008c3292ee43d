"""`gba-hvd bench cluster-load`: samples/s over an emulated day of a shared cluster, `auto` against each fixed mode.

Four workers with emulated accelerators (`emulated_accelerators.py`) train the click model of `bench gba` through 24
hours in `--day` seconds. The load of the cluster goes up and down by hour; at its peaks micro-batches take 1.5 to 5
times as long, and every six hours other workers are hit hardest. Time decides, not steps, so every mode meets the same
day. Rows in the result file are kept and not run again. `--plot` draws the day. Where `auto`, `allreduce` and `gba` are
there and the day takes 4 minutes and more, auto's share of the better fixed mode is printed as by `gba-hvd bench gba`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..picture import GRID, picture
from .harness import auto_by_minute, measure, resumable
from .harness import emulated_accelerators as emulated
from .harness.measure import Row, Subparsers, Variant

MODES = ("auto", "allreduce", "gba", "async", "bsp", "hop_bs", "hop_bw")
HOURS = len(emulated.LOAD_BY_HOUR)
SCENARIO = "cluster_day"
TIMEOUT_S = 600.0  # for one run, beyond the day
_COLOURS = dict(zip(MODES, ("#c0392b", "#333333", "#2f8f5b", "#2c6fbb", "#d1761c", "#8e44ad", "#16a085"), strict=True))
KEY = ("mode", "run")  # distinguishes one row from another
_SHADE = "#e8edf3"


@dataclass(frozen=True)
class Day:
    """One launch of a mode."""

    mode: str
    run: int

    def __str__(self) -> str:
        return f"{self.mode}, run {self.run}"


def add_parser(subparsers: Subparsers) -> None:
    does = "samples/s over an emulated day of cluster load, in all modes"
    parser = measure.add_benchmark(subparsers, "cluster-load", does, __doc__, run, help="rows in it are kept")
    measure.add_chosen(parser, "--modes", MODES, "MODE", help=", ".join(MODES))
    parser.add_argument("--day", type=float, default=120.0, metavar="SECONDS", help="length of the day")
    parser.add_argument("--service-ms", type=float, default=100.0, help="time of a micro-batch without load")
    parser.add_argument("--runs", type=int, default=1, help="launches of each mode")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what is there at the end; .svg or .png")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    check(args)
    service_s = args.service_ms / 1000
    scenario = emulated.cluster_day(service_s, args.day)
    commands, ideal = {mode: str(variant(mode)) for mode in MODES}, ideal_by_hour(scenario)
    results = resumable.Results(
        args.out, KEY, settings_of(args),
        lambda rows: {"commands": commands, "ideal_by_hour": ideal, "headline": headline(rows, scenario),
                      "auto_by_minute": by_minute(rows)},
        has=["by_part", "by_minute"],
    )  # fmt: skip
    rows = results.rows
    waiting = results.waiting(Day(mode, number) for number in range(args.runs) for mode in args.modes)
    with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        if waiting:
            from .harness import small_ctr  # here, because it imports torch

            small_ctr.write(Path(scratch) / "data", scenario.n_micro() * emulated.MICRO_BATCH)
        words = ["--data", Path(scratch) / "data", "--scenario", SCENARIO, "--service-s", service_s]
        words += ["--measured-s", args.day, "--parts", HOURS]

        def launch(day: Day) -> None:
            found = measure.result_of(variant(day.mode), words, Path(scratch), scenario.end_s + TIMEOUT_S)
            rows.append({**asdict(day), **found})
            rate, share = found["samples_per_s"], found["ideal_share"]
            print(f"{day.mode}: {rate:,.0f} samples/s over the day, {share:.3f} of the ideal", flush=True)

        results.run_each(waiting, launch)
    show(rows, scenario)
    if args.plot is not None:
        draw(rows, scenario, args.plot)
        print(f"drawn to {args.plot}")
    return results.end()


def check(args: argparse.Namespace) -> None:
    """Raise RunFailed for what would otherwise fail after minutes."""
    measure.require_at_least(args, runs=1)
    # A step of allreduce has two micro-batches of each worker, which take up to five times as long.
    least = HOURS * 2 * max(1 + severity for severity in emulated.SEVERITY) * args.service_ms / 1000
    if args.service_ms <= 0 or args.day < least:
        raise measure.RunFailed(
            f"--day {args.day:g} with --service-ms {args.service_ms:g}: an hour must have room for a step of the "
            f"slowest worker, so the day takes at least {max(least, 0):g} s"
        )
    measure.check_plot(args.plot)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What all rows of a file have in common."""
    return {
        "day_s": args.day, "service_s": args.service_ms / 1000, "load_by_hour": list(emulated.LOAD_BY_HOUR),
        "severity": list(emulated.SEVERITY), "workers": emulated.N_WORKERS,
    }  # fmt: skip


def variant(mode: str) -> Variant:
    return measure.horovodrun(mode, emulated.N_WORKERS, "bench.stragglers.ours", "--mode", mode)


def ideal_by_hour(scenario: emulated.Scenario) -> list[float]:
    """Samples/s of workers that never wait, by hour."""
    hour_s = (scenario.end_s - scenario.warmup_s) / HOURS
    starts = (scenario.warmup_s + hour * hour_s for hour in range(HOURS))
    return [emulated.MICRO_BATCH * scenario.ideal_rate(start, start + hour_s) for start in starts]


def headline(rows: Sequence[Row], scenario: emulated.Scenario) -> dict[str, dict[str, Any]]:
    """Mode -> medians over the runs: samples/s over the day and in its busiest and quietest hours, and by hour.

    auto_gain: what `auto` does over the day, over this mode; switches: of all runs
    """
    ideal = ideal_by_hour(scenario)
    busy = [hour for hour, rate in enumerate(ideal) if rate <= sorted(ideal)[HOURS // 4 - 1]]
    quiet = [hour for hour, rate in enumerate(ideal) if rate >= sorted(ideal)[-(HOURS // 4)]]
    found: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        some = [row for row in rows if row["mode"] == mode]
        if some:
            by_hour = [median(row["by_part"][hour] for row in some) for hour in range(HOURS)]
            found[mode] = {
                "runs": len(some),
                **{name: median(row[name] for row in some) for name in ("samples_per_s", "ideal_share", "auc")},
                "busy_samples_per_s": sum(by_hour[hour] for hour in busy) / len(busy),
                "quiet_samples_per_s": sum(by_hour[hour] for hour in quiet) / len(quiet),
                "dropped_share": median(row["dropped_share"] for row in some),
                "switches": sum(len(row["switches"]) for row in some),
                "by_hour": by_hour,
            }
    if "auto" in found:
        for columns in found.values():
            columns["auto_gain"] = found["auto"]["samples_per_s"] / columns["samples_per_s"]
    return found


def by_minute(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    return auto_by_minute.compared([{**row, "scenario": SCENARIO} for row in rows])


def show(rows: Sequence[Row], scenario: emulated.Scenario) -> None:
    shown = {
        "mode": "{mode}", "samples/s, day": "{samples_per_s:,.0f}", "of the ideal": "{ideal_share:.3f}",
        "6 quietest hours": "{quiet_samples_per_s:,.0f}", "6 busiest": "{busy_samples_per_s:,.0f}",
        "auto / this": "{auto_gain:.2f}", "dropped": "{dropped_share:.2%}", "AUC": "{auc:.4f}",
        "switches": "{switches}",
    }  # fmt: skip
    found = headline(rows, scenario)
    table = [{"mode": mode, **columns} for mode, columns in found.items()]
    measure.print_figures(f"an emulated day, {emulated.N_WORKERS} workers", shown, table)
    hours = [f"{hour:02d}" for hour in range(0, HOURS, 3)]
    rates = {"ideal": ideal_by_hour(scenario)} | {mode: columns["by_hour"] for mode, columns in found.items()}
    parts = [
        (mode, *(f"{sum(by_hour[hour : hour + 3]) / 3:,.0f}" for hour in range(0, HOURS, 3)))
        for mode, by_hour in rates.items()
    ]
    measure.print_table("samples/s in the three hours from", ("mode", *hours), parts)
    auto_by_minute.show(by_minute(rows))


def draw(rows: Sequence[Row], scenario: emulated.Scenario, file: Path) -> None:
    """Samples/s by hour in every mode, the ideal, and the load behind them. The name's ending says the format."""
    with picture(file, 9, 4, letters=9) as figure:
        axis = figure.subplots()
        edges = list(range(HOURS + 1))
        loads = axis.twinx()
        loads.stairs(emulated.LOAD_BY_HOUR, edges, fill=True, color=_SHADE)
        loads.set_ylabel("load of the cluster (shaded)")
        loads.set_ylim(0, 1.6)
        axis.set_zorder(loads.get_zorder() + 1)
        axis.patch.set_visible(False)
        axis.stairs([rate / 1000 for rate in ideal_by_hour(scenario)], edges, color="#888888", linestyle="--",
                    baseline=None, label="ideal: no worker waits")  # fmt: skip
        for mode, columns in headline(rows, scenario).items():
            rates = [rate / 1000 for rate in columns["by_hour"]]
            axis.plot([hour + 0.5 for hour in range(HOURS)], rates, color=_COLOURS[mode], label=mode,
                      linewidth=2.6 if mode == "auto" else 1.3)  # fmt: skip
        axis.set_xlabel(f"hour of the emulated day ({(scenario.end_s - scenario.warmup_s) / HOURS:g} s each)")
        axis.set_ylabel("1000 samples/s")
        axis.set_xlim(0, HOURS)
        axis.set_ylim(bottom=0)
        axis.set_xticks(range(0, HOURS + 1, 3))
        axis.grid(color=GRID, linewidth=0.6)
        for one in (axis, loads):
            one.spines[["top"]].set_visible(False)
        axis.legend(frameon=False, ncols=4, loc="lower center", fontsize=8)
