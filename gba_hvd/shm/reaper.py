"""Removes a job's shard memory when every worker of the host is gone.

Workers that end well remove it themselves. A killed worker cannot, and must not while others or a restart may want
the rows; so a small process of its own watches. It leaves the launcher's process tree, because launchers kill that.

SIGTERM and SIGHUP go to all processes of a service or a batch job that is stopped. The reaper is the one that must
stay: it ignores them. While it lives it holds a shared lock on `keeper`; where none does, `shm.sweep` starts one.

Every worker holds a shared lock on `alive`. When the reaper can have it exclusively, no process lives; when that stays
so for the grace period it removes the folder and ends. When the folder goes away, it ends too.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PERIOD_S = 0.25


def start(folder: Path, grace_s: float) -> None:
    """Start the reaper of a folder, detached from this process."""
    subprocess.run(
        [sys.executable, "-I", "-S", __file__, str(folder), str(grace_s)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, check=True, timeout=30,
    )  # fmt: skip


def keep(folder: Path, grace_s: float) -> None:
    """Watch until the folder is gone, removing it once no process has lived for `grace_s`."""
    empty_since = None
    while True:
        time.sleep(_PERIOD_S)
        try:
            fd = os.open(folder / "alive", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            empty_since = None
            continue
        else:
            empty_since = empty_since or time.monotonic()
            if time.monotonic() - empty_since >= grace_s:
                remove(folder)
                return
        finally:
            os.close(fd)


def remove(folder: Path) -> None:
    """Remove a job's folder at once: a late worker finds none, not half of one.

    Raises ValueError for any other path: a job's name may have come from elsewhere.
    """
    if not folder.name.startswith("gba-hvd-") or ".." in folder.parts or folder.is_symlink():
        raise ValueError(f"{folder} is no folder of a job, and is not removed")
    gone = folder.with_name(f"{folder.name}.gone-{os.getpid()}")
    try:
        folder.rename(gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def main() -> None:
    folder, grace_s = Path(sys.argv[1]), float(sys.argv[2])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        fd = os.open(folder / "keeper", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return  # the folder is gone
    fcntl.flock(fd, fcntl.LOCK_SH)  # the reaper inherits it, and has it when `start` returns
    if os.fork() > 0:  # the parent of the reaper ends, so that no launcher finds it among its children
        os._exit(0)
    keep(folder, grace_s)


if __name__ == "__main__":
    main()
