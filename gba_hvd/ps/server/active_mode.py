"""The asynchronous mode that a server serves: entering it, leaving it, and resuming it after a server that died.

What a crash leaves behind, in the order in which things are written:

    entering   dense part, ledger, session    no session, or the one before: the workers enter again
    leaving    session (idle)                 before the workers write shards: a successor leaves them alone
    abandoned  session (idle)                 a successor that finds the session before learns of it by a heartbeat
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gba_hvd.embedding.row_optimizers import TableOptimizers, build
from gba_hvd.ps.coordinator.coordinator import Coordinator
from gba_hvd.ps.coordinator.evaluations import Evaluations
from gba_hvd.ps.coordinator.peers import Peers
from gba_hvd.ps.coordinator.service import CoordinatorService
from gba_hvd.ps.coordinator.step_executor import StepExecutor
from gba_hvd.ps.launch import Settings
from gba_hvd.ps.messages import Answer, Enter, Export, Exported, Leave, ProtocolError, Refused
from gba_hvd.ps.partition.dense_part import DensePart
from gba_hvd.ps.partition.partition import Partition
from gba_hvd.ps.partition.saver import Saver
from gba_hvd.ps.state_files import StateFiles
from gba_hvd.shm import init_functions
from gba_hvd.shm.shard_memory import ShardMemory

log = logging.getLogger("gba_hvd.ps")


class ActiveMode:
    """Belongs to the server's main thread; `mine` may be asked by others.

    part, coordinating: of the newest mode, also when it is over; None: there was none, or this is not server 0
    requested_mode: (mode, reason) that an operator asks for while the workers apply the steps
    """

    def __init__(
        self, settings: Settings, memory: ShardMemory, records: StateFiles, peers: Peers, saver: Saver
    ) -> None:
        self.part: Partition | None = None
        self.coordinator_service: CoordinatorService | None = None
        self.requested_mode: tuple[str, str] = ("", "")
        self._settings, self._memory, self._records, self._peers, self._saver = settings, memory, records, peers, saver
        own = tuple(map(build, settings.own_row_optimizers))
        self._optimizer = TableOptimizers(build(settings.row_optimizer), own)
        for table in memory.layout.tables:
            if table.hashed is not None and table.hashed.init:
                init_functions.resolve(table.hashed.init)  # at the start, not in a step
        self._buffer_bytes = settings.buffer_bytes
        self._evaluations = Evaluations(settings.lease_s)
        self._abandoned = 0  # the newest generation that its workers abandoned
        self._everywhere = np.ones(memory.layout.n_shards, dtype=bool)

    @property
    def idle(self) -> bool:
        """Workers apply the steps; this server must not touch a shard."""
        return self.part is None or self.part.idle

    @property
    def active_coordinator(self) -> CoordinatorService | None:
        """Where this server is the coordinator's, while the mode is on."""
        return None if self.idle else self.coordinator_service

    def owned_shards(self) -> np.ndarray:
        """bool [S]: the shards whose rows are given out here."""
        part = self.part
        return self._everywhere if part is None else part.mine

    def active(self, generation: int) -> Partition:
        """Raises ProtocolError unless this is the newest mode here."""
        if self.part is None or self.part.enter.generation != generation:
            now = 0 if self.part is None else self.part.enter.generation
            raise ProtocolError(f"generation {generation} is not served here, it is {now}: the job switched meanwhile")
        return self.part

    def coordinated(self, generation: int) -> CoordinatorService:
        """Raises ProtocolError unless this is the newest mode here, and the coordinator's server."""
        self.active(generation)
        if self.coordinator_service is None:
            raise ProtocolError("this server is not the coordinator")
        return self.coordinator_service

    # --- changing it -------------------------------------------------------------------------------------------------

    def enter(self, request: Enter, frames: list[Any]) -> None:
        """Take over from the workers. Asked again, does nothing. Raises ProtocolError, then nothing is changed."""
        if self.part is not None and self.part.enter.generation == request.generation:
            return
        if request.generation == self._abandoned:
            raise ProtocolError(f"generation {request.generation} was abandoned by its workers: no worker is in it")
        if request.until_s and time.monotonic() > request.until_s:
            late_s = time.monotonic() - request.until_s
            raise ProtocolError(f"Enter comes {late_s:.1f} s after its time was over: the workers continued without it")
        coordinator = self._new_coordinator(request)  # what can be refused is tried before anything is changed
        dense = self._records.path("dense")
        part = Partition.begin(request, frames, dense, self._memory, self._optimizer, self._buffer_bytes)
        if self.part is not None:
            self.part.close()
        part.idle = self.idle  # as the one before, until all is written down
        self.part, self.coordinator_service = part, self._at_work(part, coordinator) if request.me == 0 else None
        self.requested_mode = ("", "")
        self._peers.connect(request)
        if self.coordinator_service is not None:
            self.coordinator_service.save_ledger()
        part.idle = False
        self._records.save_session(request, idle=False)

    def export(self, request: Export) -> tuple[Answer, Sequence[Any]]:
        """All of this server's dense state. Ends the mode if the request says so."""
        part, position = self.active(request.generation), None
        if request.position and self.coordinator_service is not None:
            position = self.coordinator_service.executor.resume_position()
            if position is None:
                return Refused("a step is in flight", retry=True), ()
        step, values, state = part.export(request.phase)
        if request.leaving and not part.idle:
            part.idle, part.mirrors = True, None
            # Before the workers write shards: a successor must leave them alone.
            self._records.save_session(part.enter, idle=True)
            part.release()  # last: the workers kill a writer that is none of them
        return Exported(step, position), (values, state)

    def abandon(self, generation: int) -> None:
        """The workers continued in allreduce mode without this mode: leave it, or never enter it.

        Nothing is applied from here on: an idle coordinator decides no step, `Measure` and `Apply` of another one are
        refused, a push only waits, and the same `Enter` changes nothing. Shards that workers have claimed stay theirs.
        """
        if not generation or generation == self._abandoned:
            return
        self._abandoned = generation
        part = self.part
        if part is None or part.enter.generation != generation or part.idle:
            return
        part.idle, part.mirrors = True, None
        self._records.save_session(part.enter, idle=True)
        part.release()  # last, as in `export`
        log.warning("mode %s of generation %d is left: its workers continued without it", part.enter.discipline["name"],
                    generation)  # fmt: skip

    def bye(self, request: Leave) -> None:
        """A worker leaves."""
        self._evaluations.leave(request.worker)
        if self.part is not None:
            self.part.forget_worker(request.worker, request.finished)
        if self.active_coordinator is not None:
            self.active_coordinator.bye(request)

    def resume(self) -> None:
        """Resume where a server that died stopped, if there was one."""
        session = self._records.session()
        if session is None:
            return
        enter, idle = session
        dense = self._records.path("dense")
        if idle:
            self.part = Partition(enter, DensePart.open(dense), self._memory, self._optimizer, self._buffer_bytes)
            return
        self.part, torn = Partition.resume(enter, dense, self._memory, self._optimizer, self._buffer_bytes)
        self.part.idle = False
        self._peers.connect(enter)
        if enter.me != 0:
            return
        coordinator = self._new_coordinator(enter)
        if (state := self._records.ledger(enter.generation)) is not None:
            coordinator.resume(state)
        self.coordinator_service = self._at_work(self.part, coordinator)
        self.coordinator_service.executor.recover(torn)
        self.coordinator_service.save_ledger()
        log.warning("resuming at step %d where a server that died stopped", coordinator.ledger.step)

    def _new_coordinator(self, enter: Enter) -> Coordinator:
        settings = self._settings
        try:
            return Coordinator(
                enter, heartbeat_timeout_s=settings.heartbeat_timeout_s, lease_s=settings.lease_s, clock=time.monotonic
            )
        except TypeError as error:  # a discipline or an account with names that it does not have
            raise ProtocolError(f"Enter: {error}") from error

    def _at_work(self, part: Partition, coordinator: Coordinator) -> CoordinatorService:
        coordinator.arrivals, coordinator.gaps = part.arrivals, part.gaps.by_worker
        executor = StepExecutor(coordinator, part, self._peers, self._records, self._saver)
        return CoordinatorService(executor, self._evaluations, self._records)
