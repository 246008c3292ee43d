"""When every worker of a host is gone: the time until its memory is removed, and holding it for a final checkpoint.

Decided here is when; what is saved, `final_checkpoint` decides. Half of the grace period is left to a restart, which
would find everything in memory. Then the server holds the memory's lock, so that the reaper waits, and releases it
after the save, or when its time is over. A server that dies meanwhile releases it, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from gba_hvd.ps.state_files import MARK
from gba_hvd.shm.shard_memory import nobody_lives

_LOOK_S = 0.25


class MemoryHold:
    """Of one server. Belongs to its main thread; `end()` may be called twice."""

    def __init__(self, folder: Path, index: int, after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._mark = folder, folder / MARK.replace("*", str(index))
        self._after_s, self._limit_s, self._clock = after_s, 0.0, clock
        self._empty_since_s: float | None = None
        self._next_look_s = 0.0
        self._lock: int | None = None
        self._since_s = 0.0
        self._is_over = False

    @property
    def is_under_way(self) -> bool:
        return self._lock is not None

    @property
    def is_late(self) -> bool:
        return self.is_under_way and self._clock() - self._since_s > self._limit_s

    def is_due(self) -> bool:
        """Whether nobody has lived here for long enough, and there was no last checkpoint since somebody did."""
        if self.is_under_way:
            return True
        now = self._clock()
        if now >= self._next_look_s:
            self._next_look_s = now + _LOOK_S
            try:
                is_empty = nobody_lives(self._folder)
            except FileNotFoundError:
                return False
            if not is_empty:
                self._empty_since_s, self._is_over = None, False
            elif self._empty_since_s is None:
                self._empty_since_s = now
        return self._empty_since_s is not None and now - self._empty_since_s >= self._after_s and not self._is_over

    def begin(self, limit_s: float) -> bool:
        """Hold the memory, at most for so long; False when somebody else has it just now, or it is gone."""
        try:
            lock = os.open(self._folder / "alive", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            self._mark.touch()  # first: a process that finds the lock taken finds out why
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock, self._limit_s, self._since_s = lock, limit_s, self._clock()
        return True

    def end(self) -> None:
        """Let go. It does not begin again before somebody has lived here."""
        if self._lock is not None:
            self._is_over = True
            with contextlib.suppress(FileNotFoundError):
                self._mark.unlink()
            os.close(self._lock)
            self._lock = None
