"""`gba-hvd simulate recovery`: months or years of a job's operation on a virtual clock, against CPR's closed forms.

Planning, choosing rows, tracking and chaining saves is done by the code of real jobs
(`recovery.simulation.simulation`); here the worlds are set up, for growing numbers of servers, and the results
compared.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recovery.errors import BadInput
from recovery.schedule.failures import Gamma, failure_times
from recovery.schedule.planner import JobProfile, plan

from ...bench.harness.measure import ShowsDefaults
from ...simulated.output import settings_of, write
from ...terminal import print_table
from ..plan import REBASE_HELP, add_job_options, costs_of, duration, fill_in, objectives_of

if TYPE_CHECKING:
    from recovery.simulation.simulation import Mean, SimulationOutcome

STRATEGIES = ("full", "partial", "auto")
_YEAR_S = 365 * 86400.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "recovery",
        help="a year of failures, saves and recoveries on a virtual clock",
        formatter_class=ShowsDefaults,
        description="Run the planner, the choice of rows and the chain of saves against failures of thousands of "
        "servers, and compare overhead and PLS with CPR's closed forms. The tables grow with the servers: "
        "--table-gb is one server's, and a save takes as long however many there are.",
    )
    add_job_options(parser)
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 64, 512, 4096], metavar="N")
    parser.add_argument("--strategy", nargs="+", default=["full", "partial"], choices=STRATEGIES)
    parser.add_argument(
        "--server-mtbf-hours", type=float, default=5000.0, help="mean time between failures of one server"
    )
    parser.add_argument("--shape", type=float, default=1.0, help="of the gamma law; below 1: bursts")
    parser.add_argument("--failures", type=Path, metavar="FILE", help="lines of hour,server instead of random failures")
    parser.add_argument("--years", type=float, default=1.0, help="length of one operation")
    parser.add_argument("--repeats", type=int, default=16, help="independent operations")
    parser.add_argument("--sampled-servers", type=int, default=16, help="whose rows are simulated; 0: none")
    parser.add_argument("--fixed-plan", action="store_true", help="never plan again, as the closed forms have it")
    parser.add_argument("--rebase-at", type=float, default=math.inf, help=REBASE_HELP)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write the figures, as JSON")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class RecoveryLine:
    """What came of one number of servers and one strategy, and what the closed forms say of the first plan."""

    servers: int
    strategy: str
    between_failures_h: float
    failures: float
    round_s: float
    overhead: Mean
    overhead_expected: float
    pls: Mean
    pls_expected: float
    updates_lost: Mean | None
    written_per_day: float
    plans: float
    last_reason: str


def run(args: argparse.Namespace) -> int:
    fill_in(args)
    if args.repeats < 1 or min(args.servers) < 1 or not args.years > 0 or args.sampled_servers < 0:
        raise BadInput("--repeats, --servers and --years must be above 0, --sampled-servers not negative")
    law = Gamma(args.shape, args.server_mtbf_hours * 3600)
    trace = None
    if args.failures:
        trace = read_trace(args.failures)
        if np.any(trace[:, 1] >= min(args.servers)):
            raise BadInput(f"{args.failures} has failures of server {trace[:, 1].max():.0f}, of {min(args.servers)}")
    lines = [simulated(args, n, strategy, law, trace) for n in args.servers for strategy in args.strategy]
    show(lines)
    write(args.out, {"settings": settings_of(args), "results": [asdict(line) for line in lines]})
    return 0


def simulated(args: argparse.Namespace, n: int, strategy: str, law: Gamma, trace: np.ndarray | None) -> RecoveryLine:
    """Independent operations of one world."""
    from recovery.simulation.simulated_rows import RowModel
    from recovery.simulation.simulation import SimulatedJob, mean_of, simulate

    total_s = args.years * _YEAR_S
    job = JobProfile(costs_of(args), round(args.table_gb * 1e9 * n), n, law.mean_s / n, total_s)
    objectives = objectives_of(args, strategy=strategy)
    rows = RowModel(min(n, args.sampled_servers)) if args.sampled_servers else None
    world = SimulatedJob(job, objectives, rows, replan_s=None if args.fixed_plan else 86400.0)
    outcomes: list[SimulationOutcome] = []
    for repeat in range(args.repeats):
        rng = np.random.default_rng([args.seed, n, repeat])
        outcomes.append(simulate(world, failure_times(law, total_s, n, rng) if trace is None else trace, rng))
    expected = plan(job, objectives).expected
    has_rows = all(outcome.updates_lost is not None for outcome in outcomes)
    return RecoveryLine(
        servers=n,
        strategy=strategy,
        between_failures_h=job.between_failures_s / 3600,
        failures=mean_of(outcomes, lambda o: o.n_failures).value,
        round_s=expected.round_s,
        overhead=mean_of(outcomes, lambda o: o.overhead),
        overhead_expected=expected.overhead,
        pls=mean_of(outcomes, lambda o: o.pls),
        pls_expected=expected.pls,
        updates_lost=mean_of(outcomes, lambda o: o.updates_lost or 0.0) if has_rows else None,
        written_per_day=mean_of(outcomes, lambda o: o.written).value * 86400 / total_s,
        plans=mean_of(outcomes, lambda o: len(o.plans)).value,
        last_reason=outcomes[0].plans[-1][1].reason,
    )


def read_trace(path: Path) -> np.ndarray:
    """float64 [F, 2]: seconds and server, from lines of `hour,server`; # begins a comment."""
    try:
        lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
        trace = np.array([[float(word) for word in line.split(",")] for line in lines if line], np.float64)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: expected lines of hour,server: {error}") from error
    if trace.ndim != 2 or trace.shape[1] != 2 or not np.all(trace >= 0) or np.any(trace[:, 1] % 1):
        raise BadInput(f"{path}: expected lines of hour,server, both not negative, the server a whole number")
    return trace[np.argsort(trace[:, 0], kind="stable")] * (3600.0, 1.0)


