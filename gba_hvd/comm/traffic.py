"""Bytes on the wire, counted where they are handed to Horovod or to a socket.

By direction ("sent", "received"), mode, and kind: "dense" gradients and values, "rows" and their gradients, "header"
(keys of rows, and the numbers that travel along). What workers of a host leave each other in memory, or send the
servers of their host, is no traffic. Horovod's own framing is not in it, nor TCP's: the interface counters of a host
say a little more.

The account of all workers needs no message of its own: each worker's bytes since its last report travel with the commit
of a step, or, in an asynchronous mode, with the message that a push is everywhere. So it has what came up to a worker's
newest commit or push; in a failure, the bytes of about a step are missing from it or counted twice.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from recovery.units import size

KINDS = ("dense", "rows", "header")

Sums = tuple[int, int, int, int, int, int]
"""Bytes sent of each of KINDS, then received."""
NOTHING: Sums = (0, 0, 0, 0, 0, 0)


def added(one: Sums, other: Sums) -> Sums:
    a, b, c, d, e, f = (x + y for x, y in zip(one, other, strict=True))
    return a, b, c, d, e, f


def larger(one: Mapping[str, Sums], other: Mapping[str, Sums]) -> dict[str, Sums]:
    """Of two accounts by mode, whose counts only grow, what is known by either."""
    found = dict(one)
    for mode, sums in other.items():
        a, b, c, d, e, f = map(max, sums, found.get(mode, NOTHING))
        found[mode] = a, b, c, d, e, f
    return found


def sent_received(account: Mapping[str, Sums]) -> tuple[int, int]:
    """Bytes of an account by mode, over all modes and kinds."""
    n = len(KINDS)
    return sum(sum(sums[:n]) for sums in account.values()), sum(sum(sums[n:]) for sums in account.values())


def by_name(account: Mapping[str, Sums]) -> dict[str, int]:
    """ "sent_allreduce_dense" -> bytes, of an account by mode. What is 0 is left out."""
    names = [(direction, kind) for direction in ("sent", "received") for kind in KINDS]
    return {
        f"{direction}_{mode}_{kind}": n
        for mode, sums in account.items()
        for (direction, kind), n in zip(names, sums, strict=True)
        if n
    }


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


def words_of_all(sent: int, received: int) -> str:
    """`all workers so far: sent 2.5 MB, received 2.5 MB`."""
    return f"all workers so far: sent {size(sent)}, received {size(received)}"


def _kinds(n_bytes: Mapping[str, int]) -> str:
    parts = ", ".join(f"{kind} {size(n_bytes[kind])}" for kind in sorted(n_bytes, key=KINDS.index))
    return f"{size(sum(n_bytes.values()))} ({parts})"


class Traffic:
    """One worker's bytes so far. Counted from any thread.

    mode: what the job is in; set when it changes, and then the newest report counts as received
    """

    def __init__(self) -> None:
        self._mode = "allreduce"
        self._bytes: dict[tuple[str, str, str], int] = {}
        self._accounted = self._report = NOTHING
        self._reported: dict[tuple[str, str, str], int] = {}
        self._lock = threading.Lock()

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self.settle()
        self._mode = mode

    def report(self) -> Sums:
        """What the job's account lacks of this worker's bytes; each report has all of it, until `settle`."""
        with self._lock:
            total = dict.fromkeys(((way, kind) for way in ("sent", "received") for kind in KINDS), 0)
            for (direction, _, kind), n in self._bytes.items():
                total[direction, kind] += n
            a, b, c, d, e, f = (n - known for n, known in zip(total.values(), self._accounted, strict=True))
            self._report = a, b, c, d, e, f
            return self._report

    def settle(self) -> None:
        """The newest report is in the account."""
        with self._lock:
            self._accounted, self._report = added(self._accounted, self._report), NOTHING

    def count(self, direction: str, kind: str, n_bytes: int) -> None:
        with self._lock:
            key = direction, self._mode, kind
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
