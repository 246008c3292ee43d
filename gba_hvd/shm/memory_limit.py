"""The memory limit of a container, which a tmpfs's pages count towards: the kernel kills processes that exceed it.

Of control groups, versions 1 and 2. Pages of files are not counted as used: the kernel can take them back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60  # version 1 has a huge number where version 2 has `max`
_FILES = {
    "cgroup2": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}  # by type of file system: limit, usage, and the lines of memory.stat with pages of files, which the usage includes

_KILLS = {"cgroup2": "memory.events", "cgroup": "memory.oom_control"}


@dataclass(frozen=True)
class MemoryLimit:
    """In bytes. used: by all processes of the group. file: that has the limit."""

    limit: int
    used: int
    file: Path

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


def of_folder(folder: Path) -> MemoryLimit | None:
    """The limit for what is written to this folder; None: there is none, or the folder is on a disk."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    if not any(fields[2] == number and kind == "tmpfs" for fields, kind, _ in _mounts(Path("/"))):
        return None
    return tightest()


def tightest(root: Path = Path("/")) -> MemoryLimit | None:
    """Of the groups that this process is in, nested ones included, the limit that leaves least; None: no limit."""
    found = [_read(group, *_FILES[kind]) for group, kind in _groups(root)]
    return min((one for one in found if one is not None), key=lambda one: one.free, default=None)


def n_kills(root: Path = Path("/")) -> int:
    """Processes that the kernel has killed at a limit, ever, of the innermost group here that counts them."""
    for group, kind in _groups(root):
        with contextlib.suppress(OSError):  # the root of version 2 has no count
            for line in (group / _KILLS[kind]).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _groups(root: Path) -> Iterator[tuple[Path, str]]:
    """(folder, type of file system)"""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    own = {
        controller: path for _, names, path in (line.split(":", 2) for line in lines) for controller in names.split(",")
    }
    for fields, kind, options in _mounts(root):
        path = own.get("" if kind == "cgroup2" else "memory")
        if path is None or kind not in _FILES or (kind == "cgroup" and "memory" not in options):
            continue
        top, mounted = root / fields[4].lstrip("/"), Path(fields[3])
        is_below = ".." not in path and Path(path).is_relative_to(mounted)  # else it is not seen from here
        group = top / Path(path).relative_to(mounted) if is_below else top
        nested = [group, *group.parents]
        yield from ((one, kind) for one in nested[: nested.index(top) + 1])


def _mounts(root: Path) -> Iterator[tuple[list[str], str, list[str]]]:
    """(fields before the dash, type, options) of each mount, see proc_pid_mountinfo(5)."""
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        yield before.split(), kind, options.split(",")


def _read(group: Path, limit_file: str, usage_file: str, spare: tuple[str, ...]) -> MemoryLimit | None:
    try:
        limit, used = (group / limit_file).read_text().strip(), int((group / usage_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # the root of version 2 has no limit; of nested groups a container may not see all
        return None
    if limit == "max" or int(limit) >= _NO_LIMIT:
        return None
    return MemoryLimit(int(limit), max(0, used - sum(int(stat.get(name, 0)) for name in spare)), group / limit_file)
