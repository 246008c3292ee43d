"""`gba-hvd plan`: which recovery, how often to save, and what it costs, from figures given or measured.

Where the figures come from is decided here; what follows from them in `recovery.schedule.planner`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recovery import units
from recovery.errors import BadInput
from recovery.schedule.failures import MeanTime, mean_time
from recovery.schedule.planner import Costs, Estimate, JobProfile, Objectives, RecoveryPlan, plan

from ..bench.harness.measure import ShowsDefaults
from ..plan import measured_costs
from ..terminal import print_line, print_table

if TYPE_CHECKING:
    from ..plan.measured_costs import MeasuredCosts


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="which recovery, how often to save, what it costs",
        formatter_class=ShowsDefaults,
        description="Compare full and partial recovery by CPR's closed forms and say which to use, with the interval "
        "between saves, the expected portion of lost samples (PLS), bytes per day and the cost of storage.",
    )
    measured_costs.add_options(parser)
    add_job_options(parser)
    parser.add_argument("--servers", type=int, help="that hold rows (default: 8)")
    parser.add_argument("--mtbf-hours", type=float, help="mean time between failures of any one server of the job")
    parser.add_argument(
        "--failures",
        type=Path,
        metavar="FILE",
        help="observed failures, a line each with the hour since the job began; --mtbf-hours is then what was assumed "
        "before",
    )
    parser.add_argument("--observed-hours", type=float, help="how long failures were watched (default: to the last)")
    parser.add_argument("--price", type=float, default=0.0, metavar="PER_GB", help="of a GB stored for a month")
    parser.add_argument("--price-puts", type=float, default=0.0, metavar="PER_1000", help="of 1000 objects written")
    parser.add_argument("--rebase-at", type=float, default=1.0, help=REBASE_HELP)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="overhead and PLS by interval")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


REBASE_HELP = (
    "partial saves may have so many times the bytes of the base they are on top of before all rows are saved again "
    "(inf: never, as CPR's formulas have it)"
)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """What `plan` and `simulate` ask for alike."""
    parser.add_argument("--table-gb", type=float, help="all rows, with optimizer slots (default: 100)")
    parser.add_argument("--costs", type=Path, metavar="FILE.json", help="measured costs; the options below win")
    parser.add_argument("--save-s", type=float, help="a save of all rows, until durable")
    parser.add_argument("--load-s", type=float, help="loading all rows (default: as long as saving)")
    parser.add_argument("--partial-load-s", type=float, help="loading one server's rows (default: as --load-s)")
    parser.add_argument("--reschedule-s", type=float, help="until a lost server is replaced (default: 180, assumed)")
    parser.add_argument(
        "--stall-share", type=float, help="share of a save for which training stands still (default: 1)"
    )
    parser.add_argument("--delta-share", type=float, help="share of the bytes that change between saves")
    parser.add_argument(
        "--partial-stall-s",
        type=float,
        help="training stands still for so long for a partial save (default: by its bytes)",
    )
    parser.add_argument("--target-pls", type=float, help="tolerable portion of lost samples (default: 0.1)")
    parser.add_argument("--policy", help="what partial saves take: full, delta, mfu, ssu, scar (default: mfu)")
    parser.add_argument(
        "--r", type=share_or_auto, help="share of rows of a partial save, or auto: picked (default: 0.125)"
    )
    parser.add_argument("--margin", type=float, default=0.1, help="partial must cost this share less")
    parser.add_argument("--max-interval-hours", type=float, help="between rounds of saves (default: no limit)")


def share_or_auto(text: str) -> float | str:
    return text if text == "auto" else float(text)


_DEFAULTS = {"table_gb": 100.0, "servers": 8, "target_pls": 0.1, "policy": "mfu", "r": 0.125}


def fill_in(args: argparse.Namespace, found: MeasuredCosts | None = None) -> None:
    """Options that were not given: as the checkpoint says, or the defaults."""
    known: dict[str, Any] = dict(_DEFAULTS)
    longest_h = math.inf
    if found is not None:
        known |= {"table_gb": found.n_bytes / 1e9, "servers": found.n_servers}
        known |= {name: found.given[name] for name in ("target_pls", "policy", "r") if name in found.given}
        longest_h = found.given.get("longest_s", math.inf) / 3600
    for name, value in {**known, "max_interval_hours": longest_h}.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def run(args: argparse.Namespace) -> int:
    found_at = measured_costs.of_arguments(args)
    fill_in(args, found_at)
    if found_at is None:
        _refuse_unknown(args)
    costs, mean = costs_of(args, found_at), mean_time_of(args, found_at)
    job = JobProfile(costs, round(args.table_gb * 1e9), args.servers, mean.mean_s, total_s=30 * 86400.0)
    prices = {"price_per_gb_month": args.price, "price_per_1000_puts": args.price_puts}
    strategy = "full" if args.servers == 1 else "auto"  # the loss of the only host is that of the job
    objectives = objectives_of(args, strategy=strategy, **prices)
    found = plan(job, objectives)
    if args.json:
        source: dict[str, Any] = {}
        if found_at is not None:
            source = {"checkpoint": found_at.checkpoint, "measured": asdict(found_at.measured), "pace": found_at.pace}
        print(json.dumps(as_json(found, mean, job.costs) | source, indent=2))
    else:
        if found_at is not None:
            servers = f"{args.servers} servers" if args.servers != 1 else "1 server, whose loss is the loss of the job"
            print_line(f"from {found_at.checkpoint}: {servers}, {args.table_gb:,.3g} GB of rows")
            if found_at.pace:
                print_line(f"that job saved every {pace_in_words(found_at.pace)}")
        show(found, mean, job.costs, priced=args.price > 0 or args.price_puts > 0)
    if args.plot:
        from ..plan.plot import draw

        draw(job, objectives, found, args.plot)
        if not args.json:
            print_line(f"written to {args.plot}")
    return 0


def _refuse_unknown(args: argparse.Namespace) -> None:
    """Without a job that has measured something: one message for all that is missing."""
    if all(value is None for value in (args.save_s, args.costs, args.mtbf_hours, args.failures)):
        raise BadInput(
            "neither how long a save takes nor the mean time between failures is known: give --save-s (or --costs) and "
            "--mtbf-hours (or --failures), or --job or --url, a job that has measured them"
        )


def costs_of(args: argparse.Namespace, found: MeasuredCosts | None = None) -> Costs:
    """From a checkpoint, the file of measured costs and the options; the later ones win."""
    values: dict[str, Any] = {} if found is None else dict(found.costs)
    values |= measured_costs.read_costs(args.costs) if args.costs else {}
    given = {name: getattr(args, name) for name in Costs.__dataclass_fields__}
    values |= {name: value for name, value in given.items() if value is not None}
    if "save_s" not in values:
        where = "" if found is None else f" (no save of all rows was measured yet when {found.checkpoint} was made)"
        raise BadInput(f"how long a save takes is not known{where}: give --save-s, or --costs with what was measured")
    return Costs.of_mapping({"load_s": values["save_s"], "reschedule_s": 180.0} | values)


def objectives_of(args: argparse.Namespace, **more: Any) -> Objectives:
    return Objectives(
        target_pls=args.target_pls,
        policy=args.policy,
        r=None if args.r == "auto" else args.r,
        margin=args.margin,
        leave_margin=min(0.0, args.margin),
        max_interval_s=args.max_interval_hours * 3600,
        rebase_at=args.rebase_at,
        **more,
    )


def mean_time_of(args: argparse.Namespace, found: MeasuredCosts | None = None) -> MeanTime:
    """Given, or estimated from observed failures with what was given as the prior."""
    if found is not None and args.failures is None:
        return found.measured.between_failures(args.mtbf_hours or found.given.get("mtbf_h"))
    if args.mtbf_hours is None and args.failures is None:
        raise BadInput("the mean time between failures is not known: give --mtbf-hours, or --failures")
    hours = read_hours(args.failures) if args.failures else []
    watched = args.observed_hours if args.observed_hours is not None else (hours[-1] if hours else 0.0)
    if hours and watched < hours[-1]:
        raise BadInput(f"--observed-hours {watched:g} is before the last failure, at {hours[-1]:g} h")
    if args.mtbf_hours is None and not hours:
        raise BadInput(f"{args.failures} has no failure: give --mtbf-hours as what to assume")
    prior = args.mtbf_hours if args.mtbf_hours is not None else watched / len(hours)
    return mean_time(watched * 3600, len(hours), prior * 3600)


def read_hours(path: Path) -> list[float]:
    """The first number of each line; empty lines and those that begin with # are left out."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as text: {error}") from error
    hours = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            try:
                hours.append(float(line.replace(",", " ").split()[0]))
            except (ValueError, IndexError) as error:
                raise BadInput(f"{path}, line {number}: expected the hour of a failure, got {line!r}") from error
    if hours != sorted(hours) or any(not 0 < hour < math.inf for hour in hours):
        raise BadInput(f"{path}: expected hours above 0 in ascending order")
    return hours


