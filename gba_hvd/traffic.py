"""Bytes on the wire, counted where they are handed to Horovod or to a socket.

By direction ("sent", "received"), mode, and kind: "dense" gradients and values, "rows" and their gradients, "header"
(keys of rows, and the numbers that travel along). What workers of a host leave each other in memory, or tell the
servers of their host, is no traffic. Horovod's own framing is not in it, nor TCP's: the interface counters of a host
say a little more.
"""

from __future__ import annotations

import threading

KINDS = ("dense", "rows", "header")


def ring(n_bytes: int, n_workers: int) -> int:
    """What one worker sends, and receives, when n_bytes are summed over all workers by a ring."""
    return 2 * (n_workers - 1) * n_bytes // n_workers


class Traffic:
    """One worker's bytes so far. Counted from any thread.

    mode: what the job is in; whoever changes it says so
    """

    def __init__(self) -> None:
        self.mode = "allreduce"
        self._bytes: dict[tuple[str, str, str], int] = {}
        self._told: dict[tuple[str, str, str], int] = {}
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
        fresh = {key: n - self._told.get(key, 0) for key, n in now.items()}
        self._told = now
        return {"_".join(key): n for key, n in fresh.items() if n}
