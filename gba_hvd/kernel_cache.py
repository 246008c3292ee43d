"""Where numba keeps compiled kernels in an environment in which it finds no folder of its own.

numba writes to NUMBA_CACHE_DIR, to `__pycache__` beside the module, or to the user's cache folder. A container may have
none of them: no HOME, a user without an entry in passwd, a package that another user installed. Then the cache is a
private folder in the folder of temporary files. The environment names it, so processes that this one starts use it too.
What is in it is executed: a folder that another user could have written is not used.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import sys
import tempfile
import threading
from pathlib import Path

log = logging.getLogger("gba_hvd")
_LOCK = threading.Lock()


def ensure(module: Path) -> bool:
    """Whether kernels of this module can be kept; where numba would find no folder, one is made for it."""
    with _LOCK:
        named = os.environ.get("NUMBA_CACHE_DIR", "")
        beside = module.parent / "__pycache__"
        if any(is_writable(folder) for folder in (Path(named), beside, user_folder()) if folder.is_absolute()):
            return True
        made = private_folder()
        if made is None:
            return False
        os.environ["NUMBA_CACHE_DIR"] = str(made)
        if "numba" in sys.modules:
            sys.modules["numba"].config.CACHE_DIR = str(made)
        return True


def user_folder() -> Path:
    """The user's cache folder as numba has it; relative where the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "numba"


@functools.cache
def private_folder() -> Path | None:
    """A folder for kernels that only this user can write; None: it cannot be had, which is logged once."""
    try:
        folder = make_private("kernels")
    except OSError as error:
        log.warning(
            "compiled kernels cannot be kept, and every process compiles them again, for up to half a minute (%s): set "
            "NUMBA_CACHE_DIR to a folder that this user can write", error,
        )  # fmt: skip
        return None
    log.info("compiled kernels are kept in %s: numba finds no other folder that it can write", folder)
    return folder


def make_private(purpose: str) -> Path:
    """A folder among the temporary files that only this user can write, the same in each process. Raises OSError."""
    folder = Path(tempfile.gettempdir()).absolute() / f"gba-hvd-{purpose}-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


def is_writable(folder: Path) -> bool:
    """As numba finds it out: also root cannot write everywhere."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
