"""What training logs while something waits for companion servers that are not up, and when. No socket, no clock.

Training never waits for them, unless configured (`GBACallback(wait_s=...)`): allreduce continues, and a mode that
was asked for, or a checkpoint that is due, comes when the servers of all hosts answer. All workers know of that at the
same step, from numbers that travel with the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gba_hvd.callbacks import Event

FIRST_S, AGAIN_S = 5.0, 60.0  # a wait of so long is reported; then again, and then ever less often
LATE_S = 20.0  # servers that start take up to half of that where the host is busy


@dataclass
class Patience:
    """How long something has been waited for, and when to report it. Starts over when nothing waits."""

    first_s: float = FIRST_S
    again_s: float = AGAIN_S
    since_s: float | None = None
    next_s: float = 0.0

    def word(self, waits: bool, now_s: float) -> float | None:
        """The seconds waited so far, if they are due to be reported."""
        if not waits:
            self.since_s = None
            return None
        if self.since_s is None:
            self.since_s, self.next_s = now_s, self.first_s
        waited_s = now_s - self.since_s
        if waited_s < self.next_s:
            return None
        while self.next_s <= waited_s:  # several are due at once where this process was suspended
            self.next_s = self.again_s if self.next_s < self.again_s else 2 * self.next_s
        return waited_s


def missing(step: int, waiting: Sequence[str], waited_s: float, own: str) -> Event:
    """waiting: what waits, such as "mode gba" or "the checkpoint that is due".
    own: why this host's servers are not up; empty: they are, or this worker does not know.
    """
    hosts, why = ("this host", own) if own else ("another host", "the log of the workers there says why")
    text = (
        f"{' and '.join(waiting)}: waiting for {waited_s:.0f} s for the companion servers of {hosts}, training "
        f"continues in allreduce; {why}"
    )
    data = {"waiting": list(waiting), "seconds": round(waited_s, 1)}
    return Event("server_missing", step, text, data, level="warning")
