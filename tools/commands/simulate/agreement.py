"""`gba-hvd simulate agreement`: the real system with emulated workers, and its simulation, side by side.

Starts real jobs with `horovodrun` on this machine, one or several for each number of workers, mode and rule, and
simulates each once. Several real jobs of the same settings say how far two of them are apart: the noise, within which
no simulation can be distinguished from a job.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from gba_hvd.errors import BadInput

from ...bench.harness.measure import ShowsDefaults

if TYPE_CHECKING:
    from ...simulated.agreement import JobSettings

_TIMEOUT_S = 240.0  # for a job, beyond the time that is emulated


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "agreement",
        help="real jobs with emulated workers beside their simulations",
        formatter_class=ShowsDefaults,
        description="Run the real system with workers of known speeds and simulate the same, and print staleness, "
        "log loss and AUC of both; with several runs, also how far two real jobs are apart.",
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--mode", nargs="+", default=["gba", "async"], metavar="MODE")
    parser.add_argument("--rule", nargs="+", default=["none"], help="none, gap_aware or staleness_lr: Adagrad trains")
    parser.add_argument("--runs", type=int, default=1, help="real jobs of the same settings")
    parser.add_argument("--slow", type=float, default=1.0, help="the last worker takes so many times as long")
    parser.add_argument("--service-ms", type=float, default=100.0, help="time of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=800, help="of a job")
    parser.add_argument("--latency-ms", type=float, default=2.0, help="of a message, in the simulation")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write the figures, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from ...bench.harness import measure, small_ctr
    from ...simulated.agreement import JobSettings, compared, simulate

    if args.runs < 1:
        raise BadInput(f"--runs must be 1 or more, got {args.runs}")
    torch.set_num_threads(1)
    jobs = [
        JobSettings(
            n, mode, rule, args.slow, args.service_ms / 1000, args.micro_batches, latency_s=args.latency_ms / 1000
        )
        for n in args.workers
        for mode in args.mode
        for rule in args.rule
    ]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gba-hvd-agreement-") as scratch:
        folder = Path(scratch)
        small_ctr.write(folder / "data", max(job.micro_batches * job.micro_batch for job in jobs))
        for job in jobs:
            try:
                real = [real_run(job, folder) for _ in range(args.runs)]
            except measure.RunFailed as error:
                print(f"gba-hvd: {error}", file=sys.stderr)
                return 1
            simulated = simulate(job, folder / "data")
            far = compared(real, simulated)
            found.append({"job": asdict(job), "real": real, "simulated": simulated, **far})
            show(job, real, simulated, far)
            if args.out:  # the minutes before the next job are kept
                measure.write_whole(args.out, {"machine": measure.machine(), "jobs": found})
    if args.out:
        print(f"written to {args.out}")
    return 0


def real_run(job: JobSettings, folder: Path) -> dict[str, Any]:
    """One job of the real system. Raises RunFailed."""
    from ...bench.harness import measure

    variant = measure.horovodrun("real", job.workers, "simulated.real_worker")
    timeout_s = job.micro_batches * job.service_s * job.slow / job.workers + _TIMEOUT_S
    arguments = ["--data", folder / "data", "--job", json.dumps(asdict(job))]
    measured: dict[str, Any] = measure.result_of(variant, arguments, folder, timeout_s)
    return measured


def show(
    job: JobSettings,
    real: Sequence[Mapping[str, Any]],
    simulated: Mapping[str, Any],
    far: Mapping[str, Mapping[str, Any]],
) -> None:
    """real: of several jobs, all histograms together and the medians of the rest."""
    from ...bench.harness.measure import print_table
    from ...simulated.agreement import shares, together

    def distances(name: str, how: str) -> tuple[str, str]:
        apart, noise = far["apart"][name], far["noise"][name]
        return format(apart, how), "-" if noise is None else format(noise, how)

    rows = []
    for name, title in (("staleness", "staleness"), ("lags", "values old")):
        left, right = shares(together([one[name] for one in real])), shares(simulated[name])
        for key in sorted({*left, *right}):
            if max(left.get(key, 0.0), right.get(key, 0.0)) >= 0.005:
                rows.append((f"{title} {key}", f"{left.get(key, 0.0):.1%}", f"{right.get(key, 0.0):.1%}", "", ""))
        rows.append((title, "", "", *distances(name, ".3f")))
    for name, how in (("auc", ".4f"), ("log_loss", ".4f"), ("time", ".1f"), ("steps", ".0f"), ("dropped", ".0f")):
        middle = median(one[name] for one in real)
        rows.append((name, format(middle, how), format(simulated[name], how), *distances(name, how)))
    slow = f", the last {job.slow:g}x slower" if job.slow > 1 else ""
    title = f"{job.workers} workers{slow}, {job.mode}, rule {job.rule}, {len(real)} real"
    print_table(title, ("", "real", "simulated", "apart", "two real jobs"), rows)
    late = sum(one["late"] for one in real)
    if late:
        print(f"the chief computed {late} micro-batches for longer than half the service time: a busy machine")
