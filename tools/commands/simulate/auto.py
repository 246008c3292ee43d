"""`gba-hvd simulate auto`: mode auto beside the two modes that it chooses between, on a virtual clock."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gba_hvd.errors import BadInput

from ...bench.harness.measure import Row, ShowsDefaults, benchmark
from ...bench.harness.resumable import Results

SCENARIOS = (
    "none", "straggler_5x", "throttled", "gamma", "come_and_go", "noise", "day", "slow_host_of_two", "slow_link",
    "gba_dearer",
)  # fmt: skip
CLUSTER_S = 3600.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "auto",
        help="mode auto against the better of allreduce and gba",
        formatter_class=ShowsDefaults,
        description="Simulate workers whose speed changes, let the real GBACallback choose the mode, and compare with "
        "runs that stay in one. The share is of the better mode's micro-batches over the whole run; the worst minute "
        "is one after the first two, against the mode that was better in it. A switch is needless if its mode was the "
        "slower one for the stay that followed.",
    )
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="NAME",
                        help=f"{', '.join(SCENARIOS)} (default: all)")  # fmt: skip
    parser.add_argument(
        "--clusters", type=int, default=0, metavar="N", help="instead: so many drawn clusters, 1 h each"
    )
    parser.add_argument("--seconds", type=float, default=1800.0, help="of a scenario, at least 360")
    parser.add_argument("--seed", type=int, default=0, help="of the scenarios, or of the first cluster")
    parser.add_argument("--processes", type=int, default=1, help="that simulate clusters")
    parser.add_argument(
        "--informed", action="store_true", help="in place of auto, a policy that sees a run of each mode: a bound"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep the figures, as JSON; rows in it are kept")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Simulated:
    """A scenario, or with a seed the cluster that is drawn with it."""

    name: str
    seed: int | None = None


@benchmark
def run(args: argparse.Namespace) -> int:
    if args.seconds < 360 or args.clusters < 0 or args.processes < 1:
        raise BadInput(
            "expected --seconds of 360 or more, --clusters of 0 or more and --processes of 1 or more, got "
            f"{args.seconds:g}, {args.clusters} and {args.processes}"
        )
    of: dict[str, Any] = {"of": "clusters", "seconds": CLUSTER_S}
    if not args.clusters:
        of = {"of": "scenarios", "seconds": args.seconds, "seed": args.seed}
    results = Results(
        args.out, ("name",), {**of, "informed": args.informed},
        lambda rows: {"summary": summarised(rows)} if args.clusters else {}, packages=("numpy",),
    )  # fmt: skip
    for row in _rows(args, results.waiting(_planned(args))):
        results.rows.append(row)
        results.write()
    if args.clusters:
        for name, value in summarised(results.rows).items():
            print(f"{name}: {value:.4g}")
    else:
        _show(results.rows)
    return results.end()


def _planned(args: argparse.Namespace) -> list[Simulated]:
    if args.clusters:
        return [Simulated(f"cluster {seed}", seed) for seed in range(args.seed, args.seed + args.clusters)]
    return [Simulated(name) for name in dict.fromkeys(args.scenarios)]


def _rows(args: argparse.Namespace, waiting: Sequence[Simulated]) -> Iterator[Row]:
    """Of each, as soon as it and those before it are done."""
    from multiprocessing import get_context

    row_of = partial(_row_of, seconds=args.seconds, scenario_seed=args.seed, informed=args.informed)
    if args.processes == 1 or not args.clusters:
        yield from map(row_of, waiting)
        return
    with get_context("spawn").Pool(args.processes) as pool:
        yield from pool.imap(row_of, waiting)


def _row_of(one: Simulated, seconds: float, scenario_seed: int, informed: bool) -> Row:
    from ...simulated.mode_choice import compare, random_cluster, scenarios

    drawn = scenarios(seconds, scenario_seed)[one.name] if one.seed is None else random_cluster(one.seed, CLUSTER_S)
    found = compare(drawn, informed=informed)
    return asdict(found) | {"needless_per_h": found.needless_per_h}


def summarised(found: Sequence[Row]) -> dict[str, Any]:
    """Of many clusters: regret (share of samples; 0 where auto was faster), worst minutes, needless switches."""
    share = np.array([one["share"] for one in found])
    worst = np.array([one["worst_minute"] for one in found])
    needless = np.array([one["needless_per_h"] for one in found])
    return {
        "clusters": len(found),
        "allreduce was the better mode in": float(np.mean([one["allreduce"] > one["gba"] for one in found])),
        "auto / better mode, mean": float(share.mean()),
        "regret, mean": float(np.maximum(0, 1 - share).mean()),
        "regret, 99 of 100 clusters within": float(np.quantile(np.maximum(0, 1 - share), 0.99)),
        "regret, largest": float(max(0.0, 1 - share.min())),
        "worst minute, 95 of 100 clusters above": float(np.quantile(worst, 0.05)),
        "worst minute, least": float(worst.min()),
        "clusters with a minute below .95": float((worst < 0.95).mean()),
        "needless switches an hour, mean": float(needless.mean()),
        "clusters with more than one an hour": float((needless > 1).mean()),
        "switches an hour, mean": float(np.mean([len(one["switches"]) * 3600 / one["seconds"] for one in found])),
    }


def _show(found: Sequence[Row]) -> None:
    from ...bench.harness.measure import print_figures

    columns = {
        "scenario": "{name}", "allreduce": "{allreduce:.1f}", "gba": "{gba:.1f}", "auto": "{auto:.1f}",
        "auto / better mode": "{share:.3f}", "worst minute": "{worst_minute:.3f}", "switches": "{n_switches}",
        "needless": "{needless}",
    }  # fmt: skip
    print_figures("Micro-batches/s", columns, [one | {"n_switches": len(one["switches"])} for one in found])
    for one in found:
        for switch in one["switches"]:
            print(f"{one['name']}, {switch['at_s']:.0f} s: {switch['reason']}")
