"""`join`: what all ranks of a world that has just formed run before they train in it. `elastic` has the order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from gba_hvd.callbacks import Callback
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.comm.collectives import World, all_or_none, worker_lost
from gba_hvd.comm.key_exchange import share_key, shared_secret
from gba_hvd.errors import StateMismatch
from gba_hvd.membership import full_recovery, shard_transfer
from gba_hvd.membership.agreement import Agreement, ModeExitRace, RankState, agree, asynchronous_source
from gba_hvd.membership.full_recovery import RolledBack
from gba_hvd.membership.restore_shards import RestoredShards, restore_missing_shards
from gba_hvd.membership.resume_job import ResumedFromMemory, resume_previous_job
from gba_hvd.modes.allreduce import AllreduceMode
from gba_hvd.modes.allreduce_exchange import AllreduceExchange
from gba_hvd.ps import launch
from gba_hvd.ps.state_files import path_of
from gba_hvd.ps.worker.session import PsSession
from gba_hvd.shm.host_identity import Host
from gba_hvd.shm.layout import digest
from gba_hvd.shm.placement import WorkerTopology, place_shards
from gba_hvd.shm.shard_memory import difference
from gba_hvd.switching import enter_ps, leave_ps
from gba_hvd.switching.requests import ModeRequests, switching_of
from gba_hvd.training.engine import Engine
from gba_hvd.training.mode import RankFacts
from recovery import state_codec
from recovery.redaction import redacted
from recovery.restore import Report
from recovery.schedule.recovery_choice import RecoveryDecision
from recovery.selection.selector import bytes_per_row


@dataclass(frozen=True)
class JoinResult:
    """What came out of `join`.

    membership: in an asynchronous mode, the change of membership this world stands for. part: this host's number.
    rows_restored, rows_age (steps, mean): of a host that was lost, load_s: what that took; why_lost: why some of its
    rows did not come back.
    refilled: for each host that took over some of its rows: samples that had been applied when they were saved (mean
    over the rows, each by its own last save), and how many rows. restored_from: the manifests; skipped: newer
    checkpoints that could not be used, and why.
    resumed: the checkpoint a new job resumes from; taken: what it resumes from in memory
    decision: about a lost host's rows; rolled_back: the checkpoint that all roll back to, with full recovery
    leaders_apart: why the workers of several hosts could not be connected, if so
    workers: all of this world, as (host, process)
    """

    job_id: str
    source: int
    n_hosts: int
    is_host_leader: bool
    is_restart: bool
    shard_steps_missed: int
    rows_lost: int
    host: int
    asynchronous: bool = False
    membership: int = 0
    part: int = 0
    rows_restored: int = 0
    rows_age: float = 0.0
    refilled: tuple[tuple[float, int], ...] = ()
    why_lost: str = ""
    restored_from: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    load_s: float = 0.0
    resumed: Report | None = None
    taken: ResumedFromMemory | None = None
    decision: RecoveryDecision | None = None
    rolled_back: RolledBack | None = None
    leaders_apart: str = ""
    workers: frozenset[tuple[int, int]] = frozenset()

    def samples_lost(self, applied: int, n_rows: int) -> float:
        """Samples lost with a lost host's rows, when so many were applied: mean over all `n_rows` rows of the model.

        Rows that no checkpoint has lost all.
        """
        lost = sum(max(0, applied - samples) * n for samples, n in self.refilled)
        return (lost + applied * self.rows_lost) / n_rows


def join(engine: Engine, world: World, job_id: str, has_state: bool) -> JoinResult:
    """Agree on a step, open the memory, place and fill the shards, and give the engine its mode. A collective.

    In an asynchronous mode survivors change nothing and late joiners become workers of it.
    """
    if engine.model.tables.memory is not None:
        engine.model.tables.memory.await_device()
    settings, callbacks = _settings(engine), _callbacks(engine)
    mine = _rank_state(engine, has_state, digest({**settings, "callbacks": callbacks}))
    facts = [RankState.of_row(row) for row in world.gather("facts", mine.row())]
    engine.host.neighbours = {rank: f.pid for rank, f in enumerate(facts) if f.host == mine.host and rank != world.rank}
    _refuse_different_settings(world, facts, {**settings, **callbacks})
    try:
        source = asynchronous_source(facts)
    except ModeExitRace as error:
        raise worker_lost(str(error)) from error
    if source is not None:
        return _join_asynchronous(engine, world, facts, source)
    agreed = agree(facts)
    if (requests := engine.participant(ModeRequests)) is not None:
        refused = {rank: f.refused for rank, f in enumerate(facts) if f.refused}
        requests.refused_elsewhere(refused, is_new=not mine.has_state)
    _catch_up(engine, world, mine, agreed)
    members = WorkerTopology(tuple(f.host for f in facts))
    here = members.order.index(mine.host)
    is_leader = members.leader_of(mine.host) == world.rank
    if not agreed.is_restart:
        all_or_none(world, False, "start", lambda: _start_callbacks(engine, world, is_leader), "its callbacks")
    engine.identify(settings=digest(settings))
    job_id, agreed, taken = resume_previous_job(engine, world, agreed, job_id, is_leader)
    memory = all_or_none(
        world, agreed.is_restart, "open", lambda: shard_transfer.open_memory(engine, job_id, engine.job.key, is_leader)
    )
    holdings = shard_transfer.gather_holdings(world, members, memory)
    if taken is None:
        shard_transfer.refuse_foreign_rows(agreed, holdings, memory)
    placement = place_shards(members, holdings)
    if is_leader:
        # First, since a server that has left its mode is no writer: only one that may still write is killed.
        leave_ps.retire_servers(job_id, engine.job.key, memory.folder, mine.host)
        memory.end_old_writers({f.pid for f in facts if f.host == mine.host})
    checkpoints, beside = checkpoints_of(engine), 0
    if checkpoints is not None and not agreed.is_restart:  # a running job trains on without it, and its saves fail
        beside = bytes_per_row(checkpoints.callback.config.policy)
    recovery = full_recovery.decide(engine, world, agreed, placement)
    refilled, rolled_back, missed = RestoredShards(), None, 0
    if recovery is not None and recovery.is_full:
        shard_transfer.reserve(world, agreed, placement, holdings, here, is_leader, memory)
        rolled_back = full_recovery.roll_back(
            engine, world, agreed, recovery, placement, holdings, here, is_leader, memory
        )
    else:
        newest, missed = shard_transfer.close_torn_steps(agreed.step, placement, holdings, here, is_leader, memory)
        shard_transfer.reserve(world, agreed, placement, holdings, here, is_leader, memory, beside)
        refilled = restore_missing_shards(engine, world, agreed, placement, here, is_leader, memory)
        shard_transfer.move_shards(world, members, placement, here, is_leader, memory, newest)
    carriers = shard_transfer.open_carriers(world, agreed, members, facts, memory, engine.model.dense)
    if is_leader:  # all shards are filled when all outboxes are there
        for shard, host in placement.drops:
            if host == here:
                memory.drop(shard)
    if engine.mode is not None:
        engine.mode.close()
    engine.traffic.mode = AllreduceMode.name
    model = engine.model
    exchange = AllreduceExchange(
        world, members, placement, model.tables, carriers.outboxes, model.row_average, model.compression,
        model.row_coder, engine.traffic, carriers.host_sum, carriers.workers,
    )  # fmt: skip
    engine.mode = AllreduceMode(engine, exchange)
    if is_leader and (switching_of(engine) is not None or checkpoints_of(engine) is not None):
        _start_servers(engine, job_id)
    rows_lost = 0
    if agreed.is_restart and agreed.step and rolled_back is None:
        rows_lost = (
            sum(shard_transfer.rows_in(engine.model.tables.layout, shard) for shard in placement.new) - refilled.rows
        )
    return JoinResult(
        job_id, agreed.source, len(members.order), is_leader, agreed.is_restart, missed, rows_lost, mine.host,
        part=here, rows_restored=refilled.rows if agreed.is_restart else 0, rows_age=refilled.age,
        refilled=refilled.by_host, why_lost=refilled.why_not, load_s=refilled.seconds,
        restored_from=refilled.manifests, skipped=refilled.skipped,
        resumed=refilled.report, taken=taken,
        decision=None if recovery is None else recovery.decision, rolled_back=rolled_back, leaders_apart=carriers.apart,
        workers=_workers(facts),
    )  # fmt: skip


def _start_callbacks(engine: Engine, world: World, is_leader: bool) -> None:
    for callback in engine.callbacks:
        if isinstance(callback, Callback):
            callback.on_start(world.rank == 0, is_leader)


def _workers(facts: list[RankState]) -> frozenset[tuple[int, int]]:
    return frozenset((f.host, f.pid) for f in facts)


def _settings(engine: Engine) -> dict[str, object]:
    """What all workers must have in common, and a job with the memory of another that it resumes from."""
    tables, checkpoints, switching = engine.model.tables, checkpoints_of(engine), switching_of(engine)
    recovery = "auto" if checkpoints is None else checkpoints.callback.recovery
    if_set: dict[str, object] = {
        "sync_micro_batch": engine.model.sync_micro_batch,
        "accesses": tables.counts_accesses,
        "recovery": "" if recovery == "auto" else recovery,
    }
    return {
        **tables.layout.describe(),
        "row optimizer": repr(tables.optimizer),
        **tables.describe_tables(),
        "global_batch": engine.model.global_batch,
        "micro_batch": engine.model.micro_batch,
        "dense parameters": engine.model.dense.n,
        "row_average": engine.model.row_average,
        **{name: value for name, value in if_set.items() if value},  # memory of earlier versions does not name them
        "clipping": str(engine.model.clip),
        "grad_scaler": None if engine.model.loss_scale is None else list(engine.model.loss_scale.settings),
        "compression": "none" if engine.model.compression is None else engine.model.compression.spec.exactly,
        "row_compression": engine.model.row_compression.exactly,
        "CheckpointCallback": None if checkpoints is None else redacted(checkpoints.callback.url),
        "GBACallback": None if switching is None else switching.agreed,
    }


def _callbacks(engine: Engine) -> dict[str, Any]:
    """What the callbacks of all workers must have in common, by the names of their arguments.

    Any worker may become the chief, whose callbacks decide. A job that resumes from memory may have other ones.
    """
    checkpoints, switching = checkpoints_of(engine), switching_of(engine)
    return {
        "CheckpointCallback": None if checkpoints is None else _plain(checkpoints.callback.compared),
        "GBACallback": None if switching is None else _plain(switching.compared),
    }


def _plain(value: Any) -> Any:
    """What JSON has, of settings that may be numbers of numpy, and of others their words."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else str(value)


