"""Renames: a small file replaced as a whole; without replacing, and exchanging two names, which Linux alone has."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2
# Not with this kernel, this C library, or this file system.
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a small file of one writer: others read the one of before or this one, whole."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(content if isinstance(content, bytes) else content.encode())
    fresh.replace(path)


def rename_new(old: Path, new: Path) -> bool:
    """Give `old` another name, at once and only if nothing has it; False when that cannot be done here.

    Raises FileExistsError when the name is taken, OSError as a rename does.
    """
    return _renameat2(old, new, _NOREPLACE)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two files or folders in one step; False when that cannot be done here. Raises OSError."""
    return _renameat2(one, other, _EXCHANGE)


@cache
def _function() -> Callable[..., int] | None:
    found = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return found


def _renameat2(old: Path, new: Path, flags: int) -> bool:
    function = _function()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_HERE:
        return False
    raise OSError(number, os.strerror(number), str(old), None, str(new))
