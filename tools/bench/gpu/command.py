"""`gba-hvd bench gpu`: one GPU trains a DLRM whose embedding tables stand in several places.

hbm           plain torch: nn.EmbeddingBag(sparse=True) for each table, all on the GPU, and torch.optim.Adagrad
hbm_merged    the same with one table for all fields: one lookup and one update a step; not run unless it is named
ours_host     tables in host memory; the CPU looks up, pools and updates rows, pooled rows are copied to the GPU
ours          the same tables; the GPU reads and writes the rows in host memory
ours_hot      the same, with copies on the GPU of the --hot-rows rows that are used most
ours_all      the same, with copies of all rows
torchrec_uvm  fbgemm's batched tables as UVM_CACHING, with a cache of --hot-rows rows; where fbgemm_gpu has CUDA

26 tables with --rows rows together, 13 dense features, bottom MLP 512-256-dim, dot products of all pairs, top MLP
512-256-1. Ids follow Zipf's law (exponent 1.05), another permutation in each table. No batch comes twice; all are in
pinned host memory before the clock starts, and copying them to the GPU is part of a step for all contestants. Every run
is a fresh process; runs of the contestants alternate. Needs no Horovod, and may be started as
`python -m gba_hvd_tools.bench.gpu.command`. Rows in the result file are kept and their runs not done again; those of a
contestant that could not be run here are tried again.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...signals import INTERRUPTED, ended_cleanly
from ..harness import measure, resumable
from ..harness.measure import Row, RunFailed, Subparsers, Variant
from . import summary

KEY = ("rows", "dim", "batch", "peer", "run")
PEERS = {
    "hbm": "plain torch, all tables on the GPU",
    "hbm_merged": "the same, one table for all fields",
    "ours_host": "EmbeddingTables, rows read and written by the CPU (GBA_HVD_DEVICE_ROWS=off)",
    "ours": "EmbeddingTables, rows in host memory, read and written by the GPU",
    "ours_hot": "EmbeddingTables(hot_rows=N), the rest in host memory, read and written by the GPU",
    "ours_all": 'EmbeddingTables(hot_rows="all"), written by the GPU to the rows in host memory',
    "torchrec_uvm": "fbgemm's SplitTableBatchedEmbeddingBagsCodegen, MANAGED_CACHING",
}
USUAL = tuple(name for name in PEERS if name != "hbm_merged")
N_TABLES = 26  # as `harness.dlrm`, which needs torch
RULES = ("adagrad", "row_adagrad")
ELEMENT_WISE = (
    "hbm, hbm_merged: element-wise Adagrad of the rows, since plain torch has no row-wise one; the others: row-wise"
)


@dataclass(frozen=True)
class Run:
    rows: int
    dim: int
    batch: int
    peer: str
    run: int

    def __str__(self) -> str:
        return f"{self.rows:,} rows x {self.dim}, batch {self.batch:,}, {self.peer}, run {self.run + 1}"

    @property
    def contestant(self) -> tuple[int, int, int, str]:
        """What all runs of one contestant at one size have in common."""
        return self.rows, self.dim, self.batch, self.peer


def add_parser(subparsers: Subparsers) -> None:
    does = "samples/s of one GPU, embedding tables on it or in host memory"
    parser = measure.add_benchmark(subparsers, "gpu", does, __doc__, run, help="rows in it are kept")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000_000, 100_000_000], help="of all tables together")
    parser.add_argument("--dim", type=int, nargs="+", default=[16, 64], help="of a row")
    parser.add_argument("--batch", type=int, nargs="+", default=[8192, 32768], help="samples of a step")
    parser.add_argument("--bag", type=int, default=1, help="ids of each table that a sample has, pooled by their sum")
    parser.add_argument("--runs", type=int, default=3, help="launches of each contestant at each size")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of a run")
    measure.add_chosen(parser, "--peers", PEERS, "PEER", default=USUAL, help=f"of {', '.join(PEERS)}")
    parser.add_argument("--hot-rows", type=int, metavar="N", help="of all tables together (default: a tenth of --rows)")
    parser.add_argument("--optimizer", choices=RULES, default="adagrad", help="of the rows")
    parser.add_argument("--device", default="cuda", help="of the dense modules; cpu: to try the benchmark")
    parser.add_argument("--threads", type=int, default=0, help="of torch on the CPU; 0: as many as torch takes")
    parser.add_argument("--seed", type=int, default=1, help="of batches and initial values")
    parser.add_argument("--profile", action="store_true", help="of each contestant of ours: the dearest operators of "
                        "10 more steps, to a file beside --out")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for one run")
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="after which no further run starts")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    """Raises RunFailed before anything is measured; what fails later is written and reported, and costs status 1."""
    check(args)
    settings = {
        name: getattr(args, name)
        for name in ("bag", "warm_up", "steps", "hot_rows", "optimizer", "device", "threads", "seed")
    }
    notes = [ELEMENT_WISE] if args.optimizer == "row_adagrad" and {"hbm", "hbm_merged"} & {*args.peers} else []
    results = resumable.Results(
        args.out, KEY, settings, lambda rows: {"peers": PEERS, "notes": notes, "summary": summary.of(rows)},
        has=["state"], packages=("torch", "numpy", "numba", "fbgemm-gpu"),
    )  # fmt: skip
    rows = results.rows
    rows[:] = [row for row in rows if row["state"] != summary.NOT_RUN]
    planned = [
        Run(n, dim, batch, peer, number)
        for n in args.rows for batch in args.batch for dim in args.dim
        for number in range(args.runs) for peer in args.peers
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        launches = Launches(Path(scratch), args)

        def one_run(one: Run) -> None:
            if summary.is_settled(rows, one.contestant) or any(_of_one(name, one) for name in results.failures):
                return  # it would end as it did before
            row = {**asdict(one), **launches.run(one), "load": os.getloadavg()[0]}
            rows.append(row)
            print(f"{one}: {summary.in_words(row)}", flush=True)

        results.run_each(results.waiting(planned), one_run, time.monotonic() + 60 * args.limit_minutes)
    summary.show(summary.of(rows))
    for note in notes:
        print(f"note: {note}")
    return results.end()


def check(args: argparse.Namespace) -> None:
    """Raises RunFailed for options that are not possible."""
    measure.require_at_least(args, rows=N_TABLES, dim=1, batch=1, bag=1, warm_up=1, steps=1, hot_rows=1)
    measure.require_at_least(args, runs=0, threads=0, seed=0)
    measure.require_positive(args, "timeout", "limit_minutes")
    if args.hot_rows is not None and args.hot_rows > min(args.rows):
        raise RunFailed(f"--hot-rows {args.hot_rows} of --rows {min(args.rows)}: there are not so many")
    import torch  # (slow; `gba-hvd --help` does without it)

    try:
        kind = torch.device(args.device).type
    except RuntimeError as error:
        raise RunFailed(f"--device {args.device}: {error}") from error
    if kind not in ("cuda", "cpu"):
        raise RunFailed(f"--device {args.device}: expected cuda or cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise RunFailed(f"--device {args.device}: torch {torch.__version__} finds no GPU here")


class Launches:
    """Runs at all sizes. Owns the batches in `folder`, those of one size at a time."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._folder, self._args = folder, args
        self._drawn: tuple[int, int] | None = None

    def run(self, one: Run) -> Row:
        """One launch, as a row of the result. Raises RunFailed."""
        args = self._args
        more: list[object] = ["--clicks", self._clicks(one), "--rows", one.rows // N_TABLES, "--dim", one.dim]
        more += ["--hot-rows", args.hot_rows or max(1, one.rows // 10), "--optimizer", args.optimizer]
        more += ["--warm-up", args.warm_up, "--steps", args.steps, "--seed", args.seed]
        more += ["--device", args.device, "--threads", args.threads]
        if args.profile and one.peer.startswith("ours"):
            profile = profile_of(args.out, one)
            more += ["--profile", profile]
            print(f"{one}: its profile goes to {profile}", flush=True)
        found: Row = measure.result_of(variant(one.peer, args.device), more, self._folder, args.timeout)
        return found

    def _clicks(self, one: Run) -> Path:
        """The folder of the batches of this size."""
        folder, size, args = self._folder / "clicks", (one.rows, one.batch), self._args
        if self._drawn != size:
            from . import clicks
            from .worker import PROFILED_STEPS

            shutil.rmtree(folder, ignore_errors=True)
            self._drawn = None
            n_batches, start = args.warm_up + args.steps + (PROFILED_STEPS if args.profile else 0), time.monotonic()
            clicks.write(folder, one.rows // N_TABLES, one.batch, args.bag, n_batches, args.seed)
            self._drawn = size
            took = time.monotonic() - start
            print(f"{n_batches} batches of {one.batch:,} drawn from {one.rows:,} rows in {took:.1f} s", flush=True)
        return folder


def variant(peer: str, device: str) -> Variant:
    """The launch of a contestant, short of its arguments."""
    command = (sys.executable, "-W", "ignore", "-m", f"{__package__}.worker", peer)
    return Variant(peer, command, {"GBA_HVD_DEVICE_ROWS": _device_rows(peer, device)})


def _device_rows(peer: str, device: str) -> str:
    if peer == "ours_host":
        return "off"
    return "on" if device == "cpu" else "auto"  # on: also for a CPU as the device


def profile_of(out: Path, one: Run) -> Path:
    """The file for the profile of a run: that of a later one of the same contestant replaces it."""
    return out.with_name(f"{out.stem}_{one.rows}x{one.dim}_{one.batch}_{one.peer}.profile.txt")


def _of_one(failed: str, one: Run) -> bool:
    return failed.rpartition(",")[0] == str(one).rpartition(",")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """The same without the rest of `gba-hvd`."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.command")
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["gpu", *(sys.argv[1:] if argv is None else argv)])
    try:
        with ended_cleanly():
            status: int = args.run(args)
        return status
    except KeyboardInterrupt:
        print("gba-hvd: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
