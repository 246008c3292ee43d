"""How a command ends from outside, and what it started with it: SIGTERM is handled as Ctrl-C is.

Needs nothing but the standard library: `build_horovod` runs before anything is installed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


@contextmanager
def ended_cleanly() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that started processes and scratch folders go with us."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop(process: subprocess.Popen[bytes], grace_s: float = 10) -> None:
    """End the process and its session; launchers get the chance to end their workers, in other sessions, themselves."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
