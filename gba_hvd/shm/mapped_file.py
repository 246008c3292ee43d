"""A file in memory where pages of 2 MiB fit, and its space taken in such pages.

A lookup touches rows at random, and a good part of its time is the search for their pages, of which 2 MiB have 512 of
the usual size. The kernel (Linux 6.1 or newer, MADV_COLLAPSE) makes such pages of a tmpfs for any user, also where the
mount has huge=never, but not where /sys/kernel/mm/transparent_hugepage/shmem_enabled is "deny". Other file systems and
kernels, and memory that is in pieces too small, leave pages of 4 KiB: nothing depends on it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
import weakref
from pathlib import Path

import numpy as np

HUGE = 2 << 20  # bytes of a huge page of x86-64, the only machine that has shard memory
_COLLAPSE = 25  # MADV_COLLAPSE, which `mmap` does not have
_FIXED, _NO_RESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE: the same
_AT_ONCE = 16 * HUGE
_S_PER_BYTE, _LEAST_S = 0.5 / (1 << 30), 0.25  # of processor time to make huge pages in
_BUSY = 8  # times as long where the processor is shared
_PASSING = (errno.EAGAIN, errno.EBUSY)  # of some pages, which stay small
_libc = ctypes.CDLL(None, use_errno=True)  # (lets go of the interpreter's lock)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedFile:
    """A file, for reading and writing, mapped until no array of it is left. Raises OSError.

    bytes: uint8 [n], at an address that is a multiple of 2 MiB
    """

    def __init__(self, fd: int, n_bytes: int) -> None:
        self._fd = os.dup(fd)
        try:
            self._address = _map(fd, n_bytes)
        except OSError:
            os.close(self._fd)
            raise
        memory = (ctypes.c_uint8 * n_bytes).from_address(self._address)
        weakref.finalize(memory, _unmap, self._address, n_bytes, self._fd).atexit = False  # threads may still read it
        self.bytes = np.frombuffer(memoryview(memory), dtype=np.uint8)

    def file_size(self) -> int:
        """Of the file, which may have been cut short since it was mapped."""
        return os.fstat(self._fd).st_size

    def free(self, start: int, n_bytes: int) -> None:
        """Give this part's space back. Raises OSError where the file system cannot."""
        _advise(self._address + start, n_bytes, mmap.MADV_REMOVE)

    def take_huge(self, start: int, end: int) -> None:
        """Take the space of this part of the file in huge pages, those within it, as far as this is possible.

        What is not taken afterwards is for the caller to take. A page that others have written keeps what it has.
        """
        first, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        limit_s = max(_LEAST_S, (end - first) * _S_PER_BYTE)
        began_s, worked_s = time.monotonic(), time.thread_time()
        for part in range(first, end, _AT_ONCE):
            if time.thread_time() - worked_s > limit_s or time.monotonic() - began_s > _BUSY * limit_s:
                break
            n_bytes = min(_AT_ONCE, end - part)
            try:
                for at in range(part, part + n_bytes, HUGE):  # where there is no page at all, none is made huge
                    os.posix_fallocate(self._fd, at, mmap.PAGESIZE)
                _advise(self._address + part, n_bytes, _COLLAPSE)
            except OSError as error:
                if error.errno not in _PASSING:
                    break


def has_huge_pages(folder: Path) -> bool:
    """Whether a file of this folder is in huge pages, by an attempt with one of them. Raises OSError."""
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, HUGE)
        MappedFile(fd, HUGE).take_huge(0, HUGE)
        return 512 * os.fstat(fd).st_blocks == HUGE
    finally:
        os.close(fd)


def _map(fd: int, n_bytes: int) -> int:
    """The address, of the file in the middle of what is reserved."""
    size = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    reserved = _mmap(None, size + HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1)
    address = -(-reserved // HUGE) * HUGE
    try:
        _mmap(address, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, fd)
    except OSError:
        _libc.munmap(reserved, size + HUGE)
        raise
    if before := address - reserved:
        _libc.munmap(reserved, before)
    if after := HUGE - before:
        _libc.munmap(address + size, after)
    return address


def _mmap(address: int | None, n_bytes: int, access: int, flags: int, fd: int) -> int:
    found: int = _libc.mmap(address, n_bytes, access, flags, fd, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _advise(address: int, n_bytes: int, advice: int) -> None:
    if _libc.madvise(address, n_bytes, advice):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _unmap(address: int, n_bytes: int, fd: int) -> None:
    _libc.munmap(address, n_bytes)
    os.close(fd)
