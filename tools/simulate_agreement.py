"""`gba-hvd simulate agreement`: the real system with emulated workers, and its simulation, side by side.

Starts real jobs with `horovodrun` on this machine, one for each number of workers, mode and speed, then simulates each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .simulated.agreement import Job

_TIMEOUT_S = 240.0  # for a job, beyond the time that is emulated


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "agreement",
        help="real jobs with emulated workers beside their simulations",
        description="Run the real system with workers of known speeds and simulate the same, and print staleness, "
        "log loss and AUC of both.",
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--mode", nargs="+", default=["gba", "async"], help="(gba async)")
    parser.add_argument("--rule", default="none")
    parser.add_argument("--slow", type=float, default=1.0, help="the last worker takes so many times as long")
    parser.add_argument("--service-ms", type=float, default=100.0, help="time of a micro-batch (%(default)s)")
    parser.add_argument("--micro-batches", type=int, default=800, help="of a job (%(default)s)")
    parser.add_argument("--latency-ms", type=float, default=2.0, help="of a message, in the simulation (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from .bench import measure, small_ctr
    from .simulated.agreement import Job, distance, simulate

    torch.set_num_threads(1)
    jobs = [
        Job(n, mode, args.rule, args.slow, args.service_ms / 1000, args.micro_batches, latency_s=args.latency_ms / 1000)
        for n in args.workers
        for mode in args.mode
    ]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gba-hvd-agreement-") as scratch:
        folder = Path(scratch)
        small_ctr.write(folder / "data", max(job.micro_batches * job.micro_batch for job in jobs))
        for job in jobs:
            try:
                real = real_run(job, folder)
            except measure.RunFailed as error:
                print(f"gba-hvd: {error}", file=sys.stderr)
                return 1
            simulated = simulate(job, folder / "data")
            apart = {name: distance(real[name], simulated[name]) for name in ("staleness", "lags")}
            found.append({"job": asdict(job), "real": real, "simulated": simulated, "apart": apart})
            show(job, real, simulated, apart)
    if args.out:
        measure.write_json(args.out, {"machine": measure.machine(), "jobs": found})
        print(f"written to {args.out}")
    return 0


def real_run(job: Job, folder: Path) -> dict[str, Any]:
    """One job of the real system. Raises RunFailed."""
    from .bench import measure

    result, log = folder / "result.json", folder / "log"
    result.unlink(missing_ok=True)
    launcher = (measure.console_script("horovodrun"), "-np", str(job.workers), "-H", f"localhost:{job.workers}")
    python = ("--network-interface", "lo", sys.executable, "-m", f"{__package__}.simulated.real_worker")
    variant = measure.Variant("real", (*launcher, *python), {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "3"})
    arguments = ["--data", str(folder / "data"), "--result", str(result), "--job", json.dumps(asdict(job))]
    timeout_s = job.micro_batches * job.service_s * job.slow / job.workers + _TIMEOUT_S
    measure.launch(variant, arguments, log=log, timeout_s=timeout_s)
    if not result.exists():
        raise measure.RunFailed(f"ended without a result\n{measure.gist(log.read_text())}")
    told: dict[str, Any] = json.loads(result.read_text())
    return told


def show(job: Job, real: Mapping[str, Any], simulated: Mapping[str, Any], apart: Mapping[str, float]) -> None:
    from .bench.measure import print_table
    from .simulated.agreement import shares

    rows = []
    for name, title in (("staleness", "staleness"), ("lags", "values old")):
        left, right = shares(real[name]), shares(simulated[name])
        for key in sorted({*left, *right}):
            if max(left.get(key, 0.0), right.get(key, 0.0)) >= 0.005:
                rows.append((f"{title} {key}", f"{left.get(key, 0.0):.1%}", f"{right.get(key, 0.0):.1%}"))
        rows.append((f"{title}, distance", "", f"{apart[name]:.3f}"))
    for name, how in (("auc", ".4f"), ("log_loss", ".4f"), ("time", ".1f"), ("steps", "d"), ("dropped", "d")):
        rows.append((name, format(real[name], how), format(simulated[name], how)))
    slow = f", the last {job.slow:g}x slower" if job.slow > 1 else ""
    print_table(f"{job.workers} workers{slow}, {job.mode}, rule {job.rule}", ("", "real", "simulated"), rows)
    if real["late"]:
        print(f"the chief computed {real['late']} micro-batches for longer than half the service time: a busy machine")
