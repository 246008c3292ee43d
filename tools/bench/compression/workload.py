"""What every contestant of `bench compression` trains, and how a worker measures it on one link after the other.

    wide    a tower of 10 million parameters over the click log of `small_ctr`: dense gradients are what travels
    dlrm    the model of `bench allreduce`: rows are what travels
    small   a tower of 0.2 million parameters, trained to the end: how good it becomes

A worker that has come to a phase says so with a file; the benchmark then sets the links and answers with a file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..harness import small_ctr

HIDDEN = {"wide": (3136, 3136), "small": (512, 256)}
BATCH = {"wide": 64, "dlrm": 1024, "small": 256}  # of one worker
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Phase:
    """Steps on one link. warmup: not measured."""

    link: str
    warmup: int
    steps: int


def parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where workers and benchmark meet")
    parser.add_argument("--phases", type=phases_of, default=[], help="LINK:WARMUP:STEPS,...")
    parser.add_argument("--epochs", type=int, default=0, help="instead of phases: train so long, then evaluate")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def phases_of(text: str) -> list[Phase]:
    """ "100mbit:3:10,unlimited:3:20" """
    parts = [part.split(":") for part in text.split(",") if part]
    return [Phase(link, int(warmup), int(steps)) for link, warmup, steps in parts]


def n_steps(phases: list[Phase]) -> int:
    return sum(phase.warmup + phase.steps for phase in phases)


def measure(
    args: argparse.Namespace,
    rank: int,
    step: Callable[[], object],
    barrier: Callable[[], object],
    counted: Callable[[], Mapping[str, int]] = dict,
) -> None:
    """Run all phases; rank 0 writes what it measured to result.json in the folder.

    counted: bytes so far by kind, by the contestant's own account
    """
    rows = []
    for number, phase in enumerate(args.phases):
        barrier()
        if rank == 0:
            (args.folder / f"ready-{number}").touch()
        wait_for(args.folder / f"go-{number}")
        for _ in range(phase.warmup):
            step()
        barrier()
        before, own, began_s = interface_bytes(), dict(counted()), time.perf_counter()
        for _ in range(phase.steps):
            step()
        barrier()
        seconds = time.perf_counter() - began_s
        own = {kind: (n - own.get(kind, 0)) / phase.steps for kind, n in counted().items()}
        wire = (interface_bytes() - before) / phase.steps
        rows.append({"link": phase.link, "s_per_step": seconds / phase.steps, "wire_bytes": wire, "own_bytes": own})
    if rank == 0:
        write(args, {"phases": rows})


def write(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    fresh = args.folder / "result.new"
    fresh.write_text(json.dumps(result))
    fresh.rename(args.folder / "result.json")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the benchmark did not set the links within {PATIENCE_S:.0f} s: no {path}")
        time.sleep(0.02)


def interface_bytes(text: str | None = None) -> int:
    """Sent and received so far by all interfaces of this host but the loopback."""
    lines = (Path("/proc/net/dev").read_text() if text is None else text).splitlines()[2:]
    fields = {name.strip(): numbers.split() for name, numbers in (line.split(":", 1) for line in lines)}
    return sum(int(n[0]) + int(n[8]) for name, n in fields.items() if name != "lo")


def batches(samples: small_ctr.Samples, args: argparse.Namespace, rank: int, size: int) -> Iterator[Any]:
    """For contestants without an order of their own: (ids [8, B], dense, label) of each step, for ever, shuffled."""
    batch, epoch = BATCH[args.model], 0
    while True:
        order = np.random.default_rng([args.seed, epoch]).permutation(len(samples))
        for at in range(0, len(order) - size * batch + 1, size * batch):
            yield samples.tensors(order[at + rank * batch : at + (rank + 1) * batch])
        epoch += 1
