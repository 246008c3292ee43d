"""The final checkpoint, when all workers are gone: saves what is newer than the one before it, before the memory goes.

When: half of the grace period is left to a restart, which would find everything in memory. Then the server holds the
memory's lock, so that the reaper waits, and releases it after the save, or when its time is over (`MemoryHold`). A
server that dies meanwhile releases it, too.

What (`FinalCheckpoint`): in an asynchronous mode all servers save; in allreduce mode the one of a single host, if the
training state was retained in memory, or those of several hosts if they agree (`final_checkpoint_hosts`). A server that
its coordinator does not ask only holds the memory, for as long as the save may take.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from gba_hvd.epoch import position_in
from gba_hvd.errors import GbaError
from gba_hvd.ps.coordinator.service import CoordinatorService
from gba_hvd.ps.messages import SaveStatus
from gba_hvd.ps.partition.saver import Saver
from gba_hvd.ps.server import final_checkpoint_hosts
from gba_hvd.ps.server.active_mode import ActiveMode
from gba_hvd.ps.state_files import MARK
from gba_hvd.shm import retained_state
from gba_hvd.shm.retained_state import RetainedState
from gba_hvd.shm.shard_memory import ShardMemory, no_process_lives
from recovery import state_codec

log = logging.getLogger("gba_hvd.ps")
_LOOK_S = 0.25


class MemoryHold:
    """When the memory is held for a final checkpoint. Belongs to the main thread; `end()` may be called twice."""

    def __init__(self, folder: Path, index: int, after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._mark = folder, folder / MARK.replace("*", str(index))
        self._after_s, self._limit_s, self._clock = after_s, 0.0, clock
        self._empty_since_s: float | None = None
        self._next_look_s = 0.0
        self._lock: int | None = None
        self._since_s = 0.0
        self._is_over = False

    @property
    def is_active(self) -> bool:
        return self._lock is not None

    @property
    def is_late(self) -> bool:
        return self.is_active and self._clock() - self._since_s > self._limit_s

    def is_due(self) -> bool:
        """Whether no process has lived here for long enough, with no final checkpoint since one did."""
        if self.is_active:
            return True
        now = self._clock()
        if now >= self._next_look_s:
            self._next_look_s = now + _LOOK_S
            try:
                is_empty = no_process_lives(self._folder)
            except FileNotFoundError:
                return False
            if not is_empty:
                self._empty_since_s, self._is_over = None, False
            elif self._empty_since_s is None:
                self._empty_since_s = now
        return self._empty_since_s is not None and now - self._empty_since_s >= self._after_s and not self._is_over

    def begin(self, limit_s: float) -> bool:
        """Hold the memory, at most for so long; False when another process has it just now, or it is gone."""
        try:
            lock = os.open(self._folder / "alive", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            self._mark.touch()  # first: a process that finds the lock taken finds out why
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock, self._limit_s, self._since_s = lock, limit_s, self._clock()
        return True

    def end(self) -> None:
        """Let go. It does not begin again before a process has lived here."""
        if self._lock is not None:
            self._is_over = True
            with contextlib.suppress(FileNotFoundError):
                self._mark.unlink()
            os.close(self._lock)
            self._lock = None


class FinalCheckpoint:
    """Belongs to the server's main thread."""

    def __init__(self, index: int, grace_s: float, memory: ShardMemory, mode: ActiveMode, saver: Saver) -> None:
        self._index, self._memory, self._mode, self._saver = index, memory, mode, saver
        self._memory_hold = MemoryHold(memory.folder, index, grace_s / 2)
        self._newest: SaveStatus | None = None  # what was the newest save when a last one was asked for

    def tick(self) -> None:
        """Hold the memory when it is time to, save once, and let go."""
        hold, limit_s = self._memory_hold, self._saver.final_checkpoint_s
        if limit_s <= 0 or not hold.is_due() or self._workers_are_alive():
            return
        if not hold.is_active:
            if hold.begin(limit_s):
                self._newest = None
                self._saver.workers_are_gone()
            return
        report = self._saver.report()
        if report.state == "running" and not hold.is_late:
            return
        if self._newest is None:
            self._newest = report
            if self._ask():
                return
        if hold.is_late or report != self._newest or not self._is_expected():
            log.warning("all workers are gone; the last checkpoint: %s %s", report.state or "none", report.facts)
            hold.end()

    def _workers_are_alive(self) -> bool:
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
        request.about.position = position_in(state_codec.decode(state.state)["position"])
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
        request.about.position = position_in(position)
        whole = final_checkpoint_hosts.collect_state(state.state, [mine], self._memory.layout.n_shards)
        self._saver.begin(request, shards, lambda extras: whole)
        return True
