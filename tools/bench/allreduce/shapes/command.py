"""`gba-hvd bench allreduce --shapes`: runs of all peers in alternation, and what each shape's step consists of.

Rows in the result file are kept and their runs not done again. Ratios are medians over the runs of one number, which
follow each other.

not dense   the share of a step of ours that the dense modules alone, on ready-made rows, do not take
limit       samples/s of a step that consists of the dense modules and of reading and writing each distinct row of the
            step once, with its Adagrad sum, as fast as the workers gather random rows of that width
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...harness import measure, peer_environments, resumable
from ...harness.measure import Row, Variant
from ..row import row_of

KEY = ("shape", "peer", "run")
SHAPE_NAMES = ("dlrm", "bags", "wide", "din")  # of `shape.SHAPES`, which needs torch
PEERS = {
    "ours": "allreduce mode, HOROVOD_CYCLE_TIME=5, as `gba-hvd run` sets it",
    "horovod": "plain Horovod, sparse tables, HOROVOD_CYCLE_TIME=3",
    "torchrec": "TorchRec, table_wise, fused Adagrad, DDP for the dense part",
    "torch": "plain torch, one process with a thread for each worker, which computes the batches of all",
}
DENSE = "dense"  # the dense modules alone
GOALS = {
    "torchrec": {"dlrm": 1.0, "bags": 1.3, "wide": 1.3, "din": 1.3},
    "horovod": dict.fromkeys(SHAPE_NAMES, 1.5),
}
WORKERS, BATCHES_KEPT, WARMUP_STEPS, STEPS = 2, 12, 6, 30
_MODULES = "bench.allreduce.shapes"


@dataclass(frozen=True)
class Run:
    shape: str
    peer: str
    run: int

    def __str__(self) -> str:
        return f"{self.shape}, {self.peer}, run {self.run + 1}"


def run(args: argparse.Namespace) -> int:
    """Raises RunFailed before anything is measured; what fails later is written and reported, and costs status 1."""
    from .shape import SHAPES

    shapes, peers = args.shapes or list(SHAPE_NAMES), list(args.peers)
    steps = args.steps or STEPS
    sizes = {name: args.batch[0] if args.batch else SHAPES[name].batch for name in SHAPE_NAMES}
    settings = {"workers": WORKERS, "steps": steps, "batch": sizes, **({"noise": args.noise} if args.noise else {})}
    before = resumable.earlier(args.out, KEY, settings)
    rows, traffic = before["rows"], dict(before.get("traffic") or {})
    about = before.get("machine") or measure.machine()
    if "torchrec" in peers and torchrec_environment() is None:
        peers.remove("torchrec")
        print("torchrec is left out: it is not in .peers/models, where `make setup` installs it")
    planned = [Run(shape, peer, number) for shape in shapes for number in range(args.runs) for peer in (*peers, DENSE)]
    waiting = resumable.missing(planned, rows, KEY)
    print(f"{len(rows)} rows in {args.out}, {len(waiting)} runs to do", flush=True)
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        launches: dict[str, Launches] = {}

        def one_run(one: Run) -> None:
            if one.shape not in launches:
                launches[one.shape] = Launches(
                    Path(scratch) / one.shape, one.shape, sizes[one.shape], steps, args.timeout
                )
                traffic[one.shape] = launches[one.shape].traffic
            row = {**asdict(one), **launches[one.shape].run(one.peer), "load": os.getloadavg()[0]}
            rows.append(row)
            print(f"{one}: {row['samples_per_s']:,.0f} samples/s, load {row['load']:.1f}", flush=True)

        def write() -> None:
            found = {"machine": about, "settings": settings, "peers": PEERS, "traffic": traffic, "rows": rows}
            found |= {"summary": summary(rows, traffic, sizes), "failures": failures}
            measure.write_whole(args.out, found)

        resumable.run_each(waiting, one_run, write, failures)
        write()
    show(summary(rows, traffic, sizes))
    print(f"written to {args.out}")
    return 1 if failures else 0


class Launches:
    """Runs of one shape, all on the same prepared batches. Owns the files in `folder`."""

    def __init__(self, folder: Path, name: str, batch: int, steps: int, timeout_s: float) -> None:
        from . import batches
        from .shape import SHAPES

        self._folder, self._name, self._batch = folder, name, batch
        self._steps, self._timeout_s = steps, timeout_s
        shape = SHAPES[name]
        drawn = batches.write(folder / "batches", shape, batch, BATCHES_KEPT, WORKERS)
        bytes_per_row = 2 * 2 * 4 * shape.dim  # read and written, weights and Adagrad's sum
        self.traffic = {
            "ids_per_sample": drawn.ids,
            "distinct_rows_per_step": drawn.distinct_rows,
            "bytes_per_step": drawn.distinct_rows * bytes_per_row,
        }

    def run(self, peer: str) -> Row:
        """One launch, as a row of the result. Raises RunFailed."""
        variant, n_processes = variant_of(peer)
        results = [self._folder / f"rank{rank}.json" for rank in range(n_processes)]
        for path in results:
            path.unlink(missing_ok=True)
        arguments = ["--shape", self._name, "--clicks", self._folder / "batches", "--result", self._folder]
        arguments += ["--warmup", WARMUP_STEPS, "--steps", self._steps]
        log = self._folder / "log"
        started = measure.launch(variant, [str(a) for a in arguments], log=log, timeout_s=self._timeout_s)
        ranks = [json.loads(path.read_text()) for path in results]
        row = row_of(ranks, started, self._batch * WORKERS // n_processes, self._steps)
        rates = ("copied_per_s", "gathered_per_s")
        return row | {name: sum(rank[name] for rank in ranks) for name in rates if name in ranks[0]}


def variant_of(peer: str) -> tuple[Variant, int]:
    """The launch of a peer, and its processes."""
    if peer == "ours":
        return measure.horovodrun(peer, WORKERS, f"{_MODULES}.ours", **measure.AS_RUN), WORKERS
    if peer == "horovod":
        return measure.horovodrun(peer, WORKERS, f"{_MODULES}.torch_tables"), WORKERS
    if peer == DENSE:
        return measure.horovodrun(peer, WORKERS, f"{_MODULES}.dense_only", **measure.AS_RUN), WORKERS
    python = (sys.executable, "-m")
    if peer == "torch":
        command = (*python, f"gba_hvd_tools.{_MODULES}.torch_tables", "--alone", str(WORKERS))
        return Variant(peer, command, {"OMP_NUM_THREADS": str(WORKERS)}), 1
    launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}")
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(torchrec_environment() or {})}
    return Variant(peer, (*python, *launcher, "-m", f"gba_hvd_tools.{_MODULES}.torchrec"), env), WORKERS


def torchrec_environment() -> dict[str, str] | None:
    """What this Python needs to import TorchRec; None where `make setup` has not installed it."""
    models = peer_environments.PEERS / "models"
    return {"PYTHONPATH": str(models)} if (models / "torchrec").is_dir() else None


def summary(
    rows: Sequence[Row], traffic: Mapping[str, Mapping[str, float]], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """By shape: medians of each peer, ours over each, and the parts of a step; what was not run is left out."""
    found: dict[str, Any] = {}
    for shape in dict.fromkeys(row["shape"] for row in rows):
        some = [row for row in rows if row["shape"] == shape]
        columns = ("samples_per_s", "ms_per_step", "cpu_ms_per_step", "peak_own_bytes", "load", "loss_last")
        peers = measure.by_groups(some, "shape", "peer", columns)[shape]
        dense = peers.pop(DENSE, None)
        one: dict[str, Any] = {"peers": peers, "ratios": ratios(some)}
        one["goals"] = {
            peer: {"goal": goals[shape], "is_met": one["ratios"][peer] >= goals[shape]}
            for peer, goals in GOALS.items()
            if peer in one["ratios"]
        }
        if dense is not None and shape in traffic:
            measured = [row for row in some if row["peer"] == DENSE]
            copied, gathered = (median(row[name] for row in measured) for name in ("copied_per_s", "gathered_per_s"))
            one["step"] = step_of(peers.get("ours"), dense, gathered, traffic[shape]["bytes_per_step"], sizes[shape])
            one["step"] |= {"copied_per_s": copied, "gathered_per_s": gathered, **traffic[shape]}
        found[shape] = one
    return found


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Samples/s of ours over those of each peer: the median over runs of one number."""
    speed = {(row["peer"], row["run"]): row["samples_per_s"] for row in rows}
    by_peer: dict[str, list[float]] = {}
    for (peer, number), value in speed.items():
        if peer in PEERS and peer != "ours" and ("ours", number) in speed:
            by_peer.setdefault(peer, []).append(speed["ours", number] / value)
    return {peer: median(values) for peer, values in by_peer.items()}


