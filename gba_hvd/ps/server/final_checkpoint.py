"""The final checkpoint, when all workers are gone: saves what is newer than the one before it, before the memory goes.

`memory_hold` decides when. In an asynchronous mode all servers save; in allreduce mode the one of a single host, if the
training state was retained in memory, or those of several hosts if they agree (`final_checkpoint_hosts`). A server that
its coordinator does not ask only holds the memory, for as long as the save may take.
"""

from __future__ import annotations

import logging

from gba_hvd.errors import GbaError
from gba_hvd.ps.coordinator.service import CoordinatorService
from gba_hvd.ps.messages import SaveStatus
from gba_hvd.ps.partition.saver import Saver
from gba_hvd.ps.server import final_checkpoint_hosts
from gba_hvd.ps.server.active_mode import ActiveMode
from gba_hvd.ps.server.memory_hold import MemoryHold
from gba_hvd.shm import retained_state
from gba_hvd.shm.retained_state import RetainedState
from gba_hvd.shm.shard_memory import ShardMemory
from recovery import state_codec

log = logging.getLogger("gba_hvd.ps")


class FinalCheckpoint:
    """Belongs to the server's main thread."""

    def __init__(self, index: int, grace_s: float, memory: ShardMemory, mode: ActiveMode, saver: Saver) -> None:
        self._index, self._memory, self._mode, self._saver = index, memory, mode, saver
        self._gasp = MemoryHold(memory.folder, index, grace_s / 2)
        self._newest: SaveStatus | None = None  # what was the newest save when a last one was asked for

    def tick(self) -> None:
        """Hold the memory when it is time to, save once, and let go."""
        gasp, limit_s = self._gasp, self._saver.final_checkpoint_s
        if limit_s <= 0 or not gasp.is_due() or self._hears_workers():
            return
        if not gasp.is_under_way:
            if gasp.begin(limit_s):
                self._newest = None
                self._saver.workers_are_gone()
            return
        report = self._saver.report()
        if report.state == "running" and not gasp.is_late:
            return
        if self._newest is None:
            self._newest = report
            if self._ask():
                return
        if gasp.is_late or report != self._newest or not self._is_expected():
            log.warning("all workers are gone; the last checkpoint: %s %s", report.state or "none", report.facts)
            gasp.end()

    def _hears_workers(self) -> bool:
        """Those of other hosts, at the coordinator."""
        coordinator_service = self._mode.active_coordinator
        return coordinator_service is not None and any(
            not one.silent for one in coordinator_service.coordinator.workers.values()
        )

    def _is_expected(self) -> bool:
        """Whether one may still begin: the coordinator asks, or waits for a moment between two steps."""
        coordinator_service = self._mode.coordinator_service
        return not self._mode.idle and (coordinator_service is None or coordinator_service.executor.save_waits)

    def _ask(self) -> bool:
        """Whether something is being saved, or will be."""
        try:
            state = retained_state.read(self._memory.folder)
            if self._mode.idle or self._is_as_entered(state):
                return self._save_of_allreduce(state)
            coordinator_service = self._mode.coordinator_service
            if coordinator_service is None:
                return True  # its coordinator asks
            return self._save_of_all_servers(coordinator_service, state)
        except (GbaError, OSError, KeyError) as error:
            log.warning("no last checkpoint is made: %s", error)
            return False

    def _is_as_entered(self, state: RetainedState | None) -> bool:
        """Whether the state retained last is that of allreduce mode, and no step was made since."""
        part = self._mode.part
        return state is not None and not state.generation and part is not None and state.step == part.dense.step

    def _save_of_all_servers(self, coordinator_service: CoordinatorService, state: RetainedState | None) -> bool:
        generation = coordinator_service.coordinator.generation
        request = self._saver.last_request(coordinator_service.coordinator.ledger.step, 0, generation)
        if request is None or state is None or state.generation != generation:
            return False
        coordinator_service.executor.save(request, state.state)
        return True

    def _save_of_allreduce(self, state: RetainedState | None) -> bool:
        if not self._index and self._saver.n_hosts > 1:
            final_checkpoint_hosts.begin(self._saver, self._memory, state)
            return True
        shards = self._memory.ready()
        if self._index or state is None or state.generation or len(shards) < self._memory.layout.n_shards:
            return False
        position = state_codec.decode(state.state)["position"]
        request = self._saver.last_request(state.step, position["account"]["applied"])
        if request is None:
            return False
        mine = final_checkpoint_hosts.rows_of(self._memory, state.step)
        if mine.torn:
            request.about.torn_shards = mine.torn
        whole = final_checkpoint_hosts.collect_state(state.state, [mine], self._memory.layout.n_shards)
        self._saver.begin(request, shards, lambda extras: whole)
        return True
