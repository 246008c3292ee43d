"""Which workers have died or send no heartbeats, at the coordinator. Its leases go to others then.

A process of the coordinator's own host is looked at; of another host its server is asked, and a worker of a host that
sends nothing either is evicted after a while. Heartbeats come to `coordinator`, which returns who is silent.
"""

from __future__ import annotations

import time

from gba_hvd.ps.coordinator.peers import Peers
from gba_hvd.ps.coordinator.service import CoordinatorService
from gba_hvd.ps.messages import ProbeProcess
from gba_hvd.shm.process_state import is_alive

_ASK_AGAIN_S = 1.0
_LATE_TICK_S = 1.0  # after such a pause of this server, no worker counts as silent for one tick
_DEAD_AFTER = 10  # a worker of another host that is silent for so many times `heartbeat_timeout_s` counts as dead


class FailureDetector:
    """Belongs to the server's main thread."""

    def __init__(self, peers: Peers, heartbeat_timeout_s: float) -> None:
        self._peers, self._heartbeat_timeout_s = peers, heartbeat_timeout_s
        self._looked_s = time.monotonic()
        self._asked_s: dict[int, float] = {}  # by worker: when its host's server was last asked

    def check(self, coordinator_service: CoordinatorService | None) -> None:
        """Called in every tick, also while there are no workers to look after (None)."""
        now, before = time.monotonic(), self._looked_s
        self._looked_s = now
        if coordinator_service is None:
            return
        coordinator, here = coordinator_service.coordinator, coordinator_service.part.enter.servers[0].host
        for worker, seen in list(coordinator.workers.items()):
            if seen.host == here and not is_alive(seen.pid):  # no need to wait until it is missed
                coordinator_service.is_dead(worker)
        coordinator_service.take_back_late_evaluations()
        # A server that was stopped or busy has not read any heartbeats: they are queued.
        silent = coordinator.fall_silent() if now - before < _LATE_TICK_S else []
        for worker in silent:
            coordinator_service.evaluations.leave(worker)
        for worker in {*silent, *coordinator.missed_chiefs()}:
            seen = coordinator.workers[worker]
            if time.monotonic() - seen.last_seen_s > _DEAD_AFTER * self._heartbeat_timeout_s and seen.host != here:
                # No server of that host answers; should it live, it comes back with a heartbeat.
                coordinator_service.is_dead(worker)
            elif seen.host != here and time.monotonic() - self._asked_s.get(worker, 0.0) > _ASK_AGAIN_S:
                self._asked_s[worker] = time.monotonic()
                server = self._peers.of_host(seen.host)
                if server is not None:
                    self._peers.send([server], worker, ProbeProcess(seen.pid))
