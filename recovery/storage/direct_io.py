"""Writes and reads large objects past the page cache, which takes a fraction of the processor time of copying them.

Training needs that time. It is done where it can be: on Linux, for memory that starts at a block (`aligned`), and on
file systems that take it; all else, and the end of a file that is no whole block, is written and read as usual, and so
is what is in the cache already. Nothing is promised about durability: who writes still has to sync.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

import numpy as np

from recovery.storage.store import stop_if_cancelled

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

BLOCK_BYTES = 4096
_WRITE_BYTES = 64 << 20  # at once: between two writes it is seen that no caller waits any more
_LEAST_BYTES = 1 << 20  # below, the page cache is as fast


def aligned(n_bytes: int) -> np.ndarray:
    """uint8 [n_bytes] that starts at a block."""
    whole = np.empty(n_bytes + BLOCK_BYTES, np.uint8)
    start = -whole.ctypes.data % BLOCK_BYTES
    return whole[start : start + n_bytes]


def write_blocks(file: int, view: memoryview) -> int:
    """Write the first bytes of `view`, at the start of a file; returns how many, 0 when it cannot be done so.

    Raises OSError as a write does.
    """
    n_bytes = whole_blocks(view)
    done = 0
    with _past_the_cache(file) as possible:
        while possible and done < n_bytes:
            try:
                stop_if_cancelled("a write")
                done += os.write(file, view[done : min(n_bytes, done + _WRITE_BYTES)])
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: not with this file system, or not with such blocks
                    raise
                break
            if done % BLOCK_BYTES:
                break  # nearly full, or a signal came
    return done


def read_blocks(file: int, start: int, n_bytes: int) -> memoryview | None:
    """The bytes of a file from `start` on, at most n_bytes; None when it cannot be done so, or they are in the cache.

    Raises OSError as a read does.
    """
    if n_bytes < _LEAST_BYTES or _is_cached(file, start):
        return None
    skip = start % BLOCK_BYTES
    view, done = aligned(-(-(skip + n_bytes) // BLOCK_BYTES) * BLOCK_BYTES).data, 0
    with _past_the_cache(file) as possible:
        while possible and done < skip + n_bytes:
            try:
                more = os.preadv(file, [view[done:]], start - skip + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return None
            done += more
            if not more or done % BLOCK_BYTES:
                break  # the end of the file; if it is not, what is missing will be noticed
    return view[skip : min(done, skip + n_bytes)] if possible else None


def _is_cached(file: int, at: int) -> bool:
    """As far as one byte shows; asking reads nothing from the disk."""
    try:
        return os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):  # not in the cache; or not with this file system, or not on Linux
        return False


def whole_blocks(view: memoryview) -> int:
    """How many of its first bytes could be written past the cache."""
    if len(view) < _LEAST_BYTES or np.frombuffer(view, np.uint8).ctypes.data % BLOCK_BYTES:
        return 0
    return len(view) // BLOCK_BYTES * BLOCK_BYTES


@contextlib.contextmanager
def _past_the_cache(file: int) -> Iterator[bool]:
    """For this file, within the context; False: not possible."""
    flag: int = getattr(os, "O_DIRECT", 0)
    if fcntl is None or not flag:
        yield False
        return
    before = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, before | flag)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, before)
