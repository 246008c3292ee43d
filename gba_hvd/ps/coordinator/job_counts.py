"""Counts over all epochs of a job: those of the ledgers before, and what workers and steps add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gba_hvd.comm.traffic import NOTHING, Sums, added
from gba_hvd.ps.coordinator.ledger import Ledger, StepPlan
from gba_hvd.ps.messages import JobPosition


class JobCounts:
    """What a ledger counts is added when its epoch is over; until then it is given to each look."""

    def __init__(self, position: JobPosition, mode: str) -> None:
        self._staleness, self._dense_ages = dict(position.staleness), dict(position.dense_ages)
        self._refused, self._reissued = position.refused, position.reissued
        self._mode = mode
        self._traffic_before = dict(position.traffic)
        self._traffic: dict[int, Sums] = {}  # by worker, of those that are gone, too; a successor has those that live
        self._drops: dict[int, tuple[int, int]] = {}  # by worker: its pushes in steps, those dropped as stale

    def staleness(self, ledger: Ledger) -> dict[int, int]:
        return _together(self._staleness, ledger.staleness_histogram)

    def dense_ages(self, ledger: Ledger) -> dict[int, int]:
        """The same of the dense values that gradients were computed with; of several servers, the oldest."""
        return _together(self._dense_ages, ledger.age_histogram)

    def refused(self, ledger: Ledger) -> int:
        return self._refused + ledger.refused

    def reissued(self, ledger: Ledger) -> int:
        return self._reissued + ledger.reissued

    def end_epoch(self, ledger: Ledger) -> None:
        self._staleness, self._dense_ages = self.staleness(ledger), self.dense_ages(ledger)
        self._refused, self._reissued = self.refused(ledger), self.reissued(ledger)

    def sent(self, worker: int, traffic: Sums) -> None:
        """traffic: of this worker since it came. Its requests may come in another order than it sent them."""
        self._traffic[worker] = max(self._traffic.get(worker, NOTHING), traffic)

    def traffic(self) -> dict[str, Sums]:
        """By mode."""
        sums = self._traffic_before.get(self._mode, NOTHING)
        for of_worker in self._traffic.values():
            sums = added(sums, of_worker)
        return {**self._traffic_before, self._mode: sums}

    def step(self, plan: StepPlan) -> None:
        for member in () if plan.overflowed else plan.members:
            pushes, dropped = self._drops.get(member.worker, (0, 0))
            is_stale = member.weight == 0 and not member.refused
            self._drops[member.worker] = pushes + (not member.refused), dropped + is_stale

    def drops(self, ranks: Mapping[int, int]) -> list[tuple[int, int, int, int]]:
        """Of these workers, as of `JobPosition`. ranks: by worker."""
        return sorted((rank, worker, *self._drops[worker]) for worker, rank in ranks.items() if worker in self._drops)

    def state(self) -> dict[str, Any]:
        return {
            "staleness": self._staleness,
            "lags": self._dense_ages,
            "refused": self._refused,
            "reissued": self._reissued,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        self._staleness = {int(k): v for k, v in state["staleness"].items()}
        self._dense_ages = {int(k): v for k, v in state.get("lags", {}).items()}
        self._refused, self._reissued = state["refused"], state["reissued"]


def _together(before: Mapping[int, int], now: Mapping[int, int]) -> dict[int, int]:
    """Two histograms as one."""
    total = dict(before)
    for key, count in now.items():
        total[key] = total.get(key, 0) + count
    return total
