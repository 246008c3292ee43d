"""Other work on the machine, on purpose: processes that take a share of each core, in bursts.

What a process does is in `core_load.py`. It ends with the `with` block, and by itself when its parent is gone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gba_hvd.errors import BadInput

_SCRIPT = Path(__file__).with_name("core_load.py")  # a file of the standard library alone: it is there at once


def add_option(parser: argparse.ArgumentParser) -> None:
    does = "processes of the benchmark's own take this share of each core, in bursts, while contestants run"
    parser.add_argument("--noise", type=float, default=0.0, metavar="SHARE", help=does)


def setting(share: float) -> dict[str, Any]:
    """What a result's settings say of it: None without noise, which is what files from before have."""
    return {"noise": share or None}


def beside(share: float) -> str:
    """The end of a table's title; without noise empty."""
    return f", beside noise of {share:g} of each core" if share else ""


class Noise:
    """Runs one process on each core that this process may use; none with a share of 0. Raises BadInput."""

    def __init__(self, share: float) -> None:
        """share: of a core, 0 to below 1"""
        if not 0 <= share < 1:
            raise BadInput(f"noise must be a share of each core, 0 to below 1, got {share}")
        self._share = share
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def __enter__(self) -> Noise:
        for core in sorted(os.sched_getaffinity(0)) if self._share else ():
            words = [sys.executable, str(_SCRIPT), "--core", str(core), "--share", str(self._share)]
            self._processes.append(subprocess.Popen([*words, "--parent", str(os.getpid())], stdin=subprocess.DEVNULL))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes = []
