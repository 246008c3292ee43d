"""After an epoch there is work for rank 0 alone: whether the others wait for it, and whom they miss."""

from __future__ import annotations

from collections.abc import Mapping

from gba_hvd.ps.coordinator.worker_seen import WorkerSeen

_CHIEF_S = 90.0  # so long an epoch's end waits for a world that has a rank 0
_MISSED_S = 1.0  # so long it waits for rank 0 before anybody looks whether that has died


class ChiefWatch:
    """Seconds are of the coordinator's clock."""

    def __init__(self) -> None:
        self._died_s: float | None = None  # until another worker is rank 0
        self._finished_s: float | None = None  # when a worker first learned that this epoch is over

    def died(self, now_s: float) -> None:
        self._died_s = now_s

    def lives(self) -> None:
        self._died_s = None

    def begin_epoch(self) -> None:
        self._finished_s = None

    def end_epoch(self, now_s: float) -> None:
        if self._finished_s is None:
            self._finished_s = now_s

    def is_awaited(self, worker: int, workers: Mapping[int, WorkerSeen], now_s: float) -> bool:
        """Whether this worker, which learns now that the epoch is over, waits: if rank 0 has died, until another is.

        It may have died a moment ago, so it must send something after the last step; its request counts.
        """
        assert self._finished_s is not None
        chiefs = {w: seen for w, seen in workers.items() if seen.rank == 0 and not seen.silent}
        if worker in chiefs:
            chiefs[worker].last_seen_s = now_s
        if chiefs:
            return all(seen.last_seen_s < self._finished_s for seen in chiefs.values())
        return self._died_s is not None and now_s - self._died_s < _CHIEF_S

    def missed(self, workers: Mapping[int, WorkerSeen], now_s: float) -> list[int]:
        """Workers of rank 0 that an epoch's end waits for, since they sent nothing after its last step."""
        finished_s = self._finished_s
        if finished_s is None or now_s - finished_s < _MISSED_S:
            return []
        return [w for w, seen in workers.items() if seen.rank == 0 and seen.last_seen_s < finished_s]
