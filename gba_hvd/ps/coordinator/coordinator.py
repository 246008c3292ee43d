"""The coordinator's decisions: who may compute what, when a step is decided, who is alive. One per job, in server 0.

Holds the ledger of the current epoch and what is known of the workers. It knows no sockets: the server gives it
requests and carries out the `Apply` that it decides. Everything that must survive the process is in `state()`, saved by
the server before any answer leaves.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from gba_hvd.comm.traffic import NOTHING, Sums, added
from gba_hvd.epoch import EpochPlan, SampleAccount
from gba_hvd.gradients.clipping import Clip
from gba_hvd.gradients.loss_scale import LossScale
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.coordinator.ledger import Drained, Finished, Ledger, StepPlan
from gba_hvd.ps.coordinator.recent_pace import RecentPace
from gba_hvd.ps.messages import (
    Apply,
    Enter,
    GroupSetting,
    HeartbeatMsg,
    JobPosition,
    LeaseGrant,
    LeaseReply,
    LeaseRequest,
    Measure,
    Mismatch,
    PlannedMember,
    ProtocolError,
    PushDone,
    ReplicaSubmitted,
)
from gba_hvd.ps.validation import check_rates, check_settings
from gba_hvd.update_rules import damps

log = logging.getLogger("gba_hvd.ps")


@dataclass(frozen=True)
class _Handed:
    """An outstanding lease, and since when."""

    serial: int
    worker: int
    given_s: float


# Training ends when so many gradients in a row, of all workers, were not finite: steps, and micro-batches.
_STOPPED_AFTER = 5  # a worker that lives is reported after so many times `heartbeat_timeout_s` without heartbeats
_PATIENCE = 4  # a lease may take so many times what the worker's micro-batches took, however short `lease_s` is
_REFUSED_STEPS, _REFUSED_AT_LEAST = 3, 100
_CHIEF_S = 90.0  # so long an epoch's end waits for a world that has a rank 0
_NORMS = 64  # of so many steps workers learn the norms: more than are made between two requests of a worker
_MISSED_S = 1.0  # so long it waits for rank 0 before anybody looks whether that has died


@dataclass
class WorkerSeen:
    """What is known of one worker."""

    rank: int
    host: int
    pid: int
    last_seen_s: float
    worked_s: float  # when the thread that trains last did something: heartbeats come from another one
    silent: bool = False
    lost_lease: bool = False  # it took too long for one, and that thread did nothing since
    seconds: float = 0.0  # per micro-batch, recent mean
    newest_s: float = 0.0  # the same of the newest one
    computed_s: float = 0.0  # of all of them
    done: int = 0
    host_name: str = ""  # for people
    pace: RecentPace | None = None  # in micro-batches

    def took(self, seconds: float, now_s: float) -> None:
        self.pace = self.pace or RecentPace(now_s)
        self.pace.add(now_s)
        if not (math.isfinite(seconds) and seconds >= 0):
            return
        self.seconds = seconds if not self.done else 0.8 * self.seconds + 0.2 * seconds
        self.newest_s = seconds
        self.computed_s += seconds
        self.done += 1


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
        self._staleness_before, self._dense_ages_before = dict(position.staleness), dict(position.dense_ages)
        self._refused_before, self._reissued_before = position.refused, position.reissued
        self._lrs, self._row_lr, self._lrs_key = list(enter.lrs), enter.row_lr, (position.epoch, position.step)
        self._settings: list[dict[str, GroupSetting]] = []  # as of `Apply`
        self._losses: dict[int, float] = {}
        self._given: dict[int, _Handed] = {}  # by micro-batch: the newest lease on it
        self.refused_gradients: list[str] = []
        self._refused_in_a_row = 0
        self._ending = False
        # Both counted by the part of this server: by step, of the newest steps, and
        self.arrivals: Collection[list[tuple[int, float]]] = ()
        self.gaps: dict[int, tuple[int, float, float]] = {}  # by worker, as of `GapMeter.by_worker`
        self._drops: dict[int, tuple[int, int]] = {}  # by worker: its pushes in steps, those dropped as stale
        self._traffic_before = dict(position.traffic)
        self._traffic: dict[int, Sums] = {}  # by worker, of those that are gone, too; a successor has those that live
        self._chief_died_s: float | None = None  # until another worker is rank 0
        self._finished_s: float | None = None  # when a worker first learned that this epoch is over
        self._asked: dict[int, tuple[int, int]] = {}  # by worker: the epoch, and its segment, that it asked for last
        self.void = 0  # pushes of leases up to this serial number count for nothing: some server may have them no more
        self.gathered = -1  # the last phase for which all living workers submitted their replicas (`replica_worker`)
        self._handed: dict[int, int] = {}  # by worker: the last phase
        self._awaited_s: dict[int, float] = {}  # by phase: since when

    @property
    def generation(self) -> int:
        return self._enter.generation

    # --- requests ----------------------------------------------------------------------------------------------------

    def ask(self, request: LeaseRequest) -> LeaseReply | None:
        """A lease, or why there is none; None while the worker should wait. Raises Mismatch."""
        try:
            self._check_rates(request)
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
            new = self._ledger(at, request.n_samples, 0, ledger.step, ledger.last_serial)
            self._staleness_before, self._dense_ages_before = self.staleness(), self.dense_ages()
            self._refused_before += ledger.refused
            self._reissued_before += ledger.reissued
            self.ledger, self._order = new, None
            ledger = new
            self._finished_s = None
            for worker, seen in self.workers.items():
                if self._hangs(seen):
                    ledger.await_no_more(worker)
                elif not seen.silent:
                    ledger.join(worker)
            self._losses.clear()
            self.moved.clear()
            self._given.clear()
        if request.n_samples != ledger.cut.n_samples:
            raise Mismatch(
                f"epoch {request.epoch} has {ledger.cut.n_samples} samples for others and {request.n_samples} here: "
                "all workers must run the same script on the same data"
            )
        if self._order is None:
            self._order = request.order
        elif self._order != request.order:
            raise Mismatch(
                f"epoch {request.epoch}: this worker has other samples than others, or the same in another order: all "
                "workers must run the same script, with the same seed, on the same data"
            )
        self._take_rates(request.epoch, request)
        if is_first:
            self.works(request.worker)  # what it did between two epochs is over
        if self.gathered < self._handed.get(request.worker, -1) == 2 * request.run + 1:
            del self._handed[request.worker]  # it had left its loop early, and is back
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

    def _check_rates(self, request: LeaseRequest | PushDone) -> None:
        check_rates(request.lrs, len(self._enter.lrs) + 1)
        check_settings(request.settings, self._enter.optimizer.get("groups", ()))

    def _take_rates(self, epoch: int, request: LeaseRequest | PushDone) -> None:
        """Learning rates and settings as a worker had them after a step, unless newer ones are known.

        A worker that came late sends what was changed since: the changes before that stay.
        """
        if (epoch, request.lrs_step) >= self._lrs_key:
            *self._lrs, self._row_lr = request.lrs
            self._lrs_key = (epoch, request.lrs_step)
            if request.settings:
                known = self._settings or [{} for _ in request.settings]
                self._settings = [{**old, **new} for old, new in zip(known, request.settings, strict=True)]

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
            self._check_rates(request)
        self.works(request.worker)
        # Both only grow.
        self._traffic[request.worker] = max(self._traffic.get(request.worker, NOTHING), request.traffic)
        answer = self.ledger.accept(
            request.worker, request.micro, request.serial, request.refused or None, request.dense_step
        )
        if answer == "accepted":
            self._given.pop(request.micro, None)
            if request.lrs:
                self._take_rates(self.ledger.epoch, request)
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
        phase, now = request.phase, self._clock()
        self._handed[request.worker] = max(phase, self._handed.get(request.worker, -1))
        if request.early:
            self.give_back(request.worker)
        if phase <= self.gathered or request.early:
            return True
        since_s = self._awaited_s.setdefault(phase, now)
        awaited = [w for w, seen in self.workers.items() if not seen.silent and self._handed.get(w, -1) < phase]
        if awaited and now - since_s <= self._lease_s:
            return False
        self.gathered = phase
        self._awaited_s.clear()
        return True

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
            self._chief_died_s = None
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
        self._handed.pop(worker, None)
        self.ledger.leave(worker)
        seen = self.workers.pop(worker, None)
        self._drop_decision()
        if not self._ending:
            self.world += 1
            if seen is not None and seen.rank == 0:
                self._chief_died_s = self._clock()

    def _awaits_chief(self, worker: int) -> bool:
        """After an epoch there is work for rank 0 alone: if it has died, the others wait until another worker is.

        It may have died a moment ago, so it must send something after the last step; its request counts.
        """
        now = self._clock()
        if self._finished_s is None:
            self._finished_s = now
        if self._ending:
            return False
        chiefs = {w: seen for w, seen in self.workers.items() if seen.rank == 0 and not seen.silent}
        if worker in chiefs:
            chiefs[worker].last_seen_s = now
        if chiefs:
            return all(seen.last_seen_s < self._finished_s for seen in chiefs.values())
        died_s = self._chief_died_s
        return died_s is not None and now - died_s < _CHIEF_S

    def missed_chiefs(self) -> list[int]:
        """Workers of rank 0 that an epoch's end waits for, since they sent nothing after its last step."""
        finished_s = self._finished_s
        if finished_s is None or self._ending or self._clock() - finished_s < _MISSED_S:
            return []
        return [w for w, seen in self.workers.items() if seen.rank == 0 and seen.last_seen_s < finished_s]

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
            limit = self._heartbeat_timeout_s if leased_to is None else self._longest_s(leased_to)
            if now - handed.given_s > limit:
                self.ledger.revoke(micro)
                del self._given[micro]
                self.took_too_long(handed.worker)
        for worker, seen in self.workers.items():
            if self._hangs(seen):
                self.ledger.await_no_more(worker)
        return [worker for worker, seen in self.workers.items() if seen.silent]

    def _longest_s(self, seen: WorkerSeen) -> float:
        """So long a micro-batch of this worker may take."""
        return max(self._lease_s, _PATIENCE * seen.seconds)

    def _hangs(self, seen: WorkerSeen) -> bool:
        """It sends heartbeats, and has been at something else than training for longer than a micro-batch may take."""
        return self._clock() - seen.worked_s > self._longest_s(seen)

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
            self._row_lr, self._lrs, self.ledger.oldest_serial,
            sorted(self.workers), dense_factor, row_factor, self.account.steps_skipped, sums.dropped, sums.n_micro,
            self._settings,
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
        for m in () if plan.overflowed else plan.members:
            pushes, dropped = self._drops.get(m.worker, (0, 0))
            self._drops[m.worker] = pushes + (not m.refused), dropped + (m.weight == 0 and not m.refused)
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

    def staleness(self) -> dict[int, int]:
        return _together(self._staleness_before, self.ledger.staleness_histogram)

    def dense_ages(self) -> dict[int, int]:
        """The same of the dense values that gradients were computed with; of several servers, the oldest."""
        return _together(self._dense_ages_before, self.ledger.age_histogram)

    def _all_traffic(self) -> dict[str, Sums]:
        sums, mode = NOTHING, self._enter.discipline["name"]
        for of_worker in self._traffic.values():
            sums = added(sums, of_worker)
        return {**self._traffic_before, mode: added(self._traffic_before.get(mode, NOTHING), sums)}

    def position(
        self, at: tuple[int, int] | None = None, steps_done: int | None = None, n_steps: int | None = None
    ) -> JobPosition:
        """at: the epoch and its segment, when a worker asks for others than those of the ledger; then their steps."""
        ledger = self.ledger
        of_ledger = ledger.epoch, ledger.segment
        epoch, segment = at or of_ledger
        return JobPosition(
            step=ledger.step,
            epoch=epoch,
            segment=segment,
            steps_done=ledger.steps_done if steps_done is None else steps_done,
            n_steps=ledger.cut.n_steps if n_steps is None else n_steps,
            account=vars(self.account).copy(),
            staleness=self.staleness(),
            dense_ages=self.dense_ages(),
            traffic=self._all_traffic(),
            gaps=sorted((s.rank, *self.gaps[w], w) for w, s in self.workers.items() if w in self.gaps),
            drops=sorted((s.rank, w, *self._drops[w]) for w, s in self.workers.items() if w in self._drops),
            refused=self._refused_before + ledger.refused,
            reissued=self._reissued_before + ledger.reissued,
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
            "staleness": self._staleness_before,
            "lags": self._dense_ages_before,
            "refused": self._refused_before,
            "reissued": self._reissued_before,
            "lrs": [*self._lrs, self._row_lr],
            "lrs_key": list(self._lrs_key),
            "settings": self._settings,
            "moved": [[place, micro] for place, micro in self.moved.items()],
            "gathered": self.gathered,
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
            self._chief_died_s = self._clock()
        self.world, self.requested_mode, self.reason = state["world"], state["wanted"], state["reason"]
        self.pin = state["pin"]
        self._is_left = state["ledger"]["held"]  # perhaps: no state says whether a worker had learned of it
        self._staleness_before = {int(k): v for k, v in state["staleness"].items()}
        self._dense_ages_before = {int(k): v for k, v in state.get("lags", {}).items()}
        self._refused_before, self._reissued_before = state["refused"], state["reissued"]
        self._given = {
            micro: _Handed(serial, worker, now) for worker, _, micro, serial, *_ in state["ledger"]["outstanding"]
        }
        *self._lrs, self._row_lr = state["lrs"]
        self._lrs_key = (state["lrs_key"][0], state["lrs_key"][1])
        self._settings = msgspec.convert(state.get("settings", []), list[dict[str, GroupSetting]])
        self.moved = dict(state["moved"])
        self.gathered, self.void, self._order = state["gathered"], state.get("void", 0), state.get("order")
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


def _together(before: Mapping[int, int], now: Mapping[int, int]) -> dict[int, int]:
    """Two histograms as one."""
    total = dict(before)
    for key, count in now.items():
        total[key] = total.get(key, 0) + count
    return total


def row_damping(plan: StepPlan, answers: Sequence[tuple[int, int, float]]) -> list[float]:
    """What the row gradients of each member are multiplied by: the mean of the rule's damping over all dense elements.

    answers: micro-batch, dense elements there, mean damping of these; of each server that has the push. A server
    without dense elements has no say, unless none has any. 1 for a push that no server has.
    """
    found = []
    for member in plan.members:
        own = [(n, factor) for micro, n, factor in answers if micro == member.micro]
        n_all = sum(n for n, _ in own)
        if n_all:
            found.append(sum(n * factor for n, factor in own) / n_all)
        else:
            found.append(sum(factor for _, factor in own) / len(own) if own else 1.0)
    return found


@dataclass(frozen=True)
class WeighedStep:
    """What servers sum in a step.

    members: those that count, each with its weight. scale: of their weighted sum, which becomes a mean over `n_micro`
    micro-batches. dropped: (micro, serial) of those that only count as contributors of rows, see `ROW_AVERAGES`
    """

    members: list[PlannedMember]
    scale: float
    dropped: list[tuple[int, int]]
    n_micro: int


def weighed(plan: StepPlan, micro_batch: int, discipline: Discipline, row_average: str) -> WeighedStep:
    """The weights and divisors of a decided step."""
    kept = [m for m in plan.members if m.weight > 0]
    damping = plan.row_damping or (1.0,) * len(plan.members)
    members = [
        PlannedMember(m.micro, m.serial, m.weight * m.n_samples / micro_batch, factor)
        for m, factor in zip(plan.members, damping, strict=True)
        if m.weight > 0
    ]
    is_round = discipline.step_of == "round"  # a round is the gradients it waited for
    all_of_it = kept if is_round and kept else plan.members
    n_samples = sum(m.n_samples for m in all_of_it)
    dropped: list[tuple[int, int]] = []
    if row_average == "contributors" and kept and not is_round:
        dropped = [(m.micro, m.serial) for m in plan.members if not m.weight and not m.refused]
    return WeighedStep(members, micro_batch / n_samples, dropped, len(all_of_it))