def step_of(
    ours: Mapping[str, float] | None, dense: Mapping[str, float], gathered_per_s: float, n_bytes: float, batch: int
) -> dict[str, float]:
    """Of a step: the dense modules' time, the limit, and where ours stands. n_bytes: of rows, of all workers."""
    least_s = dense["ms_per_step"] / 1000 + n_bytes / gathered_per_s
    found = {"dense_ms": dense["ms_per_step"], "limit_samples_per_s": WORKERS * batch / least_s}
    if ours is not None:
        found["not_dense_share"] = 1 - dense["ms_per_step"] / ours["ms_per_step"]
        found["share_of_limit"] = ours["samples_per_s"] / found["limit_samples_per_s"]
    return found


def show(found: Mapping[str, Any]) -> None:
    """A table for each shape, the parts of its step, and its goals."""
    for name, one in found.items():
        lines = [
            [peer, f"{of['samples_per_s']:,.0f}", f"{of['ms_per_step']:.1f}", f"{of['cpu_ms_per_step']:.1f}",
             f"{of['peak_own_bytes'] / 2**20:,.0f}", f"{one['ratios'][peer]:.2f}" if peer in one["ratios"] else "",
             f"{of['load']:.1f}"]
            for peer, of in one["peers"].items()
        ]  # fmt: skip
        columns = ["peer", "samples/s", "ms/step", "CPU ms/step", "own memory MiB", "ours / peer", "load"]
        measure.print_table(f"{name}, {WORKERS} workers, medians", columns, lines)
        if "step" in one:
            print(parts_of_step(name, one["step"]))
        for peer, goal in one["goals"].items():
            is_met = "met" if goal["is_met"] else "missed"
            print(f"{name}: {one['ratios'][peer]:.2f}x {peer}, the goal of {goal['goal']:.1f} is {is_met}")


def parts_of_step(name: str, step: Mapping[str, float]) -> str:
    """One line, in words."""
    text = f"{name}: {step['ids_per_sample']:.0f} ids a sample; dense modules alone {step['dense_ms']:.1f} ms a step"
    if "not_dense_share" in step:
        text += f", {step['not_dense_share']:.0%} of ours is not dense"
    text += (
        f"; {step['bytes_per_step'] / 1e6:.0f} MB of distinct rows at {step['gathered_per_s'] / 1e9:.1f} GB/s (a long "
        f"copy: {step['copied_per_s'] / 1e9:.1f}) beside them: limit {step['limit_samples_per_s']:,.0f} samples/s"
    )
    if "share_of_limit" in step:
        text += f", ours at {step['share_of_limit']:.2f} of it"
    return text
