"""How a command ends from outside, and what it started with it: SIGTERM is handled as Ctrl-C is.

Needs nothing but the standard library: `build_horovod` runs before anything is installed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
_ended = threading.Event()


@contextmanager
def ended_cleanly() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that started processes and scratch folders go with us."""
    _ended.clear()
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def raise_if_ended() -> None:
    """KeyboardInterrupt after SIGTERM, for long loops: Python drops what a handler raises in a callback of C code."""
    if _ended.is_set():
        raise KeyboardInterrupt


def _end(signum: int, frame: object) -> None:
    _ended.set()
    raise KeyboardInterrupt


def stop(process: subprocess.Popen[bytes], grace_s: float = 10) -> None:
    """End the process and its session; launchers get the chance to end their workers, in other sessions, themselves."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
