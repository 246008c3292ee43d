"""Processes of this machine: their command lines and environments."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Of the fields of /proc/PID/stat after the command: virtual memory, where the environment begins and ends.
_SIZE, _ENVIRON, _ENVIRON_END = 20, 47, 48
_ASKED = 1000  # at most, of a millisecond each


class Listed(NamedTuple):
    """A process. command: its words, each with a NUL after it; environ: what it was started with"""

    pid: int
    command: bytes
    environ: list[bytes]


def others() -> Iterator[Listed]:
    """All but this one, as far as this user may read them."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and (found := process(int(name))) is not None:
            yield found


def process(pid: int) -> Listed | None:
    """None: it has ended, a zombie as well, or is another user's."""
    entry = Path("/proc") / str(pid)
    with contextlib.suppress(OSError):
        environ = _environ_of(entry)
        if command := (entry / "cmdline").read_bytes():
            return Listed(pid, command, environ.split(b"\0"))
    return None


def _environ_of(entry: Path) -> bytes:
    """Asks again while another program is being executed: then a process has neither environment nor command line."""
    for _ in range(_ASKED):
        if environ := (entry / "environ").read_bytes():
            return environ
        fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        if fields[_SIZE] == b"0" or fields[_ENVIRON] == fields[_ENVIRON_END] != b"0":  # a zombie; has an empty one
            break
        time.sleep(0.001)
    return b""
