"""`gba-hvd bench import-time`: what a process pays for `import gba_hvd`, beside `import torch`.

Each figure is a median over fresh processes that take turns, in seconds and in seconds of CPU time, which a busy
machine changes less. `import torch, gba_hvd` is what a script pays for its first lines; `every public name` has
imported all modules that a worker needs; `and the kernels` has numba and the row kernels loaded, as after
`DistributedOptimizer`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import median

from .harness import measure
from .harness.measure import Subparsers

_ALL = "import torch; from gba_hvd import *"
STATEMENTS = {
    "import torch": "import torch",
    "import torch, gba_hvd": "import torch, gba_hvd",
    "every public name": _ALL,
    "and the kernels": f"{_ALL}; from gba_hvd import kernels; kernels.load()",
}
_TIMED = """
import json, time
wall, cpu = time.perf_counter(), time.process_time()
{}
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""


def add_parser(subparsers: Subparsers) -> None:
    does = "seconds that `import gba_hvd` takes"
    parser = measure.add_benchmark(subparsers, "import-time", does, __doc__, run, required=False)
    parser.add_argument("--runs", type=int, default=5)


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    rows = [{name: seconds(statement) for name, statement in STATEMENTS.items()} for _ in range(args.runs)]
    result = {name: [round(median(row[name][i] for row in rows), 3) for i in (0, 1)] for name in STATEMENTS}
    if args.out is not None:
        args.out.write_text(json.dumps({"about": measure.machine(), "median": result, "runs": rows}, indent=1))
    print(f"{'':24} {'seconds':>8} {'CPU':>8} {'CPU above torch':>16}")
    for name, (wall_s, cpu_s) in result.items():
        print(f"{name:24} {wall_s:8.2f} {cpu_s:8.2f} {cpu_s - result['import torch'][1]:16.2f}")
    return 0


def seconds(statement: str) -> list[float]:
    """Wall time and CPU time of a fresh process that runs the statement."""
    command = [sys.executable, "-c", _TIMED.format(statement)]
    found: list[float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found
