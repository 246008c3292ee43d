"""Space of files in the folder of a job's memory: taken, or refused with the limit that was reached and what to do.

Not here: the room for tables that is asked for before any is taken, `ShardMemory.reserve`.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gba_hvd.errors import ShardMemoryError

_T = TypeVar("_T")
_LIMITS = {
    errno.EFBIG: (resource.RLIMIT_FSIZE, "of the size of a file", "ulimit -f", "LimitFSIZE"),
    errno.ENOMEM: (resource.RLIMIT_AS, "of the address space of a process", "ulimit -v", "LimitAS"),
}


def take(fd: int, at: int, n_bytes: int, what: str, folder: Path, advice: str = "") -> None:
    """Take the space now: a write to a page without space would kill the process. folder: of the job

    Raises ShardMemoryError
    """
    or_refuse(lambda: os.posix_fallocate(fd, at, n_bytes), n_bytes, what, folder, advice, at + n_bytes)


def set_size(fd: int, n_bytes: int, what: str, folder: Path) -> None:
    """Raises ShardMemoryError"""
    or_refuse(lambda: os.ftruncate(fd, n_bytes), n_bytes, what, folder)


def map_file(fd: int, n_bytes: int, what: str, folder: Path) -> mmap.mmap:
    """Raises ShardMemoryError"""
    return or_refuse(lambda: mmap.mmap(fd, n_bytes), n_bytes, what, folder)


def limit_reached(error: OSError, n_bytes: int) -> str:
    """The limit of this process that an operation on so many bytes has met, and where to raise it; empty: none."""
    kind, of, command, setting = _LIMITS.get(error.errno or 0, (-1, "", "", ""))
    limit = resource.RLIM_INFINITY if kind < 0 else resource.getrlimit(kind)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    return (
        f"{n_bytes:,} bytes reach the limit {of}, {limit:,} bytes: raise it where the launcher is started, on each "
        f"host ({command} unlimited; of a service: {setting}=infinity)"
    )


def or_refuse(
    act: Callable[[], _T], n_bytes: int, what: str, folder: Path, advice: str = "", end: int | None = None
) -> _T:
    """Do what takes so many bytes; end: of the space in the file, where it is not that number.

    Raises ShardMemoryError
    """
    try:
        return act()
    except OSError as error:
        place = f"no room for {n_bytes} bytes of {what} in {folder.parent}"
        if limit := limit_reached(error, end or n_bytes):
            raise ShardMemoryError(f"{place}: {limit}") from error
        free = os.statvfs(folder)
        raise ShardMemoryError(
            f"{place}: {error.strerror}, {free.f_bavail * free.f_frsize:,} bytes are free; name a larger folder with "
            f"GBA_HVD_SHARD_DIR (a disk will do), enlarge /dev/shm (docker run --shm-size=...){advice}"
        ) from error
