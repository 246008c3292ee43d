"""Phases at which all workers submit their replicas (`worker/replica_worker.py`), and who has submitted."""

from __future__ import annotations

from collections.abc import Iterable


class ReplicaPhases:
    """gathered: the last phase for which all living workers submitted; a worker that takes too long is not awaited."""

    def __init__(self, longest_s: float) -> None:
        self.gathered = -1
        self._longest_s = longest_s
        self._submitted: dict[int, int] = {}  # by worker: the last phase
        self._awaited_s: dict[int, float] = {}  # by phase: since when

    def submitted(self, worker: int, phase: int, early: bool, living: Iterable[int], now_s: float) -> bool:
        """Whether this worker need not wait for others. early: it left its loop before its end, and waits for none."""
        self._submitted[worker] = max(phase, self._submitted.get(worker, -1))
        if phase <= self.gathered or early:
            return True
        since_s = self._awaited_s.setdefault(phase, now_s)
        awaited = any(self._submitted.get(other, -1) < phase for other in living)
        if awaited and now_s - since_s <= self._longest_s:
            return False
        self.gathered = phase
        self._awaited_s.clear()
        return True

    def trains(self, worker: int, run: int) -> None:
        """It asks for work of this run. If it had left its loop early, it is back."""
        if self.gathered < self._submitted.get(worker, -1) == 2 * run + 1:
            del self._submitted[worker]

    def leave(self, worker: int) -> None:
        self._submitted.pop(worker, None)
