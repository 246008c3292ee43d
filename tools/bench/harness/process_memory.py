"""What a worker's memory is: peaks, and pages that it maps from files which several workers share."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import numpy as np


def forget_peak() -> None:
    """The peak resident size, VmHWM, starts again."""
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(field: str, pid: int | str = "self") -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found, f"no {field} in /proc/{pid}/status"
    return int(found[1]) * 1024


def touch(prefix: str) -> None:
    """Read one byte of every page that is mapped from files under `prefix`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(prefix):
            start, end = (int(address, 16) for address in fields[0].split("-"))
            mapped = np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start))
            int(mapped[:: mmap.PAGESIZE].sum())


def shared_memory(prefix: str, smaps: str | None = None) -> dict[str, int]:
    """What this process maps from files under `prefix`: size of one copy, resident and proportional share, bytes."""
    text = Path("/proc/self/smaps").read_text() if smaps is None else smaps
    sizes = {"shared_bytes": 0, "shared_resident_bytes": 0, "shared_proportional_bytes": 0}
    names = {"Size": "shared_bytes", "Rss": "shared_resident_bytes", "Pss": "shared_proportional_bytes"}
    inside = False
    for line in text.splitlines():
        head = line.split(maxsplit=5)
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", head[0]):
            inside = len(head) == 6 and head[5].startswith(prefix)
        elif inside and head[0].rstrip(":") in names:
            sizes[names[head[0].rstrip(":")]] += int(head[1]) * 1024
    return sizes
