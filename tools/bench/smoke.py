"""`gba-hvd bench smoke`: short forms of the ratios that matter, against those of docs/bench.json.

A ratio is worse when it is below its committed value by more than the noise that stands with it, a share of the value.
Then there is a line for it, and the status is 1. Peers that are not installed are left out, and named. What is
compared are ratios to peers that run in alternation on the same machine, since speeds vary with the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .allreduce import command as allreduce
from .harness import measure, peer_environments
from .harness.measure import Subparsers
from .ps import command as ps
from .serving import command as serving
from .stragglers import command as stragglers

_COMMITTED = Path(__file__).resolve().parents[2] / "docs" / "bench.json"
_BATCH, _ROWS = 2048, 8192


@dataclass(frozen=True)
class Short:
    """One benchmark in short. ratios: of its result, by name; noise: the share of a value that is no change"""

    benchmark: Any
    arguments: Sequence[str]
    ratios: Callable[[Mapping[str, Any]], dict[str, float]]
    noise: float

    def run(self, out: Path) -> dict[str, float]:
        """Raises RunFailed."""
        parser = argparse.ArgumentParser()
        self.benchmark.add_parser(parser.add_subparsers())
        name = self.benchmark.__doc__.split("`")[1].split()[-1]
        if self.benchmark.run(parser.parse_args([name, "--out", str(out), *self.arguments])):
            raise measure.RunFailed(f"bench {name} failed, so nothing is compared")
        return self.ratios(json.loads(out.read_text()))


def shorts() -> list[Short]:
    """What is run here; TorchRec only where it is installed."""
    torchrec = ["torchrec"] if peer_environments.torchrec_environment() else []
    return [
        Short(
            allreduce,
            ["--peers", "ours", "horovod", *torchrec, "--batch", str(_BATCH), "--runs", "2", "--steps", "20"],
            _of_allreduce,
            0.15,
        ),
        Short(
            stragglers,
            ["--modes", "gba", "allreduce", "--scenarios", "straggler_5x", "--seconds", "4"],
            lambda found: {"gba / allreduce, straggler_5x": _speed(found, "gba") / _speed(found, "allreduce")},
            0.1,
        ),
        Short(
            ps,
            ["--contestants", "ours", "rpc", "--rows", str(_ROWS), "--seconds", "0.5", "--runs", "2"],
            lambda found: {"ours / torch RPC, pull and push": _rate(found, "ours") / _rate(found, "rpc")},
            0.2,
        ),
        Short(
            serving,
            ["--models", "dlrm", "--systems", "ours", "torch", "--rows", "1000000", "--samples", "1024",
             "--seconds", "0.5", "--runs", "3"],
            lambda found: {"ours / torch, serving 1,024 samples": _served(found, "ours") / _served(found, "torch")},
            0.15,
        ),
    ]  # fmt: skip


def add_parser(subparsers: Subparsers) -> None:
    does = "is a ratio worse than the committed one? (under 5 minutes)"
    out = {"required": False, "help": "the ratios of this run"}
    parser = measure.add_benchmark(subparsers, "smoke", does, __doc__, run, **out)
    parser.add_argument("--committed", type=Path, default=None, metavar="FILE.json", help="instead of docs/bench.json")
    parser.add_argument("--write", action="store_true", help="write the committed file; its noise stays")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    path = _COMMITTED if args.committed is None else args.committed
    before = _read(path) if path.exists() or not args.write else {}
    about = measure.machine()
    load, cores = about["load_average_before"], os.cpu_count() or 1
    if load > cores / 2:
        print(f"the machine is busy (load {load:.1f} on {cores} cores): ratios may differ by more than their noise")
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        for number, short in enumerate(shorts()):
            for name, value in short.run(Path(scratch) / f"{number}.json").items():
                found[name] = {"value": value, "noise": before.get(name, {}).get("noise", short.noise)}
    about["load_average_after"] = os.getloadavg()[0]
    for name, one in found.items():
        print(f"{name}: {one['value']:.2f}" + (f", committed {before[name]['value']:.2f}" if name in before else ""))
    if args.out is not None:
        measure.write_json(args.out, {"machine": about, "ratios": found})
    if args.write:
        measure.write_whole(path, {"machine": about, "ratios": {**before, **found}})
        print(f"written to {path}")
        return 0
    for name in before.keys() - found.keys():
        print(f"{name}: not compared, the peer is not installed")
    lines = worse(before, found)
    for line in lines:
        print(line)
    return 1 if lines else 0


def worse(before: Mapping[str, Mapping[str, float]], found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each ratio that is below the committed one by more than its noise."""
    return [
        f"worse: {name} is {found[name]['value']:.2f}; committed {one['value']:.2f}, noise {one['noise']:.0%}"
        for name, one in before.items()
        if name in found and found[name]["value"] < one["value"] * (1 - one["noise"])
    ]


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        found = json.loads(path.read_text())["ratios"]
        return {name: {"value": float(one["value"]), "noise": float(one["noise"])} for name, one in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise measure.RunFailed(
            f"{path}: expected ratios with `value` and `noise`, as `gba-hvd bench smoke --write` writes them: {error!r}"
        ) from error


def _of_allreduce(found: Mapping[str, Any]) -> dict[str, float]:
    names = {"horovod": "plain Horovod", "torchrec": "TorchRec"}
    ratios = found["summary"]["dlrm"][str(_BATCH)]["ratios"]
    return {f"ours / {names[peer]}, allreduce": ratio for peer, ratio in ratios.items()}


def _speed(found: Mapping[str, Any], mode: str) -> float:
    return float(found["scenarios"]["straggler_5x"][mode]["samples_per_s"])


def _rate(found: Mapping[str, Any], contestant: str) -> float:
    """Rows/s of a pull and a push one after the other, with one server."""
    return 1 / sum(1 / float(found["rows_per_s"][f"{contestant} 1 {_ROWS} {what}"]) for what in ("pull", "push"))


def _served(found: Mapping[str, Any], system: str) -> float:
    return float(found["summary"]["models"]["dlrm"][system]["sizes"]["1024"]["samples_per_s"])
