"""`gba-hvd bench ...`: side-by-side measurements. Each writes one JSON object; nothing here is a test."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import delay, import_time, launcher, model_averaging, quality, row_compression, server_start
from .allreduce import command as allreduce
from .checkpoint import command as checkpoint
from .compression import command as compression
from .membership import command as membership
from .ps import command as ps
from .recovery import command as recovery
from .stragglers import command as gba
from .switch import command as switch

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

BENCHMARKS = (
    allreduce, checkpoint, compression, delay, gba, import_time, launcher, membership, ps, quality, recovery,
    row_compression, server_start, model_averaging, switch,
)  # fmt: skip


def add_parser(subparsers: Subparsers) -> None:
    bench = subparsers.add_parser("bench", help="measure against other systems on this machine")
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for module in BENCHMARKS:
        module.add_parser(benchmarks)
