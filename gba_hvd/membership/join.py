"""`join`: what all ranks of a world that has just formed run before they train in it. `elastic` tells the order."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from gba_hvd.clipping import Factors
from gba_hvd.comm.collectives import World, all_or_none, worker_lost
from gba_hvd.comm.key_exchange import share_key, shared_secret
from gba_hvd.errors import StateMismatch
from gba_hvd.loss_scale import SKIPPED
from gba_hvd.membership import shard_transfer
from gba_hvd.membership.agreement import Agreement, Facts, LeavingApart, agree, asynchronous_source
from gba_hvd.membership.restore_shards import fill_new_shards
from gba_hvd.membership.resume_job import Taken, take_over
from gba_hvd.modes.allreduce_exchange import AllreduceMode
from gba_hvd.modes.parameter_server import GbaMode
from gba_hvd.ps import launch
from gba_hvd.ps.state_files import path_of
from gba_hvd.ps.worker.session import Session
from gba_hvd.shm.host_identity import Host
from gba_hvd.shm.layout import digest
from gba_hvd.shm.placement import Membership, place_shards
from gba_hvd.shm.shard_memory import difference
from gba_hvd.switching import handover
from gba_hvd.training.engine import Engine
from recovery import state_codec
from recovery.redaction import redacted
from recovery.restore import Report


@dataclass(frozen=True)
class Joined:
    """What came out of `join`.

    membership: in an asynchronous mode, the change of membership this world stands for. part: this host's number.
    rows_restored, rows_age (steps, mean): of a host that was lost, load_s: what that took; why_lost: why some of its
    rows did not come back.
    refilled: for each host that took over some of its rows: samples of the checkpoint, and how many. restored_from: the
    manifests; skipped: newer checkpoints that could not be used, and why.
    resumed: the checkpoint a new job goes on from; taken: what it goes on from in memory
    """

    job_id: str
    source: int
    n_hosts: int
    leads_host: bool
    is_restart: bool
    shard_steps_missed: int
    rows_lost: int
    host: int
    asynchronous: bool = False
    membership: int = 0
    part: int = 0
    rows_restored: int = 0
    rows_age: float = 0.0
    refilled: tuple[tuple[int, int], ...] = ()
    why_lost: str = ""
    restored_from: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    load_s: float = 0.0
    resumed: Report | None = None
    taken: Taken | None = None


def join(engine: Engine, world: World, job_id: str, has_state: bool) -> Joined:
    """Agree on a step, open the memory, place and fill the shards, and give the engine its mode. A collective.

    In an asynchronous mode survivors change nothing and newcomers become workers of it.
    """
    settings = _settings(engine)
    mine = _facts(engine, has_state, digest(settings))
    facts = [Facts.of_row(row) for row in world.gather("facts", mine.row())]
    engine.neighbours = {rank: f.pid for rank, f in enumerate(facts) if f.host == mine.host and rank != world.rank}
    _refuse_different_settings(world, facts, settings)
    try:
        source = asynchronous_source(facts)
    except LeavingApart as error:
        raise worker_lost(str(error)) from error
    if source is not None:
        return _join_asynchronous(engine, world, facts, source)
    agreed = agree(facts)
    _catch_up(engine, world, mine, agreed)
    members = Membership(tuple(f.host for f in facts))
    here = members.order.index(mine.host)
    leads = members.lead_of(mine.host) == world.rank
    engine.settings = mine.settings
    job_id, agreed, taken = take_over(engine, world, agreed, job_id, leads)
    memory = all_or_none(
        world, agreed.is_restart, "open", lambda: shard_transfer.open_memory(engine, job_id, engine.key)
    )
    holdings = shard_transfer.gather_holdings(world, members, memory)
    if taken is None:
        shard_transfer.refuse_foreign_rows(agreed, holdings, memory)
    placement = place_shards(members, holdings)
    if leads:
        memory.end_old_writers({f.pid for f in facts if f.host == mine.host})
        handover.retire_servers(job_id, engine.key, memory.folder, mine.host)
    newest, missed = shard_transfer.close_torn_steps(agreed.step, placement, holdings, here, leads, memory)
    shard_transfer.reserve(world, agreed, placement, holdings, here, leads, memory)
    refilled = fill_new_shards(engine, world, agreed, placement, here, leads, memory)
    shard_transfer.move_shards(world, members, placement, here, leads, memory, newest)
    outboxes = shard_transfer.open_outboxes(world, agreed, members, facts, memory)
    if leads:  # all shards are filled when all outboxes are there
        for shard, host in placement.drops:
            if host == here:
                memory.drop(shard)
    if engine.mode is not None:
        engine.mode.close()
    engine.traffic.mode = AllreduceMode.name
    engine.mode = AllreduceMode(
        world, members, placement, engine.tables, outboxes, engine.row_average, engine.compression, engine.row_coder,
        engine.traffic,
    )  # fmt: skip
    if leads and (engine.switching is not None or engine.checkpoints is not None):
        _start_servers(engine, job_id)
    rows_lost = 0
    if agreed.is_restart and agreed.step:
        rows_lost = sum(shard_transfer.rows_in(engine.tables.layout, shard) for shard in placement.new) - refilled.rows
    return Joined(
        job_id, agreed.source, len(members.order), leads, agreed.is_restart, missed, rows_lost, mine.host, part=here,
        rows_restored=refilled.rows if agreed.is_restart else 0, rows_age=refilled.age,
        refilled=refilled.by_host, why_lost=refilled.why_not, load_s=refilled.seconds,
        restored_from=refilled.manifests, skipped=refilled.skipped,
        resumed=refilled.report, taken=taken,
    )  # fmt: skip


def _settings(engine: Engine) -> dict[str, object]:
    """What all workers must have in common."""
    tables = engine.tables
    return {
        **tables.layout.describe(),
        "row optimizer": repr(tables.optimizer),
        "global_batch": engine.global_batch,
        "micro_batch": engine.micro_batch,
        "dense parameters": engine.dense.n,
        "row_average": engine.row_average,
        "clipping": str(engine.clip),
        "grad_scaler": None if engine.loss_scale is None else list(engine.loss_scale.settings),
        "compression": "none" if engine.compression is None else engine.compression.spec.exactly,
        "row_compression": engine.row_compression.exactly,
        "CheckpointCallback": None if engine.checkpoints is None else redacted(engine.checkpoints.callback.url),
        "GBACallback": None if engine.switching is None else engine.switching.agreed,
    }


def _facts(engine: Engine, has_state: bool, settings: int) -> Facts:
    """What this rank says of itself."""
    held = engine.mode.held if isinstance(engine.mode, AllreduceMode) else None
    inside = engine.mode if isinstance(engine.mode, GbaMode) else None
    return Facts(
        has_state, engine.step, -1 if held is None else held.step, Host.here(engine.tables.config.shard_dir).number,
        settings, os.getpid(),
        0 if inside is None else inside.session.generation, 0 if inside is None else inside.contact.stands_for,
        engine.factors.rows,
    )  # fmt: skip


def _catch_up(engine: Engine, world: World, mine: Facts, agreed: Agreement) -> None:
    """A rank that missed the newest step's result applies the row gradients it holds; all others forget theirs."""
    catches_up = world.rank in agreed.catch_up
    if isinstance(engine.mode, AllreduceMode) and engine.mode.held is not None:
        if catches_up:
            if agreed.row_factor == SKIPPED:
                engine.mode.skip_held()
            else:
                engine.mode.apply_held(agreed.row_factor)
            engine.factors = Factors(rows=agreed.row_factor)
        else:
            engine.mode.forget_held()
    # (After an asynchronous mode survivors stand at different steps, and nobody was left behind.)
    was_left = isinstance(engine.mode, AllreduceMode) and mine.step < agreed.step
    was_left = was_left and mine.has_state and not catches_up
    if engine.compression is not None:
        engine.compression.world_formed()
        if was_left:
            engine.compression.clear()  # the world went on without this worker, and counted its rest as lost
    if engine.row_coder is not None and was_left:
        engine.row_coder.clear()


