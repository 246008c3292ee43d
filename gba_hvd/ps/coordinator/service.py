"""The coordinator at work: what workers ask of it, who waits for a lease, who has died.

`coordinator` decides, `executor` carries out its steps. What is done here is the order of things: what was decided is
saved before any answer leaves, then what has become possible is done, then who waits is answered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gba_hvd.ps.coordinator.evaluations import Evaluations
from gba_hvd.ps.coordinator.source_lists import SourceLists
from gba_hvd.ps.coordinator.step_executor import StepExecutor
from gba_hvd.ps.messages import (
    Answer,
    Applied,
    Evaluate,
    EvaluationReply,
    HeartbeatMsg,
    JobPosition,
    LeaseReply,
    LeaseRequest,
    Leave,
    Measured,
    Ok,
    OtherSources,
    ProcessAlive,
    ProtocolError,
    PushDone,
    Refused,
    ReplicaSubmitted,
    ReturnLeases,
    Score,
    Sources,
    SwitchTo,
    TrainingFailed,
)
from gba_hvd.ps.request_port import Requester, refused_by
from gba_hvd.ps.state_files import StateFiles

log = logging.getLogger("gba_hvd.ps")
_WAIT_S = 0.5  # longest time a `LeaseRequest` is queued before the answer is to wait


@dataclass(frozen=True)
class _Waiter:
    caller: Requester
    ask: LeaseRequest
    since_s: float


class CoordinatorService:
    """In server 0, of one mode, also when it is over. Belongs to the server's main thread."""

    def __init__(self, executor: StepExecutor, evaluations: Evaluations, records: StateFiles) -> None:
        self.executor, self.evaluations, self._records = executor, evaluations, records
        self.coordinator, self.part = executor.coordinator, executor.part
        self._waiters: list[_Waiter] = []
        self._source_lists = SourceLists()

    # --- what workers ask --------------------------------------------------------------------------------------------

    def ask(self, caller: Requester, request: LeaseRequest) -> Answer | None:
        """A lease, or why there is none; None: the caller is answered later."""
        ledger = self.coordinator.ledger
        answer = self._lease(request)
        if answer is None:
            asked = request.worker, request.request
            self._waiters = [w for w in self._waiters if (w.ask.worker, w.ask.request) != asked]
            self._waiters.append(_Waiter(caller, request, time.monotonic()))
        elif isinstance(answer, LeaseReply) and answer.lease is not None:
            self.save_ledger()
        if self.coordinator.ledger is not ledger:
            self._answer_waiters()  # of the new epoch, which this worker was the last to ask for
        return answer

    def done(self, request: PushDone) -> Ok:
        is_void = request.serial <= self.coordinator.void or (request.micro, request.serial) not in self.part.buffer
        if is_void and not request.refused:
            self.coordinator.lost_push(request)  # it went down with a server, unless the step had it already
        self.coordinator.done(request)
        before = self._records.n_ledgers
        self.advance()
        if self._records.n_ledgers == before:  # no step was decided, whose save has this in it
            self.save_ledger()
        return Ok(self.coordinator.position())

    def evaluate(self, request: Evaluate, frames: Sequence[Any]) -> tuple[EvaluationReply, Sequence[Any]]:
        self.coordinator.works(request.worker)
        return self.evaluations.ask(request, frames)

    def score(self, request: Score, frames: Sequence[Any]) -> Ok:
        self.coordinator.works(request.worker)
        self.evaluations.score(request, frames)
        return Ok()

    def sources(self, request: Sources, frames: Sequence[Any]) -> tuple[OtherSources, Sequence[Any]]:
        if len(frames) != 1:
            raise ProtocolError(f"Sources comes with one frame, got {len(frames)}")
        found = self._source_lists.add(request, bytes(frames[0]))
        if found is None:
            return OtherSources(), ()
        seen = self.coordinator.workers.get(found[0])
        return OtherSources(-1 if seen is None else seen.rank), found[1:]

    def beat(self, request: HeartbeatMsg) -> JobPosition:
        world = self.coordinator.world
        self.coordinator.beat(request)
        if self.coordinator.world != world:
            self.save_ledger()
        position = self.coordinator.position()
        position.sources_wanted = self._source_lists.wanted
        return position

    def request_mode(self, request: SwitchTo) -> bool:
        """Whether the request counts, see `Coordinator.request_mode`."""
        counts = self.coordinator.request_mode(request.mode, request.reason, request.pin, request.world)
        self.save_ledger()
        self.advance()
        return counts

    def replica_submitted(self, request: ReplicaSubmitted) -> Answer:
        before = self.coordinator.replicas.gathered
        if not self.coordinator.replica_submitted(request):
            return Refused("other workers have not submitted their replicas yet", retry=True)
        if request.early or self.coordinator.replicas.gathered != before:
            self.save_ledger()
        if request.early:
            self.advance()  # others may have its leases
        return Ok()

    def returned(self, request: ReturnLeases) -> Ok:
        self.coordinator.give_back(request.worker)
        self.save_ledger()
        self.advance()  # others may have its leases
        return Ok(self.coordinator.position())

    # --- who goes ----------------------------------------------------------------------------------------------------

    def bye(self, request: Leave) -> None:
        if request.worker not in self.coordinator.workers:
            return
        if request.finished:
            self.coordinator.bye(request.worker)
        else:  # its process may continue, but not as a worker of this world
            self.coordinator.dead(request.worker)
        self.save_ledger()
        self.advance()

    def is_dead(self, worker: int) -> None:
        if worker in self.coordinator.workers:
            log.warning("worker of rank %d is dead", self.coordinator.workers[worker].rank)
            self.coordinator.dead(worker)
            self.evaluations.leave(worker)
            self.part.forget_worker(worker)
            self.save_ledger()
            self.advance()

    def take_back_late_evaluations(self) -> None:
        for worker in self.evaluations.take_back_late():
            self.coordinator.took_too_long(worker)

    # --- what happens by itself --------------------------------------------------------------------------------------

    def tick(self) -> None:
        if self.part.idle:
            self._answer_waiters()
            return
        self.executor.repeat()
        self.advance()
        self.executor.save_between()

    def advance(self) -> None:
        """Decide and apply what is due, then answer who waits."""
        if not self.part.idle:
            self.executor.advance()
            self._answer_waiters()

    def peer_answered(self, index: int, number: int | None, answer: Answer) -> None:
        """What another server answers to the request of this number; None: it is not known."""
        if isinstance(answer, Refused) and not answer.retry:
            if self.executor.refused_by(index, number, answer):
                self._answer_waiters()
        elif isinstance(answer, Measured):
            if self.executor.measured_by(index, answer):
                self.advance()
        elif isinstance(answer, Applied):
            if self.executor.applied_by(index, answer):
                self.advance()
        elif isinstance(answer, ProcessAlive) and not answer.alive:
            assert number is not None
            self.is_dead(number)

    def save_ledger(self) -> None:
        self._records.save_ledger(self.coordinator.generation, self.coordinator.state())

    def _lease(self, request: LeaseRequest) -> Answer | None:
        if self.executor.failure:
            raise TrainingFailed(self.executor.failure)
        answer = self.coordinator.ask(request)
        if isinstance(answer, LeaseReply) and answer.lease is None and self._is_chief(request.worker):
            answer.position.arrivals = list(self.coordinator.arrivals)  # once an epoch: rank 0 reports them at the end
        return answer

    def _is_chief(self, worker: int) -> bool:
        seen = self.coordinator.workers.get(worker)
        return seen is not None and seen.rank == 0

    def _answer_waiters(self) -> None:
        waiting: list[_Waiter] = []
        answered: list[tuple[_Waiter, Answer]] = []
        for waiter in self._waiters:
            try:
                answer = self._lease(waiter.ask)
                if answer is None and time.monotonic() - waiter.since_s < _WAIT_S:
                    waiting.append(waiter)
                    continue
                answered.append((waiter, answer or LeaseReply(self.coordinator.position(), None, "wait")))
            except Exception as error:
                answered.append((waiter, refused_by(error)))
        self._waiters = waiting
        if any(isinstance(answer, LeaseReply) and answer.lease is not None for _, answer in answered):
            self.save_ledger()
        for waiter, answer in answered:
            waiter.caller.reply(answer)
