"""What counts as one host, and whose a memory is.

Two hosts on one folder would each count its shards as theirs, and give the other's rows away when the world changes.
So `memory.json` names the host that has the memory; a process that opens it from another one is refused while a process
lives in it. Where none does (locks are the kernel's):

    of the same kernel                      it is taken over, rows and all: a container was started again
    of an earlier boot of this machine      it is removed: on a disk, pages may be missing
    of another machine                      it is refused: not every network file system shares locks with others
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from gba_hvd.errors import ShardMemoryError
from gba_hvd.shm import reaper
from gba_hvd.shm.layout import digest

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_INITS = ("systemd", "init", "runit", "openrc-init")
_ALONE_TRIES, _ALONE_PAUSE_S = 20, 0.02  # a process that checks for live workers holds the lock for a moment


@dataclass(frozen=True)
class Host:
    """What counts as one host: the processes of one boot of a machine that see each other and the same folder.

    boot: of the kernel; processes: the namespace of process numbers; folder, device: the base, as this process sees it.
    name: for messages, and where a kernel has no boot id
    """

    boot: str
    name: str
    processes: int
    folder: str
    device: int

    @classmethod
    def here(cls, base: Path) -> Host:
        name, base = os.uname().nodename, base.resolve()
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else name
        space = Path("/proc/self/ns/pid")
        there = next(path for path in (base, *base.parents) if path.exists())
        return cls(boot, name, space.stat().st_ino if space.exists() else 0, str(base), there.stat().st_dev)

    @property
    def number(self) -> int:
        """A signed 64-bit number, equal for the workers of one host only."""
        return digest({"host": [self.boot, self.folder, self.device, self.processes]})

    def is_another_machine(self, other: Host) -> bool:
        return self.boot != other.boot and self.name != other.name

    def difference(self, other: Host) -> str:
        """Why `other` is another host, in words."""
        found = ["it was started by another boot"] if self.boot != other.boot else []
        if self.processes != other.processes:
            found.append("it cannot see the processes of this one (another container, or namespace of processes)")
        if (self.folder, self.device) != (other.folder, other.device):
            found.append(f"it sees the folder as {other.folder}, this one as {self.folder}")
        return " and ".join(found)


def is_of_a_container(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process descends from the first one of a container, with which all others end: no init of a machine.

    What is started in a container later (docker exec) does not descend from it.
    """
    try:
        while pid > 1:
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        return pid == 1 and not (proc / "1/comm").read_text().startswith(_INITS)
    except (OSError, ValueError):  # one that has ended meanwhile, or is hidden
        return False


def elsewhere(folder: Path) -> str:
    """The container, in words, whose processes opened the memory of this folder last; empty: it was this one."""
    try:
        theirs = Host(**json.loads((folder / "memory.json").read_text())["host"])
    except (OSError, ValueError, TypeError, KeyError):  # not there yet, or damaged
        return ""
    mine = Host.here(folder.parent)
    if theirs.boot != mine.boot or theirs.processes == mine.processes:
        return ""
    return f"another container (host name {theirs.name}, pid namespace {theirs.processes}, here {mine.processes})"


def take_from(theirs: Host, mine: Host, folder: Path, alive_fd: int) -> None:
    """Take a memory of another host over, if no process lives in it. Called with the door locked and `alive` held.

    Raises ShardMemoryError where it must be left alone; FileNotFoundError where it was of an earlier boot, and is gone.
    """
    base = folder.parent
    apart = f"give each host a folder of its own, as GBA_HVD_SHARD_DIR={base}/$(hostname)"
    if theirs.is_another_machine(mine):
        raise ShardMemoryError(
            f"{folder} was made on another machine, {theirs.name}, this one is {mine.name}: hosts cannot share shard "
            f"memory; {apart}. If no job of this name is left there, remove it (rm -r {folder})"
        )
    if not _is_alone(alive_fd):
        raise ShardMemoryError(
            f"{folder} is held by living workers of another host, {theirs.name}: "
            f"{theirs.difference(mine)}. Two hosts on one folder would give each other's rows away: "
            f"{apart}, or a /dev/shm of its own (docker run without --ipc=host). A job that is to run beside another "
            "one needs a name of its own (GBA_HVD_JOB_ID). Workers that are to count as one host "
            "need one namespace of processes (docker run --pid=...) and the same GBA_HVD_SHARD_DIR"
        )
    if theirs.boot != mine.boot:
        reaper.remove(folder)
        raise FileNotFoundError(folder)


def _is_alone(alive_fd: int) -> bool:
    """Whether no other process holds the memory. It holds it shared before and after."""
    for _ in range(_ALONE_TRIES):
        try:
            fcntl.flock(alive_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_ALONE_PAUSE_S)
            continue
        finally:
            fcntl.flock(alive_fd, fcntl.LOCK_SH)
        return True
    return False
