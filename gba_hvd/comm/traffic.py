"""Bytes on the wire, counted where they are handed to Horovod or to a socket.

By direction ("sent", "received"), mode, and kind: "dense" gradients and values, "rows" and their gradients, "header"
(keys of rows, and the numbers that travel along). What workers of a host leave each other in memory, or send the
servers of their host, is no traffic. Horovod's own framing is not in it, nor TCP's: the interface counters of a host
say a little more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

KINDS = ("dense", "rows", "header")


def ring(n_bytes: int, n_workers: int) -> int:
    """What one worker sends, and receives, when n_bytes are summed over all workers by a ring."""
    return 2 * (n_workers - 1) * n_bytes // n_workers


def words(n_bytes: Mapping[str, int]) -> str:
    """`allreduce: sent 1.3 MB (dense 614.7 kB, rows 700.0 kB, header 720 B), received as much`. What is 0 is left out.

    n_bytes: as `Traffic.since_last` returns them
    """
    by_mode: dict[str, dict[str, dict[str, int]]] = {}
    for name, n in n_bytes.items():
        direction, _, rest = name.partition("_")
        mode, _, kind = rest.rpartition("_")  # modes such as hop_bs have a _ of their own
        if n:
            by_mode.setdefault(mode, {}).setdefault(direction, {})[kind] = n
    lines = []
    for mode, directions in by_mode.items():
        sent, received = directions.get("sent", {}), directions.get("received", {})
        parts = [f"sent {_kinds(sent)}"] if sent else []
        if received:
            parts.append("received as much" if received == sent else f"received {_kinds(received)}")
        lines.append(f"{mode}: {', '.join(parts)}")
    return "; ".join(lines)


def _kinds(n_bytes: Mapping[str, int]) -> str:
    parts = ", ".join(f"{kind} {_size(n_bytes[kind])}" for kind in sorted(n_bytes, key=KINDS.index))
    return f"{_size(sum(n_bytes.values()))} ({parts})"


def _size(n_bytes: float) -> str:
    """Powers of 1000, as disks and networks count."""
    for unit, power in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= power:
            return f"{n_bytes / power:.1f} {unit}"
    return f"{n_bytes:.0f} B"


class Traffic:
    """One worker's bytes so far. Counted from any thread.

    mode: what the job is in; set when it changes
    """

    def __init__(self) -> None:
        self.mode = "allreduce"
        self._bytes: dict[tuple[str, str, str], int] = {}
        self._reported: dict[tuple[str, str, str], int] = {}
        self._lock = threading.Lock()

    def count(self, direction: str, kind: str, n_bytes: int) -> None:
        with self._lock:
            key = direction, self.mode, kind
            self._bytes[key] = self._bytes.get(key, 0) + n_bytes

    def both(self, kind: str, n_bytes: int) -> None:
        """As many bytes sent as received, as in collectives."""
        self.count("sent", kind, n_bytes)
        self.count("received", kind, n_bytes)

    def so_far(self) -> dict[tuple[str, str, str], int]:
        """(direction, mode, kind) -> bytes."""
        with self._lock:
            return dict(self._bytes)

    def since_last(self) -> dict[str, int]:
        """ "sent_allreduce_dense" -> bytes since this was last asked; what was not used is left out."""
        now = self.so_far()
        fresh = {key: n - self._reported.get(key, 0) for key, n in now.items()}
        self._reported = now
        return {"_".join(key): n for key, n in fresh.items() if n}
