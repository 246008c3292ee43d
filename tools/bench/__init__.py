"""`gba-hvd bench ...`: side-by-side measurements. Each writes one JSON object; nothing here is a test."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import allreduce, checkpoint, compression, delay, gba, membership, ps, quality, recovery, rows, shadow, switch

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

BENCHMARKS = (
    allreduce, checkpoint, compression, delay, gba, membership, ps, quality, recovery, rows, shadow, switch,
)  # fmt: skip


def add_parser(subparsers: Subparsers) -> None:
    bench = subparsers.add_parser("bench", help="measure against other systems on this machine")
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for module in BENCHMARKS:
        module.add_parser(benchmarks)
