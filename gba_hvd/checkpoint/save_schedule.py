"""How often a job saves, what is due, what is in flight, and its outcome.

How often and what, unless configured, is planned from what was measured (`recovery.schedule.adaptive`); the chief
plans again with every save and every change of hosts. Who asks which server to save is decided in `job_checkpoints`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.failures_in_a_row import FailuresInARow
from gba_hvd.comm.wait_notices import Patience
from gba_hvd.ps.messages import SaveFacts, SaveStatus
from gba_hvd.ps.worker.host_server import HostServer
from gba_hvd.ps.worker.worker import PsWorker
from gba_hvd.shm.checkpoint_rows import schema_of
from gba_hvd.training.engine import Engine
from recovery.callback import CheckpointCallback
from recovery.errors import Fenced, StoreError
from recovery.policies import is_lossless, lossless_kind
from recovery.schedule import planner
from recovery.schedule.adaptive import IntervalPlan, JobMeasurements, plan_interval

_FORGET_S = 90.0  # a save without any report for so long: the mode changed, or its server hangs
_AGE_EVERY_S, _LATE_AT = 2.0, 2.0  # how often the newest one's age is reported; how many intervals are too many
_LOOK_S, _BEGIN_S = 0.05, 60.0
_SILENT_S = 3.0  # a wait that is over sooner is not reported
_AGAIN_S = 1.0  # after a failure, before a worker leaves


def is_complete(saved: SaveStatus) -> bool:
    """Whether a save, or this host's part of one, is done and leaves out no change."""
    return saved.state in ("done", "part") and is_lossless(saved.facts.kind)


