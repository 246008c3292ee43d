"""One line where a job takes long to start: before its workers have imported what they need, none of them can report.

A process beside the launcher waits until the first worker of this host has begun `state.sync`, which removes a file, or
the launcher has ended, and says after `FIRST_S` what is waited for. A start that is quicker prints nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

FIRST_S, _LOOK_S = 10.0, 0.2
VARIABLE = "GBA_HVD_START_FILE"  # the file that a worker removes, see `gba_hvd.elastic.launch_file`


def watch() -> dict[str, str]:
    """Start the process; this one is, or becomes, the launcher. Returns a variable for it."""
    handle, name = tempfile.mkstemp(prefix="gba-hvd-start-")
    os.close(handle)
    launcher = os.getpid()
    if child := os.fork():
        os.waitpid(child, 0)
        return {VARIABLE: name}
    try:
        os.setsid()  # no Ctrl-C of the terminal
        if not os.fork():
            _report(Path(name), launcher)
    finally:
        os._exit(0)


def _report(file: Path, launcher: int) -> None:
    if outcome(file, launcher, FIRST_S) == "waits":
        clock = time.strftime("%H:%M:%S")
        text = (
            f"{clock} gba-hvd run: no worker here has come to its training for {FIRST_S:.0f} s: they start Python and "
            "import what the script needs, and Horovod connects them, which takes long where the machine is busy. The "
            "line [started] follows"
        )
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
    file.unlink(missing_ok=True)


def outcome(file: Path, launcher: int, limit_s: float) -> Literal["begun", "ended", "waits"]:
    """What comes first: a worker that has removed the file, the end of the launcher, or the limit."""
    try:
        ends = os.pidfd_open(launcher)
    except ProcessLookupError:
        return "ended"
    deadline = time.monotonic() + limit_s
    try:
        while file.exists():
            if select.select([ends], [], [], min(_LOOK_S, max(0.0, deadline - time.monotonic())))[0]:
                return "ended"
            if time.monotonic() >= deadline:
                return "waits"
        return "begun"
    finally:
        os.close(ends)
