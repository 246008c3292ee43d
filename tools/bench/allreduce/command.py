"""`gba-hvd bench allreduce`: training speed of allreduce mode beside plain Horovod and TorchRec, two workers a host.

Each shape is a model. All peers train the same dense modules on the same batches with the same optimizer rule, one
thread per worker. Every run is a fresh launch; runs of the peers alternate. Warm-up steps are not timed. Beside the
peers the dense modules run alone, which says what each shape's step consists of.

--hosts: names of this machine, each with a copy of the tables, that exchange rows and dense gradients through its
loopback interface. TorchRec places its tables by worker, and knows no hosts.

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

from gba_hvd.config import Config

from ..harness import measure, noise, peer_environments, resumable
from ..harness.measure import Row, RunFailed, Subparsers, Variant

KEY = ("shape", "batch", "peer", "run")
SHAPE_NAMES = ("dlrm", "bags", "wide", "din")  # of `shape.SHAPES`, which needs torch
PEERS = {
    "ours": "allreduce mode, HOROVOD_CYCLE_TIME=5, as `gba-hvd run` sets it: no step has a Horovod operation",
    "ours_micro": "ours with micro-batches of an eighth of the batch, as a job that switches to gba has them",
    "ours_sync": "the same with sync_micro_batch: the whole batch at once in allreduce mode",
    "horovod": "plain Horovod, sparse tables, HOROVOD_CYCLE_TIME=3",
    "torchrec": "TorchRec, table_wise, fused Adagrad, DDP for the dense part",
    "torchrec_pipeline": "the same in TrainPipelineSparseDist: the next batch's ids are exchanged meanwhile",
    "torch": "plain torch, one process with a thread for each worker, which computes the batches of all",
}
USUAL = ("ours", "horovod", "torchrec")
PARTS = 8  # micro-batches of a batch, for ours_micro and ours_sync
# More arguments of their workers.
OF_OURS: dict[str, tuple[str, ...]] = {
    "ours": (),
    "ours_micro": ("--parts", str(PARTS)),
    "ours_sync": ("--parts", str(PARTS), "--together"),
}
OF_TORCHREC: dict[str, tuple[str, ...]] = {"torchrec": (), "torchrec_pipeline": ("--pipeline",)}
DENSE = "dense"  # the dense modules alone
GOALS = {"torchrec": {"dlrm": 1.0, "bags": 1.3, "wide": 1.3, "din": 1.3}, "horovod": dict.fromkeys(SHAPE_NAMES, 1.5)}
COLUMNS = (
    "samples_per_s", "ms_per_step", "cpu_ms_per_step", "startup_s", "peak_own_bytes", "table_copies_per_host", "load",
    "loss_last", "copied_per_s", "gathered_per_s",
)  # fmt: skip
SHOWN = {
    "peer": "{peer}", "samples/s": "{samples_per_s:,.0f}", "ms/step": "{ms_per_step:.1f}",
    "CPU ms/step": "{cpu_ms_per_step:.1f}", "start-up s": "{startup_s:.1f}", "own MiB": "{own_mib:,.0f}",
    "table copies": "{table_copies_per_host:.2f}", "load": "{load:.1f}", "ours / peer": "{ratio:.2f}",
}  # fmt: skip
WORKERS, BATCHES_KEPT, WARMUP_STEPS, STEPS = 2, 12, 6, 30
_MODULES = "bench.allreduce"


@dataclass(frozen=True)
class Run:
    shape: str
    batch: int
    peer: str
    run: int

    def __str__(self) -> str:
        return f"{self.shape}, batch {self.batch}, {self.peer}, run {self.run + 1}"


def add_parser(subparsers: Subparsers) -> None:
    does = "samples/s beside plain Horovod and TorchRec"
    parser = measure.add_benchmark(subparsers, "allreduce", does, __doc__, run, help="rows in it are kept")
    parser.add_argument(
        "--shapes", nargs="*", default=["dlrm"], choices=SHAPE_NAMES, metavar="SHAPE",
        help=f"{', '.join(SHAPE_NAMES)}, or all of them where none is named",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, nargs="+", help="samples per worker and step (default: what a shape has)")
    parser.add_argument("--hosts", type=int, default=1, choices=range(1, len(measure.NAMES) + 1), metavar="N")
    parser.add_argument("--runs", type=int, default=5, help="launches of each peer with each shape and batch")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps per run")
    others = ", ".join(name for name in PEERS if name not in USUAL)
    measure.add_chosen(parser, "--peers", PEERS, "PEER", default=USUAL, help=f"also: {others}")
    parser.add_argument("--timeout", type=float, default=180, metavar="SECONDS", help="for one run")
    noise.add_option(parser)


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    """Raises RunFailed before anything is measured; what fails later is written and reported, and costs status 1."""
    planned = planned_runs(args)
    settings = {"workers": WORKERS * args.hosts, "steps": args.steps, **noise.setting(args.noise)}
    traffic: dict[str, Any] = {}

    def more(rows: list[Row]) -> dict[str, Any]:
        return {"peers": PEERS, "traffic": traffic, "summary": summary(rows, traffic)}

    results = resumable.Results(args.out, KEY, settings, more)
    traffic |= results.before.get("traffic") or {}
    with noise.Noise(args.noise), tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        launches: dict[tuple[str, int], Launches] = {}

        def one_run(one: Run) -> None:
            prepared = launches.get((one.shape, one.batch))
            if prepared is None:
                folder = Path(scratch) / f"{one.shape}-{one.batch}"
                prepared = Launches(folder, one.shape, one.batch, args.steps, args.hosts, args.timeout)
                launches[one.shape, one.batch] = prepared
                traffic.setdefault(one.shape, {})[str(one.batch)] = prepared.traffic
            row = {**asdict(one), **prepared.run(one.peer), "load": os.getloadavg()[0]}
            results.rows.append(row)
            print(f"{one}: {row['samples_per_s']:,.0f} samples/s, load {row['load']:.1f}", flush=True)

        results.run_each(results.waiting(planned), one_run)
    show(summary(results.rows, traffic), WORKERS * args.hosts, noise.beside(args.noise))
    return results.end()


def planned_runs(args: argparse.Namespace) -> list[Run]:
    """The dense modules alone among them. Raises RunFailed for a batch that cannot be."""
    from .shape import SHAPES

    peers = list(args.peers)
    for batch in args.batch or ():
        if batch < 1 or (batch % PARTS and not {"ours_micro", "ours_sync"}.isdisjoint(peers)):
            raise RunFailed(
                f"--batch {batch}: expected 1 or more, and for ours_micro and ours_sync a multiple of {PARTS}"
            )
    if peer_environments.torchrec_environment() is None and (absent := [one for one in peers if one in OF_TORCHREC]):
        peers = [one for one in peers if one not in absent]
        print(f"{', '.join(absent)}: left out, as TorchRec is not in .peers/models, where `make setup` installs it")
    runs = [
        Run(shape, batch, peer, number)
        for shape in args.shapes or SHAPE_NAMES
        for batch in args.batch or [SHAPES[shape].batch]
        for number in range(args.runs)
        for peer in (*peers, *([DENSE] if args.hosts == 1 else []))
    ]
    return list(dict.fromkeys(runs))


class Launches:
    """Runs of one shape and batch, all on the same prepared batches. Owns the files in `folder`."""

    def __init__(self, folder: Path, name: str, batch: int, steps: int, hosts: int, timeout_s: float) -> None:
        from . import batches
        from .shape import SHAPES

        self._folder, self._name, self._batch = folder, name, batch
        self._steps, self._hosts, self._timeout_s = steps, hosts, timeout_s
        shape = SHAPES[name]
        drawn = batches.write(folder / "batches", shape, batch, BATCHES_KEPT, WORKERS * hosts)
        bytes_per_row = 2 * 2 * 4 * shape.dim  # read and written, weights and Adagrad's sum
        self.traffic = {**drawn, "bytes_per_step": drawn["distinct_rows_per_step"] * bytes_per_row}

    def run(self, peer: str) -> Row:
        """One launch, as a row of the result. Raises RunFailed."""
        variant, n_processes = variant_of(peer, self._hosts)
        results = [self._folder / f"rank{rank}.json" for rank in range(n_processes)]
        for path in results:
            path.unlink(missing_ok=True)
        arguments = ["--shape", self._name, "--clicks", self._folder / "batches", "--result", self._folder]
        arguments += ["--warmup", WARMUP_STEPS, "--steps", self._steps]
        log = self._folder / "log"
        # Not `gba-hvd-`: a job that starts meanwhile would take it for the memory of a dead one, and remove it.
        with tempfile.TemporaryDirectory(prefix="bench-gba-hvd-", dir=Config().shard_dir) as memory:
            if peer in OF_OURS and self._hosts > 1:
                arguments += ["--memory", memory]
            started = measure.launch(variant, [str(a) for a in arguments], log=log, timeout_s=self._timeout_s)
        ranks = [json.loads(path.read_text()) for path in results]
        row = row_of(ranks, started, self._batch * WORKERS * self._hosts // n_processes, self._steps)
        rates = ("copied_per_s", "gathered_per_s")
        return row | {name: sum(rank[name] for rank in ranks) for name in rates if name in ranks[0]}


def row_of(ranks: Sequence[Row], started: float, batch: int, steps: int) -> Row:
    """What one run measured. The slowest worker's time counts; memory is that of the larger worker."""
    seconds = max(rank["seconds"] for rank in ranks)
    row = {
        "steps": steps,
        "samples_per_s": len(ranks) * batch * steps / seconds,
        "ms_per_step": 1000 * seconds / steps,
        "cpu_ms_per_step": 1000 * sum(rank["cpu_s"] for rank in ranks) / len(ranks) / steps,
        "startup_s": max(rank["first_step_unix_s"] for rank in ranks) - started,
        "peak_own_bytes": max(rank["peak_own_bytes"] for rank in ranks),
        "loss_first": sum(rank["loss_first"] for rank in ranks) / len(ranks),
        "loss_last": sum(rank["loss_last"] for rank in ranks) / len(ranks),
    }
    if "shared_bytes" in ranks[0]:
        copies = sum(rank["shared_proportional_bytes"] for rank in ranks) / ranks[0]["shared_bytes"]
        row |= {"table_bytes": ranks[0]["shared_bytes"], "table_copies_per_host": copies}
    return row


