"""`gba-hvd bench checkpoint`: what a checkpoint costs training, beside torch.save, DCP and torchsnapshot.

One model (`model.py`: embedding tables with Adagrad) is trained in one thread, and saved by other threads of
the same process; ours also by a process of its own, whose memory counts as well. Measured: how long training was held
up (the save call, and steps that took longer than usual until all was durable), time until durable with everything
synced, bytes, the memory above the level before, and a restore in a fresh process with the files out of the page cache.
Every measurement is a fresh process; the contestants alternate.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..harness import measure
from ..harness.measure import Row, RunFailed, Subparsers, Variant
from . import analysis
from .analysis import CONTESTANTS, RESTORES, Case, cases, why_not

QUIET_S = 5.0


def add_parser(subparsers: Subparsers) -> None:
    parser = measure.add_benchmark(subparsers, "checkpoint", "stall, speed and memory of saves", __doc__, run)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.5, 2, 8], help="sizes of tables and slots, 1e9 bytes")
    parser.add_argument("--changed", type=float, nargs="+", default=[0.01, 0.1], help="shares of rows that changed")
    parser.add_argument("--runs", type=int, default=3, help="measurements of each contestant at each size")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: where temporary files go)")
    measure.add_chosen(parser, "--contestants", CONTESTANTS, "NAME")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="for one measurement")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    about = measure.machine(("torch", "numpy", "xxhash", "zstandard"))
    pythons, skipped = interpreters(args.contestants)
    chosen = cases([name for name in args.contestants if name in pythons], args.changed)
    variants = {case: variant(case, pythons[case.contestant]) for case in chosen}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-", dir=args.folder) as scratch:
        for gb in args.gb:
            rows += of_size(int(gb * 1e9), variants, Path(scratch), args, skipped)
    result = {
        "machine": about,
        "commands": {case.name: str(variant) for case, variant in variants.items()},
        "settings": settings(args),
        **analysis.headline(rows),
        "medians": analysis.figures(rows),
        "skipped": skipped,
        "rows": rows,
    }
    measure.write_json(args.out, result)
    show(result)
    return 0


def interpreters(contestants: Sequence[str]) -> tuple[dict[str, str], list[Row]]:
    """The Python of each contestant, and those that cannot be had, with the reason."""
    found, skipped = {name: sys.executable for name in contestants}, []
    for name in contestants:
        if name.startswith("torchsnapshot"):
            from ..harness import peer_environments

            try:
                found[name] = str(peer_environments.torchsnapshot_python())
            except (OSError, subprocess.CalledProcessError) as error:
                del found[name]
                skipped.append({"case": name, "why": f"cannot be installed: {error}"})
    return found, skipped


def variant(case: Case, python: str) -> Variant:
    command = (python, "-W", "ignore", "-m", f"{__package__}.worker", case.contestant)
    return Variant(case.name, (*command, "--changed", str(case.changed)), {"OMP_NUM_THREADS": "1"})


def of_size(
    n_bytes: int, variants: Mapping[Case, Variant], scratch: Path, args: argparse.Namespace, skipped: list[Row]
) -> list[Row]:
    """All runs at one size; what does not fit, or a peer that fails, goes to `skipped`. Raises RunFailed for ours."""
    case_of = {one.name: case for case, one in variants.items()}

    def once(one: Variant, number: int) -> Row:
        case = case_of[one.name]
        row = {"contestant": case.contestant, "case": case.name, "changed": case.changed, "run": number}
        try:
            return row | measured(case, one, n_bytes, scratch, args)
        except RunFailed as error:
            if case.contestant.startswith("ours"):
                raise
            return row | {"failed": str(error)}

    fitting = []
    for case, one in variants.items():
        if (why := lacking(case.contestant, n_bytes, scratch)) is None:
            fitting.append(one)
        else:
            skipped.append({"case": case.name, "bytes": n_bytes, "why": why})
            print(f"{n_bytes / 1e9:g} GB  {case.name}: left out, {why}", flush=True)
    rows = measure.interleave(fitting, args.runs, once)
    for row in rows:
        gone = row.pop("left_out", {}) | ({row["case"]: row["failed"]} if "failed" in row else {})
        skipped += [{"case": what, "bytes": n_bytes, "run": row["run"], "why": why} for what, why in gone.items()]
    return [row for row in rows if "failed" not in row]


def measured(case: Case, one: Variant, n_bytes: int, scratch: Path, args: argparse.Namespace) -> Row:
    """A save, and each way to restore it. Raises RunFailed."""
    folder = scratch / "state"
    folder.mkdir()
    # No more rows may change while a delta is made than it is about.
    trained = case.changed if case.contestant.endswith("_delta") else max(args.changed)
    common = ["--bytes", n_bytes, "--trained", trained, "--quiet-s", QUIET_S, "--folder", folder]

    def launched(*more: str) -> Row:
        found: Row = measure.result_of(one, [*common, *more], scratch, args.timeout)
        return found

    try:
        row: Row = launched()
        row["bytes_per_s"] = row["bytes"] / row["durable_s"]
        for how in RESTORES.get(case.contestant, ()):
            if (why := lacking(how, n_bytes, scratch)) is not None:
                row.setdefault("left_out", {})[how] = why
                continue
            back = launched("--restore", how)
            row[f"restore_s {how}"] = back["restore_s"]
            row[f"restore_peak_extra_bytes {how}"] = back["restore_peak_extra_bytes"]
    finally:
        shutil.rmtree(folder)
        subprocess.run(["sync", "-f", str(scratch)], check=False)  # freeing blocks must not slow down who comes next
    restores = "".join(f"  {name.split()[1]} {row[name]:.2f} s" for name in row if name.startswith("restore_s "))
    print(
        f"{n_bytes / 1e9:g} GB  {case.name:20s} stall {row['stall_s']:6.3f} s  durable {row['durable_s']:6.2f} s  "
        f"{row['bytes'] / 1e6:8.1f} MB  extra memory {row['peak_extra_bytes'] / 2**20:6.0f} MiB{restores}",
        flush=True,
    )
    return row


def lacking(what: str, n_bytes: int, scratch: Path) -> str | None:
    import psutil

    return why_not(what, n_bytes, psutil.virtual_memory().available, shutil.disk_usage(scratch).free)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    from recovery import Config

    from . import model

    return {
        "tables": model.N_TABLES,
        "dim": model.DIM,
        "batch": model.BATCH,
        "changed": args.changed,
        "quiet_s": QUIET_S,
        "config": asdict(Config.from_env()),
        "contestants": {name: CONTESTANTS[name] for name in args.contestants},
    }


def show(result: Mapping[str, Any]) -> None:
    """A table of medians for each size, and the headline figures."""
    columns = {
        "contestant": "{case}", "stall s": "{stall_s:.3f}", "net": "{stall_net_s:.3f}", "call": "{blocked_s:.3f}",
        "durable s": "{durable_s:.2f}", "MB": "{mb:,.1f}", "MB/s": "{mb_per_s:,.0f}", "extra MiB": "{extra_mib:,.0f}",
        "step ms": "{step_ms:.2f}", "restore s": "{backs}",
    }  # fmt: skip
    for n_bytes, by_case in result["medians"].items():
        table = []
        for case, found in by_case.items():
            backs = " / ".join(f"{value:.2f}" for name, value in found.items() if name.startswith("restore_s "))
            units = {"mb": found["bytes"] / 1e6, "mb_per_s": found["bytes_per_s"] / 1e6}
            units |= {"extra_mib": found["peak_extra_bytes"] / 2**20, "step_ms": 1000 * found["quiet_step_s"]}
            table.append({"case": case, **found, **units, "backs": backs})
        measure.print_figures(f"checkpoints of {int(n_bytes) / 1e9:.2f} GB, medians", columns, table)
    for name, value in result.items():
        if "_vs_" in name or name.startswith("write_efficiency") or name in ("mfu_bytes_share", "peak_extra_bytes"):
            print(f"{name}: {json.dumps(value)}")
    for one in result["skipped"]:
        print(f"left out: {one['case']} at {one.get('bytes', 'any')} bytes: {one['why'].splitlines()[0]}")
