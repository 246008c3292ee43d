"""`gba-hvd bench reader`: what a slow dataset costs, with reading ahead and without.

One worker trains on micro-batches that take `--step-ms` to compute, emulated by a pause as of an accelerator, from a
dataset that waits `--read` of that time for each micro-batch, as for a disk or an object store. Measured after the
first steps: the time of a micro-batch, against that with a dataset that waits for nothing (`fast`). `plain` reads in
the training loop, `thread` has prefetch=2, `processes` num_workers=2; gba reads beside the micro-batch before, always.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from .harness import measure
from .harness.measure import Subparsers

WARM = 10  # micro-batches that are not measured: modes and processes start meanwhile
READING: dict[str, dict[str, int]] = {
    "fast": {}, "fast_thread": {"prefetch": 2}, "plain": {}, "thread": {"prefetch": 2}, "processes": {"num_workers": 2},
}  # fmt: skip


def add_parser(subparsers: Subparsers) -> None:
    does = "what a slow dataset costs, with reading ahead and without"
    parser = measure.add_benchmark(subparsers, "reader", does, __doc__, run)
    parser.add_argument("--modes", nargs="+", default=["allreduce", "gba"], choices=["allreduce", "gba"])
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--read", type=float, default=0.8, help="of --step-ms; default 0.8")
    parser.add_argument("--micro-batches", type=int, default=60, help="that are measured, in each run")
    parser.add_argument("--rounds", type=int, default=3)


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    seconds: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in READING} for mode in args.modes}
    for _ in range(args.rounds):
        for mode in args.modes:
            for name, how in READING.items():
                read_s = 0.0 if name.startswith("fast") else args.step_ms / 1000 * args.read
                one = seconds_of_micro_batch(mode, how, args.step_ms / 1000, read_s, args.micro_batches)
                seconds[mode][name].append(one)
    load = os.getloadavg()[1]
    ratios = {
        mode: {name: median(all_) / median(of["fast"]) for name, all_ in of.items()} for mode, of in seconds.items()
    }
    settings = {"step_ms": args.step_ms, "read": args.read, "micro_batches": args.micro_batches}
    about = {"about": measure.machine(), "load of the last 5 minutes": load, **settings}
    args.out.write_text(json.dumps({**about, "ratios": ratios, "seconds": seconds}, indent=1))
    rows = [[mode, *(f"{ratio:.2f}x" for ratio in of.values())] for mode, of in ratios.items()]
    title = f"time of a micro-batch, against fast; load of this machine {load:.1f}, {os.cpu_count()} cores"
    measure.print_table(title, ["mode", *READING], rows)
    return 0


def seconds_of_micro_batch(mode: str, how: dict[str, int], step_s: float, read_s: float, n: int) -> float:
    """The mean over `n` micro-batches of one job of one worker."""
    import torch

    import gba_hvd

    with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        tables = gba_hvd.EmbeddingTables({"item": (1000, 8)}, gba_hvd.RowAdagrad(lr=0.05), shard_dir=scratch)
        model = torch.nn.Linear(8, 1)
        optimizer: Any = gba_hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), tables, global_batch=64, micro_batch=32
        )
        state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
        if mode == "gba":
            state.register_callbacks([gba_hvd.GBACallback(mode="gba", wait_s=120)])
        times: list[float] = []
        try:
            for batch in gba_hvd.batches(SlowItems(32 * (n + WARM), read_s), state, **how):  # type: ignore[arg-type]
                times.append(time.perf_counter())
                optimizer.zero_grad()
                loss = model(tables(batch.ids)["item"]).mean()
                time.sleep(step_s)
                loss.backward()
                optimizer.step(loss=loss)
        finally:
            state.close()
        while list(Path(scratch).glob("gba-hvd-*")):  # the reaper removes it
            time.sleep(0.05)
    measured = times[WARM:]
    return (measured[-1] - measured[0]) / (len(measured) - 1)


class SlowItems:
    """n samples, of which each micro-batch is waited for."""

    def __init__(self, n: int, read_s: float) -> None:
        self._n, self._read_s = n, read_s

    def __len__(self) -> int:
        return self._n

    def take(self, rows: Any) -> Any:
        import torch

        import gba_hvd

        time.sleep(self._read_s)
        numbers = torch.from_numpy(rows)
        return gba_hvd.Batch({"item": numbers % 1000}, torch.empty(len(rows), 0), (numbers % 2).float())
