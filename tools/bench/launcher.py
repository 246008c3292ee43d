"""`gba-hvd bench launcher`: the share of a core that the launcher of an idle elastic job takes.

One job with one sleeping worker for each kind of host discovery: the command that `gba-hvd run` makes from a list of
hosts, and a user's script in shell and in Python. The share is the CPU time of the launcher and of all processes under
it, also of those that have ended, divided by the length of the window. The jobs run one after another, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from ..launch.command_line import Asked, Here, plan
from ..signals import stop
from .harness import measure
from .harness.measure import Row, Subparsers, Variant

_SCRIPTS = {"shell": "#!/bin/sh\necho localhost:1\n", "python": f"#!{sys.executable}\nprint('localhost:1')\n"}
DISCOVERIES = ("hosts", *_SCRIPTS)
_POLL_S = 0.1
_SETTLE_S = 2.0  # from the start of the worker to the first window: the launcher's own start is not idle


def add_parser(subparsers: Subparsers) -> None:
    does = "share of a core that the launcher of an idle elastic job takes"
    parser = measure.add_benchmark(subparsers, "launcher", does, __doc__, run)
    measure.add_chosen(parser, "--discoveries", DISCOVERIES, "KIND")
    parser.add_argument("--windows", type=int, default=5, help="windows of each kind of discovery; the median counts")
    parser.add_argument("--window-s", type=float, default=10.0, help="length of a window")
    parser.add_argument("--timeout", type=float, default=120, metavar="SECONDS", help="for a job to start")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    about = measure.machine()
    with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        variants = [variant(kind, Path(scratch)) for kind in args.discoveries]
        rows = measure.interleave(variants, args.windows, partial(one_window, Path(scratch), args))
    shares = {kind: share for (kind,), share in measure.medians(rows, ("discovery",), "core_share").items()}
    commands = {v.name: str(v) for v in variants}
    result = {"machine": about, "commands": commands, "window_s": args.window_s, "core_share": shares, "rows": rows}
    measure.write_json(args.out, result)
    table = [(kind, f"{share:.2%}") for kind, share in shares.items()]
    measure.print_table("launcher of an idle elastic job, medians", ("discovery", "share of a core"), table)
    return 0


def variant(kind: str, folder: Path) -> Variant:
    """The command of `gba-hvd run` for one worker that sleeps; scripts are written to `folder`."""
    script = None
    if kind in _SCRIPTS:
        script = folder / f"discover-{kind}"
        script.write_text(_SCRIPTS[kind])
        script.chmod(0o755)
    worker = ("sh", "-c", f"touch {_started(kind, folder)}; exec sleep 1000000")
    asked = Asked(1, 1, True, worker, {}, discovery=str(script) if script else None, interface="lo")
    here = Here(1, "lo", frozenset({"localhost"}), measure.console_script("horovodrun"), os.environ)
    launch = plan(asked, here, slots_now=1)
    return Variant(kind, launch.argv, launch.variables)


def _started(kind: str, folder: Path) -> Path:
    """The file that the worker of a job makes when it starts."""
    return folder / f"started-{kind}"


def one_window(folder: Path, args: argparse.Namespace, job: Variant, number: int) -> Row:
    """Start the job, measure one window of it, end it. Raises RunFailed when the worker does not start in time."""
    started, log = _started(job.name, folder), folder / f"log-{job.name}"
    started.unlink(missing_ok=True)
    with log.open("wb") as out:
        launcher = subprocess.Popen(
            job.command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **job.env}, start_new_session=True
        )
        try:
            deadline = time.monotonic() + args.timeout
            while not started.exists():
                if launcher.poll() is not None or time.monotonic() > deadline:
                    output = measure.gist(log.read_text(errors="replace"))
                    raise measure.RunFailed(f"{job.name}: no worker within {args.timeout:.0f} s\n{output}")
                time.sleep(_POLL_S)
            time.sleep(_SETTLE_S)
            began_s, before_s = time.monotonic(), cpu_s(launcher.pid)
            time.sleep(args.window_s)
            share = (cpu_s(launcher.pid) - before_s) / (time.monotonic() - began_s)
        finally:
            stop(launcher)
    print(f"window {number + 1}  {job.name:8s} {share:.2%}", flush=True)
    return {"discovery": job.name, "window": number, "core_share": share, "load_average": os.getloadavg()[0]}


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of all under it so far; what ended is in the sums of the process that reaped it."""
    import psutil

    process, total = psutil.Process(pid), 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            used = one.cpu_times()
            total += used.user + used.system + used.children_user + used.children_system
    return total
