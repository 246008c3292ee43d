"""Which processes hold a lock on a file, as the kernel lists them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def lock_owners(path: Path) -> set[int]:
    """Processes of this machine that hold a lock on this file, as far as they can be seen from here."""
    with contextlib.suppress(OSError, LookupError, ValueError):  # the last two: a /proc of another form
        return owners_in(Path("/proc/locks").read_text(), _device_of(path), os.stat(path).st_ino)
    return set()


def owners_in(locks: str, device: tuple[int, int], inode: int) -> set[int]:
    """Processes that hold a lock on this file. locks: as /proc/locks has them."""
    found = set()
    for line in locks.splitlines():
        words = line.split()  # 1: FLOCK ADVISORY READ 4711 00:1a:12345 0 EOF
        if "->" in words or words[1] != "FLOCK":
            continue
        major, minor, number = words[5].split(":")
        if (int(major, 16), int(minor, 16), int(number)) == (*device, inode):
            found.add(int(words[4]))
    return found


def _device_of(path: Path) -> tuple[int, int]:
    """(major, minor) as the kernel lists locks. `st_dev` is another number on btrfs."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        info = Path(f"/proc/self/fdinfo/{fd}").read_text()
    finally:
        os.close(fd)
    (mount,) = (line.split()[1] for line in info.splitlines() if line.startswith("mnt_id:"))
    mounts = (line.split(maxsplit=3) for line in Path("/proc/self/mountinfo").read_text().splitlines())
    major, minor = {number: device for number, _, device, _ in mounts}[mount].split(":")
    return int(major), int(minor)
