"""What dead jobs of this user left on a host, and removing it: nothing that anybody alive holds.

The kernel knows whether a process holds a thing, across containers; so no process is looked for by its
number. What is left, and by whom:

    gba-hvd-<job>             all workers and the reaper were killed. Held: `alive`, `keeper` or a `ps-N.lock` is locked
    gba-hvd-<job>.gone-<pid>  the process that removed it was killed meanwhile. No process opens a folder of such a name
    sem.mp-*                  Horovod's launcher and the process that cleans up behind it were killed. Held: it is open
                              or mapped somewhere, so there is no write lease on it to be had. Python gives these names

A folder of such a name in which something is that no job makes, or in which `door` is not, is left alone.

A job that starts gives each folder a new reaper, so a restart of the dead job has its grace period.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gba_hvd.shm import job_folder as folders
from gba_hvd.shm import reaper
from gba_hvd.shm.host_identity import elsewhere
from recovery.units import size

SEMAPHORES = Path("/dev/shm")
_GONE = re.compile(rf"{folders.PREFIX}.+\.gone-\d+")
_SEMAPHORE = re.compile(r"sem\.mp-\w{8}")


@dataclass(frozen=True)
class OrphanedMemory:
    """job: all its workers on this host are dead.

    watched: its reaper lives and will remove it after the grace period; served: a companion server lives, and may be
    saving what is there
    """

    path: Path
    kind: Literal["job", "removal", "semaphore"]
    n_bytes: int
    watched: bool = False
    served: bool = False

    @property
    def held_by(self) -> str:
        """What removes it without being asked; empty: nothing does."""
        if self.served:
            return "its companion server lives, and may be saving it; it ends when the keeper removes the memory"
        return "its keeper removes it after the grace period" if self.watched else ""


def orphaned_memory(base: Path, semaphores: Path | None = None) -> list[OrphanedMemory]:
    """Orphaned memory of this user, in this base; the semaphores lie in one place for any base: `SEMAPHORES`."""
    found = []
    for path in sorted(base.glob(f"{folders.PREFIX}*")):
        with contextlib.suppress(OSError):  # it went, or is another user's
            folders.check(path)
            is_gone = _GONE.fullmatch(path.name) is not None
            if folders.foreign(path, is_whole=not is_gone):
                continue
            if is_gone:
                found.append(OrphanedMemory(path, "removal", _size(path)))
            elif not _is_held(path / "door") and not _is_held(path / "alive"):
                served = any(_is_held(lock) for lock in path.glob("ps-*.lock"))
                found.append(OrphanedMemory(path, "job", _size(path), _is_held(path / "keeper"), served))
    for path in sorted((semaphores or SEMAPHORES).glob("sem.mp-*")):
        with contextlib.suppress(OSError):
            if _SEMAPHORE.fullmatch(path.name) and _is_abandoned(path):
                found.append(OrphanedMemory(path, "semaphore", _size(path)))
    return found


def held_elsewhere(base: Path) -> list[tuple[Path, str]]:
    """Memory of this user that processes of other containers live in, and which container that is, in words."""
    found = []
    for path in sorted(base.glob(f"{folders.PREFIX}*")):
        with contextlib.suppress(OSError):
            folders.check(path)
            if not _GONE.fullmatch(path.name) and _is_held(path / "alive") and (container := elsewhere(path)):
                found.append((path, container))
    return found


def not_of_jobs(base: Path) -> list[tuple[Path, str]]:
    """Folders of this user that have the name of a job's memory and are none, or have more in them; with the reason."""
    found = []
    for path in sorted(base.glob(f"{folders.PREFIX}*")):
        with contextlib.suppress(OSError):
            folders.check(path)
            if why := folders.foreign(path, is_whole=_GONE.fullmatch(path.name) is None):
                found.append((path, why))
    return found


def free_and_held(found: Sequence[OrphanedMemory]) -> tuple[list[OrphanedMemory], list[OrphanedMemory]]:
    """What a user has to remove, and what goes without that."""
    return [left for left in found if not left.held_by], [left for left in found if left.held_by]


def counted(found: Sequence[OrphanedMemory]) -> str:
    """`2 memories (31.0 MB) and 20 semaphores`"""
    memories = [left for left in found if left.kind != "semaphore"]
    n, n_semaphores = len(memories), len(found) - len(memories)
    parts = [f"{n} memor{'ies' if n > 1 else 'y'} ({size(sum(left.n_bytes for left in memories))})"] if n else []
    parts += [f"{n_semaphores} semaphore{'s' * (n_semaphores > 1)}"] if n_semaphores else []
    return " and ".join(parts)


def remove(left: OrphanedMemory) -> bool:
    """Whether it was removed: a process may have come to live there meanwhile."""
    try:
        if left.kind == "semaphore":
            if not _is_abandoned(left.path):
                return False
            left.path.unlink()
        elif folders.foreign(left.path, is_whole=left.kind == "job"):
            return False
        elif left.kind == "removal":
            shutil.rmtree(left.path)
        else:
            folders.check(left.path)
            with _locked(left.path, "door") as at_door, _locked(left.path, "alive") as alone:
                if not at_door or not alone or _is_held(left.path / "keeper"):
                    return False
                reaper.remove(left.path)
    except OSError:
        return False
    return True


def sweep(base: Path, grace_s: float) -> list[OrphanedMemory]:
    """When a job starts: remove what no job can use, and have the memory of dead jobs removed after a grace period."""
    swept = []
    for left in orphaned_memory(base):
        with contextlib.suppress(OSError):
            if left.kind != "job" or not (left.path / "alive").exists():  # a job killed before it had begun has none
                swept += [left] if remove(left) else []
            elif not left.watched:
                reaper.start(left.path, grace_s)
                swept.append(left)
    return swept


def in_words(swept: Sequence[OrphanedMemory]) -> list[str]:
    """A line for each memory, and one for all semaphores, of which a launcher leaves many."""
    lines = [
        f"{left.path} was left by a dead job and is removed ({size(left.n_bytes)})"
        for left in swept
        if left.kind != "semaphore"
    ]
    if n := sum(left.kind == "semaphore" for left in swept):
        what = "1 semaphore that a dead job's launcher had left was" if n == 1 else f"{n} semaphores of dead jobs were"
        lines.append(f"{what} removed from {SEMAPHORES}")
    return lines


def _is_held(file: Path) -> bool:
    """Whether a living process has a lock on it. Opens it only if it is there."""
    with _locked(file.parent, file.name) as free:
        return not free


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[bool]:
    """Hold the lock of a file alone, if no other process has it; a file that is not there is held by none."""
    try:
        fd = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _is_abandoned(semaphore: Path) -> bool:
    """Whether it is this user's and no process has it open or mapped: only then the kernel gives a write lease."""
    fd = os.open(semaphore, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return False
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # who opens it now must not end this process by the usual signal
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:  # in use; or a file system without leases, where it cannot be known
        return False
    finally:
        os.close(fd)
    return True


def _size(path: Path) -> int:
    """Bytes it takes."""
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    total = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            total += 512 * file.lstat().st_blocks
    return total
