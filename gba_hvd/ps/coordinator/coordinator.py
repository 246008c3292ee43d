"""The coordinator's decisions: who may compute what, when a step is decided, who is alive. One per job, in server 0.

Holds the ledger of the current epoch and what is known of the workers. It knows no sockets: the server gives it
requests and carries out the `Apply` that it decides. Everything that must survive the process is in `state()`, saved by
the server before any answer leaves.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from gba_hvd.epoch import EpochPlan, SampleAccount
from gba_hvd.gradients.clipping import Clip
from gba_hvd.gradients.loss_scale import LossScale
from gba_hvd.ps.coordinator.chief_watch import ChiefWatch
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.coordinator.job_counts import JobCounts
from gba_hvd.ps.coordinator.ledger import Drained, Finished, Ledger
from gba_hvd.ps.coordinator.newest_rates import NewestRates
from gba_hvd.ps.coordinator.recent_pace import RecentPace
from gba_hvd.ps.coordinator.replica_phases import ReplicaPhases
from gba_hvd.ps.coordinator.weighed_step import row_damping, weighed
from gba_hvd.ps.coordinator.worker_seen import WorkerSeen
from gba_hvd.ps.messages import (
    Apply,
    Enter,
    HeartbeatMsg,
    JobPosition,
    LeaseGrant,
    LeaseReply,
    LeaseRequest,
    Measure,
    Mismatch,
    ProtocolError,
    PushDone,
    ReplicaSubmitted,
)
from gba_hvd.update_rules import damps

log = logging.getLogger("gba_hvd.ps")


@dataclass(frozen=True)
class _Handed:
    """An outstanding lease, and since when."""

    serial: int
    worker: int
    given_s: float


_STOPPED_AFTER = 5  # a worker that lives is reported after so many times `heartbeat_timeout_s` without heartbeats
# Training ends when so many gradients in a row, of all workers, were not finite: steps, and micro-batches.
_REFUSED_STEPS, _REFUSED_AT_LEAST = 3, 100
_NORMS = 64  # of so many steps workers learn the norms: more than are made between two requests of a worker


class Coordinator:
    """Not thread-safe: belongs to the server's main thread. `clock` counts seconds."""

    def __init__(self, enter: Enter, *, heartbeat_timeout_s: float, lease_s: float, clock: Callable[[], float]) -> None:
        self._enter, self._heartbeat_timeout_s, self._lease_s, self._clock = enter, heartbeat_timeout_s, lease_s, clock
        position = enter.position
        self.account = SampleAccount(**position.account)
        self.loss_scale = None if enter.loss_scale is None else LossScale(**enter.loss_scale)
        at = position.epoch, position.segment
        self.ledger = self._ledger(at, enter.n_samples, position.steps_done, position.step)
        self._order: int | None = None  # digest of the ledger's samples in their order, as the first worker has them
        self.workers: dict[int, WorkerSeen] = {}
        for worker, rank, host, pid in enter.workers:  # one that dies before its first heartbeat is missed as well
            self.workers[worker] = WorkerSeen(rank, host, pid, clock(), clock())
            self.ledger.join(worker)
        self.moved = dict(position.remapped)
        self.world = position.membership_epoch
        self.requested_mode, self.reason, self.pin = "", "", False
        self._is_left = False  # a worker has learned that it is to leave the mode
        self.clip = Clip(enter.max_norm, enter.max_row_norm)
        self._damps_rows = damps(enter.rule)
        self.sample_pace = RecentPace(clock())  # of what is applied
        self.last_loss: float | None = None
        self.last_norm: float | None = None  # of the newest step's gradient, before it was clipped
        self._norms: deque[tuple[int, float]] = deque(maxlen=_NORMS)  # the same by step; a successor has none
        self._counts = JobCounts(position, enter.discipline["name"])
        self._rates = NewestRates(enter)
        self._losses: dict[int, float] = {}
        self._given: dict[int, _Handed] = {}  # by micro-batch: the newest lease on it
        self.refused_gradients: list[str] = []
        self._refused_in_a_row = 0
        self._ending = False
        # Both are counted by the part of this server.
        self.arrivals: Collection[list[tuple[int, float]]] = ()  # of the newest steps
        self.gaps: dict[int, tuple[int, float, float]] = {}  # by worker, as of `GapMeter.by_worker`
        self._chief = ChiefWatch()
        self._asked: dict[int, tuple[int, int]] = {}  # by worker: the epoch, and its segment, that it asked for last
        self.void = 0  # pushes of leases up to this serial number count for nothing: some server may have them no more
        self.replicas = ReplicaPhases(lease_s)

    @property
    def generation(self) -> int:
        return self._enter.generation

    # --- requests ----------------------------------------------------------------------------------------------------

    def ask(self, request: LeaseRequest) -> LeaseReply | None:
        """A lease, or why there is none; None while the worker should wait. Raises Mismatch."""
        try:
            self._rates.check(request)
        except ProtocolError as error:
            raise Mismatch(str(error)) from error
        ledger, at = self.ledger, (request.epoch, request.segment)
        seen = self.workers.get(request.worker)
        reads_ahead = seen is not None and (seen.lost_lease or bool(ledger.outstanding(request.worker)))
        if not reads_ahead or request.run > ledger.run:  # else another thread asks, for what comes later
            self.works(request.worker)
        if request.run < ledger.run:
            n_steps = self._cut(request.n_samples).n_steps
            return LeaseReply(self.position(at, n_steps, n_steps), None, "finished")
        is_first = self._asked_for(request.worker)[0] != request.epoch
        self._asked[request.worker] = at
        if request.run > ledger.run:
            if not ledger.finished and not self._all_left_early(request.worker):
                return None  # others still work on the epoch before
            if self._is_left or self.requested_mode not in ("", "auto", ledger.discipline.name):
                self._is_left = True
                return LeaseReply(self.position(at, 0, self._cut(request.n_samples).n_steps), None, "drained")
            if request.epoch > ledger.epoch and self._others_are_between_epochs():
                return None
            self._begin_epoch(at, request.n_samples)
            ledger = self.ledger
        self._check_samples(request)
        self._rates.take(request.epoch, request)
        if is_first:
            self.works(request.worker)  # what it did between two epochs is over
        self.replicas.trains(request.worker, request.run)
        answer = ledger.lease(request.worker, request.request)
        if isinstance(answer, LeaseGrant):
            handed = self._given.get(answer.micro)
            if handed is None or handed.serial != answer.serial:
                self._given[answer.micro] = _Handed(answer.serial, request.worker, self._clock())
            answer.expected = ledger.expected(request.worker)
            return LeaseReply(self.position(), answer)
        if isinstance(answer, Finished):
            return None if self._awaits_chief(request.worker) else LeaseReply(self.position(), None, "finished")
        if isinstance(answer, Drained):
            self._is_left = True
            return LeaseReply(self.position(), None, "drained")
        return None

    def _begin_epoch(self, at: tuple[int, int], n_samples: int) -> None:
        """at: the epoch and its segment. Raises BadInput, and changes nothing, if it has no samples."""
        before = self.ledger
        new = self._ledger(at, n_samples, 0, before.step, before.last_serial)
        self._counts.end_epoch(before)
        self.ledger, self._order = new, None
        self._chief.begin_epoch()
        for worker, seen in self.workers.items():
            if self._hangs(seen):
                self.ledger.await_no_more(worker)
            elif not seen.silent:
                self.ledger.join(worker)
        self._losses.clear()
        self.moved.clear()
        self._given.clear()

    def _check_samples(self, request: LeaseRequest) -> None:
        """Raises Mismatch where this worker does not have the samples of the others, in their order."""
        n_samples = self.ledger.cut.n_samples
        if request.n_samples != n_samples:
            raise Mismatch(
                f"epoch {request.epoch} has {n_samples} samples for others and {request.n_samples} here: "
                "all workers must run the same script on the same data"
            )
        if self._order is None:
            self._order = request.order
        elif self._order != request.order:
            raise Mismatch(
                f"epoch {request.epoch}: this worker has other samples than others, or the same in another order: all "
                "workers must run the same script, with the same seed, on the same data"
            )

    def _all_left_early(self, worker: int) -> bool:
        """This worker left the epoch before its end, and gives back what it held. When all did, the rest is skipped."""
        ledger = self.ledger
        ledger.leave(worker)
        asked = [self._asked_for(w) for w, seen in self.workers.items() if not seen.silent]
        return all(at > (ledger.epoch, ledger.segment) for at in asked) and ledger.decided is None

    def _asked_for(self, worker: int) -> tuple[int, int]:
        """Of a worker that asked for none yet: one before all others."""
        return self._asked.get(worker, (-1, 0))

    def _others_are_between_epochs(self) -> bool:
        """Whether others may be in code of the script that reads the model, as `save_model` or a metric of its own.

        All ask for an epoch before any step of it. Not awaited: workers that are gone or silent, that did not train in
        the epoch before, or have done nothing for longer than a micro-batch may take.
        """
        epoch = self.ledger.epoch
        others = {w: s for w, s in self.workers.items() if not s.silent and self._asked_for(w)[0] == epoch}
        if not all(map(self._hangs, others.values())):
            return True
        for late in others:
            self.took_too_long(late)
        return False

    def done(self, request: PushDone) -> str:
        """Every server has this push: "accepted", "repeated" or "revoked"."""
        if request.lrs:
            self._rates.check(request)
        self.works(request.worker)
        self._counts.sent(request.worker, request.traffic)
        answer = self.ledger.accept(
            request.worker, request.micro, request.serial, request.refused or None, request.dense_step
        )
        if answer == "accepted":
            self._given.pop(request.micro, None)
            if request.lrs:
                self._rates.take(self.ledger.epoch, request)
            if request.loss is not None:
                self._losses[request.serial] = request.loss
            if request.worker in self.workers:
                self.workers[request.worker].took(request.seconds, self._clock())
            self._refused_in_a_row = self._refused_in_a_row + 1 if request.refused else 0
            if request.refused:
                rank = self.workers[request.worker].rank if request.worker in self.workers else -1
                self.refused_gradients = [
                    *self.refused_gradients[-9:],
                    f"worker {rank}, micro-batch {request.micro}: {request.refused[:200]}",
                ]  # fmt: skip
        return answer

    def replica_submitted(self, request: ReplicaSubmitted) -> bool:
        """This worker submitted its replica. Whether all have: those that live, and are not at it for too long.

        One that left its loop early is not waited for, does not wait for others, and gives back its leases.
        """
        if request.early:
            self.give_back(request.worker)
        living = (w for w, seen in self.workers.items() if not seen.silent)
        return self.replicas.submitted(request.worker, request.phase, request.early, living, self._clock())

    def give_back(self, worker: int) -> None:
        """This worker left its loop early, and computes none of what it has leased. It may come back at any time."""
        self.works(worker)
        for micro in self.ledger.leave(worker):
            self._given.pop(micro, None)

    def lost_push(self, request: PushDone) -> None:
        """The push of a lease that is still out is gone: its micro-batch is computed again."""
        if any(lease.serial == request.serial for lease in self.ledger.outstanding(request.worker)):
            self.ledger.revoke(request.micro)
            self._given.pop(request.micro, None)

    def beat(self, request: HeartbeatMsg) -> None:
        if request.generation != self._enter.generation:
            return  # a host leader as client of its own server, or a worker that was away through a change of mode
        seen = self.workers.get(request.worker)
        if seen is None:
            seen = self.workers[request.worker] = WorkerSeen(
                request.rank, request.host, request.pid, self._clock(), self._clock()
            )
        seen.rank, seen.last_seen_s, seen.silent = request.rank, self._clock(), False
        seen.host_name = request.host_name
        if request.rank == 0:
            self._chief.lives()
        self.ledger.join(request.worker)
        if request.awaited and self.ledger.finished:
            self.works(request.worker)
        if request.hosts_updated and not self._ending:
            self.world += 1

    def bye(self, worker: int) -> None:
        """Training is over for this worker, so it is for all: no worker is let in any more."""
        self.ledger.leave(worker)
        self.workers.pop(worker, None)
        self._ending = True

    def dead(self, worker: int) -> None:
        """The worker is gone: the others form a new world."""
        self.replicas.leave(worker)
        self.ledger.leave(worker)
        seen = self.workers.pop(worker, None)
        self._drop_decision()
        if not self._ending:
            self.world += 1
            if seen is not None and seen.rank == 0:
                self._chief.died(self._clock())

    def _awaits_chief(self, worker: int) -> bool:
        """The epoch is over, and this worker learns of it: whether it waits for another worker to be rank 0."""
        now = self._clock()
        self._chief.end_epoch(now)
        return not self._ending and self._chief.is_awaited(worker, self.workers, now)

    def missed_chiefs(self) -> list[int]:
        """Workers of rank 0 that an epoch's end waits for, since they sent nothing after its last step."""
        return [] if self._ending else self._chief.missed(self.workers, self._clock())

    def fall_silent(self) -> list[int]:
        """Take the leases of workers without heartbeats; returns the silent ones, whose processes may be dead."""
        now = self._clock()
        for worker, seen in self.workers.items():
            if not seen.silent and now - seen.last_seen_s > self._heartbeat_timeout_s:
                seen.silent = True
                self.ledger.leave(worker)
                self._drop_decision()
        for micro, handed in list(self._given.items()):
            # A worker that never sent a heartbeat, or has left: its request was late.
            leased_to = self.workers.get(handed.worker)
            limit = self._heartbeat_timeout_s if leased_to is None else leased_to.longest_s(self._lease_s)
            if now - handed.given_s > limit:
                self.ledger.revoke(micro)
                del self._given[micro]
                self.took_too_long(handed.worker)
        for worker, seen in self.workers.items():
            if self._hangs(seen):
                self.ledger.await_no_more(worker)
        return [worker for worker, seen in self.workers.items() if seen.silent]

    def _hangs(self, seen: WorkerSeen) -> bool:
        return seen.hangs(self._clock(), self._lease_s)

    def took_too_long(self, worker: int) -> None:
        """A lease of this worker is for others now, though it lives."""
        if worker in self.workers:
            self.workers[worker].lost_lease = True

    def works(self, worker: int) -> None:
        """The thread of this worker that trains did something."""
        if worker in self.workers:
            self.workers[worker].worked_s, self.workers[worker].lost_lease = self._clock(), False
            self.ledger.await_again(worker)

    def request_mode(self, mode: str, reason: str, pin: bool, world: int | None = None) -> bool:
        """Another mode is requested: stop at the next step boundary. Whether the request counts.

        "auto" and this mode are for the workers to note, and end a stop, unless some worker is leaving already.
        pin: by an operator or a plan, which a decision by measurements that comes later does not replace.
        world: the membership that the chief knew; None: any
        """
        if self.pin and not pin and self.requested_mode not in ("", "auto"):
            return False  # the chief had not learned of it
        is_outdated = world is not None and world < self.world
        if not pin and (is_outdated or any(seen.silent for seen in self.workers.values())):
            return False  # it was decided with workers that are gone
        self.requested_mode, self.reason, self.pin = mode, reason, pin
        if mode not in ("auto", self.ledger.discipline.name):
            self.ledger.hold()
        elif not self._is_left:
            self.ledger.release()
        return True

    def _drop_decision(self) -> None:
        """A worker is gone: what measurements decided with it counts no more, unless some worker is leaving already.

        The chief decides again, by those that are left. What an operator or a plan asked for stays.
        """
        if self.pin or self._is_left or not self.requested_mode:
            return
        log.warning("a worker is gone, so the switch to %s is dropped (%s)", self.requested_mode, self.reason)
        self.requested_mode = self.reason = ""
        self.ledger.release()

    # --- steps -------------------------------------------------------------------------------------------------------

    def decide(self) -> Apply | Measure | None:
        """The next step, if one is due; or the one that was decided before a crash.

        `Measure` while an update rule is to damp its rows, or it is to be clipped, and the factors are not known yet:
        `damped` or `measured` comes next.
        """
        plan = self.ledger.decided or self.ledger.next_step()
        if plan is None:
            return None
        enter = self._enter
        sums = weighed(plan, enter.micro_batch, self.ledger.discipline, enter.row_average)
        losses = [(self._losses.pop(m.serial), m.n_samples) for m in plan.members if m.serial in self._losses]
        if losses:
            self.last_loss = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
        if sums.members:
            measure = Measure(enter.generation, plan.step, sums.members, sums.scale, sums.dropped, sums.n_micro)
            if plan.row_damping is None and self._damps_rows:
                return replace(measure, damping=True)
            if plan.clipped is None and not self.clip.is_none:
                return measure
        dense_factor, row_factor, self.last_norm = plan.clipped or (1.0, 1.0, None)
        return Apply(
            enter.generation, plan.step, sums.members, sums.scale,
            self._rates.row, self._rates.dense, self.ledger.oldest_serial,
            sorted(self.workers), dense_factor, row_factor, self.account.steps_skipped, sums.dropped, sums.n_micro,
            self._rates.settings,
        )  # fmt: skip

    def damped(self, answers: Sequence[tuple[int, int, float]]) -> None:
        """How the update rule damps the decided step's members, from every server (`Measured.damping`)."""
        plan = self.ledger.decided
        assert plan is not None
        self.ledger.damp(row_damping(plan, answers))

    def measured(self, dense_squares: float, row_squares: float) -> None:
        """The decided step is measured, over all servers: what it is multiplied by belongs to the decision."""
        factors = self.clip.factors(dense_squares, row_squares)
        self.ledger.clip(factors.dense, factors.rows, float(factors.norm or 0.0))

    def applied(self, step: int, lost_micros: set[int], shard_steps_missed: int) -> None:
        """The decided step is applied everywhere. `lost_micros`: members that some server had no push of any more."""
        plan = self.ledger.decided
        assert plan is not None
        if self.loss_scale is not None and (plan.overflowed or any(m.weight > 0 for m in plan.members)):
            self.loss_scale.step(plan.overflowed)
        self._counts.step(plan)
        lost = sum(m.n_samples for m in plan.members if m.weight > 0 and m.micro in lost_micros)
        self.ledger.applied(step)
        if plan.clipped is not None:
            self._norms.append((self.ledger.step, plan.clipped[2]))
        n_samples = 0 if plan.overflowed else sum(m.n_samples for m in plan.members if m.weight > 0)
        self.sample_pace.add(self._clock(), n_samples - lost)
        self.account.applied -= lost
        self.account.lost += lost
        self.account.shard_steps_missed += shard_steps_missed

    def _failure(self) -> str:
        """Why training makes no sense any more: nothing but gradients that are not finite."""
        limit = max(_REFUSED_AT_LEAST, _REFUSED_STEPS * self.ledger.cut.n_micro)
        if self._refused_in_a_row < limit:
            return ""
        return f"{self._refused_in_a_row} gradients in a row were not finite, the last of {self.refused_gradients[-1]}"

    # --- a look ------------------------------------------------------------------------------------------------------

    def position(
        self, at: tuple[int, int] | None = None, steps_done: int | None = None, n_steps: int | None = None
    ) -> JobPosition:
        """at: the epoch and its segment, when a worker asks for others than those of the ledger; then their steps."""
        ledger, counts = self.ledger, self._counts
        of_ledger = ledger.epoch, ledger.segment
        epoch, segment = at or of_ledger
        return JobPosition(
            step=ledger.step,
            epoch=epoch,
            segment=segment,
            steps_done=ledger.steps_done if steps_done is None else steps_done,
            n_steps=ledger.cut.n_steps if n_steps is None else n_steps,
            account=vars(self.account).copy(),
            staleness=counts.staleness(ledger),
            dense_ages=counts.dense_ages(ledger),
            traffic=counts.traffic(),
            gaps=sorted((s.rank, *self.gaps[w], w) for w, s in self.workers.items() if w in self.gaps),
            drops=counts.drops({w: seen.rank for w, seen in self.workers.items()}),
            refused=counts.refused(ledger),
            reissued=counts.reissued(ledger),
            n_waiting=ledger.n_waiting,
            loss=self.last_loss,
            grad_norm=self.last_norm,
            grad_norms=list(self._norms),
            loss_scale=None if self.loss_scale is None else self.loss_scale.now,
            rates=sorted((s.rank, s.seconds) for s in self.workers.values() if not s.silent),
            hanging=self._hanging(),
            newest=sorted((s.rank, w, s.done, s.newest_s) for w, s in self.workers.items() if not s.silent),
            computed=sorted((w, s.computed_s) for w, s in self.workers.items() if not s.silent),
            requested_mode=self.requested_mode,
            reason=self.reason,
            pinned=self.pin,
            failure=self._failure(),
            membership_epoch=self.world,
            remapped=self.moved if (epoch, segment) == of_ledger else {},
        )

    def _hanging(self) -> list[tuple[int, int, float]]:
        """Workers that live and do nothing: rank, process, and for how many seconds."""
        now, silent_s = self._clock(), _STOPPED_AFTER * self._heartbeat_timeout_s
        return sorted(
            (seen.rank, seen.pid, round(now - (seen.last_seen_s if seen.silent else seen.worked_s), 1))
            for seen in self.workers.values()
            if (seen.silent and now - seen.last_seen_s > silent_s) or (seen.lost_lease and self._hangs(seen))
        )

    def resume_position(self) -> JobPosition | None:
        """Where another job would resume, in order; None while a step is in flight."""
        moved = self.ledger.resume_order()
        if moved is None:
            return None
        position = self.position()
        position.remapped = {**self.moved, **{place: self.moved.get(micro, micro) for place, micro in moved.items()}}
        return position

    def state(self) -> dict[str, Any]:
        """Plain values; `resume` is the inverse."""
        return {
            "ledger": self.ledger.state(),
            "n_samples": self.ledger.cut.n_samples,
            "workers": [[w, s.rank, s.host, s.pid] for w, s in self.workers.items()],
            "world": self.world,
            "wanted": self.requested_mode,
            "reason": self.reason,
            "pin": self.pin,
            **self._counts.state(),
            **self._rates.state(),
            "moved": [[place, micro] for place, micro in self.moved.items()],
            "gathered": self.replicas.gathered,
            "loss_scale": None if self.loss_scale is None else list(self.loss_scale.now),
            "void": self.void,
            "order": self._order,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a coordinator that died; workers get the full heartbeat time-out."""
        self.ledger = Ledger.from_state(state["ledger"])
        self.account = self.ledger.account
        now = self._clock()
        self.workers = {w: WorkerSeen(rank, host, pid, now, now) for w, rank, host, pid in state["workers"]}
        # Perhaps: no state says which of them asked for the next one.
        self._asked = dict.fromkeys(self.workers, (self.ledger.epoch, self.ledger.segment))
        if self.workers and all(seen.rank for seen in self.workers.values()):
            # Rank 0 had died. If another worker is by now, its next heartbeat says so.
            self._chief.died(now)
        self.world, self.requested_mode, self.reason = state["world"], state["wanted"], state["reason"]
        self.pin = state["pin"]
        self._is_left = state["ledger"]["held"]  # perhaps: no state says whether a worker had learned of it
        self._counts.resume(state)
        self._rates.resume(state)
        self._given = {
            micro: _Handed(serial, worker, now) for worker, _, micro, serial, *_ in state["ledger"]["outstanding"]
        }
        self.moved = dict(state["moved"])
        self.replicas.gathered = state["gathered"]
        self.void, self._order = state.get("void", 0), state.get("order")
        if self.loss_scale is not None:
            self.loss_scale.load(state["loss_scale"])

    def _cut(self, n_samples: int) -> EpochPlan:
        return EpochPlan(n_samples, self._enter.global_batch, self._enter.micro_batch)

    def _ledger(self, at: tuple[int, int], n_samples: int, steps_done: int, step: int, last_serial: int = 0) -> Ledger:
        """at: the epoch and its segment."""
        discipline = Discipline(**self._enter.discipline)
        return Ledger(
            self._cut(n_samples),
            discipline,
            epoch=at[0],
            segment=at[1],
            steps_done=steps_done,
            step=step,
            account=self.account,
            last_serial=last_serial,
            skips=self.loss_scale is not None,
        )
