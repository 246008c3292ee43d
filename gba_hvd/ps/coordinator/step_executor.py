"""Executes the coordinator's decisions, step by step, over all servers of the mode: a two-phase commit.

The ledger is a write-ahead log: a decision is saved in it before any server applies a part of it.

    decided -> saved in the ledger -> sent to the other servers, applied here -> all have applied it -> it counts

Where steps are clipped, the servers are first asked how large their parts of the gradient are:

    decided -> saved -> measured by all servers -> saved with its factors -> sent, applied, ...

Where an update rule damps gradients (`gap_aware`), the rows of a push are damped alike on every server: by the mean of
the rule's damping over the dense elements of all of them, also on a server that has none. That is asked before:

    decided -> saved -> damping of each member, from all servers -> saved with the step -> [measured ->] applied, ...

The coordinator computes both kinds of factors; a server sees them in `Apply` (damping also in the `Measure` of the
norm), after they are saved in the ledger. A server that died and came back has no older values: it reports that nothing
is damped there. A push that it lost is damped by the mean of the other servers.

Measuring changes nothing, so a step whose factors are not in the ledger was applied nowhere: a successor has it
measured again, by the servers that have pushes of it. A step whose factors exist is applied with these, even if servers
died meanwhile.

One step is in flight at a time. Killed at any point, the successor finds the decision in the ledger or not at all: a
step that was decided is sent again, and a server that has applied it repeats its answer (`partition`). A server that
has lost the pushes of a step has lost those of later ones, too: all these are then computed again, by free workers.
Between two steps a checkpoint that waits is begun.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from gba_hvd.errors import GbaError
from gba_hvd.ps.coordinator.coordinator import Coordinator
from gba_hvd.ps.coordinator.peers import Peers
from gba_hvd.ps.coordinator.pending_save import PendingSave
from gba_hvd.ps.messages import Applied, Apply, Discard, JobPosition, Measure, Measured, Refused, Save
from gba_hvd.ps.partition.partition import Partition
from gba_hvd.ps.partition.saver import Saver
from gba_hvd.ps.state_files import StateFiles
from gba_hvd.trace import TRACE

log = logging.getLogger("gba_hvd.ps")
_RESEND_S = 1.0


@dataclass
class _StepInFlight:
    """A decided step: which other servers have not applied it yet, and what it has cost so far."""

    request: Apply
    pending: set[int]
    sent_s: float
    lost: set[int] = field(default_factory=set)  # micro-batches that some server had no push of
    missed: int = 0


@dataclass
class _BeingMeasured:
    """A decided step: which servers have not reported its size and its damping, and what the others reported."""

    request: Measure
    pending: set[int]
    sent_s: float
    dense_squares: float = 0.0
    row_squares: float = 0.0
    damping: list[tuple[int, int, float]] = field(default_factory=list)

    def add(self, answer: Measured) -> None:
        self.dense_squares += answer.dense_squares
        self.row_squares += answer.row_squares
        self.damping += answer.damping or []

    def is_answered_by(self, answer: Measured) -> bool:
        """Not by one to the request before, which was repeated."""
        return answer.step == self.request.step and (answer.damping is not None) == self.request.damping


class StepExecutor:
    """In server 0. Belongs to its main thread.

    failure: why a step could not be applied, the answer to lease requests; there are no more steps then
    """

    def __init__(
        self, coordinator: Coordinator, part: Partition, peers: Peers, records: StateFiles, saver: Saver
    ) -> None:
        self.coordinator, self.part, self.failure = coordinator, part, ""
        self._peers, self._records = peers, records
        self._step_in_flight: _StepInFlight | None = None
        self._being_measured: _BeingMeasured | None = None
        self._next_save = PendingSave(part, peers, saver)

    def advance(self) -> None:
        """Decide and apply what is due."""
        while not self.failure and self._in_flight is None and (request := self.coordinator.decide()) is not None:
            if isinstance(request, Measure):
                self._measure(request)
                continue
            self._save_ledger()  # the decision, before anything of it is applied
            if TRACE is not None and (plan := self.coordinator.ledger.decided) is not None:
                dropped = [(m.micro, m.serial) for m in plan.members if m.weight == 0]
                TRACE.write("decided", generation=request.generation, step=request.step, dropped=dropped)
            self._step_in_flight = _StepInFlight(request, set(self._peers), time.monotonic())
            self._send(self._step_in_flight)
            try:
                answer = self.part.apply(request)
            except GbaError as error:  # nothing of it was applied, nothing after it will be: workers get the reason
                self.failure = f"step {request.step}: {error}"
                self._step_in_flight = None
                return
            self._note(self._step_in_flight, answer)

    def repeat(self) -> None:
        """Send the step again where no answer came for long."""
        step = self._in_flight
        if step is not None and time.monotonic() - step.sent_s > _RESEND_S:
            self._send(step)

    def measured_by(self, index: int, answer: Measured) -> bool:
        """A server's answer. Returns whether it was the last one: `advance` applies the step."""
        step = self._being_measured
        if step is None or not step.is_answered_by(answer) or index not in step.pending:
            return False
        step.pending.discard(index)
        step.add(answer)
        self._note_measured(step)
        return not step.pending

    def applied_by(self, index: int, answer: Applied) -> bool:
        """A server's answer. Returns whether it is news."""
        step = self._step_in_flight
        if step is None or answer.step != step.request.step or index not in step.pending:
            return False
        step.pending.discard(index)
        self._note(step, answer)
        return True

    def refused_by(self, index: int, number: int | None, answer: Refused) -> bool:
        """A server's answer to the request of this number, None: it is not known. Returns whether it ends the steps."""
        log.error("server %d refused: %s", index, answer.why)
        step = self._in_flight
        if step is None or index not in step.pending or number not in (None, step.request.step):
            return False
        self.failure = f"server {index} cannot take part in step {step.request.step}: {answer.why}"
        return True

    @property
    def _in_flight(self) -> _StepInFlight | _BeingMeasured | None:
        return self._step_in_flight or self._being_measured

    def _measure(self, request: Measure) -> None:
        if self._peers:
            self._save_ledger()  # who measures it is to find the same members in it later
        step = _BeingMeasured(request, set(self._peers), time.monotonic())
        try:
            step.add(self.part.measure(request))
        except Exception as error:  # a registered rule may raise any; nothing was sent: workers get the reason
            log.exception("step %d could not be measured", request.step)
            self.failure = f"step {request.step} could not be measured: {type(error).__name__}: {error}"
            return
        self._being_measured = step
        self._send(step)
        self._note_measured(step)

    def _note_measured(self, step: _BeingMeasured) -> None:
        if not step.pending:
            self._being_measured = None
            if step.request.damping:
                self.coordinator.damped(step.damping)
            else:
                self.coordinator.measured(step.dense_squares, step.row_squares)

    def _send(self, step: _StepInFlight | _BeingMeasured) -> None:
        step.sent_s = time.monotonic()
        self._peers.send(step.pending, step.request.step, step.request)

    def _note(self, step: _StepInFlight, answer: Applied) -> None:
        step.lost |= set(answer.missing)
        step.missed += answer.missed
        self.failure = self.failure or answer.failed
        if not step.pending:
            self.coordinator.applied(step.request.step, step.lost, step.missed)
            self._step_in_flight = None
            if step.lost:
                self._compute_again()
            self._save_ledger()
            self.save_between()

    # --- between two steps -------------------------------------------------------------------------------------------

    def resume_position(self) -> JobPosition | None:
        """Where another job would resume, in order; None while a step is in flight."""
        return None if self._in_flight is not None else self.coordinator.resume_position()

    @property
    def save_waits(self) -> bool:
        return self._next_save.is_waiting

    def save(self, request: Save, snapshot: bytes) -> None:
        """At the next moment between two steps. snapshot: the chief's training state."""
        self._next_save.ask(request, snapshot)
        self.save_between()

    def save_between(self) -> None:
        """Begin the checkpoint that waits, if there is one and no step is in flight."""
        if self._next_save.is_waiting and (position := self.resume_position()) is not None:
            self._next_save.begin(position, sorted(self.coordinator.workers))

    # --- after a server that died ------------------------------------------------------------------------------------

    def recover(self, torn: int) -> None:
        """Recover the pushes and the decided step that a dead server held. torn: shards it left in mid-step.

        With other servers, the step stays decided: it is sent to all of them again.
        """
        ledger, alone = self.coordinator.ledger, not self._peers
        decided = ledger.decided
        if decided is not None:
            begun, done = self.part.begun_and_done(decided.step)
            if alone and not begun:
                ledger.undo()
            else:
                missed = 0 if done and not torn else self.part.skip(decided.step)
                if alone:
                    self.coordinator.applied(decided.step, set(), missed)
        if ledger.decided is None:
            self._compute_again()
        else:  # the peers may still need what they have
            ledger.lost_pushes()

    def _save_ledger(self) -> None:
        self._records.save_ledger(self.coordinator.generation, self.coordinator.state())

    def _compute_again(self) -> None:
        """What waits for a step, or is on its way, and some server may have lost."""
        ledger = self.coordinator.ledger
        ledger.lost_pushes()
        if self._peers:
            self.coordinator.void = ledger.last_serial
            self._save_ledger()  # first: a successor must not count what is discarded
            self._peers.send(self._peers, 0, Discard(self.part.enter.generation, self.coordinator.void + 1))