class SaveSchedule:
    """One worker's. Belongs to the training thread. What was saved last is known to the chief only.

    newest: the checkpoint that the next one is on top of. pace: the plan in force; on the chief, and where the interval
    is planned. saved_step: of the newest checkpoint, those that were there
    at the start included; on the chief
    """

    def __init__(self, engine: Engine, callback: CheckpointCallback) -> None:
        self._engine, self.callback = engine, callback
        self.newest: str | None = None
        self.saved_step = self._asked_number = self._asked_step = -1
        self.n_hosts = 1
        self._chain = planner.ChainSize()
        self._reported = SaveStatus()  # what was last reported to callbacks
        self._asks = False  # this worker has asked for a checkpoint as the chief
        self._asked_s: float | None = None  # when a checkpoint was asked for that has no result yet
        self._running_s = 0.0  # when it was last reported as being saved
        self._trouble = ""  # what its store met then
        self._good_s, self._good_step = math.nan, 0  # of the newest checkpoint there is; at first of the job's start
        self._late, self._age_reported_s = Patience(), 0.0
        self._failures, self._failed_s = FailuresInARow(), -math.inf
        self._awaited_step = -1  # of the newest checkpoint whose wait was reported
        self._unsaved_step = -1  # of the newest best model of which it was reported that it is not saved
        self._leave_step: int | None = None  # of an asynchronous mode, where it was reported
        self._measured = JobMeasurements()
        self._since_s: float | None = None  # when this worker began to count the time that is observed
        self.pace: IntervalPlan | None = None
        self._since_epoch = 0  # what was saved under claims before this is of training that was rolled back

    def resume(self, step: int, measured: JobMeasurements) -> None:
        """The job resumes from a checkpoint of this step, or from memory."""
        self.callback.restored(step, time.monotonic())
        self._measured = measured

    def load_measured(self, measured: JobMeasurements) -> None:
        """By another worker, which was the chief."""
        self._measured, self._since_s = measured, None

    def world_formed(self, forget: bool) -> None:
        """Discard what was in flight. forget: the next save takes all rows."""
        self._asked_s = None
        if self._engine.world.rank == 0:  # from now on this worker decides when one is due
            now, step = time.monotonic(), self._engine.progress.step
            self.callback.count_from(step, now)
            if math.isnan(self._good_s):
                self._good_s, self._good_step = now, step
        if forget:
            self.newest, self._chain = None, planner.ChainSize()

    # --- a lost host -------------------------------------------------------------------------------------------------

    def rolled_back_to(self, samples_lost: float, load_s: float, stood_s: float) -> None:
        """Full recovery, on the rank whose state the others get. samples_lost: by all recoveries, at the checkpoint.

        load_s: for loading all rows; stood_s: since the last step, the loading included.
        """
        seen = self.seen()
        seen = replace(seen.lost(seen.observed_s), samples_lost=samples_lost, load_s=load_s)
        self._measured = replace(seen, reschedule_s=max(0.0, stood_s - load_s))

    def void_before(self, epoch: int) -> None:
        """Reports of saves under claims before this one are ignored from now on."""
        self._since_epoch = epoch

    def rolled_back(self, step: int) -> None:
        """The job is at this step again."""
        self._reported, self._failures, self._failed_s = SaveStatus(), FailuresInARow(), -math.inf
        self._asked_s, self._asked_number, self._asked_step, self._leave_step = None, -1, -1, None
        self.saved_step, self._good_step = step, min(step, self._good_step)
        self.newest, self._chain = None, planner.ChainSize()
        self.callback.restored(step, time.monotonic())

    def in_force(self, saved: SaveStatus | None) -> SaveStatus | None:
        """The status of a save; None where it is of training that the job has rolled back."""
        return None if saved is None or (saved.number and saved.epoch < self._since_epoch) else saved

    # --- how often, and what -----------------------------------------------------------------------------------------

    def seen(self) -> JobMeasurements:
        """What was measured, with the time until now."""
        now = time.monotonic()
        if self._since_s is None:
            self._since_s = now
        passed_s, self._since_s = now - self._since_s, now
        self._measured = replace(self._measured, observed_s=self._measured.observed_s + passed_s)
        return self._measured

    @property
    def samples_lost(self) -> float:
        """By all recoveries so far, see `JobMeasurements.samples_lost`."""
        return self._measured.samples_lost

    def host_was_lost(self, load_s: float | None, stood_s: float | None, samples_lost: float) -> None:
        """load_s: until its rows were back, if they are; stood_s: since the last step, the loading included.

        samples_lost: by this recovery, mean over all rows of the model.
        """
        seen = self.seen()
        seen = replace(seen.lost(seen.observed_s), samples_lost=seen.samples_lost + samples_lost)
        if load_s is not None:
            seen = replace(seen, partial_load_s=load_s)
        if stood_s is not None:
            seen = replace(seen, reschedule_s=max(0.0, stood_s - (load_s or 0.0)))
        self._measured = seen

    def record_stall(self, seconds: float) -> None:
        """Training did, until a save was in flight. On the chief."""
        self._measured = replace(self._measured, stall_s=seconds)

    def plan_pace(self, n_hosts: int) -> None:
        """On the chief, whenever something new is known: how often to save from now on, unless configured."""
        self.n_hosts = n_hosts
        if not self.callback.is_planned:
            return
        engine = self._engine
        n_bytes = schema_of(engine.model.tables.layout).n_bytes
        found = plan_interval(self.seen(), self.callback.given, n_bytes, n_hosts, self.pace)
        before, self.pace, self.callback.planned_s = self.pace, found, found.interval_s
        if found.plan is not None:
            self._say_that_the_policy_is_idle(found)
        if found.plan is not None and (before is None or found.differs_from(before)):
            expected = found.plan.expected
            facts = {"interval_s": found.interval_s, "kind": found.kind, "strategy": found.plan.strategy}
            facts |= {"pls": expected.pls, "overhead": expected.overhead, "reason": found.reason}
            engine.emit(Event("checkpoint_plan", engine.progress.step, found.reason, facts))

    def _say_that_the_policy_is_idle(self, found: IntervalPlan) -> None:
        """Warn, once, where the plan saves other rows than the policy that was named."""
        policy = self.callback.config.policy
        if not self.callback.policy_is_named or found.kind == policy or is_lossless(policy):
            return
        why = "partial saves take more than half of the bytes of a full one"
        if self.n_hosts > 1:
            why = "full recovery is planned, which goes back to checkpoints that leave out no change"
        text = (
            f"policy={policy!r} is not used now: the plan has saves of kind {found.kind!r}, since {why}. For saves by "
            "this policy give every_s or every_steps; else leave policy out"
        )
        data = {"policy": policy, "kind": found.kind, "hosts": self.n_hosts}
        self._engine.reports.once(Event("policy_idle", self._engine.progress.step, text, data, level="warning"))

    def next_kind(self, is_last: bool = False) -> tuple[str, str]:
        """("full" or the kind that policy or plan ask for, why). is_last: no change may be left out."""
        policy = self.callback.config.policy
        wanted = policy if self.pace is None else self.pace.kind
        if is_last and not is_lossless(wanted):
            wanted = lossless_kind(policy)
        return planner.next_kind(self._chain, wanted)

    def next_number(self, step: int) -> int:
        """Number of a save of this step: the step, but for one that was saved before, with changes left out, or failed.

        No number comes twice: the blobs of two saves would bear the same names, and a server takes the second request
        for the first one again.
        """
        return max(step, self._reported.number + 1)

    # --- what is due -------------------------------------------------------------------------------------------------

    def is_due_at(self, step: int) -> bool:
        return not self.is_in_flight and self.callback.due(step, time.monotonic())

    @property
    def is_in_flight(self) -> bool:
        """Whether a checkpoint was asked for that may still be saved."""
        return self._asked_s is not None and time.monotonic() - max(self._asked_s, self._running_s) < _FORGET_S

    def is_due_before_a_leave(self, mode: PsWorker) -> bool:
        """Whether a checkpoint is due because a worker is being preempted."""
        if not (mode.contact.worker_leaves or self._engine.signals.preempt_deadline_s is not None):
            self._leave_step = None
            return False
        if self._leave_step is None:
            # The worker that leaves may be ahead of this one, but not of the position that came with its notice.
            self._leave_step = max(self._engine.progress.step, mode.contact.position.step)
        is_saved = self._reported.facts.saved_step >= self._leave_step and is_complete(self._reported)
        has_failed = time.monotonic() - self._failed_s < _AGAIN_S  # just now
        return not is_saved and not has_failed and self._asked_s is None

    # --- what was asked for, and its outcome -------------------------------------------------------------------------

    def asked(self, number: int, step: int) -> None:
        """A checkpoint of this step was asked for just now. On all workers in allreduce mode, else on the chief."""
        self._asks = self._asks or self._engine.world.rank == 0
        self._asked_s, self._asked_number, self._asked_step = time.monotonic(), number, step
        self.callback.began(step, self._asked_s)

    @property
    def was_fenced(self) -> bool:
        """Whether the newest save failed since another job had taken the location over."""
        return self._failures.why.startswith(f"{Fenced.__name__}:")

    def part_failed(self) -> None:
        """On the chief: another host's server did not save its part."""
        if self._asked_s is not None:
            why = "the server of another host did not save its part (the log of that host's workers says why)"
            self.poll(SaveStatus(self._since_epoch, self._asked_number, "failed", SaveFacts(why=why)))

    def await_read(self, line: HostServer | None, step: int) -> None:
        """strict: return when this host's server has read its rows, or will not. If later, it lets the save fail."""
        until_s = time.monotonic() + _BEGIN_S + self.callback.config.busy_timeout_s
        while line is not None and not line.has_read(step) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)

    def has(self, step: int) -> bool:
        """On the chief: whether the newest checkpoint is of this step and leaves out no change."""
        return self._reported.facts.saved_step == step and is_complete(self._reported)

    def why_not_saved(self, step: int) -> str:
        """On the chief, when nothing is in flight: why there is no checkpoint of this step; empty when there is one."""
        newest = self._reported
        if self._engine.world.rank != 0 or (is_complete(newest) and newest.facts.saved_step >= step):
            return ""
        if newest.state == "failed" and newest.number >= step:
            return newest.facts.why
        return "nothing was reported of it"

    def await_quiet(self, latest: Callable[[], SaveStatus | None], timeout_s: float) -> None:
        """Wait until no save is in flight here. On the chief, and on host leaders."""
        began_s = time.monotonic()
        deadline = began_s + timeout_s
        while True:
            self._report_wait(began_s, timeout_s)
            saved = self.in_force(latest())
            if self._engine.world.rank == 0:
                self.poll(saved)
            is_quiet = not saved or saved.state != "running"
            if self._engine.host.server is not None and self._engine.host.server.folder_lost:
                return
            if self._engine.world.rank == 0:
                is_quiet = self._asked_s is None or (time.monotonic() - self._asked_s > _BEGIN_S and is_quiet)
            if is_quiet or time.monotonic() > deadline:
                return
            time.sleep(_LOOK_S)

    def await_saved(
        self, latest: Callable[[], SaveStatus | None], step: int, timeout_s: float, why_not: Callable[[], str] = str
    ) -> None:
        """Wait until a checkpoint of this step or a later one, or this host's part of it, is saved, or has failed.

        One that leaves out changes does not count: another one follows. Nor does one before the newest asked for.
        """
        began_s, least = time.monotonic(), step if self._asked_s is None else max(step, self._asked_number)

        def is_over(saved: SaveStatus | None) -> bool:
            if saved is None or saved.number < least:
                return False
            return saved.state == "failed" or (is_complete(saved) and saved.facts.saved_step >= step)

        while not is_over(saved := self.in_force(latest())):
            if self._engine.host.server is not None and self._engine.host.server.folder_lost:
                raise StoreError(self._engine.host.server.folder_lost)
            has_begun = saved is not None and saved.number >= least
            limit_s = timeout_s if has_begun else min(timeout_s, _BEGIN_S)
            self._report_wait(began_s, limit_s)
            if time.monotonic() - began_s > limit_s:
                why = why_not()
                silent = f"nothing was reported of it for {time.monotonic() - began_s:.0f} s"
                raise StoreError(f"{silent}; {why}" if why else silent)
            time.sleep(_LOOK_S)
        if self._engine.world.rank == 0:
            self.poll(saved)

    def _report_wait(self, began_s: float, limit_s: float) -> None:
        """That training stands until a checkpoint is saved: once for each. On the chief."""
        text = f"waiting for the checkpoint of step {self._asked_step}, for {limit_s:.0f} s at most"
        text += f"; the one before was not saved: {self._failures.why}" if self._failures.why else ""
        self._report_standing(text, self._asked_step, began_s, limit_s)

    def report_wait_for_best(self, why: str, began_s: float, limit_s: float) -> None:
        """That training stands until the checkpoint of the best model can be begun: once for each. On the chief."""
        step = self._engine.progress.step
        text = f"waiting to save the best model, of step {step}, for {limit_s:.0f} s at most: {why}"
        self._report_standing(text, step, began_s, limit_s)

    def _report_standing(self, text: str, step: int, began_s: float, limit_s: float) -> None:
        if self._engine.world.rank or time.monotonic() - began_s < _SILENT_S or step == self._awaited_step:
            return
        self._awaited_step = step
        data = {"of_step": step, "limit_s": limit_s}
        self._engine.emit(Event("checkpoint_awaited", self._engine.progress.step, text, data))

    def report_unsaved_best(self) -> None:
        """Once for each model that was the best one and cannot be saved any more. On the chief."""
        unsaved = self.callback.unsaved_best
        if unsaved is None or unsaved.step == self._unsaved_step or self._engine.world.rank:
            return
        self._unsaved_step = unsaved.step
        text = (
            f"{unsaved.words}. The best one that is saved counts in its place: `gba-hvd checkpoint ls` marks it. Where "
            "that one is needed, train again up to there, with checkpoints that can be saved"
        )
        data = {"best_step": unsaved.step, "metric": unsaved.metric, "value": unsaved.value, "why": unsaved.why}
        self._engine.emit(Event("best_not_saved", self._engine.progress.step, text, data, level="warning"))

    def poll(self, saved: SaveStatus | None) -> None:
        """Report the result of a checkpoint to the callbacks. On the chief."""
        engine, saved = self._engine, self.in_force(saved)
        if saved is not None and saved.state == "running" and saved.number >= self._asked_number:
            self._running_s, self._trouble = time.monotonic(), saved.facts.why
        if saved is None or saved.state in ("running", "part") or saved == self._reported:
            return
        if saved.number < self._asked_number and self._asked_s is not None:
            return  # a report of the save before
        # A chief that took over asked for none yet: what it finds complete has probably been reported before.
        is_known = not self._asks and self._reported == SaveStatus() and not self._running_s
        began_s, step = self._asked_s or time.monotonic(), saved.number if self._asked_s is None else self._asked_step
        self._reported, self._asked_s, self._running_s, self._trouble = saved, None, 0.0, ""
        if saved.state == "failed":
            self._failed_s = time.monotonic()
            self.callback.failed(saved.facts.why)
            if text := self._failures.text(step, saved.facts.why):
                self.report_failure(text, saved.facts.why)
            self._chain = planner.ChainSize(self._chain.base_bytes, self._chain.partial_bytes, trusted=False)
            return
        self.saved_step = saved.facts.saved_step
        self._good_s, self._good_step = began_s, self.saved_step
        self.callback.done(self.saved_step)
        facts, n_bytes = saved.facts, saved.facts.n_bytes
        self.newest = facts.manifest
        self._measured = self._measured.saved(facts.kind, facts.seconds, n_bytes, self._chain.base_bytes)
        if facts.kind == "full":
            self._chain = planner.ChainSize(n_bytes)
        else:
            chain = self._chain
            self._chain = planner.ChainSize(chain.base_bytes, chain.partial_bytes + n_bytes, n_bytes)
        text = f"step {facts.saved_step} saved ({facts.kind}): {n_bytes / 1e6:,.1f} MB in {facts.seconds:.2f} s"
        if n_failed := self._failures.over():
            text += f"; {n_failed} before it {'was' if n_failed == 1 else 'were'} not"
        data = facts.of_checkpoint() | {"stall_s": self._measured.stall_s} | ({"found": True} if is_known else {})
        data |= self.callback.best
        engine.emit(Event("checkpoint", engine.progress.step, text, data))
        self.plan_pace(self.n_hosts)

    def look_at_age(self, why_not_ready: Callable[[], str]) -> None:
        """On the chief, between two steps: report how old the newest checkpoint is; warn when the next one is late.

        why_not_ready: what is wrong with the server of this host, if anything.
        """
        self.report_unsaved_best()
        now, engine = time.monotonic(), self._engine
        age_s, age_steps = now - self._good_s, engine.progress.step - self._good_step
        if now - self._age_reported_s >= _AGE_EVERY_S:
            self._age_reported_s = now
            data = {"checkpoint_age_s": round(age_s, 1), "checkpoint_age_steps": age_steps}
            engine.emit(Event("rates", engine.progress.step, f"the newest checkpoint is {age_s:.0f} s old", data))
        intervals = self.callback.intervals(age_steps, age_s)
        if self._late.word(intervals >= _LATE_AT, now) is None:
            return
        reason = why_not_ready() or self._failures.why
        if not reason:
            running = self._asked_s is not None
            reason = f"that of step {self._asked_step} is still being saved" if running else "none was begun"
            reason += f": {self._trouble}" if running and self._trouble else ""
        text = (
            f"no checkpoint for {age_s:.0f} s and {age_steps} steps, {intervals:.1f} times the interval: {reason}. A "
            "host that is lost now costs what came since; training continues"
        )
        facts = {"seconds": round(age_s, 1), "steps": age_steps, "why": reason}
        engine.emit(Event("checkpoint_late", engine.progress.step, text, facts, level="warning"))

    def report_failure(self, text: str, why: str = "") -> None:
        facts = {"why": why or text}
        self._engine.emit(Event("checkpoint_failed", self._engine.progress.step, text, facts, "warning"))
