"""What a server reports to people and workers: heartbeats, `gba-hvd status`, `gba-hvd switch`."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

from gba_hvd.mode_names import known_mode
from gba_hvd.ps.coordinator.coordinator import Coordinator
from gba_hvd.ps.coordinator.recent_pace import RecentPace
from gba_hvd.ps.messages import HeartbeatMsg, JobPosition, SwitchTo
from gba_hvd.ps.partition.saver import Saver
from gba_hvd.ps.server.active_mode import ActiveMode
from recovery.redaction import redacted

_KEPT_DECISIONS = 10


class StatusService:
    """Belongs to the server's main thread."""

    def __init__(self, job: str, index: int, mode: ActiveMode, saver: Saver) -> None:
        self._job, self._index, self._mode, self._saver = job, index, mode, saver
        self.warming = False  # what an asynchronous mode needs is still being imported
        self._reported: dict[str, Any] = {}  # by the chief, in allreduce mode
        self._decisions: list[str] = []
        self._decided_unix_s: list[float] = []
        self._leaving: set[int] = set()  # workers that wait for a checkpoint

    def beat(self, request: HeartbeatMsg) -> JobPosition:
        """A worker lives; where training stands, for it."""
        self._saver.alive()
        self._mode.abandon(request.abandoned)
        if request.report:
            self._reported = dict(request.report)
        coordinator_service = self._mode.active_coordinator
        if coordinator_service is None:
            mode, reason = self._mode.requested_mode
            return JobPosition(
                requested_mode=mode, reason=reason, saved=self._saver.report(), server=os.getpid(), warming=self.warming
            )
        self._leaving = self._leaving - {request.worker} | ({request.worker} if request.leaving else set())
        position = coordinator_service.beat(request)
        if request.generation == 0:  # of this host's leader, which passes on orders to servers that do not coordinate
            position.requested_mode = position.reason = ""
        position.saved, position.server = self._saver.report(), os.getpid()
        if (held := self._saver.held) is not None:
            position.claim, position.first_epoch = held.claim, held.first_epoch
        position.leaving = not self._leaving.isdisjoint(coordinator_service.coordinator.workers)
        return position

    def switch(self, request: SwitchTo) -> None:
        """Raises BadInput for a mode that there is not."""
        known_mode(request.mode)
        coordinator_service = self._mode.active_coordinator
        if coordinator_service is None:
            self._mode.requested_mode = (request.mode, request.reason)
        elif not coordinator_service.request_mode(request):
            return
        decided = f"{request.mode}: {request.reason}"
        if self._decisions[-1:] != [decided]:  # it is asked again until the workers know
            self._decisions = [*self._decisions[1 - _KEPT_DECISIONS :], decided]
            self._decided_unix_s = [*self._decided_unix_s[1 - _KEPT_DECISIONS :], time.time()]

    def status(self) -> dict[str, Any]:
        report: dict[str, Any] = {"job": self._job, "server": self._index, "decisions": self._decisions}
        report["decided_unix_s"] = self._decided_unix_s
        report["checkpoints"] = redacted(self._saver.url)
        coordinator_service = self._mode.active_coordinator
        if coordinator_service is None:
            return {**report, "mode": "allreduce", **self._reported}
        report |= {
            name: self._reported[name]
            for name in ("last_decision", "decided_at_step", "setting")
            if name in self._reported
        }
        return {**report, **_of_asynchronous(coordinator_service.coordinator)}


def _of_asynchronous(coordinator: Coordinator) -> dict[str, Any]:
    now = time.monotonic()
    position = msgspec.to_builtins(coordinator.position(), str_keys=True)
    del position["arrivals"]  # the chief receives them at the end of an epoch
    return {
        "mode": coordinator.ledger.discipline.name,
        **position,
        "samples_per_s": round(coordinator.sample_pace.per_s(now), 1),
        "under_way": coordinator.ledger.n_outstanding,
        "refused_gradients": coordinator.refused_gradients,
        "by_worker": [
            {"rank": s.rank, "pid": s.pid, "host": s.host_name, "silent_s": round(now - s.last_seen_s, 1),
             "micro_batches": s.done, "seconds_per_micro_batch": round(s.seconds, 4),
             "idle_s": round(now - s.worked_s, 1), **_pace(s.pace, now)}
            for s in sorted(coordinator.workers.values(), key=lambda s: s.rank)
        ],
    }  # fmt: skip


def _pace(pace: RecentPace | None, now_s: float) -> dict[str, float]:
    """pace: None of a worker that has pushed nothing"""
    if pace is None or pace.last_s is None:
        return {}
    return {"micro_batches_per_s": round(pace.per_s(now_s), 2), "pushed_s": round(now_s - pace.last_s, 1)}