def as_json(found: RecoveryPlan, mean: MeanTime, costs: Costs) -> dict[str, Any]:
    """Everything that was found and what it is from; times in seconds, overheads as shares of training time."""
    values = asdict(found)
    for name in ("full", "partial"):
        values[name]["overhead"] = getattr(found, name).overhead
    return {**values, "between_failures": asdict(mean), "costs": asdict(costs)}


def show(found: RecoveryPlan, mean: MeanTime, costs: Costs, priced: bool) -> None:
    columns = ("recovery", "saved every", "saves", "loads", "replace", "redo", "overhead", "PLS")
    title = "Cost of safety, as a share of training time"
    print_table(columns, [row(found.full), row(found.partial)], left=(0,), title=title)
    what = f"{found.r:.1%} of rows" if found.r < 1 else "all rows" if found.kind == "full" else "changed rows"
    lines = [
        found.reason,
        f"save: {found.kind} ({what}) every {duration(found.interval_s)}",
        f"written: {units.size(found.bytes_per_day)} per day; stored: at most {units.size(found.stored_bytes)}",
        f"failures: {mean.reason}",
        f"assumed or measured: save {costs.save_s:g} s, of which training stands still {costs.stall_share:.0%}; "
        f"load {costs.load_s:g} s; replace a server {costs.reschedule_s:g} s",
    ]
    if priced:
        lines.insert(3, f"cost: {found.cost_per_month:,.2f} per month")
    for line in lines:
        print_line(line)


def pace_in_words(pace: Mapping[str, Any]) -> str:
    """`30 min (planned)`, `100 steps`, `10 s or 100 steps`: what comes first."""
    parts = [duration(pace["every_s"])] if "every_s" in pace else []
    parts += [f"{pace['every_steps']:,} steps"] if "every_steps" in pace else []
    return " or ".join(parts) + (" (planned)" if pace.get("is_planned") else "")


def row(estimate: Estimate) -> tuple[str, ...]:
    shares = (estimate.saving, estimate.loading, estimate.rescheduling, estimate.redoing, estimate.overhead)
    percents = (f"{share:.3%}" for share in shares)
    return estimate.strategy, duration(estimate.round_s), *percents, f"{estimate.pls:.3g}"


def duration(seconds: float) -> str:
    if seconds < 1:
        return units.duration(seconds)
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
