"""Waiting for a word of shared memory to change without looking again and again: Linux's futex.

The kernel compares the word and puts the process to sleep in one step, so no wake-up is missed. It wakes on every
change that its writer announces, on a signal, and at the time-out: callers look at the word again in any case.
"""

from __future__ import annotations

import ctypes
import math

_SYSCALL, _WAIT, _WAKE, _ALL = 202, 0, 1, 2**31 - 1  # of x86-64, the only machine that has shard memory
_libc = ctypes.CDLL(None)  # (lets go of the interpreter's lock while it waits)


class _Time(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]


_libc.syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Time)]
_libc.syscall.restype = ctypes.c_long


def wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep until the 32-bit word at `address` is woken or, at once, where it is not `value`; at most `timeout_s`."""
    fraction, whole = math.modf(timeout_s)
    _libc.syscall(_SYSCALL, address, _WAIT, value & 0xFFFFFFFF, ctypes.byref(_Time(int(whole), int(fraction * 1e9))))


def wake(address: int) -> None:
    """Wake all that wait for this word, in every process that maps it. After the word was changed."""
    _libc.syscall(_SYSCALL, address, _WAKE, _ALL, None)