def variant_of(peer: str, hosts: int = 1) -> tuple[Variant, int]:
    """The launch of a peer, and its processes."""
    workers = WORKERS * hosts
    if peer in OF_OURS:
        ours = (f"{_MODULES}.ours", *OF_OURS[peer])
        return measure.horovodrun(peer, workers, *ours, hosts=hosts, **measure.AS_RUN), workers
    if peer == "horovod":
        return measure.horovodrun(peer, workers, f"{_MODULES}.torch_tables", hosts=hosts), workers
    if peer == DENSE:
        return measure.horovodrun(peer, workers, f"{_MODULES}.dense_only", hosts=hosts, **measure.AS_RUN), workers
    python = (sys.executable, "-m")
    command: tuple[str, ...]
    if peer == "torch":
        command = (*python, f"gba_hvd_tools.{_MODULES}.torch_tables", "--alone", str(workers))
        return Variant(peer, command, {"OMP_NUM_THREADS": str(workers)}), 1
    launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={workers}")
    command = (*python, *launcher, "-m", f"gba_hvd_tools.{_MODULES}.torchrec", *OF_TORCHREC[peer])
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(peer_environments.torchrec_environment() or {})}
    return Variant(peer, command, env), workers


def summary(rows: Sequence[Row], traffic: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """By shape and batch; what was not run is left out."""
    found: dict[str, Any] = {}
    for shape, batch in dict.fromkeys((row["shape"], row["batch"]) for row in rows):
        some = [row for row in rows if (row["shape"], row["batch"]) == (shape, batch)]
        of_step = traffic.get(shape, {}).get(str(batch))
        found.setdefault(shape, {})[str(batch)] = _summary_of(some, shape, batch, of_step)
    return found


def _summary_of(rows: Sequence[Row], shape: str, batch: int, traffic: Mapping[str, float] | None) -> dict[str, Any]:
    """Medians of each peer, ours over each, and the parts of a step. rows: all of one shape and batch"""
    peers = measure.by_groups(rows, "shape", "peer", COLUMNS)[shape]
    dense = peers.pop(DENSE, None)
    found: dict[str, Any] = {"peers": peers, "ratios": ratios(rows)}
    found["goals"] = {
        peer: {"goal": goals[shape], "is_met": found["ratios"][peer] >= goals[shape]}
        for peer, goals in GOALS.items()
        if peer in found["ratios"]
    }
    if dense is not None and traffic is not None:
        copied, gathered = dense.pop("copied_per_s"), dense.pop("gathered_per_s")
        found["step"] = step_of(peers.get("ours"), dense, gathered, traffic["bytes_per_step"], batch)
        found["step"] |= {"copied_per_s": copied, "gathered_per_s": gathered, **traffic}
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


def show(found: Mapping[str, Any], workers: int, beside: str = "") -> None:
    """For each shape and batch a table, the parts of its step, and its goals."""
    for shape, by_batch in found.items():
        for batch, one in by_batch.items():
            name = f"{shape}, batch {batch}"
            lines = [
                {"peer": peer, **of, "own_mib": of["peak_own_bytes"] / 2**20, "ratio": one["ratios"].get(peer)}
                for peer, of in one["peers"].items()
            ]
            measure.print_figures(f"{name}, {workers} workers, medians{beside}", SHOWN, lines)
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
