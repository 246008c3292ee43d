"""`gba-hvd bench server-start`: how long a companion server takes to start, and when training can use it.

Each run makes a small job's folder and starts a server as a worker does, on a real memory. Measured from the start of
the process: until it answers (a checkpoint could be asked for), and until it has imported what a mode needs (a switch
could be agreed on); in seconds, and in seconds of CPU time of the server, which a busy machine changes less. Beside it,
what `import torch` alone takes on this machine, which bounds both from below.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from .harness import measure
from .harness.measure import Subparsers

if TYPE_CHECKING:
    from gba_hvd.ps.worker.host_server import HostServer

TIMEOUT_S, _LOOK_S = 120.0, 0.01


def add_parser(subparsers: Subparsers) -> None:
    does = "seconds a companion server takes to start"
    parser = measure.add_benchmark(subparsers, "server-start", does, __doc__, run)
    parser.add_argument("--runs", type=int, default=5)


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    rows = [one_start() for _ in range(args.runs)]
    result = {name: round(median(row[name] for row in rows), 2) for name in rows[0]}
    args.out.write_text(json.dumps({"about": measure.machine(), "median": result, "runs": rows}, indent=1))
    for name, seconds in result.items():
        print(f"{name.removesuffix('_s').replace('_', ' '):24} {seconds:6.2f} s")
    return 0


def one_start() -> dict[str, float]:
    """Times of one server: `answers_s`, `can_enter_s`; and `import_torch_s` of another process, before it."""
    import psutil

    import gba_hvd
    from gba_hvd.ps import launch, transport
    from gba_hvd.ps.worker.host_server import HostServer
    from gba_hvd.shm.shard_memory import ShardMemory

    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=environ)
    torch_s = time.perf_counter() - began_s
    with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        tables = gba_hvd.EmbeddingTables({"t": (1000, 8)}, gba_hvd.RowAdagrad(lr=0.1), shard_dir=scratch)
        memory, key = (
            ShardMemory.create_or_open(Path(scratch), "bench", tables.layout, grace_s=1.0),
            transport.new_key(),
        )
        for shard in range(tables.layout.n_shards):
            memory.init_shard(shard, 0)
        launch.write_settings(memory.folder, "bench", key, tables.layout, tables.optimizer)
        line = HostServer("bench", key, memory.folder, 0, 1, 0, dict)
        began_s = time.perf_counter()
        line.start()
        try:
            row = {"import_torch_s": torch_s}
            for name, to_enter in (("answers", False), ("can_enter", True)):
                row[f"{name}_s"] = _seconds_until(line, began_s, to_enter)
                used = psutil.Process(launch.pid_of(memory.folder, 0)).cpu_times()
                row[f"{name}_cpu_s"] = used.user + used.system
            return row
        finally:
            line.close()
            memory.close()
            wait_until_gone = time.perf_counter() + TIMEOUT_S
            while memory.folder.exists() and time.perf_counter() < wait_until_gone:
                time.sleep(_LOOK_S)  # the reaper removes it, and with it the server goes


def _seconds_until(line: HostServer, began_s: float, to_enter: bool) -> float:
    while not line.is_ready(to_enter):
        if time.perf_counter() - began_s > TIMEOUT_S:
            raise TimeoutError(f"no server in {TIMEOUT_S:.0f} s: {line.why_not_ready(to_enter)}")
        time.sleep(_LOOK_S)
    return time.perf_counter() - began_s
