"""`gba-hvd bench ...`: side-by-side measurements. Each writes one JSON object; nothing here is a test."""

from __future__ import annotations

from . import cluster_load, delay, import_time, launcher, model_averaging, quality, row_compression, smoke, vocabulary
from .allreduce import command as allreduce
from .checkpoint import command as checkpoint
from .compression import command as compression
from .days import command as days
from .follower import command as follower
from .gpu import command as gpu
from .harness.measure import Subparsers
from .membership import command as membership
from .ps import command as ps
from .reader import command as reader
from .recovery import command as recovery
from .row_dtypes import command as row_dtypes
from .serving import command as serving
from .stragglers import command as gba
from .switch import command as switch

BENCHMARKS = (
    allreduce, checkpoint, cluster_load, compression, days, delay, follower, gba, gpu, import_time, launcher,
    membership, ps, quality, reader, recovery, row_compression, row_dtypes, serving, model_averaging, smoke, switch,
    vocabulary,
)  # fmt: skip


def add_parser(subparsers: Subparsers) -> None:
    bench = subparsers.add_parser("bench", help="measure against other systems on this machine")
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for module in BENCHMARKS:
        module.add_parser(benchmarks)