def _rank_state(engine: Engine, has_state: bool, settings: int) -> RankState:
    """What this rank reports to the others."""
    of_mode = RankFacts() if engine.mode is None else engine.mode.rank_facts()
    requests = engine.participant(ModeRequests)
    return RankState(
        has_state, engine.progress.step, of_mode.held_step, Host.here(engine.model.tables.config.shard_dir).number,
        settings, os.getpid(),
        of_mode.generation, of_mode.membership,
        engine.progress.factors.rows,
        engine.rollback.number, engine.rollback.agreed_number,
        0 if requests is None else requests.refused,
    )  # fmt: skip


def _catch_up(engine: Engine, world: World, mine: RankState, agreed: Agreement) -> None:
    """A rank that missed the newest step's result applies the row gradients it holds; all others discard theirs."""
    was_left = False
    if engine.mode is not None:
        was_left = engine.mode.settle(world.rank in agreed.catch_up, agreed.row_factor, agreed.step) and mine.has_state
    was_left = was_left or (mine.has_state and mine.rollbacks < agreed.rollbacks)
    if engine.model.compression is not None:
        engine.model.compression.world_formed()
        if was_left:
            engine.model.compression.clear()  # the world ran without this worker, and counted its residual as lost
    if engine.model.row_coder is not None and was_left:
        engine.model.row_coder.clear()


