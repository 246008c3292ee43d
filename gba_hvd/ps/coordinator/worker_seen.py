"""What the coordinator knows of one worker, and whether it hangs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gba_hvd.ps.coordinator.recent_pace import RecentPace

_PATIENCE = 4  # a lease may take so many times what the worker's micro-batches took, however short `lease_s` is


@dataclass
class WorkerSeen:
    """Seconds are of the coordinator's clock."""

    rank: int
    host: int
    pid: int
    last_seen_s: float
    worked_s: float  # when the thread that trains last did something: heartbeats come from another one
    silent: bool = False
    lost_lease: bool = False  # it took too long for one, and that thread did nothing since
    seconds: float = 0.0  # per micro-batch, recent mean
    newest_s: float = 0.0  # the same of the newest one
    computed_s: float = 0.0  # of all of them
    done: int = 0
    host_name: str = ""  # for people
    pace: RecentPace | None = None  # in micro-batches

    def took(self, seconds: float, now_s: float) -> None:
        self.pace = self.pace or RecentPace(now_s)
        self.pace.add(now_s)
        if not (math.isfinite(seconds) and seconds >= 0):
            return
        self.seconds = seconds if not self.done else 0.8 * self.seconds + 0.2 * seconds
        self.newest_s = seconds
        self.computed_s += seconds
        self.done += 1

    def longest_s(self, lease_s: float) -> float:
        """So long a micro-batch of this worker may take."""
        return max(lease_s, _PATIENCE * self.seconds)

    def hangs(self, now_s: float, lease_s: float) -> bool:
        """It sends heartbeats, and has been at something else than training for longer than a micro-batch may take."""
        return now_s - self.worked_s > self.longest_s(lease_s)
