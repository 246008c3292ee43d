"""`gba-hvd bench compression`: bytes, time and quality of compressed gradients, ours and others', between two hosts.

The hosts are namespaces of this machine (`lab`), their links limited by `tc`; needs root. Speed: every contestant
trains a model on one link after the other; what is counted is what its host's interface carried. Quality: a smaller
model is trained to the end with every compressor forced, and judged on held-out samples.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from ..lab import Lab, LabError
from . import measure
from .measure import Row

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESK, HOSTS = "desk", ("h1", "h2")
LINKS = ("100mbit", "1gbit", "unlimited")
STEPS = {"100mbit": 8, "1gbit": 15, "unlimited": 20}
WARMUP, WARMUP_COMPRESSED = 3, 12  # ours tries both ways on the first nine steps of a link
OURS = {  # (dense, rows)
    "none": ("none", "none"),
    "fp16": ("fp16", "none"),
    "int8": ("int8", "none"),
    "topk": ("topk", "none"),
    "dct_dp": ("dct", "none"),
    "dct_mp": ("none", "dct_rows"),
    "dct_both": ("dct", "dct_rows"),
}
PEERS = {
    "horovod": "plain Horovod, one table, its gradient dense",
    "horovod_fp16": "the same with hvd.Compression.fp16",
    "ddp": "DistributedDataParallel over Gloo",
    "powersgd": "the same with PowerSGD, rank 2",
}
UNCOMPRESSED = ("none", "horovod", "ddp")
MODELS = ("wide", "dlrm")
TIMEOUT_S = 600.0
N_SAMPLES, EPOCHS = 300_000, 1  # of the quality runs


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "compression", help="bytes, time and AUC of compressed gradients", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    names = (*OURS, *PEERS)
    parser.add_argument("--contestants", nargs="+", default=list(names), choices=names, metavar="NAME")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=LINKS, metavar="LINK")
    parser.add_argument("--seeds", type=int, default=1, help="quality runs of each contestant; 0 for none")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    speed: list[Row] = []
    quality: list[Row] = []
    failed: Exception | None = None
    try:
        measure.check_writable(args.out)
        about = measure.machine()
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gba-hvd-bench-")))
            lab = stack.enter_context(Lab(scratch / "lab", (DESK, *HOSTS)))
            launches = Launches(scratch, lab, args.links)
            runs = [
                partial(launches.speed, speed, model, name)
                for model in args.models
                for name in args.contestants
                if model != "dlrm" or name in OURS
            ]
            runs += [
                partial(launches.quality, quality, name, seed)
                for seed in range(args.seeds)
                for name in args.contestants
            ]
            for one in runs:
                try:
                    one()
                except measure.RunFailed as error:  # one contestant's trouble is not the others'
                    failed = error
                    print(f"gba-hvd: {error}", file=sys.stderr)
    except (measure.RunFailed, LabError) as error:
        failed = error
        print(f"gba-hvd: {error}", file=sys.stderr)
    if speed or quality:
        result = headline(speed, quality)
        settings = {"hosts": len(HOSTS), "ours": OURS, "peers": PEERS, "steps": STEPS, "samples": N_SAMPLES}
        measure.write_json(
            args.out, {"machine": about, "settings": settings, **result, "rows": speed, "quality": quality}
        )
        show(speed, result)
        print(f"written to {args.out}")
    return 1 if failed else 0


@dataclass
class Launches:
    """Runs on prepared samples, between the hosts of a lab. Owns the files in `folder`."""

    folder: Path
    lab: Lab
    links: Sequence[str]

    def __post_init__(self) -> None:
        from . import clicks, compressed_model, small_ctr  # here, because they import torch

        small_ctr.write(self.folder / "small", N_SAMPLES)
        clicks.write(self.folder / "clicks", compressed_model.BATCH["dlrm"], 8, len(HOSTS))
        self._number = 0

    def speed(self, rows: list[Row], model: str, name: str) -> None:
        """One launch over all links, added to the rows. Raises RunFailed."""
        warmup = WARMUP if name in UNCOMPRESSED else WARMUP_COMPRESSED
        phases = ",".join(f"{link}:{warmup}:{STEPS[link]}" for link in self.links)
        result = self._launch(name, ["--model", model, "--phases", phases], self.links)
        for row in [{"model": model, "contestant": name, **phase} for phase in result["phases"]]:
            rows.append(row)
            print(
                f"{model:5s} {name:13s} {row['link']:10s} {1000 * row['s_per_step']:9.1f} ms a step  "
                f"{row['wire_bytes'] / 1e6:8.3f} MB",
                flush=True,
            )

    def quality(self, rows: list[Row], name: str, seed: int) -> None:
        """One launch to the end, added to the rows. Raises RunFailed."""
        flags = ["--model", "small", "--epochs", str(EPOCHS), "--seed", str(seed)]
        result = self._launch(name, [*flags, *(["--always"] if name in OURS else [])], ())
        print(f"small {name:13s} seed {seed}     AUC {result['auc']:.5f}", flush=True)
        rows.append({"contestant": name, "seed": seed, **result})

    def _launch(self, name: str, flags: Sequence[str], links: Iterable[str]) -> Any:
        self._number += 1
        folder = self.folder / f"run-{self._number}"
        folder.mkdir()
        data = self.folder / ("clicks" if "dlrm" in flags else "small")
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
                measure.stop(process)
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
                command = [*horovodrun, f"{__package__}.ours_compression", *arguments, *more]
                return [self.lab.popen(DESK, command, env=env, **settings)]
            module, arguments = f"{__package__}.peer_compression", [*arguments, "--peer", name]
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
            if any(status is not None for status in ended) and not path.exists():
                said = measure.gist((folder / "log").read_text(errors="replace"))
                raise measure.RunFailed(f"ended with status {ended} before {path.name}\n{said}")
            if time.monotonic() > deadline:
                said = measure.gist((folder / "log").read_text(errors="replace"))
                raise measure.RunFailed(f"no {path.name} after {TIMEOUT_S:.0f} s\n{said}")
            time.sleep(0.05)


def headline(speed: Sequence[Row], quality: Sequence[Row]) -> dict[str, Any]:
    """The figures people ask for; without those whose contestants did not run.

    bytes_ratio_dp: dense bytes of a step of `wide`, none over dct_dp; bytes_ratio_mp: of rows, gradients and keys, of
    `dlrm`, none over dct_mp: both by our own count. bytes_ratio_wire: all that the interface carried.
    """
    of = {(row["model"], row["contestant"], row["link"]): row for row in speed}

    def own(model: str, name: str, kinds: Sequence[str]) -> float | None:
        found = [row["own_bytes"] for (m, c, _), row in of.items() if (m, c) == (model, name)]
        return min((sum(b.get(k, 0) for k in kinds) for b in found), default=None)

    def ratio(model: str, name: str, kinds: Sequence[str]) -> float | None:
        with_, without = own(model, name, kinds), own(model, "none", kinds)
        return None if not with_ or not without else without / with_

    dense, rows = ("sent_dense", "received_dense"), ("sent_rows", "received_rows", "sent_header", "received_header")
    times: dict[str, dict[str, dict[str, float]]] = {}
    wire: dict[str, dict[str, dict[str, float]]] = {}
    best: dict[str, dict[str, float]] = {}
    for (model, name, link), row in of.items():
        none = of.get((model, "none", link))
        if none is not None:
            times.setdefault(model, {}).setdefault(link, {})[name] = row["s_per_step"] / none["s_per_step"]
            wire.setdefault(model, {}).setdefault(link, {})[name] = none["wire_bytes"] / row["wire_bytes"]
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
        "bytes_ratio_wire": wire,
        "auc": {name: mean(values) for name, values in aucs.items()},
        "auc_delta": {} if none_auc is None else {name: mean(values) - none_auc for name, values in aucs.items()},
        "time_vs_none": times,
        "time_saved_vs_best_uncompressed": best,
    }


def show(speed: Sequence[Row], result: Mapping[str, Any]) -> None:
    """Print a table for each model and link, and the ratios."""
    for model in dict.fromkeys(row["model"] for row in speed):
        for link in dict.fromkeys(row["link"] for row in speed):
            table = [
                (row["contestant"], f"{1000 * row['s_per_step']:.1f}", f"{row['wire_bytes'] / 1e6:.3f}")
                for row in speed
                if (row["model"], row["link"]) == (model, link)
            ]
            measure.print_table(f"{model}, {link}, {len(HOSTS)} hosts", ("contestant", "ms/step", "MB/step"), table)
    for name in ("bytes_ratio_dp", "bytes_ratio_mp", "auc_delta", "time_saved_vs_best_uncompressed"):
        print(f"{name}: {json.dumps(result[name])}")