COLUMNS = ("servers", "recovery", "failures", "every", "overhead %", "CPR", "sigma", "PLS", "CPR", "sigma", "lost")


def show(lines: list[RecoveryLine]) -> None:
    print_table(COLUMNS, [cells(line) for line in lines], left=(1,), title="Simulated operation, +- standard error")
    for sentence in (
        "every: time for a round of saves; CPR: the closed form for the first plan; sigma: standard errors from it",
        "lost: share of all row updates, each row since it was itself saved, in the sampled servers",
        *growth(lines),
    ):
        print(sentence)


def cells(line: RecoveryLine) -> tuple[str, ...]:
    expected, apart = line.overhead_expected, line.overhead.sigmas_from(line.overhead_expected)
    pls = ("-", "-", "-")
    if line.pls_expected:
        off = line.pls.sigmas_from(line.pls_expected)
        pls = (f"{line.pls.value:.4f} +-{line.pls.error:.4f}", f"{line.pls_expected:.3g}", f"{off:+.1f}")
    return (
        *(f"{line.servers:,}", line.strategy, f"{line.failures:,.0f}", duration(line.round_s)),
        *(percent(line.overhead), f"{100 * expected:.3g}", f"{apart:+.1f}", *pls),
        f"{line.updates_lost.value:.4f}" if line.updates_lost else "-",
    )


def growth(lines: list[RecoveryLine]) -> list[str]:
    """How overhead and PLS grow from the fewest to the most servers, in words."""
    conclusions = []
    for strategy in dict.fromkeys(line.strategy for line in lines):
        of_strategy = sorted((line for line in lines if line.strategy == strategy), key=lambda line: line.servers)
        few, many = of_strategy[0], of_strategy[-1]
        if few.servers < many.servers:
            summary = f"{strategy}: {few.servers:,} to {many.servers:,} servers: overhead {percent(few.overhead)} % to "
            summary += f"{percent(many.overhead)} %"
            conclusions.append(
                summary + (f", PLS {few.pls.value:.3g} to {many.pls.value:.3g}" if many.pls_expected else "")
            )
    if any(line.overhead.value > 0.2 for line in lines):
        conclusions.append(
            "overheads above 20 % are too low: no failure comes while work is done again, or servers replaced"
        )
    return conclusions


def percent(mean: Mean) -> str:
    return f"{100 * mean.value:.3g} +-{100 * mean.error:.1g}"
