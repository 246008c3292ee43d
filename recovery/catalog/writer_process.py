"""The process that wrote a claim, and whether it lives or has ended, as far as this host can know.

A number of a process means something on one boot of one machine, in one namespace of processes, and is used again: so
both and the time of its start are compared. Where the kernel does not tell these, nothing is known.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BOOT_ID, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class WriterProcess:
    """boot: of the kernel, and pids: of the namespace, "" and 0: not known; started: in ticks since the boot."""

    pid: int
    boot: str = ""
    pids: int = 0
    started: int = -1

    @classmethod
    def this(cls) -> WriterProcess:
        boot, pids = _here()
        return cls(os.getpid(), boot, pids, started("self"))

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> WriterProcess | None:
        """What a claim says of its writer; None: nothing, as of an earlier release."""
        pid, boot, pids, started = (about.get(name) for name in ("pid", "boot", "pids", "started"))
        if isinstance(pid, int) and isinstance(boot, str) and isinstance(pids, int) and isinstance(started, int):
            return cls(pid, boot, pids, started)
        return None

    def has_ended_here(self) -> bool:
        """False also where it is not known: the process is of another host, boot, or container."""
        return self._is_known_here and started(str(self.pid)) != self.started

    def lives_here(self) -> bool:
        """False also where it is not known. A stopped process lives."""
        return self._is_known_here and started(str(self.pid)) == self.started

    @property
    def _is_known_here(self) -> bool:
        return bool(self.boot) and self.pids > 0 and self.started >= 0 and (self.boot, self.pids) == _here()


@functools.cache
def _here() -> tuple[str, int]:
    try:
        return _BOOT_ID.read_text().strip(), _NAMESPACE.stat().st_ino
    except OSError:
        return "", 0


def started(pid: str) -> int:
    """When a process of this host began, in ticks since the boot; -1: it has ended, or there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
