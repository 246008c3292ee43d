"""How a command ends from outside: SIGTERM is handled as Ctrl-C is, so nothing of it stays behind.

Needs nothing but the standard library: `build_horovod` runs before anything is installed.
"""

from __future__ import annotations

import signal
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
