"""Checkpoints as a job sees them: when one is made, who saves what, and going on from one.

The rows are saved by the companion servers, in their processes; each host's lead asks its own. The order of one save in
allreduce mode, after the commit of step k said that one is due:

    1. broadcast  the chief tells all what is to be saved: epoch of its claim, number k, kind, parent
    2. ask        each host's lead asks its server; the chief's request has the training state, as of step k
    3. (servers)  save their rows while training goes on (strict: when all have read their rows); the chief's waits for
                  all parts and writes the manifest
    4. follow     the chief hears what became of it with the heartbeats, and tells the callbacks

How often and what, unless the user said so, is planned from what was measured (`recovery.schedule.adaptive`); the chief
plans again with every save and every change of hosts.

A crash before the manifest leaves the checkpoint before in force. The claim on the place is made anew whenever the
world was formed anew with other hosts, so a host that was cut off is fenced.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gba_hvd.callbacks import Event
from gba_hvd.comm.wait_notices import Patience
from gba_hvd.config import checked_job_id
from gba_hvd.errors import BadInput
from gba_hvd.modes.parameter_server import GbaMode
from gba_hvd.ps.messages import Hold, Save, Saved
from gba_hvd.ps.worker.host_server import LocalServer
from gba_hvd.shm.checkpoint_rows import MemoryRows, schema_of
from gba_hvd.shm.shard_memory import ShardMemory
from recovery.callback import CheckpointCallback
from recovery.catalog import claims
from recovery.catalog.chains import Chain, chains
from recovery.errors import RecoveryError, StoreError
from recovery.redaction import redacted
from recovery.restore import Now, Report, restore
from recovery.schedule import planner
from recovery.schedule.adaptive import Measured, Pace, pace
from recovery.storage.open import open_store
from recovery.storage.store import Store, check

if TYPE_CHECKING:
    from gba_hvd.training.engine import Engine

_FORGET_S = 90.0  # a save of which nothing was heard for so long: the mode changed, or its server hangs
_AGE_EVERY_S, _LATE_AT = 2.0, 2.0  # how often the newest one's age is told; how many intervals are too many
_LOOK_S, _BEGIN_S = 0.05, 60.0
_STORE_TIMEOUT_S = 20.0
# They travel with the commit: the chief wants a checkpoint of this step; so many workers are to leave; so many hosts'
# servers failed to save their part of the newest one; so many hosts' servers are not up.
N_NUMBERS = 4


class Checkpoints:
    """One worker's part. Belongs to the training thread.

    What was saved last is known to the chief only: its successor begins with a save of all rows. The claim travels with
    the training state, so that a successor goes on under it; so does what was measured.
    """

    def __init__(self, engine: Engine, callback: CheckpointCallback) -> None:
        config = callback.config
        if config.policy == "ssu":
            raise BadInput(
                "checkpoints of a job cannot have policy 'ssu', since servers are not told of single updates: use 'mfu'"
            )
        self.callback = callback
        self._engine = engine
        self._launch = f"{secrets.token_hex(4)}"  # the same command started twice is two writers
        self._store: Store | None = None
        self._claim: claims.Claim | None = None
        self.first_epoch = 0  # of this job; what was written since, by its claims, may expire
        self._epochs: list[int] = []  # of all claims of this job, oldest first
        self._resumed_epoch = 0  # of the checkpoint that the job went on from
        self._newest: str | None = None  # the checkpoint the next one is on top of
        self._chain = planner.Chain()
        self._told = Saved()  # what callbacks were told of last
        self._asked_s: float | None = None  # when a checkpoint was asked for that nobody has told of yet
        self._asked_number = -1
        self._running_s = 0.0  # when it was last heard that it is being saved
        self._part_told = -1  # number of the newest save of which all know that this host's part failed
        self._good_s, self._good_step = math.nan, 0  # of the newest checkpoint there is; at first of the job's start
        self._late, self._age_told_s = Patience(), 0.0
        self._last_failure = ""
        self.waiting: list[str] = []  # a checkpoint that is due, where servers are not up
        self._due = False
        self.somebody_leaves = False  # all workers know of it, and save first
        self._leave_step: int | None = None  # of an asynchronous mode, where it was heard of
        self._measured = Measured()
        self._since_s: float | None = None  # when this worker began to count the time that is observed
        self._pace: Pace | None = None  # on the chief
        self._n_hosts = 1
        self.saved_step = -1  # of the newest checkpoint, those that were there at the start included; on the chief
        self._died_before = False  # the job that this one goes on from did not end in peace

    # --- at the start, and after a change of hosts -------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """With little patience: all workers stand while one of them asks it."""
        if self._store is None:
            self._store = self._opened({"timeout_s": _STORE_TIMEOUT_S, "tries": 2})
        return self._store

    def _opened(self, patience: Mapping[str, Any]) -> Store:
        return open_store(self.callback.url, **{**patience, **self.callback.storage_options})

    def job_to_resume(self) -> str | None:
        """The name of the job whose checkpoint is the newest, if this one is to go on from it. On the chief."""
        if not self.callback.resume:
            return None
        chain = next((one for one in chains(self.store) if isinstance(one, Chain)), None)
        newest = max(claims.claims_of(self.store.names("claims/")), default=None)
        self._died_before = newest is not None and not newest.is_closed
        self.saved_step = -1 if chain is None else chain.newest.step
        job = "" if chain is None else str(chain.newest.about.get("job", ""))
        try:
            return checked_job_id(job) if job else None
        except BadInput as error:  # it is part of the name of a folder that may be removed
            raise BadInput(
                f"the newest checkpoint in {redacted(self.callback.url)} names a job that there cannot be: {error}. It "
                "was not written by gba_hvd, or was changed: name another place, or delete that manifest"
            ) from error

    def take_place(self, job: str, writer: str = "") -> None:
        """Claim the place for this job. On the chief. writer: of a claim of this job's that is known to be dead.

        Raises BadInput when the store cannot be used, or another job writes there. Later on, a store that cannot be
        reached is no reason to stop: saving will fail, and be told, until it can.
        """
        config = self.callback.config
        if self._claim is None:
            check(self.store)
            writer = writer or f"{config.job or job}.{self._launch}"
            self._claim = claims.claim(self.store, writer, takeover=self.callback.takeover, lease_s=config.lease_s)
            others = self._others_since(self._claim)
        else:
            try:
                self._claim = claims.claim(self.store, self._claim.writer, lease_s=self._claim.lease_s)
                others = self._others_since(self._claim)
            except (BadInput, RecoveryError) as error:
                self._tell_failure(f"the place for checkpoints was not claimed again: {error}")
                return
        now, before = self._claim.epoch, self._epochs[-1] if self._epochs else 0
        self._epochs.append(now)
        if not self.first_epoch:
            self.first_epoch = now
        elif others:  # what was saved until then never expires
            self.first_epoch = now
            text = (
                f"another job has claimed {self.store.url} since this one did (this one had epoch {before}, has "
                f"{now}): this job goes on saving there, but deletes no checkpoint from before, and uses none of the "
                "other's. Give each job a place of its own; `gba-hvd checkpoint gc` removes what nobody needs"
            )
            told = {"before": before, "now": now}
            self._engine.emit(Event("place_shared", self._engine.step, text, told, level="warning"))

    def _others_since(self, claim: claims.Claim) -> bool:
        """Whether epochs between this job's last claim and this one are another's, as far as the claims say.

        A chief that died may have claimed in the job's name, and told nobody.
        """
        writers: dict[int, set[str]] = {}
        for seen in claims.claims_of(self.store.names("claims/")):
            writers.setdefault(seen.epoch, set()).add(seen.writer)
        between = range(self._epochs[-1] + 1, claim.epoch) if self._epochs else ()
        return any(writers.get(epoch) != {claim.writer} for epoch in between)

    def _is_of_this_job(self, epoch: int) -> bool:
        """Whether rows may come from what was written under an epoch: by this job, or before what it went on from."""
        return epoch in self._epochs or epoch <= self._resumed_epoch

    def place(self) -> dict[str, Any]:
        """What the leads of all hosts know of the place: plain values."""
        return {"first_epoch": self.first_epoch, "epochs": self._epochs, "resumed_epoch": self._resumed_epoch}

    def load_place(self, place: Mapping[str, Any]) -> None:
        self.first_epoch, self._epochs = place["first_epoch"], list(place["epochs"])
        self._resumed_epoch = place["resumed_epoch"]

    def fill(self, memory: ShardMemory, shards: Sequence[int], now: Now | None) -> Report | None:
        """Bring shards back from the newest good checkpoint; None when there is none. Nobody may use them meanwhile.

        now: where the job is, if it goes on: then only rows come back, of its own checkpoints and of what it went on
        from, else also the state. Raises as `recovery.restore.restore`.
        """
        rows = MemoryRows(memory, lambda: shards, filling=True)
        if now is None:
            return restore(self._opened({}), rows, config=self.callback.config)
        config, is_mine = self.callback.config, self._is_of_this_job
        return restore(self.store, rows, config=config, now=now, with_state=False, is_wanted=is_mine)

    def _tell_failure(self, text: str) -> None:
        self._engine.emit(Event("checkpoint_failed", self._engine.step, text, {"why": text}, "warning"))

    def hold(self, line: LocalServer, part: int, n_parts: int) -> None:
        """On each host's lead: its server is told of this world; the chief's gives the claim's signs of life."""
        assert self._claim is not None
        facts = asdict(self._claim), self.callback.settings(), self._about("allreduce"), self.first_epoch
        line.hold(Hold(*facts, part, n_parts))

    def release(self) -> None:
        """On the chief, at the end: whoever comes next need not wait."""
        if self._claim is not None:
            with contextlib.suppress(RecoveryError):
                claims.release(self.store, self._claim)

    def goes_on_from(self, report: Report) -> None:
        """The whole job was restored. On the chief."""
        self.callback.began(report.step, time.monotonic())
        self._resumed_epoch = report.manifest.epoch
        measured = Measured.of_checkpoint(report.manifest)
        if self._died_before:
            measured = measured.lost(measured.observed_s)
        self._measured = replace(measured, load_s=report.seconds)

    def goes_on_from_memory(self, state: Mapping[str, Any], step: int) -> str:
        """What this class kept in memory (`state`), in a job that lost all its workers. Returns the writer's name."""
        self.load_place(state["place"])
        measured = Measured.of_mapping(state["measured"])
        self._measured = measured.lost(measured.observed_s)
        self.callback.began(min(step, max(0, self.saved_step)), time.monotonic())
        return "" if state["claim"] is None else str(state["claim"]["writer"])

    # --- how often ---------------------------------------------------------------------------------------------------

    def _seen(self) -> Measured:
        """What was measured, with the time until now."""
        now = time.monotonic()
        if self._since_s is None:
            self._since_s = now
        passed_s, self._since_s = now - self._since_s, now
        self._measured = replace(self._measured, observed_s=self._measured.observed_s + passed_s)
        return self._measured

    def host_was_lost(self, load_s: float | None, stood_s: float | None) -> None:
        """load_s: until its rows were back, if they are; stood_s: since the last step, the loading included."""
        seen = self._seen()
        seen = seen.lost(seen.observed_s)
        if load_s is not None:
            seen = replace(seen, partial_load_s=load_s)
        if stood_s is not None:
            seen = replace(seen, reschedule_s=max(0.0, stood_s - (load_s or 0.0)))
        self._measured = seen

    def stood_still(self, seconds: float) -> None:
        """Training did, until a save was under way. On the chief."""
        self._measured = replace(self._measured, stall_s=seconds)

    def plan_pace(self, n_hosts: int) -> None:
        """On the chief, whenever something new is known: how often to save from now on, unless the user said so."""
        self._n_hosts = n_hosts
        if not self.callback.is_planned:
            return
        engine = self._engine
        n_bytes = schema_of(engine.tables.layout).n_bytes
        found = pace(self._seen(), self.callback.given, n_bytes, n_hosts, self._pace)
        before, self._pace, self.callback.planned_s = self._pace, found, found.interval_s
        if found.plan is not None and (before is None or found.differs_from(before)):
            expected = found.plan.expected
            told = {"interval_s": found.interval_s, "kind": found.kind, "strategy": found.plan.strategy}
            told |= {"pls": expected.pls, "overhead": expected.overhead, "reason": found.reason}
            engine.emit(Event("checkpoint_plan", engine.step, found.reason, told))

    def check_fits(self, about: Mapping[str, Any]) -> None:
        """Raises BadInput when this job cannot go on from the checkpoint.

        Of a job that cut its data otherwise, the place in it is void. Of one that compressed its gradients otherwise,
        what was not sent yet has no place here; one that did not compress them has nothing that waits.
        """
        engine = self._engine
        for name in ("global_batch", "micro_batch"):
            saved, mine = about.get(name), getattr(engine, name)
            if saved != mine:
                raise BadInput(
                    f"the checkpoint at {self.store.url} is of a job with {name}={saved}, this one has {mine}: "
                    "keep it, or start anew at another url or with resume=False"
                )
        saved, mine = about.get("compression", "none"), self._compressor
        if saved not in ("none", mine):
            raise BadInput(
                f"the checkpoint at {self.store.url} is of a job with compression={saved}, this one has {mine}: "
                f"what was not sent yet would be lost; go on with {saved}, or start anew at another url or with "
                "resume=False"
            )

    @property
    def _compressor(self) -> str:
        compression = self._engine.compression
        return "none" if compression is None else str(compression.spec)

    # --- allreduce mode ----------------------------------------------------------------------------------------------

    def tell(self, numbers: Tensor) -> None:
        """Before a commit, into this worker's share of what is summed."""
        engine = self._engine
        if engine.world.rank == 0 and self.is_due_at(engine.step + 1):
            numbers[0] = 1.0
        numbers[1] = float(engine.leave_by_s is not None)
        numbers[3] = float(engine.line is not None and not engine.line.is_ready())
        saved = None if engine.line is None else engine.line.saved
        if engine.world.rank and saved is not None and saved.state == "failed" and saved.number > self._part_told:
            self._part_told, numbers[2] = saved.number, 1.0
            text = f"this host's part of the checkpoint of step {saved.number} was not saved: {saved.facts['why']}"
            data = {"why": saved.facts["why"], "rank": engine.world.rank}
            engine.emit(Event("checkpoint_failed", engine.step, text, data, "warning"), only_here=True)

    def hear(self, agreed: Sequence[float]) -> None:
        """What is due waits for servers that are not up; training does not."""
        self._due, self.somebody_leaves = agreed[0] > 0 and not agreed[3], agreed[1] > 0
        self.waiting = ["the checkpoint that is due"] if agreed[0] > 0 and agreed[3] else []
        if agreed[2] > 0 and self._engine.world.rank == 0 and self._asked_s is not None:
            why = "the server of another host did not save its part (the log of that host's workers says why)"
            self.follow(Saved(0, self._asked_number, "failed", {"why": why}))

    def is_due_at(self, step: int) -> bool:
        now = time.monotonic()
        is_under_way = self._asked_s is not None and now - max(self._asked_s, self._running_s) < _FORGET_S
        return not is_under_way and self.callback.due(step, now)

    @property
    def is_due(self) -> bool:
        return self._due

    def plan(self) -> dict[str, Any]:
        """What is to be saved now: the chief's word to all."""
        engine = self._engine
        assert self._claim is not None
        wanted = self.callback.config.policy if self._pace is None else self._pace.kind
        kind, why = planner.next_kind(self._chain, wanted)
        return {
            "epoch": self._claim.epoch,
            "first_epoch": self.first_epoch,
            "number": engine.step,
            "kind": kind,
            "parent": None if kind == "full" else self._newest,
            "step": engine.step,
            "samples": engine.account.applied,
            "about": {"why": why, **self._about("allreduce")},
            "supersedes": True,  # of what was asked for before nothing is waited for any more
        }

    def _about(self, mode: str) -> dict[str, Any]:
        engine = self._engine
        return {
            "job": engine.job_id,
            "mode": mode,
            "global_batch": engine.global_batch,
            "micro_batch": engine.micro_batch,
            "n_servers": self._n_hosts,
            "given": asdict(self.callback.given),
            **self._seen().told(),
            "compression": self._compressor,
        }

    def save(self, plan: dict[str, Any], line: LocalServer | None, part: int, n_parts: int, state: bytes) -> None:
        """Ask this host's server for its part, if this worker leads the host."""
        self._due, self._asked_s, self._asked_number = False, time.monotonic(), plan["number"]
        self.callback.began(plan["step"], self._asked_s)
        if line is not None:  # credentials and claim stay on each host: all know them
            line.save(Save(part=part, n_parts=n_parts, **plan, **self._own_facts()), state)

    @property
    def is_strict(self) -> bool:
        return self.callback.config.strict

    def await_read(self, line: LocalServer | None, step: int) -> None:
        """strict: return when this host's server has read its rows, or will not. If later, it lets the save fail."""
        until_s = time.monotonic() + _BEGIN_S + self.callback.config.busy_timeout_s
        while line is not None and not line.has_read(step) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)

    def _own_facts(self) -> dict[str, Any]:
        assert self._claim is not None
        return {"settings": self.callback.settings(), "claim": asdict(self._claim)}

    # --- asynchronous modes ------------------------------------------------------------------------------------------

    def is_due_before_a_leave(self, mode: GbaMode) -> bool:
        """A worker was told to leave, and what is saved is older than that."""
        if not (mode.contact.somebody_leaves or self._engine.leave_by_s is not None):
            self._leave_step = None
            return False
        if self._leave_step is None:
            self._leave_step = self._engine.step
        is_saved = self._told.state == "done" and self._told.number >= self._leave_step
        return not is_saved and self._asked_s is None

    def save_asynchronously(self, mode: GbaMode, snapshot: bytes) -> None:
        """The coordinator has all servers save at its next moment between two steps. On the chief."""
        started, plan = time.monotonic(), self.plan()
        plan["about"]["mode"] = mode.name
        mode.before_save()
        self._asked_s, self._asked_number = time.monotonic(), plan["number"]
        self.callback.began(self._engine.step, self._asked_s)
        request = Save(part=0, n_parts=1, generation=mode.session.generation, **plan, **self._own_facts())
        mode.contact.asked_to_save(request.epoch, request.number)
        mode.client.send(0, request, [snapshot]).add_done_callback(mode.contact.save_answered)
        self.stood_still(time.monotonic() - started)

    # -----------------------------------------------------------------------------------------------------------------

    def has(self, step: int) -> bool:
        """On the chief: whether the newest checkpoint is of this step."""
        return self._told.state == "done" and self._told.number == step

    def why_not_saved(self, step: int) -> str:
        """On the chief, when nothing is under way: why there is no checkpoint of this step; empty when there is one."""
        told = self._told
        if self._engine.world.rank != 0 or (told.state == "done" and told.number >= step):
            return ""
        if told.state == "failed" and told.number >= step:
            return str(told.facts["why"])
        return "nothing was heard of it"

    def await_quiet(self, heard: Callable[[], Saved | None], timeout_s: float) -> None:
        """Wait until no save is under way here. On the chief, and on the leads of hosts."""
        deadline = time.monotonic() + timeout_s
        while True:
            saved = heard()
            if self._engine.world.rank == 0:
                self.follow(saved)
            is_quiet = not saved or saved.state != "running"
            if self._engine.line is not None and self._engine.line.folder_lost:
                return
            if self._engine.world.rank == 0:
                is_quiet = self._asked_s is None or (time.monotonic() - self._asked_s > _BEGIN_S and is_quiet)
            if is_quiet or time.monotonic() > deadline:
                return
            time.sleep(_LOOK_S)

    def await_saved(
        self, heard: Callable[[], Saved | None], step: int, timeout_s: float, why_not: Callable[[], str] = str
    ) -> None:
        """Wait until a checkpoint of this step or a later one, or this host's part of it, is saved, or has failed."""
        began_s = time.monotonic()
        while (saved := heard()) is None or saved.number < step or saved.state == "running":
            if self._engine.line is not None and self._engine.line.folder_lost:
                raise StoreError(self._engine.line.folder_lost)
            has_begun = saved is not None and saved.number >= step
            if time.monotonic() - began_s > (timeout_s if has_begun else min(timeout_s, _BEGIN_S)):
                why = why_not()
                silent = f"nothing was heard of it for {time.monotonic() - began_s:.0f} s"
                raise StoreError(f"{silent}; {why}" if why else silent)
            time.sleep(_LOOK_S)
        if self._engine.world.rank == 0:
            self.follow(saved)

    def follow(self, saved: Saved | None) -> None:
        """On the chief: tell the callbacks what became of a checkpoint."""
        engine = self._engine
        if saved is not None and saved.state == "running" and saved.number >= self._asked_number:
            self._running_s = time.monotonic()
        if saved is None or saved.state in ("running", "part") or saved == self._told:
            return
        if saved.number < self._asked_number and self._asked_s is not None:
            return  # a report of the save before
        began_s = self._asked_s or time.monotonic()
        self._told, self._asked_s, self._running_s = saved, None, 0.0
        self.callback.done(saved.number)
        if saved.state == "failed":
            self._last_failure = str(saved.facts["why"])
            self._tell_failure(f"the checkpoint of step {saved.number} was not saved: {saved.facts['why']}")
            self._chain = planner.Chain(self._chain.base_bytes, self._chain.partial_bytes, trusted=False)
            return
        self._good_s, self._good_step, self._last_failure = began_s, saved.number, ""
        self.saved_step = saved.number
        facts, n_bytes = saved.facts, int(saved.facts["n_bytes"])
        self._newest = facts["manifest"]
        self._measured = self._measured.saved(facts["kind"], facts["seconds"], n_bytes, self._chain.base_bytes)
        if facts["kind"] == "full":
            self._chain = planner.Chain(n_bytes)
        else:
            chain = self._chain
            self._chain = planner.Chain(chain.base_bytes, chain.partial_bytes + n_bytes, n_bytes)
        text = f"step {saved.number} saved ({facts['kind']}): {n_bytes / 1e6:,.1f} MB in {facts['seconds']:.2f} s"
        engine.emit(Event("checkpoint", engine.step, text, {**facts, "stall_s": self._measured.stall_s}))
        self.plan_pace(self._n_hosts)

    def look_at_age(self, why_not_ready: Callable[[], str]) -> None:
        """On the chief, between two steps: tell how old the newest checkpoint is; warn when the next one is late.

        why_not_ready: what is wrong with the server of this host, if anything.
        """
        now, engine = time.monotonic(), self._engine
        if math.isnan(self._good_s):
            self._good_s, self._good_step = now, engine.step
        age_s, age_steps = now - self._good_s, engine.step - self._good_step
        if now - self._age_told_s >= _AGE_EVERY_S:
            self._age_told_s = now
            data = {"checkpoint_age_s": round(age_s, 1), "checkpoint_age_steps": age_steps}
            engine.emit(Event("rates", engine.step, f"the newest checkpoint is {age_s:.0f} s old", data))
        intervals = self.callback.intervals(age_steps, age_s)
        if self._late.word(intervals >= _LATE_AT, now) is None:
            return
        reason = why_not_ready() or self._last_failure
        if not reason:
            running = self._asked_s is not None
            reason = f"that of step {self._asked_number} is still being saved" if running else "none was begun"
        text = (
            f"no checkpoint for {age_s:.0f} s and {age_steps} steps, {intervals:.1f} times the interval: {reason}. A "
            "host that is lost now costs what came since; training goes on"
        )
        told = {"seconds": round(age_s, 1), "steps": age_steps, "why": reason}
        engine.emit(Event("checkpoint_late", engine.step, text, told, level="warning"))

    # --- what travels with the training state ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        claim = None if self._claim is None else asdict(self._claim)
        return {"claim": claim, "place": self.place(), "measured": asdict(self._seen())}

    def load_state(self, state: dict[str, Any]) -> None:
        self._claim = None if state["claim"] is None else claims.Claim(**state["claim"])
        self.load_place(state["place"])
        self._measured, self._since_s = Measured.of_mapping(state["measured"]), None

    def world_formed(self, rows_moved: bool) -> None:
        """What was under way is no more; and whoever is not the chief now knows nothing of what will be saved.

        rows_moved: shards may be elsewhere, or have begun anew: the next save takes all rows
        """
        self._due, self._asked_s, self.somebody_leaves, self.waiting = False, None, False, []
        if rows_moved or self._engine.world.rank != 0:
            self._newest, self._chain = None, planner.Chain()