def _start_servers(engine: Engine, job_id: str) -> None:
    """Those of this host, where they do not run yet. On its lead."""
    folder, tables = engine.folder, engine.tables
    launch.write_settings(
        folder, job_id, engine.key, tables.layout, tables.optimizer,
        alive_s=tables.config.alive_s, lease_s=tables.config.lease_s, grace_s=tables.config.grace_s,
    )  # fmt: skip
    for index in range(1 if engine.switching is None else engine.switching.servers_per_host):
        launch.ensure_running(folder, index)


def _join_asynchronous(engine: Engine, world: World, facts: list[Facts], source: int) -> Joined:
    """Tell newcomers of the mode the others are in. Survivors run it beside their training, newcomers before theirs.

    Raises where a host, or what its servers held, is gone.
    """
    mine = facts[world.rank]
    own = engine.mode.session if isinstance(engine.mode, GbaMode) else None
    told = b"" if own is None else msgspec.msgpack.encode(replace(own, key=b""))
    session = msgspec.msgpack.decode(
        world.broadcast("session", told if world.rank == source else None, source), type=Session
    )
    key = share_key(world, "key", None if own is None else own.key, source, shared_secret(), is_restart=True)
    session = replace(session, key=key)
    members = Membership(tuple(f.host for f in facts))
    gone = {server.host for server in session.servers} - set(members.order)
    if gone:
        raise worker_lost("a host that holds shards has gone")
    is_new = mine.generation != session.generation
    memory = all_or_none(world, True, "open", lambda: shard_transfer.open_memory(engine, session.job, session.key))
    _refuse_bare_hosts(engine, world, facts, session, memory.folder)
    leads = members.lead_of(mine.host) == world.rank
    if is_new:
        engine.key = session.key
        if engine.mode is not None:
            engine.mode.close()
        handover.start(engine, session, world.rank, mine.host)
        assert not memory.is_closed
    number = max(f.membership for f in facts)
    return Joined(session.job, source, len(members.order), leads, True, 0, 0, mine.host, True, number)


def _refuse_bare_hosts(engine: Engine, world: World, facts: list[Facts], session: Session, folder: Path) -> None:
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
    if isinstance(engine.mode, GbaMode):
        for rank in bare:
            engine.mode.client.give_up(facts[rank].host, why)
        engine.mode.give_up(why)
    raise worker_lost(why)


def _refuse_different_settings(world: World, facts: list[Facts], settings: dict[str, object]) -> None:
    if len({f.settings for f in facts}) == 1:
        return
    measure = next((rank for rank, f in enumerate(facts) if f.has_state), 0)
    theirs = state_codec.decode(world.broadcast("settings", state_codec.encode(settings), measure))
    ranks = [rank for rank, f in enumerate(facts) if f.settings != facts[measure].settings]
    text = f"workers {ranks} define the model differently from rank {measure}"
    if world.rank not in ranks and facts[measure].has_state:
        raise worker_lost(f"{text}; going on without them")
    found = difference(theirs, settings)
    detail = f"rank {measure} has {found}" if found else f"see the log of rank {ranks[0]}"
    raise StateMismatch(f"{text}: {detail}; run the same script with the same settings everywhere")