def _start_servers(engine: Engine, job_id: str) -> None:
    """Those of this host, where they do not run yet. On its host leader."""
    folder, tables, switching = engine.folder, engine.model.tables, switching_of(engine)
    launch.write_settings(
        folder, job_id, engine.job.key, tables.layout, tables.optimizer,
        heartbeat_timeout_s=tables.config.heartbeat_timeout_s, lease_s=tables.config.lease_s,
        grace_s=tables.config.grace_s,
        own_row_optimizers=[launch.describe_optimizer(one) for one in tables.optimizers.own],
        wire="curve" if switching is None else switching.wire,
    )  # fmt: skip
    for index in range(1 if switching is None else switching.servers_per_host):
        launch.ensure_running(folder, index)


def _join_asynchronous(engine: Engine, world: World, facts: list[RankState], source: int) -> JoinResult:
    """Send late joiners the mode the others are in. Survivors run it beside their training, late joiners before theirs.

    Raises where a host, or what its servers held, is gone.
    """
    mine = facts[world.rank]
    inside = None if engine.mode is None else engine.mode.servers
    own = None if inside is None else inside.session
    encoded = b"" if own is None else msgspec.msgpack.encode(replace(own, key=b""))
    session = msgspec.msgpack.decode(
        world.broadcast("session", encoded if world.rank == source else None, source), type=PsSession
    )
    key = share_key(world, None if own is None else own.key, source, shared_secret(), is_restart=True)
    session = replace(session, key=key)
    members = WorkerTopology(tuple(f.host for f in facts))
    gone = {server.host for server in session.servers} - set(members.order)
    if gone:
        raise worker_lost("a host that holds shards has gone")
    is_new = mine.generation != session.generation
    memory = all_or_none(world, True, "open", lambda: shard_transfer.open_memory(engine, session.job, session.key))
    _refuse_hosts_without_memory(engine, world, facts, session, memory.folder)
    is_leader = members.leader_of(mine.host) == world.rank
    if is_new:
        engine.identify(key=session.key)
        if engine.mode is not None:
            engine.mode.close()
        enter_ps.start(engine, session, world.rank, mine.host)
        assert not memory.is_closed
    number = max(f.membership for f in facts)
    return JoinResult(
        session.job, source, len(members.order), is_leader, True, 0, 0, mine.host, True, number, workers=_workers(facts)
    )


