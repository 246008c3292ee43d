"""Checkpoints as a job sees them: who saves what, under which claim, and resuming from one.

How often, what is due and its outcome: `save_schedule`.

The rows are saved by the companion servers, in their processes; each host's leader asks its own. The order of one save
in allreduce mode, after the commit of step k agreed that one is due:

    1. broadcast  the chief sends its save plan to all ranks: epoch of its claim, number k, kind, parent
    2. ask        each host's leader asks its server; the chief's request has the training state, as of step k
    3. (servers)  save their rows during training (strict: when all have read their rows); the chief's waits for
                  all parts and writes the manifest
    4. follow     the chief receives the result with the heartbeats, and reports it to the callbacks

A crash before the manifest leaves the checkpoint before in force.

Who has the claim. A launch claims the location once it knows that no other process lives in the job's memory on any of
its hosts (`membership.resume_job`). The worker that claimed renews the claim from then on (`claim_renewal`), and so
does the server of the chief's host when it is up: the claim is alive while one of the two is. A world that is formed
again, with other hosts, claims again, so a host that was cut off is fenced. Where another job has taken the location
over, and left without a checkpoint, the chief claims again before its next save, and its plan has the new claim. In an
asynchronous mode the other workers receive it with their heartbeats' answers, so that the next chief saves under it.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
from torch import Tensor

from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.claim_renewal import ClaimRenewal
from gba_hvd.checkpoint.resumed_checkpoint import ResumedCheckpoint, digest_of
from gba_hvd.checkpoint.save_schedule import SaveSchedule
from gba_hvd.checkpoint.state_check import check_state
from gba_hvd.config import checked_job_id
from gba_hvd.embedding.accesses import were_changed
from gba_hvd.epoch import position_in
from gba_hvd.errors import BadInput
from gba_hvd.ps.messages import DelegateClaim, Save, SaveAbout, SavePace, SavePlan, SaveSettings
from gba_hvd.ps.worker.host_server import HostServer
from gba_hvd.ps.worker.worker import PsWorker
from gba_hvd.shm.checkpoint_rows import ShardRows, schema_of
from gba_hvd.shm.layout import SampledSpec
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.training.commit_fields import StepParticipant
from gba_hvd.training.engine import Engine
from recovery.callback import CheckpointCallback
from recovery.catalog import claims
from recovery.catalog.chains import Chain, Skipped, chains
from recovery.catalog.retention import first_epoch_of
from recovery.catalog.rollback import ROLLED_BACK
from recovery.errors import Damaged, NotFound, RecoveryError
from recovery.format.manifest import Manifest
from recovery.policies import counts_accesses
from recovery.redaction import redacted
from recovery.restore import Report, TrainingPoint, restore
from recovery.restore.inspect import read_state
from recovery.schedule.adaptive import JobMeasurements
from recovery.schedule.recovery_choice import RecoveryDecision, Situation, choose_recovery
from recovery.selection.importance import list_capacities, share_within
from recovery.storage.open import open_store, refuse_inside
from recovery.storage.store import Store, check

_STORE_TIMEOUT_S = 20.0
_RELEASE_TIMEOUT_S = 2.0  # a launcher that was interrupted kills this process after 5 s
_LEAST_STEP_S = 1e-3  # of a job that has seen no time pass yet
# On a commit: the chief wants a checkpoint of this step; so many workers are to leave; so many hosts' servers failed to
# save their part of the newest one; so many hosts' servers are not up.
_N_FIELDS = 4


def checkpoints_of(engine: Engine) -> JobCheckpoints | None:
    """Those of the job, if it has a CheckpointCallback."""
    return engine.participant(JobCheckpoints)


@dataclass(frozen=True)
class CompleteCheckpoint:
    """A checkpoint that all of a job can roll back to. state: the training state, as `TrainingState.resume` takes it.

    passed_over: newer ones that could not be used, and why
    """

    manifest: Manifest
    state: bytes
    passed_over: tuple[str, ...] = ()


class JobCheckpoints(StepParticipant):
    """One worker's part. Belongs to the training thread.

    What was saved last is known to the chief only: its successor begins with a save of all rows. The claim travels with
    the training state, so that a successor resumes under it; so does what was measured.
    """

    name, order = "checkpoints", 1

    def __init__(self, engine: Engine, callback: CheckpointCallback) -> None:
        config = callback.config
        if counts_accesses(config.policy):
            servers = None if engine.mode is None else engine.mode.servers
            if servers is not None and not servers.session.accesses:
                raise BadInput(
                    f"policy {config.policy!r} counts how often rows are looked up, and the servers of mode "
                    f"{servers.name!r} do not: register the callback before the job enters it, or use policy='delta'"
                )
            engine.model.tables.counts_accesses = True
        if config.policy == "ssu":
            tables = engine.model.tables
            capacities = list_capacities(schema_of(tables.layout), config.row_fraction)
            tables.layout = replace(tables.layout, sampled=SampledSpec(capacities, config.ssu_period))
        if config.save_bytes is not None:
            share_within(schema_of(engine.model.tables.layout), config.save_bytes)  # refuses too few, now
        self.callback = callback
        self._engine = engine
        self._launch = f"{secrets.token_hex(4)}"  # the same command started twice is two writers
        self._store: Store | None = None
        self._claim: claims.Claim | None = None
        self._released: claims.Claim | None = None
        self._renewal: ClaimRenewal | None = None  # in the worker that claimed
        self._delegated = ""  # nonce of the claim that this host's server was given
        self._looked_s = -math.inf  # whether a location that was taken over is free
        self.first_epoch = 0  # of this job, earlier launches included; what was written since, in its name, may expire
        self._to_continue: Manifest | None = None  # the newest checkpoint there was when this launch began
        self.rollback_epoch = 0  # of that, where `gba-hvd checkpoint rollback` made it the newest
        self._epochs: list[int] = []  # of all claims of this job, oldest first
        self._resumed_epoch = 0  # of the checkpoint that the job resumed from
        # Of each full recovery (epoch, number, last epoch before): checkpoints after that one, up to that epoch, are of
        # training that the job has rolled back. No row comes from them any more.
        self._rolled_back: list[tuple[int, int, int]] = []
        self._is_claimed = False  # the newest attempt to claim the location was successful
        self.schedule = SaveSchedule(engine, callback)
        # (epoch, number) of the newest save of which all know that this host's part failed
        self._part_reported = (0, -1)
        self.waiting: list[str] = []  # a checkpoint that is due, where servers are not up
        self._due = False
        self.worker_leaves = False  # all workers know of it, and save first
        self._died_before = False  # the job that this one resumes from did not end in peace
        self._resumed: ResumedCheckpoint | None = None  # what this launch resumed from; on the chief

    # --- at the start, and after a change of hosts -------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """With little patience: all workers stand while one of them asks it."""
        if self._store is None:
            patience = {"timeout_s": _STORE_TIMEOUT_S, "tries": 2}
            refuse_inside(self.callback.url, **{**patience, **self.callback.storage_options})
            self._store = self._opened(patience)
        return self._store

    def _opened(self, patience: Mapping[str, Any]) -> Store:
        return open_store(self.callback.url, **{**patience, **self.callback.storage_options})

    def job_to_resume(self) -> str | None:
        """The name of the job whose checkpoint is the newest, if this one is to resume from it. On the chief."""
        if not self.callback.resume:
            return None
        chain = next((one for one in chains(self.store) if isinstance(one, Chain)), None)
        newest = max(claims.claims_of(self.store.names("claims/")), default=None)
        self._died_before = newest is not None and not newest.is_closed
        self.schedule.saved_step = -1 if chain is None else chain.newest.step
        self._to_continue = None if chain is None else chain.newest
        self.rollback_epoch = chain.newest.epoch if chain and ROLLED_BACK in chain.newest.about else 0
        job = "" if chain is None else str(chain.newest.about.get("job", ""))
        try:
            return checked_job_id(job) if job else None
        except BadInput as error:  # it is part of the name of a folder that may be removed
            raise BadInput(
                f"the newest checkpoint in {redacted(self.callback.url)} names a job that there cannot be: {error}. It "
                "was not written by gba_hvd, or was changed: name another location, or delete that manifest"
            ) from error

    def claim_location(self, job: str, writer: str = "") -> None:
        """Claim the location for this job. On the chief. writer: of a claim of this job's that is known to be dead.

        Raises BadInput when the store cannot be used, or another job writes there. Later on, a store that cannot be
        reached is no reason to stop: saves fail, and are reported, until it can be reached.
        """
        config = self.callback.config
        if self._claim is None:
            check(self.store)
            writer = writer or f"{config.job or job}.{self._launch}"
            self._claim = claims.claim(self.store, writer, takeover=self.callback.takeover, lease_s=config.lease_s)
            others = self._others_since(self._claim)
        else:
            try:
                writer, lease_s = self._claim.writer, self._claim.lease_s
                self._claim = claims.claim(self.store, writer, again=True, lease_s=lease_s)
                others = self._others_since(self._claim)
            except (BadInput, RecoveryError) as error:
                self._is_claimed = False
                self.schedule.report_failure(f"the checkpoint location was not claimed again: {error}")
                return
        self._is_claimed = True
        self._renew(self._claim)
        now, before = self._claim.epoch, self._epochs[-1] if self._epochs else 0
        self._epochs.append(now)
        if not self.first_epoch:
            self.first_epoch = (self._to_continue and first_epoch_of(self._to_continue, job)) or now
        elif others:  # what was saved until then never expires
            self.first_epoch = now
            text = (
                f"another job has claimed {self.store.url} since this one did (this one had epoch {before}, has "
                f"{now}): this job continues to save there, but deletes no checkpoint from before, and uses none of "
                "the other's. Give each job a location of its own; `gba-hvd checkpoint gc` removes what no job needs"
            )
            facts = {"before": before, "now": now}
            self._engine.emit(Event("place_shared", self._engine.progress.step, text, facts, level="warning"))

    def _renew(self, claim: claims.Claim | None) -> None:
        """Renew this claim from now on, and no other one. None: none."""
        if self._renewal is not None:
            self._renewal.close()
        patience = {"timeout_s": _STORE_TIMEOUT_S, "tries": 1}
        self._renewal = None if claim is None else ClaimRenewal(claim, lambda: self._opened(patience))

    def claim_again_if_free(self) -> None:
        """Where another job has taken the location over, and has left it without a checkpoint. On the chief.

        Others wait meanwhile: it looks once in the time of a lease, and does not wait long for the store.
        """
        now = time.monotonic()
        if self._claim is None or not self.schedule.was_fenced or now - self._looked_s < self._claim.lease_s:
            return
        self._looked_s = now
        with contextlib.suppress(BadInput, RecoveryError):  # then the next save fails, with the reason
            if claims.is_free_again(self._opened({"timeout_s": _RELEASE_TIMEOUT_S, "tries": 1}), self._claim):
                self.claim_location(self._engine.job.id)

    def _others_since(self, claim: claims.Claim) -> bool:
        """Whether epochs between this job's last claim and this one are another's, as far as the claims say.

        A chief that died may have claimed in the job's name, and not reported it.
        """
        writers: dict[int, set[str]] = {}
        for seen in claims.claims_of(self.store.names("claims/")):
            writers.setdefault(seen.epoch, set()).add(seen.writer)
        between = range(self._epochs[-1] + 1, claim.epoch) if self._epochs else ()
        return any(writers.get(epoch) != {claim.writer} for epoch in between)

    def _is_of_this_job(self, epoch: int, number: int) -> bool:
        """Whether rows may come from a checkpoint: of this job, or before what it resumed from; not rolled back."""
        is_own = epoch in self._epochs or epoch <= self._resumed_epoch
        is_void = any(epoch <= last and (epoch, number) > (at, of) for at, of, last in self._rolled_back)
        return is_own and not is_void

    def location(self) -> dict[str, Any]:
        """What the host leaders know of the checkpoint location: plain values."""
        location = {"first_epoch": self.first_epoch, "epochs": self._epochs, "resumed_epoch": self._resumed_epoch}
        return {**location, "gone_back": [list(one) for one in self._rolled_back]} if self._rolled_back else location

    def load_location(self, location: Mapping[str, Any]) -> None:
        self.first_epoch, self._epochs = location["first_epoch"], list(location["epochs"])
        self._resumed_epoch = location["resumed_epoch"]
        self._rolled_back = [(int(at), int(of), int(last)) for at, of, last in location.get("gone_back", ())]
        self._note_rolled_back()

    def _note_rolled_back(self) -> None:
        if self._rolled_back:
            self.schedule.void_before(max(last for _, _, last in self._rolled_back) + 1)

    def fill(self, memory: ShardMemory, shards: Sequence[int], now: TrainingPoint | None) -> Report | None:
        """Bring shards back from the newest good checkpoint; None: there is none. No process may use them meanwhile.

        now: where the job is, if it continues: then only rows come back, of its own checkpoints and of what it resumed
        from, else also the state. Raises as `recovery.restore.restore`.
        """
        rows = ShardRows(memory, lambda: shards, filling=True)
        if now is None:
            return restore(self._opened({}), rows, config=self.callback.config, check_state=check_state)
        config, is_mine = self.callback.config, self._is_of_this_job
        return restore(self.store, rows, config=config, now=now, with_state=False, is_wanted=is_mine)

    # --- a lost host -------------------------------------------------------------------------------------------------

    def newest_complete(self, damaged: Collection[str] = ()) -> CompleteCheckpoint:
        """The newest checkpoint of this job that leaves out no change, with its training state, read and checked.

        damaged: manifests to pass over. Raises BadInput or RecoveryError saying why there is none.
        """
        if not self._is_claimed:
            raise BadInput("the checkpoint location could not be claimed: a save in flight might still change it")
        passed_over = []
        for chain in chains(self.store, self._is_of_this_job):
            if isinstance(chain, Skipped):
                passed_over.append(chain.words)
                continue
            newest = chain.newest
            if not chain.is_complete or newest.name in damaged:
                continue
            try:
                self.check_fits(newest.about)
                state = read_state(self.store, newest)
                if state is not None:
                    check_state(newest.name, state)
            except (BadInput, Damaged, NotFound) as error:
                passed_over.append(Skipped(newest.name, str(error)).words)
                continue
            if state is not None:
                return CompleteCheckpoint(newest, state, tuple(passed_over))
        why = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise NotFound(f"{redacted(self.store.url)} has no checkpoint of this job that leaves out no change{why}")

    def decide_recovery(self, n_lost: int, stood_s: float) -> tuple[RecoveryDecision, CompleteCheckpoint | None]:
        """What the survivors do about so many shards that went down with a host, and the checkpoint to roll back to.

        stood_s: seconds since the last step. On the rank whose state the others get, which owns the decision.
        """
        engine, given, layout = self._engine, self.callback.given, self._engine.model.tables.layout
        step, measured, complete, newest, why_not = engine.progress.step, self.schedule.seen(), None, None, ""
        step_s = measured.observed_s / max(1, step)
        try:
            if given.strategy != "partial":
                complete = self.newest_complete()
                newest = complete.manifest
            elif measured.save_s is None:
                chain = next((one for one in chains(self.store, self._is_of_this_job) if isinstance(one, Chain)), None)
                newest = None if chain is None else chain.newest
        except (BadInput, RecoveryError) as error:
            why_not = "" if given.strategy == "partial" else str(error)
        if newest is not None:  # a chief that was lost with its host left there what it had measured
            left = JobMeasurements.of_checkpoint(newest)
            if left.observed_s > measured.observed_s:
                step_s = left.observed_s / max(1, newest.step)
            measured = measured.with_those_of(left)
            self.schedule.load_measured(measured)
        age = 0 if complete is None else max(0, step - complete.manifest.step)
        now = Situation(
            n_bytes=schema_of(layout).n_bytes, n_servers=max(1, round(layout.n_shards / n_lost)),
            every_s=self.callback.given_interval_s(max(step_s, _LEAST_STEP_S)), pace=self.schedule.pace,
            age_s=age * step_s, age_steps=age, why_not_full=why_not,
        )  # fmt: skip
        measured = replace(measured.lost(measured.observed_s), reschedule_s=stood_s)
        decision = choose_recovery(measured, given, now)
        if decision.strategy == "partial" or complete is None:
            return decision, None
        return replace(decision, manifest=complete.manifest.name, step=complete.manifest.step), complete

    def fill_from(self, memory: ShardMemory, shards: Sequence[int], manifest: str) -> Report:
        """Bring shards back from this checkpoint. With patience: there is nothing else to train on.

        Raises Damaged, BadInput or RecoveryError; the shards are worth nothing then.
        """
        rows = ShardRows(memory, lambda: shards, filling=True)
        report = restore(self._opened({}), rows, config=self.callback.config, only=manifest, with_state=False)
        if report is None:
            raise Damaged(f"{manifest} cannot be restored any more")
        return report

    def rolled_back_to(self, epoch: int, number: int) -> None:
        """Full recovery, on the rank whose state the others get: checkpoints after this one are void from now on."""
        self._rolled_back.append((epoch, number, self._epochs[-1] - 1))
        self._note_rolled_back()

    def rolled_back(self, step: int) -> None:
        self._part_reported, self._due, self.waiting = (0, -1), False, []
        self.schedule.rolled_back(step)

    def delegate_claim(self, line: HostServer, part: int, n_parts: int) -> None:
        """Run on each host leader. Report the new world to the server; the chief's also renews the claim."""
        assert self._claim is not None
        self._delegated = self._claim.nonce
        line.hold(
            DelegateClaim(self._claim, self._save_settings, self._about("allreduce"), self.first_epoch, part, n_parts)
        )

    def delegate_if_new(self, line: HostServer | None, part: int, n_parts: int) -> None:
        """The claim, on each host leader (line), where the chief has claimed again since it was delegated."""
        if line is not None and self._claim is not None and self._delegated != self._claim.nonce:
            self.delegate_claim(line, part, n_parts)

    def adopt_claim(self, claim: claims.Claim, first_epoch: int) -> None:
        """Save under this claim from now on, if the chief has claimed again; one that is not newer changes nothing."""
        if self._claim is None or claim.epoch <= self._claim.epoch:
            return
        self._claim, self.first_epoch = claim, first_epoch
        self._epochs.append(claim.epoch)
        self.stop_renewing()  # of a claim that this worker made as the chief, before

    def release(self) -> None:
        """Release the claim, so that the next job need not wait for its lease to expire. On the chief, at the end.

        May be called again: what failed is tried again.
        """
        self.stop_renewing()
        if self._claim is not None and self._released != self._claim:
            with contextlib.suppress(BadInput, RecoveryError):
                claims.release(self._opened({"timeout_s": _RELEASE_TIMEOUT_S, "tries": 1}), self._claim)
                self._released = self._claim

    def stop_renewing(self) -> None:
        """On every worker, at the end."""
        self._renew(None)

    def resume_point(self, report: Report) -> None:
        """The whole job was restored. On the chief."""
        self._resumed_epoch = report.manifest.epoch
        self._resumed = ResumedCheckpoint.of(report)
        measured = JobMeasurements.of_checkpoint(report.manifest)
        if self._died_before:
            measured = measured.lost(measured.observed_s)
        self.schedule.resume(report.step, replace(measured, load_s=report.seconds))

    def resume_from_memory(self, state: Mapping[str, Any], step: int) -> str:
        """Restore this class's retained `state`, in a job that lost all its workers. Returns the writer's name."""
        self.load_location(state["place"])
        measured = JobMeasurements.of_mapping(state["measured"])
        self.schedule.resume(min(step, max(0, self.schedule.saved_step)), measured.lost(measured.observed_s))
        return "" if state["claim"] is None else str(state["claim"]["writer"])

    def check_fits(self, about: Mapping[str, Any]) -> None:
        """Raises BadInput when this job cannot resume from the checkpoint.

        Of a job that cut its data otherwise, the place in it is void. Of one that compressed its gradients otherwise,
        what was not sent yet has no place here; one that did not compress them has nothing that waits.
        """
        engine = self._engine
        for name in ("global_batch", "micro_batch"):
            saved, mine = about.get(name), getattr(engine.model, name)
            if saved != mine:
                raise BadInput(
                    f"the checkpoint at {self.store.url} is of a job with {name}={saved}, this one has {mine}: "
                    "keep it, or start over at another url or with resume=False"
                )
        saved, mine = about.get("compression", "none"), self._compressor
        if saved not in ("none", mine):
            raise BadInput(
                f"the checkpoint at {self.store.url} is of a job with compression={saved}, this one has {mine}: "
                f"what was not sent yet would be lost; continue with {saved}, or start over at another url or with "
                "resume=False"
            )

    @property
    def _compressor(self) -> str:
        compression = self._engine.model.compression
        return "none" if compression is None else str(compression.spec)

    # --- allreduce mode ----------------------------------------------------------------------------------------------

    def n_fields(self) -> int:
        return _N_FIELDS

    def before_commit(self, fields: Tensor) -> None:
        engine = self._engine
        if engine.world.rank == 0 and self.schedule.is_due_at(engine.progress.step + 1):
            fields[0] = 1.0
        fields[1] = float(engine.signals.preempt_deadline_s is not None)
        fields[3] = float(engine.host.server is not None and not engine.host.server.is_ready())
        saved = None if engine.host.server is None else self.schedule.in_force(engine.host.server.saved)
        asked = (0, -1) if saved is None else (saved.epoch, saved.number)
        if engine.world.rank and saved is not None and saved.state == "failed" and asked > self._part_reported:
            self._part_reported, fields[2] = asked, 1.0
            text = f"this host's part of the checkpoint of step {saved.number} was not saved: {saved.facts.why}"
            data = {"why": saved.facts.why, "rank": engine.world.rank}
            engine.emit(Event("checkpoint_failed", engine.progress.step, text, data, "warning"), only_here=True)

    def after_commit(self, agreed: Sequence[float]) -> None:
        """What is due waits for servers that are not up; training does not."""
        self._due, self.worker_leaves = agreed[0] > 0 and not agreed[3], agreed[1] > 0
        self.waiting = ["the checkpoint that is due"] if agreed[0] > 0 and agreed[3] else []
        if agreed[2] > 0 and self._engine.world.rank == 0:
            self.schedule.part_failed()

    @property
    def is_due(self) -> bool:
        return self._due

    def plan(self, is_last: bool = False) -> SavePlan:
        """The chief's save plan. is_last: there may be no later save, so no change is left out."""
        engine = self._engine
        assert self._claim is not None
        kind, why = self.schedule.next_kind(is_last)
        return SavePlan(
            epoch=self._claim.epoch,
            number=self.schedule.next_number(engine.progress.step),
            kind=kind,
            parent=None if kind == "full" else self.schedule.newest,
            step=engine.progress.step,
            samples=engine.progress.account.applied,
            about=self._about("allreduce", why),
            first_epoch=self.first_epoch,
            claim=self._claim,
        )

    def _about(self, mode: str, why: str = "") -> SaveAbout:
        engine, progress = self._engine, self._engine.progress
        return SaveAbout(
            why=why,
            job=engine.job.id,
            mode=mode,
            global_batch=engine.model.global_batch,
            micro_batch=engine.model.micro_batch,
            n_servers=self.schedule.n_hosts,
            given=self.callback.given,
            measured=self.schedule.seen(),
            costs=self.schedule.seen().costs(),
            pace=SavePace(**self.callback.pace),
            compression=self._compressor,
            hashed=engine.model.tables.layout.hashed_settings(),
            position=position_in({"cursor": vars(progress.cursor), "order": progress.order and vars(progress.order)}),
            **self.callback.best,
        )

    def save(self, plan: SavePlan, line: HostServer | None, part: int, n_parts: int, state: bytes) -> None:
        """Ask this host's server for its part, if this worker is its host's leader."""
        self._due = False
        self.adopt_claim(plan.claim, plan.first_epoch)
        self.delegate_if_new(line, part, n_parts)
        self.schedule.asked(plan.number, plan.step)
        if line is not None:
            line.save(self._request(plan, part, n_parts), state)

    @property
    def is_strict(self) -> bool:
        return self.callback.config.strict

    def _request(self, plan: SavePlan, part: int, n_parts: int, generation: int = 0) -> Save:
        """Credentials are not in the plan: they stay on each host, and all know them."""
        return Save(
            **msgspec.structs.asdict(plan),
            part=part,
            n_parts=n_parts,
            settings=self._save_settings,
            generation=generation,
            supersedes=True,  # of what was asked for before nothing is waited for any more
        )

    @property
    def _save_settings(self) -> SaveSettings:
        callback = self.callback
        return SaveSettings(callback.url, callback.storage_options, callback.config, callback.final_checkpoint_s)

    def may_be_as_resumed(self) -> bool:
        """Whether this launch may have nothing to save, but for what `is_as_resumed` looks at. On the chief.

        Not where a callback works with the checkpoint that is saved at the end.
        """
        engine, resumed = self._engine, self._resumed
        is_idle = engine.progress.launched_at == engine.progress.step and self.schedule.n_hosts == 1
        needed = any(getattr(one, "uses_last_checkpoint", False) for one in engine.callbacks)
        if resumed is None or not is_idle or needed:
            return False
        newest = None
        with contextlib.suppress(BadInput, RecoveryError):  # then it is saved, or that fails with the reason
            newest = next(iter(chains(self.store)), None)
        name = newest.newest.name if isinstance(newest, Chain) else ""
        schema, about = schema_of(engine.model.tables.layout), self._about("allreduce")
        return not resumed.why_save(step=engine.progress.step, newest=name, schema=schema, about=about)

    def is_as_resumed(self, state: bytes) -> bool:
        """Whether neither the training state nor a row has changed since this launch resumed. On the chief."""
        memory, resumed = self._engine.model.tables.memory, self._resumed
        if memory is None or resumed is None or digest_of(state) != resumed.digest:
            return False
        if any(were_changed(memory, table.name) for table in memory.layout.tables):
            return False
        step = self._engine.progress.step
        text = f"no checkpoint is saved: {resumed.name}, of step {step}, is exactly what this launch would save"
        self._engine.emit(Event("checkpoint_unchanged", step, text, {"manifest": resumed.name}))
        return True

    # --- asynchronous modes ------------------------------------------------------------------------------------------

    def save_asynchronously(self, mode: PsWorker, snapshot: bytes, is_last: bool = False) -> None:
        """The coordinator has all servers save at its next moment between two steps. On the chief.

        is_last: see `plan`.
        """
        started, plan = time.monotonic(), self.plan(is_last)
        plan.about.mode = mode.name
        mode.before_save()
        self.schedule.asked(plan.number, plan.step)
        request = self._request(plan, 0, 1, mode.session.generation)
        mode.contact.asked_to_save(request.epoch, request.number)
        mode.client.send(0, request, [snapshot]).add_done_callback(mode.contact.save_answered)
        self.schedule.record_stall(time.monotonic() - started)

    # --- what travels with the training state ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        claim = None if self._claim is None else asdict(self._claim)
        return {"claim": claim, "place": self.location(), "measured": asdict(self.schedule.seen())}

    def load_state(self, state: dict[str, Any]) -> None:
        self._claim = None if state["claim"] is None else claims.Claim(**state["claim"])
        if self._renewal is not None and self._renewal.claim != self._claim:
            self.stop_renewing()  # another worker has claimed
        self.load_location(state["place"])
        self.schedule.load_measured(JobMeasurements.of_mapping(state["measured"]))

    def world_formed(self, rows_moved: bool) -> None:
        """Discard what was in flight; a rank that is not the chief now has no knowledge of coming saves.

        rows_moved: shards may be elsewhere, or have started over: the next save takes all rows
        """
        self._due, self.worker_leaves, self.waiting = False, False, []
        self.schedule.world_formed(forget=rows_moved or self._engine.world.rank != 0)
