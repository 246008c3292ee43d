"""`gba-hvd simulate auto`: mode auto beside the two modes that it chooses between, on a virtual clock."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gba_hvd.errors import BadInput

from ...bench.harness.measure import ShowsDefaults
from ...simulated.output import write

if TYPE_CHECKING:
    from ...simulated.mode_choice import Comparison

SCENARIOS = (
    "none", "straggler_5x", "throttled", "gamma", "come_and_go", "noise", "day", "slow_host_of_two", "slow_link",
    "gba_dearer",
)  # fmt: skip


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
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write the figures, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ...simulated.mode_choice import compare, scenarios

    if args.seconds < 360 or args.clusters < 0 or args.processes < 1:
        raise BadInput(
            "expected --seconds of 360 or more, --clusters of 0 or more and --processes of 1 or more, got "
            f"{args.seconds:g}, {args.clusters} and {args.processes}"
        )
    if args.clusters:
        found = _clusters(range(args.seed, args.seed + args.clusters), args.processes, args.informed)
        summary = summarised(found)
        for name, value in summary.items():
            print(f"{name}: {value:.4g}")
    else:
        chosen = scenarios(args.seconds, args.seed)
        found = [compare(chosen[name], informed=args.informed) for name in args.scenarios]
        summary = {}
        _show(found)
    rows = [asdict(one) | {"needless_per_h": one.needless_per_h} for one in found]
    write(args.out, {"summary": summary, "runs": rows})
    return 0


def _clusters(seeds: Sequence[int], n_processes: int, informed: bool) -> list[Comparison]:
    from multiprocessing import get_context

    if n_processes == 1:
        return [_cluster(seed, informed) for seed in seeds]
    with get_context("spawn").Pool(n_processes) as pool:
        return pool.starmap(_cluster, [(seed, informed) for seed in seeds], chunksize=4)


def _cluster(seed: int, informed: bool) -> Comparison:
    from ...simulated.mode_choice import compare, random_cluster

    return compare(random_cluster(seed), informed=informed)


def summarised(found: Sequence[Comparison]) -> dict[str, Any]:
    """Of many clusters: regret (share of samples; 0 where auto was faster), worst minutes, needless switches."""
    share = np.array([one.share for one in found])
    worst = np.array([one.worst_minute for one in found])
    needless = np.array([one.needless_per_h for one in found])
    return {
        "clusters": len(found),
        "allreduce was the better mode in": float(np.mean([one.allreduce > one.gba for one in found])),
        "auto / better mode, mean": float(share.mean()),
        "regret, mean": float(np.maximum(0, 1 - share).mean()),
        "regret, 99 of 100 clusters within": float(np.quantile(np.maximum(0, 1 - share), 0.99)),
        "regret, largest": float(max(0.0, 1 - share.min())),
        "worst minute, 95 of 100 clusters above": float(np.quantile(worst, 0.05)),
        "worst minute, least": float(worst.min()),
        "clusters with a minute below .95": float((worst < 0.95).mean()),
        "needless switches an hour, mean": float(needless.mean()),
        "clusters with more than one an hour": float((needless > 1).mean()),
        "switches an hour, mean": float(np.mean([len(one.switches) * 3600 / one.seconds for one in found])),
    }


def _show(found: Sequence[Comparison]) -> None:
    from ...bench.harness.measure import print_figures

    columns = {
        "scenario": "{name}", "allreduce": "{allreduce:.1f}", "gba": "{gba:.1f}", "auto": "{auto:.1f}",
        "auto / better mode": "{share:.3f}", "worst minute": "{worst_minute:.3f}", "switches": "{n_switches}",
        "needless": "{needless}",
    }  # fmt: skip
    print_figures("Micro-batches/s", columns, [vars(one) | {"n_switches": len(one.switches)} for one in found])
    for one in found:
        for switch in one.switches:
            print(f"{one.name}, {switch.at_s:.0f} s: {switch.reason}")