def _refuse_hosts_without_memory(
    engine: Engine, world: World, facts: list[RankState], session: PsSession, folder: Path
) -> None:
    """Raises on all ranks where a host came back without its memory; survivors give its servers up. A collective.

    A server makes its part of the dense parameters when the mode is entered, and never removes it: where that is
    missing, there is no server, and none can start.
    """
    own = [server.index for server in session.servers if server.host == facts[world.rank].host]
    is_bare = not all(path_of(folder, index, "dense").exists() for index in own)
    bare = np.flatnonzero(world.gather("bare", np.array([is_bare], dtype=np.int64))[:, 0]).tolist()
    if not bare:
        return
    why = f"the hosts of ranks {bare} came back without the shards they held"
    servers = None if engine.mode is None else engine.mode.servers
    if servers is not None:
        for rank in bare:
            servers.client.abandon_host(facts[rank].host, why)
        servers.abandon(why)
    raise worker_lost(why)


def _refuse_different_settings(world: World, facts: list[RankState], settings: dict[str, object]) -> None:
    if len({f.settings for f in facts}) == 1:
        return
    measure = next((rank for rank, f in enumerate(facts) if f.has_state), 0)
    theirs = state_codec.decode(world.broadcast("settings", state_codec.encode(settings), measure))
    ranks = [rank for rank, f in enumerate(facts) if f.settings != facts[measure].settings]
    text = f"workers {ranks} have another model or other settings than rank {measure}"
    if world.rank not in ranks and facts[measure].has_state:
        raise worker_lost(f"{text}; continuing without them")
    found = difference(theirs, settings)
    detail = f"rank {measure} has {found}" if found else f"see the log of rank {ranks[0]}"
    raise StateMismatch(f"{text}: {detail}; run the same script with the same settings everywhere")
