"""Which micro-batch goes to whom, which pushes make a step, and what becomes of pushes in flight when a
server or worker dies: the ledger of one epoch in an asynchronous mode.

`Ledger` hands out leases on micro-batches, takes note of the pushes that came of them and decides the steps, so that
every micro-batch of the epoch is a member of exactly one applied step, through any failure. It holds no gradient and
does not look at the clock: the coordinator that owns it serialises the calls, says when a lease took too long, and has
the decided steps applied.

Micro-batch i has the token (step at the epoch's start) + i // M where a step is a global batch (`gba`, `bsp`), and the
step at which it was handed out elsewhere. Memory grows with what is in flight, not with what is done.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from gba_hvd.epoch import EpochPlan, SampleAccount, run_number
from gba_hvd.errors import BadInput, StateMismatch
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.coordinator.staleness import weighting
from gba_hvd.ps.messages import LeaseGrant

MAX_STALENESS = 1000  # the histogram's last key: this staleness or more
_FREE, _OTHERS = 2, 3  # lanes that no worker reads, and that others do
_REVOKED_KEPT = 4096  # revoked serials remembered; a push of an older one is ignored too, as a repeated one


@dataclass(frozen=True)
class Waiting:
    """Nothing to hand out now: ask again when something has changed."""

    reason: str


@dataclass(frozen=True)
class Finished:
    """Every micro-batch of the epoch is applied or dropped."""


@dataclass(frozen=True)
class Drained:
    """On hold at a step boundary, with nothing in flight."""


@dataclass(frozen=True)
class Member:
    """A push in a step. `weight` is f alone, 0 for a dropped one; `staleness` is k - token, in steps, 0 or more.

    refused: its gradient was not finite, so that no server has all of it. age: of the dense values that it was
    computed with, in steps; -1: not known. worker: that pushed it; -1: not known
    """

    micro: int
    serial: int
    weight: float
    n_samples: int
    staleness: int
    refused: bool = False
    age: int = -1
    worker: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class StepPlan:
    """A decided step: the number of steps applied after it, its members by index, and all their samples.

    overflowed: a gradient was not finite, so the step is skipped, where a ledger does that
    clipped: what its dense and its row gradients are multiplied by, and its norm before; None: not known, or not asked
    row_damping: by an update rule, of each member; None: not known, or not asked
    """

    step: int
    members: tuple[Member, ...]
    n_samples: int
    clipped: tuple[float, float, float] | None = None
    overflowed: bool = False
    row_damping: tuple[float, ...] | None = None


@dataclass(frozen=True)
class _Work:
    """A micro-batch in a worker's hands, or the push that came of it.

    values_step: the step of the dense values it was computed with; -1: not known, or not pushed yet
    """

    worker: int
    request: int
    micro: int
    serial: int
    token: int
    refused: bool = False
    values_step: int = -1


def _fields(work: _Work) -> list[Any]:
    return [work.worker, work.request, work.micro, work.serial, work.token, work.refused, work.values_step]


class Ledger:
    """The micro-batches of one epoch: still to come, handed out, pushed, in a decided step, done.

        lease -> accept -> next_step -> applied

    revoke, leave, lost_pushes and undo send micro-batches back to be handed out again, those first. Not thread-safe.

    A ledger resumes in another process from its `state()`. Save that before an answer leaves: a ledger restored from
    an older one would give out a serial twice.

    epoch, segment: which they are. steps_done: steps of the epoch that are done already; step: steps applied so far in
    the job; account: where the samples went, written here as steps are applied; last_serial: of the ledger before;
    skips: a step with a gradient that is not finite is skipped, with all its members; else that gradient is dropped.
    Raises BadInput.
    """

    def __init__(
        self,
        cut: EpochPlan,
        discipline: Discipline,
        *,
        epoch: int,
        segment: int = 0,
        steps_done: int,
        step: int,
        account: SampleAccount,
        last_serial: int = 0,
        skips: bool = False,
    ) -> None:
        if not 0 <= steps_done <= cut.n_steps:
            raise BadInput(f"steps_done must be from 0 to the epoch's {cut.n_steps} steps, got {steps_done}")
        self.cut, self.discipline, self.epoch, self.step, self.account = cut, discipline, epoch, step, account
        self.segment = segment
        self.skips = skips
        self.staleness_histogram: dict[int, int] = {}
        self.age_histogram: dict[int, int] = {}  # of the dense values, where they are known
        self.reissued = self.repeated = self.refused = 0
        self._weighting = weighting(discipline.staleness, discipline.tolerance)
        self._by_index = discipline.step_of == "batch"  # tokens; M pushes make a step
        self._first_step = step - steps_done
        self._n_total = -(-cut.n_samples // cut.micro_batch)
        self._next = self._n_resolved = min(steps_done * cut.n_micro, self._n_total)  # the first of the next row
        self._row: list[int] = []  # of the step that is being handed out: what is left, ascending
        self._readers: dict[int, list[int]] = {}  # by lane (index mod M): the last two workers that got it, newest last
        self._again: list[int] = []  # a heap: micro-batches to be handed out again
        self._serial = last_serial
        self._outstanding: dict[int, _Work] = {}  # by serial
        self._serial_of: dict[int, int] = {}  # by micro-batch, while outstanding
        self._serial_for: dict[tuple[int, int], int] = {}  # by worker and request, while outstanding
        self._revoked: dict[int, None] = {}  # serials, oldest first
        self._accepted: deque[_Work] = deque()  # not in a step yet, in the order they came
        self._decided: StepPlan | None = None
        self._held = False
        self._clock: dict[int, int] = {}  # by worker that is awaited: micro-batches it finished
        self._not_awaited: set[int] = set()  # workers that hang

    @property
    def run(self) -> int:
        return run_number(self.epoch, self.segment)

    # Workers

    def join(self, worker: int) -> None:
        """Know this worker from now on (asking for a lease does the same). A late joiner has the slowest clock."""
        if worker not in self._clock and worker not in self._not_awaited:
            self._clock[worker] = min(self._clock.values(), default=0)

    def leave(self, worker: int) -> list[int]:
        """The worker is gone: revoke its leases. What it pushed stays. Returns the micro-batches, ascending."""
        self._clock.pop(worker, None)
        self._not_awaited.discard(worker)
        for readers in self._readers.values():
            if worker in readers:
                readers.remove(worker)
        micros = sorted(lease.micro for lease in self.outstanding(worker))
        for micro in micros:
            self.revoke(micro)
        return micros

    def await_no_more(self, worker: int) -> None:
        """It hangs: no other worker waits for what it finishes. It may have leases all the same."""
        self._clock.pop(worker, None)
        self._not_awaited.add(worker)

    def await_again(self, worker: int) -> None:
        """It works: the others wait for it as soon as it joins, or asks for a lease."""
        self._not_awaited.discard(worker)

    # Leases

    def lease(self, worker: int, request: int) -> LeaseGrant | Waiting | Finished | Drained:
        """A micro-batch for this worker, or why there is none. A worker may hold several.

        Of those of one step a worker gets the lanes that it had before, if it can: what it reads for them is there.

        request: a number that the worker chose. The same one again gives the same lease as long as that is
        outstanding, for the answer may have been lost.
        """
        self.join(worker)
        known = self._serial_for.get((worker, request))
        if known is not None:
            return self._lease(self._outstanding[known])
        if self.finished:
            return Finished()
        if self.drained:
            return Drained()
        obstacle = self._obstacle(worker)
        if obstacle:
            return Waiting(obstacle)
        if self._again:
            micro = heapq.heappop(self._again)
            self.reissued += 1
        else:
            micro = self._take(worker)
        self._serial += 1
        work = _Work(worker, request, micro, self._serial, self._token(micro))
        self._hand_out(work)
        return self._lease(work)

    def expected(self, worker: int, n: int = 16) -> list[int]:
        """Micro-batches that this worker will probably get next, in this order; so many at most."""
        of_step, is_alone = self.cut.n_micro, len(self._clock) < 2
        lanes = [lane for lane in range(of_step) if is_alone or worker in self._readers.get(lane, ())]
        mine = set(lanes)
        found = [micro for micro in self._row if micro % of_step in mine]
        if not is_alone:
            found += [micro for micro in self._row if not self._readers.get(micro % of_step)][:1]
        first = self._next
        while lanes and first < self._n_total and len(found) < n:
            found += [first + lane for lane in lanes if first + lane < self._n_total]
            first += of_step
        return found[:n]

    def accept(
        self, worker: int, micro: int, serial: int, refused: str | None = None, values_step: int = -1
    ) -> Literal["accepted", "repeated", "revoked"]:
        """Every server has the push of this lease: it will be a member of a step, if the answer is "accepted".

        "repeated": it was accepted before; "revoked": it came too late, the micro-batch is for others to compute.
        refused: why its gradient must not be applied (not finite); it becomes a dropped member.
        values_step: the step of the dense values it was computed with, the oldest; -1: not known.
        """
        work = self._outstanding.get(serial)
        if work is None and 0 < serial <= self._serial and serial not in self._revoked:
            self.repeated += 1
            return "repeated"
        if work is None or (work.worker, work.micro) != (worker, micro):
            return "revoked"
        self._take_back(work)
        self._accepted.append(replace(work, refused=refused is not None, values_step=values_step))
        self.refused += refused is not None
        if worker in self._clock:
            self._clock[worker] += 1
        return "accepted"

    def revoke(self, micro: int) -> None:
        """The lease on this micro-batch took too long. Nothing happens if its push came in meanwhile."""
        serial = self._serial_of.get(micro)
        if serial is not None:
            self._take_back(self._outstanding[serial])
            self._compute_again(micro, serial)

    def outstanding(self, worker: int) -> list[LeaseGrant]:
        """The leases that this worker holds, oldest first."""
        return [self._lease(work) for work in self._outstanding.values() if work.worker == worker]

    # Steps

    def next_step(self) -> StepPlan | None:
        """Decide the next step. None while not enough is in, or while a decided step is not applied yet."""
        pushes = [] if self._decided is not None else self._pushes_of_step()
        if not pushes:
            return None
        members = tuple(self._member(work) for work in sorted(pushes, key=lambda work: work.micro))
        overflowed = self.skips and any(work.refused for work in pushes)
        if overflowed:
            members = tuple(replace(member, weight=0.0) for member in members)
        n_samples = sum(member.n_samples for member in members)
        self._decided = StepPlan(self.step + 1, members, n_samples, overflowed=overflowed)
        return self._decided

    def clip(self, dense_factor: float, row_factor: float, norm: float) -> None:
        """The decided step is measured: from here on this is how it is applied, even if servers die."""
        assert self._decided is not None
        self._decided = replace(self._decided, clipped=(dense_factor, row_factor, norm))

    def damp(self, factors: Sequence[float]) -> None:
        """How an update rule damps the row gradients of each member of the decided step, on every server alike."""
        assert self._decided is not None and len(factors) == len(self._decided.members)
        self._decided = replace(self._decided, row_damping=tuple(factors))

    def applied(self, step: int) -> None:
        """The decided step is applied: count its samples. Raises StateMismatch for any other step."""
        plan = self._decided
        if plan is None or plan.step != step:
            stands = "none is decided" if plan is None else f"step {plan.step} is the decided one"
            raise StateMismatch(f"epoch {self.epoch}: step {step} cannot have been applied, {stands}")
        for member in plan.members:
            self.account.total += member.n_samples
            if member.weight == 0:
                self._count_dropped(member, plan.overflowed)
            else:
                self.account.applied += member.n_samples
            key = min(member.staleness, MAX_STALENESS)
            self.staleness_histogram[key] = self.staleness_histogram.get(key, 0) + 1
            if member.age >= 0:
                age = min(member.age, MAX_STALENESS)
                self.age_histogram[age] = self.age_histogram.get(age, 0) + 1
        self.account.steps_skipped += plan.overflowed
        self._n_resolved += len(plan.members)
        self.step, self._decided = step, None

    def _count_dropped(self, member: Member, overflowed: bool) -> None:
        self.account.dropped += member.n_samples
        if overflowed:
            self.account.overflowed += member.n_samples
        elif member.refused:
            self.account.not_finite += member.n_samples

    def undo(self) -> None:
        """The decided step, if there is one, was applied nowhere: its members will be computed again."""
        if self._decided is not None:
            for member in self._decided.members:
                self._compute_again(member.micro, member.serial)
        self._decided = None

    def lost_pushes(self) -> list[int]:
        """A server lost its buffer: what is accepted and not in a decided step will be computed again.

        Returns those micro-batches, ascending.
        """
        micros = sorted(work.micro for work in self._accepted)
        for work in self._accepted:
            self._compute_again(work.micro, work.serial)
        self._accepted.clear()
        return micros

    # Stopping

    def hold(self) -> None:
        """Hand out no more than it takes to reach the next multiple of M; then leases are `Drained`."""
        self._held = True

    def release(self) -> None:
        """Resume after `hold`."""
        self._held = False

    @property
    def finished(self) -> bool:
        return self._n_resolved == self._n_total

    @property
    def drained(self) -> bool:
        in_flight = self._again or self._outstanding or self._accepted or self._decided
        return self._held and not self._row and not in_flight

    # A look

    @property
    def decided(self) -> StepPlan | None:
        """The step that is decided and not applied yet."""
        return self._decided

    @property
    def steps_done(self) -> int:
        """Steps of the epoch, of M micro-batches each, under any discipline."""
        return self.cut.n_steps if self.finished else self._n_resolved // self.cut.n_micro

    def resume_order(self) -> dict[int, int] | None:
        """How training resumes from here in order: index -> the micro-batch in its place, where another.

        What is not done yet stands at the positions from n_resolved on. None: not now, as a step is in flight, or a
        place has another number of samples.
        """
        if self._decided is not None or (not self.finished and self._n_resolved % self.cut.n_micro):
            return None
        open_ = sorted([*self._again, *self._row, *(work.micro for work in self._in_flight())])
        moved = {place: micro for place, micro in enumerate(open_, self._n_resolved) if place != micro}
        samples = self.cut.samples_of_micro
        return moved if all(samples(place) == samples(micro) for place, micro in moved.items()) else None

    @property
    def n_outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def n_waiting(self) -> int:
        """Samples of pushes that are accepted and in no decided step."""
        return sum(self.cut.samples_of_micro(work.micro) for work in self._accepted)

    @property
    def last_serial(self) -> int:
        """The newest serial given. The ledger of the next epoch resumes from it: no two leases are ever the same."""
        return self._serial

    @property
    def oldest_serial(self) -> int:
        """Pushes of leases with a smaller serial will not be members of any step to come."""
        first = islice(self._outstanding, 1)  # serials grow, so the first is the oldest
        in_flight = [*first, *(work.serial for work in self._accepted)]
        return min(in_flight, default=self._serial + 1)

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON or msgpack."""
        plan = self._decided
        return {
            "cut": vars(self.cut).copy(),
            "discipline": vars(self.discipline).copy(),
            "epoch": self.epoch,
            "segment": self.segment,
            "step": self.step,
            "account": vars(self.account).copy(),
            "histogram": [list(pair) for pair in sorted(self.staleness_histogram.items())],
            "ages": [list(pair) for pair in sorted(self.age_histogram.items())],
            "reissued": self.reissued,
            "repeated": self.repeated,
            "refused": self.refused,
            "first_step": self._first_step,
            "next": self._next,
            "row": list(self._row),
            "n_resolved": self._n_resolved,
            "again": sorted(self._again),
            "serial": self._serial,
            "outstanding": [_fields(work) for work in self._outstanding.values()],
            "revoked": list(self._revoked),
            "accepted": [_fields(work) for work in self._accepted],
            "decided": None if plan is None else [list(vars(member).values()) for member in plan.members],
            "skips": self.skips,
            "overflowed": plan is not None and plan.overflowed,
            "clipped": None if plan is None or plan.clipped is None else list(plan.clipped),
            "row_damping": None if plan is None or plan.row_damping is None else list(plan.row_damping),
            "held": self._held,
            "clock": [list(pair) for pair in self._clock.items()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ledger:
        """The ledger that `state()` was taken from, with an account of its own."""
        cut, discipline = EpochPlan(**state["cut"]), Discipline(**state["discipline"])
        account = SampleAccount(**state["account"])
        ledger = cls(
            cut,
            discipline,
            epoch=state["epoch"],
            segment=state.get("segment", 0),
            steps_done=0,
            step=state["step"],
            account=account,
            skips=state["skips"],
        )
        ledger.staleness_histogram = {key: count for key, count in state["histogram"]}
        ledger.age_histogram = {age: count for age, count in state.get("ages", ())}
        ledger.reissued, ledger.repeated, ledger.refused = state["reissued"], state["repeated"], state["refused"]
        ledger._first_step, ledger._next, ledger._n_resolved = state["first_step"], state["next"], state["n_resolved"]
        ledger._row = list(state.get("row", ()))
        if "row" not in state and ledger._next % cut.n_micro:  # a version before gave them out in order
            ledger._row = ledger._row_from(ledger._next)
            ledger._next += len(ledger._row)
        ledger._again, ledger._serial = list(state["again"]), state["serial"]  # sorted, so a heap
        for fields in state["outstanding"]:
            ledger._hand_out(_Work(*fields))
        ledger._revoked = dict.fromkeys(state["revoked"])
        ledger._accepted = deque(_Work(*fields) for fields in state["accepted"])
        if state["decided"] is not None:
            members = tuple(Member(*fields) for fields in state["decided"])
            clipped = None if state["clipped"] is None else tuple(state["clipped"])
            n_samples = sum(member.n_samples for member in members)
            damping = state.get("row_damping")
            ledger._decided = StepPlan(
                ledger.step + 1, members, n_samples, clipped, state["overflowed"],
                None if damping is None else tuple(damping),
            )  # fmt: skip
        ledger._held = state["held"]
        ledger._clock = {worker: clock for worker, clock in state["clock"]}
        return ledger

    # The rules of each discipline

    def _token(self, micro: int) -> int:
        return self._first_step + micro // self.cut.n_micro if self._by_index else self.step

    def _obstacle(self, worker: int) -> str | None:
        """Why this worker gets nothing now."""
        rules = self.discipline
        if self._nothing_to_hand_out:
            return "on hold" if self._next < self._n_total else "the last micro-batches of the epoch are in flight"
        if rules.name == "hop_bs":
            ahead = self._clock.get(worker, 0) - min(self._clock.values(), default=0)
            if ahead > rules.slack:
                return f"{ahead} micro-batches ahead of the slowest worker, the slack is {rules.slack}"
        elif rules.step_of == "round":
            if self._decided is not None:
                return f"step {self._decided.step} is being applied"
            if any(self._is_fresh(work) and work.worker == worker for work in self._in_flight()):
                return f"its part of step {self.step + 1} is done or in its hands"
        elif self._by_index and rules.lookahead is not None and not self._again:
            ahead = self._token(self._row[0] if self._row else self._next) - self.step
            if ahead > rules.lookahead:
                return f"the next micro-batch is {ahead} steps ahead, the lookahead is {rules.lookahead}"
        return None

    def _pushes_of_step(self) -> list[_Work]:
        """Take the pushes of the next step from the accepted ones; none if it is not complete."""
        if self.discipline.step_of == "round":
            return self._pushes_of_round()
        complete = self.cut.n_micro if self._by_index else 1
        if len(self._accepted) < complete and (self._outstanding or not self._nothing_to_hand_out):
            return []
        return [self._accepted.popleft() for _ in range(min(complete, len(self._accepted)))]

    def _pushes_of_round(self) -> list[_Work]:
        fresh = [work for work in self._accepted if self._is_fresh(work)]
        late = [work for work in self._accepted if not self._is_fresh(work)]
        complete = max(1, len(self._clock) - self.discipline.backups)
        if len(fresh) < complete:
            # Late ones alone make a step only when nothing else can come: they have to be counted somewhere.
            awaited = [work for work in self._outstanding.values() if self._is_fresh(work) or not fresh]
            if awaited or not self._nothing_to_hand_out:
                return []
        self._accepted = deque(fresh[complete:])
        return late + fresh[:complete]

    def _member(self, work: _Work) -> Member:
        staleness = max(0, self.step - work.token)
        weight = 1.0
        if work.refused or (self.discipline.step_of == "round" and not self._is_fresh(work)):
            weight = 0.0
        elif self.discipline.name == "gba":
            weight = self._weighting.weight(self._age(work) if self.discipline.staleness_of == "values" else staleness)
        n_samples = self.cut.samples_of_micro(work.micro)
        age = -1 if work.values_step < 0 else self._age(work)
        return Member(work.micro, work.serial, weight, n_samples, staleness, work.refused, age, work.worker)

    def _is_fresh(self, work: _Work) -> bool:
        return work.token == self.step

    def _age(self, work: _Work) -> int:
        """Steps since the dense values that a push was computed with; since its token where these are not known."""
        return max(0, self.step - (work.token if work.values_step < 0 else work.values_step))

    # Book-keeping

    @property
    def _nothing_to_hand_out(self) -> bool:
        return not self._again and not self._row and (self._next == self._n_total or self._held)

    def _take(self, worker: int) -> int:
        """The next micro-batch for this worker, of the step that is being handed out."""
        if not self._row:
            self._row = self._row_from(self._next)
            self._next += len(self._row)
        micro = min(self._row, key=lambda one: self._rank(worker, one))
        self._row.remove(micro)
        readers = self._readers.setdefault(micro % self.cut.n_micro, [])
        self._readers[micro % self.cut.n_micro] = [*(one for one in readers if one != worker), worker][-2:]
        return micro

    def _row_from(self, first: int) -> list[int]:
        """From a micro-batch on, those of its step."""
        return list(range(first, min((first // self.cut.n_micro + 1) * self.cut.n_micro, self._n_total)))

    def _rank(self, worker: int, micro: int) -> tuple[int, int]:
        """Whether the worker reads the lane of this micro-batch: the less, the sooner it gets it."""
        readers = self._readers.get(micro % self.cut.n_micro, [])
        if readers[-1:] == [worker]:
            return 0, micro
        if worker in readers:
            return 1, micro
        return (_OTHERS, -micro) if readers else (_FREE, micro)

    def _in_flight(self) -> list[_Work]:
        return [*self._outstanding.values(), *self._accepted]

    def _lease(self, work: _Work) -> LeaseGrant:
        return LeaseGrant(work.micro, work.serial, work.token, self.cut.samples_of_micro(work.micro))

    def _hand_out(self, work: _Work) -> None:
        self._outstanding[work.serial] = work
        self._serial_of[work.micro] = work.serial
        self._serial_for[work.worker, work.request] = work.serial

    def _take_back(self, work: _Work) -> None:
        del self._outstanding[work.serial], self._serial_of[work.micro], self._serial_for[work.worker, work.request]

    def _compute_again(self, micro: int, serial: int) -> None:
        heapq.heappush(self._again, micro)
        self._revoked[serial] = None
        if len(self._revoked) > _REVOKED_KEPT:
            del self._revoked[next(iter(self._revoked))]
