"""`gba-hvd simulate limits`: the stability limit that `gba-hvd advise` predicts, beside the one that is observed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "limits",
        help="the largest stable learning rate by delay: predicted and observed",
        description="Train a quadratic with gradients that are all equally old, and find the learning rate from which "
        "on it diverges. Predicted is what `gba-hvd advise` goes by.",
    )
    parser.add_argument("--delays", type=int, nargs="+", metavar="STEPS", help="default: 0, 1, 2, 4, ... 64")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from ...bench.harness.measure import print_table
    from ...simulated.stability_limit import DELAYS, observe

    torch.set_num_threads(1)
    found = [observe(delay) for delay in (DELAYS if args.delays is None else args.delays)]
    rows = [
        (str(f.delay), f"{f.predicted:.5f}", f"{f.stable:.5f}", f"{f.unstable:.5f}", f"{f.error:+.2%}") for f in found
    ]
    columns = ("delay", "predicted", "observed: fades", "grows", "predicted / observed - 1")
    print_table("Largest stable learning rate x curvature", columns, rows)
    if args.out:
        args.out.write_text(json.dumps([asdict(f) | {"error": f.error} for f in found], indent=2) + "\n")
        print(f"written to {args.out}")
    return 0
