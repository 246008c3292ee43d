"""Writes large objects past the page cache, which takes a tenth of the processor time that copying them into it does.

Training needs that time. It is done where it can be: on Linux, for memory that starts at a block (`aligned`), and on
file systems that take it; all else, and the end of a file that is no whole block, is written as usual. Nothing is
promised about durability: who writes still has to sync.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

import numpy as np

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

BLOCK_BYTES = 4096
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
                done += os.write(file, view[done:n_bytes])
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: not with this file system, or not with such blocks
                    raise
                break
            if done % BLOCK_BYTES:
                break  # nearly full, or a signal came
    return done


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
