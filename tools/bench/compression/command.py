"""`gba-hvd bench compression`: bytes, time and quality of compressed gradients, ours and others', between two hosts.

The hosts are namespaces of this machine (`lab`), their links limited by `tc`; needs root. Speed: every contestant
trains a model on every link, in a job of its own, since ours decides at its beginning whether compressing pays; what
is counted is what its host's interface carried. Launches of the contestants alternate. Quality: a smaller model is
trained to the end with every compressor forced, and evaluated on held-out samples.

Rows in the result file are kept and their launches not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from ... import signals
from ...virtual_hosts import VirtualHosts, VirtualHostsError
from ..harness import measure, resumable
from ..harness.measure import Row, RunFailed, Subparsers
from ..harness.two_hosts import DESK, HOSTS

LINKS = ("100mbit", "1gbit", "unlimited")
STEPS = {"100mbit": 8, "1gbit": 40, "unlimited": 60}
WARMUP, WARMUP_COMPRESSED = 3, 32  # ours tries both ways on the first twelve steps; then thresholds settle
OURS = {  # (dense, rows), see `compressors`
    "none": ("none", "none"),
    "fp16": ("fp16", "none"),
    "int8": ("int8", "none"),
    "topk": ("topk", "none"),
    "dct_dp": ("dct", "none"),
    "dct_mp": ("none", "dct_mp"),
    "ternary_ef": ("none", "ternary_ef"),
    "both": ("dct", "ternary_ef"),
}
PEERS = {
    "horovod": "plain Horovod; of the DLRM 26 sparse tables (allgather), else one table, its gradient dense",
    "horovod_fp16": "the same with hvd.Compression.fp16, which leaves sparse gradients as they are",
    "ddp": "DistributedDataParallel over Gloo, sparse tables likewise",
    "powersgd": "the same with PowerSGD, rank 2; not the DLRM: each of its sparse tables is a bucket of its own, and "
    "with several buckets the hook stands still over Gloo at the first step that it compresses",
}
UNCOMPRESSED = ("none", "horovod", "ddp")
MODELS = ("wide", "dlrm")
SMALL = "small"  # the model of the quality runs
KEY = ("model", "link", "contestant", "run")
LEFT_OUT = (("dlrm", "powersgd"),)  # why: PEERS
COSTS_AT_MOST = 1.02  # of the time without compression, where compressing does not pay
TIMEOUT_S = 600.0
N_SAMPLES, EPOCHS = 300_000, 1  # of the quality runs


def add_parser(subparsers: Subparsers) -> None:
    does = "bytes, time and AUC of compressed gradients"
    parser = measure.add_benchmark(subparsers, "compression", does, __doc__, run, help="rows in it are kept")
    measure.add_chosen(parser, "--contestants", (*OURS, *PEERS), "NAME")
    measure.add_chosen(parser, "--models", MODELS, "MODEL", nargs="*")
    measure.add_chosen(parser, "--links", LINKS, "LINK")
    parser.add_argument("--runs", type=int, default=1, help="launches of each contestant for speed; medians count")
    parser.add_argument("--seeds", type=int, default=1, help="quality runs of each contestant; 0 for none")
    parser.add_argument("--always", action="store_true", help="no bypass in the runs for speed, either")


@dataclass(frozen=True)
class Run:
    """One launch: for speed on a link, or, of the model `small` and on no link, for quality; its number is the seed."""

    model: str
    link: str | None
    contestant: str
    run: int

    def __str__(self) -> str:
        on = f", {self.link}, run {self.run + 1}" if self.link else f", seed {self.run}"
        return f"{self.model}, {self.contestant}{on}"


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    measure.require_at_least(args, runs=1, seeds=0)
    planned = planned_runs(args.models, args.links, args.contestants, args.runs, args.seeds)
    of_all = {**settings(), "always": args.always}
    results = resumable.Results(args.out, KEY, of_all, lambda rows: headline(*speed_and_quality(rows)))
    waiting = results.waiting(planned)
    try:
        with ExitStack() as stack:
            if waiting:
                scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gba-hvd-bench-")))
                lab = stack.enter_context(VirtualHosts(scratch / "lab", (DESK, *HOSTS)))
                launches = Launches(scratch, lab, args.always)
                results.run_each(waiting, lambda one: results.rows.append(launches.row_of(one)))
    except VirtualHostsError as error:
        raise RunFailed(str(error)) from error
    speed, quality = speed_and_quality(results.rows)
    show(speed, headline(speed, quality))
    return results.end()


def planned_runs(
    models: Sequence[str], links: Sequence[str], contestants: Sequence[str], runs: int, seeds: int
) -> list[Run]:
    """The launches for speed, then those for quality; contestants alternate."""
    speed = [
        Run(model, link, name, number)
        for number in range(runs)
        for model in models
        for link in links
        for name in contestants
        if (model, name) not in LEFT_OUT
    ]
    return speed + [Run(SMALL, None, name, seed) for seed in range(seeds) for name in contestants]


def speed_and_quality(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """The rows of each kind."""
    found: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        found[row["model"] == SMALL].append(row)
    return found


def settings() -> dict[str, Any]:
    """What a reader needs to know of the contestants."""
    from .compressors import COMPRESSION  # here, because it imports torch

    ours = {
        name: {"dense": str(COMPRESSION[dense]), "rows": str(COMPRESSION[rows])} for name, (dense, rows) in OURS.items()
    }
    return {"hosts": len(HOSTS), "ours": ours, "peers": PEERS, "steps": STEPS, "samples": N_SAMPLES}


@dataclass
class Launches:
    """Runs on prepared samples, between the hosts of a lab. Owns the files in `folder`.

    always: compress also where it does not pay
    """

    folder: Path
    lab: VirtualHosts
    always: bool = False

    def __post_init__(self) -> None:
        from ..allreduce import batches  # here, because they import torch
        from ..allreduce.shape import SHAPES
        from ..harness import small_ctr
        from . import workload

        small_ctr.write(self.folder / "small", N_SAMPLES)
        batches.write(self.folder / "dlrm", SHAPES["dlrm"], workload.BATCH["dlrm"], 8, len(HOSTS))
        self._number = 0

    def row_of(self, one: Run) -> Row:
        """One launch, as a row of the result. Raises RunFailed."""
        found = self._speed(one.model, one.link, one.contestant) if one.link else self._quality(one.contestant, one.run)
        if one.link:
            text = f"{1000 * found['s_per_step']:.1f} ms a step, {found['wire_bytes'] / 1e6:.3f} MB"
        else:
            text = f"AUC {found['auc']:.5f}"
        print(f"{one}: {text}", flush=True)
        return {**found, **asdict(one)}

    def _speed(self, model: str, link: str, name: str) -> Row:
        warmup = WARMUP if name in UNCOMPRESSED else WARMUP_COMPRESSED
        flags = ["--model", model, "--phases", f"{link}:{warmup}:{STEPS[link]}"]
        flags += ["--always"] if self.always and name in OURS else []
        (phase,) = self._launch(name, flags, [link])["phases"]
        return dict(phase)

    def _quality(self, name: str, seed: int) -> Row:
        flags = ["--model", SMALL, "--epochs", str(EPOCHS), "--seed", str(seed)]
        return dict(self._launch(name, [*flags, *(["--always"] if name in OURS else [])], ()))

    def _launch(self, name: str, flags: Sequence[str], links: Iterable[str]) -> Any:
        self._number += 1
        folder = self.folder / f"run-{self._number}"
        folder.mkdir()
        data = self.folder / ("dlrm" if "dlrm" in flags else "small")
        arguments = [*flags, "--data", str(data), "--folder", str(folder)]
        self.lab.limit(None)
        processes = self._start(name, arguments, folder)
        deadline = time.monotonic() + TIMEOUT_S
        try:
            for number, link in enumerate(links):
                self._await(folder / f"ready-{number}", processes, folder, deadline)
                self.lab.limit(None if link == "unlimited" else link)
                (folder / f"go-{number}").touch()
            self._await(folder / "result.json", processes, folder, deadline)
            self.lab.limit(None)
            for process in processes:
                process.wait(60)
        except subprocess.TimeoutExpired:
            pass  # it has its result
        finally:
            for process in processes:
                signals.stop(process)
            for host in HOSTS:
                for pid in self.lab.processes(host):
                    os.kill(pid, 9)
        return json.loads((folder / "result.json").read_text())

    def _start(self, name: str, arguments: list[str], folder: Path) -> list[subprocess.Popen[bytes]]:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HOROVOD_CYCLE_TIME": "3",
            "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONWARNINGS": "ignore",
        }
        hosts = ",".join(f"{host}:1" for host in HOSTS)
        horovodrun = [measure.console_script("horovodrun"), "-np", str(len(HOSTS)), "-H", hosts]
        horovodrun += ["--network-interface", "eth0", sys.executable, "-m"]
        with (folder / "log").open("wb") as log:
            settings: dict[str, Any] = {"stdout": log, "stderr": log, "start_new_session": True}
            if name in OURS:
                dense, rows = OURS[name]
                more = ["--compression", dense, "--row-compression", rows]
                command = [*horovodrun, f"{__package__}.ours", *arguments, *more]
                return [self.lab.popen(DESK, command, env=env, **settings)]
            module, arguments = f"{__package__}.peers", [*arguments, "--peer", name]
            if name.startswith("horovod"):
                return [self.lab.popen(DESK, [*horovodrun, module, *arguments], env=env, **settings)]
            world = {"MASTER_ADDR": self.lab.address(HOSTS[0]), "MASTER_PORT": "29511", "WORLD_SIZE": str(len(HOSTS))}
            return [
                self.lab.popen(
                    host, [sys.executable, "-m", module, *arguments], env=env | world | {"RANK": str(rank)}, **settings
                )
                for rank, host in enumerate(HOSTS)
            ]

    def _await(self, path: Path, processes: Sequence[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
        while not path.exists():
            ended = [p.poll() for p in processes]
            has_ended = any(status is not None for status in ended) and not path.exists()
            if has_ended or time.monotonic() > deadline:
                lines = measure.gist((folder / "log").read_text(errors="replace"))
                why = f"ended with status {ended} before" if has_ended else f"{TIMEOUT_S:.0f} s without"
                raise RunFailed(f"{why} {path.name}\n{lines}")
            time.sleep(0.05)


def headline(speed: Sequence[Row], quality: Sequence[Row]) -> dict[str, Any]:
    """The figures people ask for, of the medians over the runs; without those whose contestants did not run.

    bytes_ratio_dp: dense bytes of a step of `wide`, none over dct_dp; bytes_ratio_mp, bytes_ratio_ternary_ef: of rows,
    gradients and keys, of `dlrm`, none over dct_mp and ternary_ef: by our own count. bytes_ratio_wire: all that the
    interface carried.
    over_none: ours that take more than COSTS_AT_MOST of the time without compression; empty: the target is met; None:
    none of ours ran beside `none`.
    """
    of = ("model", "contestant", "link")
    seconds, bytes_ = measure.medians(speed, of, "s_per_step"), measure.medians(speed, of, "wire_bytes")

    def own(model: str, name: str, kinds: Sequence[str]) -> float | None:
        """On the link where it is least: elsewhere it may have been bypassed."""
        counted = [
            {"link": row["link"], "bytes": sum(row["own_bytes"].get(kind, 0) for kind in kinds)}
            for row in speed
            if (row["model"], row["contestant"]) == (model, name)
        ]
        return min(measure.medians(counted, ["link"], "bytes").values(), default=None)

    def ratio(model: str, name: str, kinds: Sequence[str]) -> float | None:
        with_, without = own(model, name, kinds), own(model, "none", kinds)
        return None if not with_ or not without else without / with_

    dense, rows = ("sent_dense", "received_dense"), ("sent_rows", "received_rows", "sent_header", "received_header")
    times: dict[str, dict[str, dict[str, float]]] = {}
    wire: dict[str, dict[str, dict[str, float]]] = {}
    best: dict[str, dict[str, float]] = {}
    for model, name, link in seconds:
        none = (model, "none", link)
        if none in seconds:
            found = (model, name, link)
            times.setdefault(model, {}).setdefault(link, {})[name] = seconds[found] / seconds[none]
            wire.setdefault(model, {}).setdefault(link, {})[name] = bytes_[none] / bytes_[found]
    for model in times:
        for link in times[model]:
            uncompressed = [times[model][link][name] for name in UNCOMPRESSED if name in times[model][link]]
            ours = [t for name, t in times[model][link].items() if name in OURS and name != "none"]
            if ours and uncompressed:
                best.setdefault(model, {})[link] = 1 - min(ours) / min(uncompressed)
    aucs: dict[str, list[float]] = {}
    for row in quality:
        aucs.setdefault(row["contestant"], []).append(row["auc"])
    none_auc = mean(aucs["none"]) if "none" in aucs else None
    return {
        "bytes_ratio_dp": ratio("wide", "dct_dp", dense),
        "bytes_ratio_mp": ratio("dlrm", "dct_mp", rows),
        "bytes_ratio_ternary_ef": ratio("dlrm", "ternary_ef", rows),
        "bytes_ratio_wire": wire,
        "auc": {name: mean(values) for name, values in aucs.items()},
        "auc_delta": {} if none_auc is None else {name: mean(values) - none_auc for name, values in aucs.items()},
        "time_vs_none": times,
        "time_saved_vs_best_uncompressed": best,
        "over_none": over_none(times) if best else None,
    }


def over_none(times: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """model -> link -> contestant of ours -> time against none, where that is above the target."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for model, links in times.items():
        for link, by_name in links.items():
            for name, ratio in by_name.items():
                if name in OURS and name != "none" and ratio > COSTS_AT_MOST:
                    found.setdefault(model, {}).setdefault(link, {})[name] = ratio
    return found


def show(speed: Sequence[Row], result: Mapping[str, Any]) -> None:
    """Print a table for each model and link, and the ratios."""
    of = ("model", "link", "contestant")
    seconds, bytes_ = measure.medians(speed, of, "s_per_step"), measure.medians(speed, of, "wire_bytes")
    for model, link in dict.fromkeys((model, link) for model, link, _ in seconds):
        table = [
            (name, f"{1000 * s:.1f}", f"{bytes_[m, on, name] / 1e6:.3f}")
            for (m, on, name), s in seconds.items()
            if (m, on) == (model, link)
        ]
        measure.print_table(f"{model}, {link}, {len(HOSTS)} hosts", ("contestant", "ms/step", "MB/step"), table)
    for name in (
        "bytes_ratio_dp",
        "bytes_ratio_mp",
        "bytes_ratio_ternary_ef",
        "auc_delta",
        "time_saved_vs_best_uncompressed",
    ):
        print(f"{name}: {json.dumps(result[name])}")
    if result["over_none"] is not None:
        met = "" if result["over_none"] else ", none: the target is met"
        print(f"over_none (more than {COSTS_AT_MOST} of the time{met}): {json.dumps(result['over_none'])}")
