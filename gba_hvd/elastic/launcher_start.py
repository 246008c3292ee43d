"""When this job's launcher was started: what a launch took before its first world of workers counts from there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

LAUNCHER = "horovodrun"


def launcher_started_s() -> float:
    """Unix time. Of a worker that has no launcher, or one on another host, its own start."""
    own = psutil.Process()
    started_s = own.create_time()
    try:
        for process in own.parents():
            if is_launcher(process.cmdline()):
                return process.create_time()
    except psutil.Error:  # a process that has ended meanwhile, or that may not be looked at
        pass
    return started_s


def is_launcher(command: Sequence[str]) -> bool:
    """`horovodrun ...`, or `python horovodrun ...`; not a shell whose command has the word."""
    return LAUNCHER in (Path(word).name for word in command[:2])
