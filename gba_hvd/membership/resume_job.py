"""What a new job resumes from: a checkpoint, or the orphaned memory of a job. It also claims its checkpoint location.

    1. name      the source looks whether there is a checkpoint to resume from, and all take its job's name
    2. alone     the job is refused where another one lives in the memory of that name on one of its hosts
    3. memory    what is in memory under that name, if this job can resume from it; else that is let go
    4. key       what the job's servers and workers prove themselves with, from the source
    5. location  what a dead job left on the hosts is cleared, and the checkpoint location is claimed

A refusal or a crash before 5 leaves the claim of another job as it was. Of two launches that both pass 2, the second to
claim is refused by the first one's claim: at once on the host of its claimant, elsewhere by its renewals.

A job that continues with survivors has name, key and location already: it shares them with late joiners, and claims
again.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace

import numpy as np

from gba_hvd.callbacks import Event
from gba_hvd.checkpoint import orphaned_memory
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.comm.collectives import World, all_or_none
from gba_hvd.comm.key_exchange import share_key, shared_secret
from gba_hvd.comm.slow_step import noting_slow
from gba_hvd.errors import GbaError, ShardMemoryError
from gba_hvd.membership.agreement import Agreement
from gba_hvd.membership.shard_transfer import open_memory, owner_of
from gba_hvd.ps.transport import new_key
from gba_hvd.shm import reaper
from gba_hvd.shm.job_folder import job_folder
from gba_hvd.shm.shard_memory import remove_orphaned_memory
from gba_hvd.training.engine import Engine
from recovery import state_codec
from recovery.redaction import redacted

_FLUSH_MARGIN_S = 10.0


@dataclass(frozen=True)
class ResumedFromMemory:
    """What a job resumes from in memory. state: on the source only, as in a checkpoint."""

    step: int
    source: int
    reason: str
    state: bytes | None


def resume_previous_job(
    engine: Engine, world: World, agreed: Agreement, job_id: str, is_leader: bool
) -> tuple[str, Agreement, ResumedFromMemory | None]:
    """The job's name, what is agreed on then, and what it resumes from in memory. Sets the engine's key. A collective.

    job_id: this rank's, if there is no other; is_leader: this rank is its host's leader.
    """
    checkpoints, taken = checkpoints_of(engine), None
    job_id, saved_step, rollback_epoch = _name_of_job(engine, world, agreed, job_id)
    if checkpoints is not None and not agreed.is_restart:
        _refuse_beside_another(engine, world, job_id, is_leader)
    if checkpoints is not None and checkpoints.callback.resume and not agreed.is_restart:
        taken = _resume_from_memory(engine, world, job_id, is_leader, saved_step, rollback_epoch)
    if taken is not None:
        agreed = replace(agreed, step=taken.step, source=taken.source)
    if taken is not None and taken.state is not None:
        engine.identify(key=orphaned_memory.key_of(job_folder(engine.model.tables.config.shard_dir, job_id)))
    mine = (engine.job.key or new_key()) if world.rank == agreed.source else None
    engine.identify(key=share_key(world, mine, agreed.source, shared_secret(), agreed.is_restart))
    if taken is not None and engine.model.tables.memory is not None:
        # Before others of the host open it: a collective follows.
        engine.model.tables.memory.give_to(owner_of(engine.job.key))
    if checkpoints is not None:
        _claim_location(engine, world, agreed, job_id, is_leader, taken)
    return job_id, agreed, taken


def _name_of_job(engine: Engine, world: World, agreed: Agreement, job_id: str) -> tuple[str, int, int]:
    """The name of the job that this one resumes from, if there is a checkpoint, its step, and its epoch if it was gone
    back to (0: it was not). A collective.
    """
    checkpoints = checkpoints_of(engine)

    def look() -> str:
        saved = None
        if checkpoints is not None and not agreed.is_restart and world.rank == agreed.source:
            with noting_slow(f"{redacted(checkpoints.callback.url)} to list its checkpoints"):
                saved = checkpoints.job_to_resume()
        return job_id if saved is None or engine.model.tables.config.job_id else saved

    if checkpoints is not None and not agreed.is_restart:
        job_id = all_or_none(world, False, "read", look, "the checkpoints")
    saved_step, epoch = (
        (-1, 0) if checkpoints is None else (checkpoints.schedule.saved_step, checkpoints.rollback_epoch)
    )
    name, step, back = world.broadcast("job", f"{job_id} {saved_step} {epoch}".encode(), agreed.source).decode().split()
    return name, int(step), int(back)


def _refuse_beside_another(engine: Engine, world: World, job_id: str, is_leader: bool) -> None:
    """Raises ShardMemoryError where another job of this name runs on one of the hosts. A collective."""
    folder = job_folder(engine.model.tables.config.shard_dir, job_id)
    mine, owner = {os.getpid(), *engine.host.neighbours.values()}, owner_of(engine.job.key)

    def look() -> None:
        if is_leader:
            orphaned_memory.refuse_if_in_use(folder, mine, owner)

    all_or_none(world, False, "have", look)


def _resume_from_memory(
    engine: Engine, world: World, job_id: str, is_leader: bool, saved_step: int, rollback_epoch: int
) -> ResumedFromMemory | None:
    """What a job of this name that lost all its workers left in memory, if this one can resume from it. A collective.

    rollback_epoch: memory of a claim before this one is of training that an operator went back from (0: of none)
    Otherwise the memory is removed. For the order of the steps see `checkpoint.orphaned_memory`.
    """
    tables, checkpoints = engine.model.tables, checkpoints_of(engine)
    assert checkpoints is not None
    n_shards, folder = tables.layout.n_shards, job_folder(tables.config.shard_dir, job_id)
    found, state = orphaned_memory.MemorySurvey.nothing(n_shards), None

    def look() -> None:
        nonlocal found, state
        limit_s = checkpoints.callback.final_checkpoint_s + _FLUSH_MARGIN_S
        # Open already when this process tried before and could not finish.
        memory = tables.memory if is_leader else None
        if is_leader and memory is None and orphaned_memory.survey(folder, tables.layout, limit_s):
            memory = open_memory(engine, job_id, b"")  # of two that are started at once, the second is refused
            reaper.start(folder, tables.config.grace_s)  # the one it had may have been killed, too; two do no harm
        if memory is not None:
            with contextlib.suppress(ShardMemoryError):  # what is damaged is of no use
                found, state = orphaned_memory.found_in(memory)

    all_or_none(world, False, "look at what was left in", look)
    everyone = [orphaned_memory.MemorySurvey.of_row(row) for row in world.gather("left", found.row())]
    choice = orphaned_memory.decide_resume(everyone, engine.job.settings, saved_step)
    failure, taken = "", None
    if choice.rank is not None:
        enter = orphaned_memory.session_of(folder, state) if found.ready.any() else None
        try:
            if enter is not None:
                orphaned_memory.start_servers(folder, enter)
        except (GbaError, OSError) as error:
            failure = str(error)
        started = world.gather("servers started", np.array([not failure], dtype=np.int64)).all()
        whole, step = None, -1
        if world.rank == choice.rank and started:
            assert state is not None
            try:
                whole, step = orphaned_memory.collect_state(
                    folder, job_id, state, enter, engine.model.dense.sizes, engine.model.names
                )
                _refuse_unfit(whole, rollback_epoch)
            except (GbaError, OSError) as error:
                failure, step = str(error), -1
        decided = world.broadcast("goes on", f"{step} {failure}".encode(), choice.rank).decode()
        step, failure = int(decided.partition(" ")[0]), decided.partition(" ")[2]
        taken = ResumedFromMemory(step, choice.rank, choice.reason, whole) if step >= max(0, saved_step) else None
    if taken is None and tables.memory is not None:
        tables.on_device.close()
        tables.memory.close()
        tables.memory = None
    if taken is None and (choice.reason or failure) and world.rank == 0:
        instead = (
            "the newest checkpoint is used" if saved_step >= 0 else "there is no checkpoint, so training starts over"
        )
        text = f"what the launch before left in memory is of no use: {failure or choice.reason}; {instead}"
        engine.emit(Event("memory_left", 0, text, {}, level="warning"))
    return taken


def _refuse_unfit(whole: bytes, rollback_epoch: int) -> None:
    """Raises GbaError where the state in memory cannot be read, or is of before the rollback (0: there was none)."""
    state = state_codec.decode(whole, "the training state in memory")
    if not rollback_epoch:
        return
    claim = state.get("snapshot", state)["checkpoints"]["claim"]
    if claim is None or claim["epoch"] < rollback_epoch:
        raise GbaError("it is of before `gba-hvd checkpoint rollback`")


def _claim_location(
    engine: Engine, world: World, agreed: Agreement, job_id: str, is_leader: bool, taken: ResumedFromMemory | None
) -> None:
    """Clear what a dead job of this name left on the hosts, and claim the checkpoint location. A collective."""
    checkpoints, tables, writer = checkpoints_of(engine), engine.model.tables, ""
    assert checkpoints is not None
    if taken is not None and taken.state is not None:
        state = state_codec.decode(taken.state)
        writer = checkpoints.resume_from_memory(state.get("snapshot", state)["checkpoints"], taken.step)
    if not agreed.is_restart and taken is None:  # first: a server still running renews the claim of the dead job

        def clear() -> None:
            if is_leader and tables.memory is None:
                folder, limit_s = job_folder(tables.config.shard_dir, job_id), checkpoints.callback.final_checkpoint_s
                orphaned_memory.await_last_checkpoint(folder, limit_s + _FLUSH_MARGIN_S)
                remove_orphaned_memory(tables.config.shard_dir, job_id)

        all_or_none(world, False, "clear", clear)
    is_source = world.rank == agreed.source
    act = (lambda: checkpoints.claim_location(job_id, writer)) if is_source else (lambda: None)
    all_or_none(world, agreed.is_restart, "use", act, "the checkpoint location")
    location = world.broadcast(
        "place", json.dumps(checkpoints.location()).encode() if is_source else None, agreed.source
    )
    checkpoints.load_location(json.loads(location))
