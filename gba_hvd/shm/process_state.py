"""Whether a process of this machine runs, is stopped, or is gone."""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Running or stopped; a zombie that was not waited for is dead."""
    return _state_of(pid) not in ("", "Z", "X")


def is_stopped(pid: int) -> bool:
    """By a signal, or by a debugger."""
    return _state_of(pid) in ("T", "t")


def _state_of(pid: int) -> str:
    """The letter that the kernel has for it; empty: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
