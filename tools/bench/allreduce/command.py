"""`gba-hvd bench allreduce`: training speed of allreduce mode beside plain Horovod and TorchRec, two workers, one DLRM.

All peers train the same dense modules (`dlrm.py`) on the same batches (`clicks.py`) with the same optimizer rule, one
thread per worker. Every run is a fresh launch; runs of the peers alternate. Warm-up steps are not timed.

--shapes: other models beside that DLRM, up to one whose time goes into its embeddings; see `shapes.command`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..harness import measure
from ..harness.measure import Row, RunFailed, Subparsers, Variant
from ..harness.noise import Noise
from .row import row_of
from .shapes import command as shapes

WORKERS = 2
BATCHES_KEPT = 24  # per worker; cycled
WARMUP_STEPS = 8
SAMPLES_TIMED = 250_000  # per worker and run, at least STEPS_LEAST steps, unless --steps says otherwise
STEPS_LEAST = 30
PEERS = ("ours", "horovod", "torchrec")
BATCHES = (2048, 8192)
# How peers are launched: each gets the best of the settings tried; the others stay here under names of their own.
SETTINGS = {
    "ours": "HOROVOD_CYCLE_TIME=5, as `gba-hvd run` sets it: no step has a Horovod operation",
    "ours_micro": "ours with micro-batches of an eighth of the batch, as a job that switches to gba has them",
    "ours_sync": "the same with sync_micro_batch: the whole batch at once in allreduce mode",
    "horovod": "26 sparse tables, HOROVOD_CYCLE_TIME=3: the 52 allgathers of a step go in fewer, fuller responses",
    "horovod_default_cycle": "HOROVOD_CYCLE_TIME=1, Horovod's default",
    "horovod_short_cycle": "HOROVOD_CYCLE_TIME=0.3",
    "horovod_merged": "one sparse table of 5.2 M rows instead of 26: two allgathers a step",
    "horovod_dense": "sparse_as_dense=True: allreduce of whole tables",
    "torchrec": "table_wise, fused Adagrad, DDP for the dense part",
    "torchrec_pipeline": "the same in TrainPipelineSparseDist: the next batch's ids are exchanged meanwhile",
}


def add_parser(subparsers: Subparsers) -> None:
    parser = measure.add_benchmark(subparsers, "allreduce", "samples/s beside plain Horovod and TorchRec", __doc__, run)
    parser.add_argument(
        "--shapes", nargs="*", choices=shapes.SHAPE_NAMES, metavar="SHAPE",
        help=f"{', '.join(shapes.SHAPE_NAMES)}, or all of them where none is named; rows in --out are kept then",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, nargs="+", help="samples per worker and step; default: "
                        f"{' '.join(map(str, BATCHES))}, or what each shape has")  # fmt: skip
    parser.add_argument("--runs", type=int, default=5, help="launches of each peer at each batch size")
    parser.add_argument("--steps", type=int, help="timed steps per run")
    others = " ".join(name for name in SETTINGS if name not in PEERS)
    names = f"default: {' '.join(PEERS)}; settings that were tried besides: {others}. With --shapes: "
    peers = dict.fromkeys((*SETTINGS, *shapes.PEERS))
    measure.add_chosen(parser, "--peers", peers, "PEER", default=None, help=names + " ".join(shapes.PEERS))
    parser.add_argument("--timeout", type=float, default=180, metavar="SECONDS", help="for one run")
    parser.add_argument("--noise", type=float, default=0.0, metavar="SHARE", help=measure.NOISE)
    parser.add_argument("--profile", action="store_true", help="also profile a run of ours at each batch size")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    if args.shapes is not None:
        args.peers = _of_these(args.peers, shapes.PEERS, shapes.PEERS, "with --shapes")
        if args.profile or len(args.batch or [0]) > 1:
            raise RunFailed("--shapes takes one --batch for all shapes, and no --profile")
        with Noise(args.noise):
            return shapes.run(args)
    args.peers = _of_these(args.peers, SETTINGS, PEERS, "without --shapes")
    args.batch = args.batch or list(BATCHES)
    with Noise(args.noise):
        rows, result = compare(args)
    measure.write_json(args.out, result)
    show(rows, result)
    print(f"written to {args.out}")
    return 0


def _of_these(names: Sequence[str] | None, known: Iterable[str], usual: Iterable[str], when: str) -> list[str]:
    """The names, or the usual ones where none are given. Raises RunFailed for one that is not known."""
    if strange := [name for name in names or () if name not in known]:
        raise RunFailed(f"--peers {strange[0]} {when}: expected {', '.join(known)}")
    return list(names or usual)


def compare(args: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """All runs, and the whole result with them in it. Raises RunFailed at the first run that fails."""
    about = measure.machine()
    peers = {name: variant(name, WORKERS) for name in args.peers}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        for batch in args.batch:
            prepared = Launches(Path(scratch) / str(batch), batch, args.steps, args.timeout)
            rows += measure.interleave(list(peers.values()), args.runs, prepared.run)
            if args.profile:
                print(prepared.profile(variant("ours", WORKERS)))
    return rows, {
        "machine": about,
        "commands": {name: str(peer) for name, peer in peers.items()},
        "settings": {name: SETTINGS[name] for name in peers},
        "noise": args.noise,
        **headline(rows),
        "rows": rows,
    }


class Launches:
    """Runs at one batch size, all on the same prepared batches. Owns the files in `folder`."""

    def __init__(self, folder: Path, batch: int, steps: int | None, timeout_s: float) -> None:
        from ..harness import clicks

        self._folder, self._batch, self._timeout_s = folder, batch, timeout_s
        self._steps = steps or max(STEPS_LEAST, SAMPLES_TIMED // batch)
        clicks.write(folder / "clicks", batch, BATCHES_KEPT, WORKERS)

    def run(self, peer: Variant, number: int) -> Row:
        """One launch, as a row of the result. Raises RunFailed."""
        started, ranks = self._launch(peer)
        row = row_of(ranks, started, self._batch, self._steps)
        print(
            f"batch {self._batch:5d}  run {number + 1}  {peer.name:22s} {row['samples_per_s']:9,.0f} samples/s",
            flush=True,
        )
        return {"peer": peer.name, "batch": self._batch, "run": number, **row}

    def profile(self, ours: Variant) -> str:
        """What rank 0 of a profiled run prints."""
        self._launch(ours, "--profile")
        return (self._folder / "log").read_text(errors="replace")

    def _launch(self, peer: Variant, *more: str) -> tuple[float, list[Row]]:
        results = [self._folder / f"rank{rank}.json" for rank in range(WORKERS)]
        for path in results:
            path.unlink(missing_ok=True)
        arguments = ["--clicks", self._folder / "clicks", "--result", self._folder]
        arguments += ["--warmup", WARMUP_STEPS, "--steps", self._steps, *more]
        log = self._folder / "log"
        started = measure.launch(peer, [str(a) for a in arguments], log=log, timeout_s=self._timeout_s)
        return started, [json.loads(path.read_text()) for path in results]


def headline(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures people ask for, medians over the runs; None where a peer did not run."""
    speed = measure.medians(rows, ("peer", "batch"), "samples_per_s")
    ours = [row for row in rows if row["peer"] == "ours"]

    def ratio(peer: str) -> dict[str, float]:
        return {str(b): speed["ours", b] / v for (name, b), v in speed.items() if name == peer and ("ours", b) in speed}

    def of_ours(column: str) -> float | None:
        return median(row[column] for row in ours) if ours else None

    return {
        "ratio_vs_horovod": ratio("horovod"),
        "ratio_vs_torchrec": ratio("torchrec"),
        "samples_per_s": {f"{peer} {batch}": value for (peer, batch), value in speed.items()},
        "table_copies_per_host": of_ours("table_copies_per_host"),
        "startup_s": of_ours("startup_s"),
        "peak_extra_memory_bytes": max((row["peak_own_bytes"] for row in ours), default=None),
    }


