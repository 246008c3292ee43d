"""Python's garbage collector, paused while modules are imported and kernels loaded.

Imports allocate many objects, hardly any of them garbage, and each full collection scans torch's: collections take
about an eighth of the time to a worker's first step.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator


class _Collector:
    """Pauses that have begun and not ended, in all threads, and whether it was on before the first of them."""

    def __init__(self) -> None:
        self._lock, self._pauses, self._was_on = threading.Lock(), 0, False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Off until the last thread leaves; where it was off before, it stays off."""
        with self._lock:
            if not self._pauses:
                self._was_on = gc.isenabled()
                gc.disable()
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses = max(0, self._pauses - 1)  # (none, in a child that was forked within one)
                if not self._pauses and self._was_on:
                    gc.enable()

    def forked(self) -> None:
        """In the child, which has one thread: as it was before all pauses."""
        if self._pauses and self._was_on:
            gc.enable()
        self._lock, self._pauses = threading.Lock(), 0


_COLLECTOR = _Collector()
gc_paused = _COLLECTOR.paused
os.register_at_fork(after_in_child=_COLLECTOR.forked)
