"""`join`: what all ranks of a world that has just formed run before they train in it. `elastic` tells the order."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from gba_hvd import handover
from gba_hvd.allreduce import AllreduceMode
from gba_hvd.collectives import World, worker_lost
from gba_hvd.engine import Engine
from gba_hvd.errors import StateMismatch
from gba_hvd.gba import GbaMode, Session
from gba_hvd.membership import shards
from gba_hvd.membership.agreement import Agreement, Facts, LeavingApart, agree, asynchronous_source
from gba_hvd.membership.refill import fill_new_shards
from gba_hvd.membership.takeover import Taken, take_over
from gba_hvd.membership.together import together
from gba_hvd.ps import process
from gba_hvd.ps.records import path_of
from gba_hvd.routing import Membership, place_shards
from gba_hvd.shard.layout import digest
from gba_hvd.shard.memory import difference
from recovery import state_codec
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
    facts = [Facts(bool(r[0]), *map(int, r[1:])) for r in world.gather("facts", mine.row())]
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
    memory = together(world, agreed.is_restart, "open", lambda: shards.open_memory(engine, job_id))
    holdings = shards.gather_holdings(world, members, memory)
    if taken is None:
        shards.refuse_foreign_rows(agreed, holdings, memory)
    placement = place_shards(members, holdings)
    if leads:
        memory.end_old_writers({f.pid for f in facts if f.host == mine.host})
        handover.retire_servers(job_id, engine.key, memory.folder, mine.host)
    newest, missed = shards.close_torn_steps(agreed.step, placement, holdings, here, leads, memory)
    shards.reserve(world, agreed, placement, holdings, here, leads, memory)
    refilled = fill_new_shards(engine, world, agreed, placement, here, leads, memory)
    shards.move_shards(world, members, placement, here, leads, memory, newest)
    outboxes = shards.open_outboxes(world, agreed, members, facts, memory)
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
        rows_lost = sum(shards.rows_in(engine.tables.layout, shard) for shard in placement.new) - refilled.rows
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
        "compression": "none" if engine.compression is None else engine.compression.spec.exactly,
        "row_compression": engine.row_compression.exactly,
        "CheckpointCallback": None if engine.checkpoints is None else engine.checkpoints.callback.url,
        "GBACallback": None if engine.switching is None else engine.switching.agreed,
    }


def _facts(engine: Engine, has_state: bool, settings: int) -> Facts:
    """What this rank says of itself."""
    held = engine.mode.held if isinstance(engine.mode, AllreduceMode) else None
    inside = engine.mode if isinstance(engine.mode, GbaMode) else None
    return Facts(
        has_state, engine.step, -1 if held is None else held.step, _host_number(engine.tables.config.shard_dir),
        settings, os.getpid(),
        0 if inside is None else inside.session.generation, 0 if inside is None else inside.contact.stands_for,
    )  # fmt: skip


def _catch_up(engine: Engine, world: World, mine: Facts, agreed: Agreement) -> None:
    """A rank that missed the newest step's result applies the row gradients it holds; all others forget theirs."""
    catches_up = world.rank in agreed.catch_up
    if isinstance(engine.mode, AllreduceMode) and engine.mode.held is not None:
        if catches_up:
            engine.mode.apply_held()
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
    process.write_settings(
        folder, job_id, engine.key, tables.layout, tables.optimizer,
        alive_s=tables.config.alive_s, lease_s=tables.config.lease_s, grace_s=tables.config.grace_s,
    )  # fmt: skip
    for index in range(1 if engine.switching is None else engine.switching.servers_per_host):
        process.ensure_running(folder, index)


def _join_asynchronous(engine: Engine, world: World, facts: list[Facts], source: int) -> Joined:
    """Tell newcomers of the mode the others are in. Survivors run it beside their training, newcomers before theirs.

    Raises where a host, or what its servers held, is gone.
    """
    mine = facts[world.rank]
    own = engine.mode.session if isinstance(engine.mode, GbaMode) else None
    told = world.broadcast("session", msgspec.msgpack.encode(own) if world.rank == source else None, source)
    session = msgspec.msgpack.decode(told, type=Session)
    members = Membership(tuple(f.host for f in facts))
    gone = {server.host for server in session.servers} - set(members.order)
    if gone:
        raise worker_lost("a host that holds shards has gone")
    is_new = mine.generation != session.generation
    memory = together(world, True, "open", lambda: shards.open_memory(engine, session.job))
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


def _host_number(base: Path) -> int:
    """Equal for the workers that see the same folder of the same machine, and each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [boot.read_text() if boot.exists() else os.uname().nodename, str(base.resolve())]
    parts.append(str(next(p for p in (base, *base.resolve().parents) if p.exists()).stat().st_dev))
    processes = Path("/proc/self/ns/pid")
    parts.append(str(processes.stat().st_ino) if processes.exists() else "")
    return digest({"host": parts})