def show(rows: Sequence[Row], result: Row) -> None:
    """Print the medians as a table, and the headline figures."""
    columns = {
        "samples/s": ("samples_per_s", 1, ",.0f"),
        "ms/step": ("ms_per_step", 1, ".1f"),
        "CPU ms/step": ("cpu_ms_per_step", 1, ".1f"),
        "start-up s": ("startup_s", 1, ".1f"),
        "own memory MiB": ("peak_own_bytes", 2**-20, ",.0f"),
    }
    values = {name: measure.medians(rows, ("peer", "batch"), name) for name, _, _ in columns.values()}
    table = [
        (peer, str(batch), *(format(values[name][peer, batch] * unit, how) for name, unit, how in columns.values()))
        for peer, batch in values["samples_per_s"]
    ]
    measure.print_table(f"allreduce, {WORKERS} workers, medians", ("peer", "batch", *columns), table)
    for name in ("ratio_vs_horovod", "ratio_vs_torchrec"):
        if result[name]:
            print(f"{name}: " + ", ".join(f"{ratio:.2f} at {batch}" for batch, ratio in result[name].items()))
    if result["table_copies_per_host"] is not None:
        print(f"table copies per host: {result['table_copies_per_host']:.3f}")


def variant(name: str, workers: int) -> Variant:
    """The launch of one of SETTINGS, short of the arguments that all workers take."""
    if name.startswith("torchrec"):
        return _torchrec(name, workers)
    if name == "ours":
        return measure.horovodrun(name, workers, "bench.allreduce.ours", **measure.AS_RUN)
    if name in ("ours_micro", "ours_sync"):
        flags = ("--parts", "8", *(("--together",) if name == "ours_sync" else ()))
        return measure.horovodrun(name, workers, "bench.allreduce.ours", *flags, **measure.AS_RUN)
    cycle_ms = {"horovod_default_cycle": "1", "horovod_short_cycle": "0.3"}.get(name, "3")
    flags = {"horovod_merged": ("--merged",), "horovod_dense": ("--sparse-as-dense",)}.get(name, ())
    return measure.horovodrun(name, workers, "bench.allreduce.plain_horovod", *flags, HOROVOD_CYCLE_TIME=cycle_ms)


def _torchrec(name: str, workers: int) -> Variant:
    from ..harness import peer_environments

    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}")
    flags = ("--pipeline",) if name == "torchrec_pipeline" else ()
    command = (str(peer_environments.torchrec_python()), *launcher, "-m", f"{__package__}.torchrec", *flags)
    return Variant(name, command, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
