"""How the workers of a new world come to one state: who is newest, where the shards live, what is missing.

`agree` and `routing.place_shards` decide, from facts that every rank has gathered; `join` carries it out. The order of
its steps is told in `elastic`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from gba_hvd import handover, leftover
from gba_hvd.allreduce import AllreduceMode
from gba_hvd.callbacks import Event
from gba_hvd.collectives import World, worker_lost
from gba_hvd.engine import Engine
from gba_hvd.errors import GbaError, ShardMemoryError, StateMismatch
from gba_hvd.gba import GbaMode, Session
from gba_hvd.ps import process
from gba_hvd.ps.transport import new_key
from gba_hvd.routing import Holding, Membership, Placement, place_shards
from gba_hvd.shard import keeper
from gba_hvd.shard.layout import PAGE_WORDS, Layout, digest
from gba_hvd.shard.memory import ShardMemory, clear_leftover, difference, job_folder
from gba_hvd.shard.outbox import Outbox, remove_others
from recovery import state_codec
from recovery.errors import RecoveryError
from recovery.restore import Now, Report

T = TypeVar("T")
_FLUSH_MARGIN_S = 10.0
_CHUNK_WORDS = 4 << 20  # of a shard that moves to another host, per message


@dataclass(frozen=True)
class Facts:
    """What one rank says of itself when a world forms."""

    has_state: bool
    step: int
    held_step: int  # the step whose row gradients it holds, or -1
    host: int
    settings: int  # fingerprint of tables, batch sizes and optimizers
    pid: int
    generation: int = 0  # of the asynchronous mode it is in; 0 in allreduce mode
    membership: int = 0  # in an asynchronous mode: the newest change of membership it heard of

    def row(self) -> np.ndarray:
        fields = (self.has_state, self.step, self.held_step, self.host, self.settings, self.pid)
        return np.array([*fields, self.generation, self.membership], dtype=np.int64)


@dataclass(frozen=True)
class Agreement:
    """What the ranks make of their facts.

    step: the newest committed step; source: a rank that has it; catch_up: ranks that apply the gradients they hold
    """

    step: int
    source: int
    catch_up: tuple[int, ...]
    is_restart: bool
    reason: str


def agree(facts: Sequence[Facts]) -> Agreement:
    """The newest step wins. Nobody goes back.

    Seeing a step's result means that every worker holds its row gradients, so the survivors are at most one step apart
    and the one behind can apply what it holds. Whoever is further behind was gone for longer and starts as a newcomer.
    """
    old = [rank for rank, f in enumerate(facts) if f.has_state]
    if not old:
        return Agreement(0, 0, (), False, "a new job: everybody takes the values of rank 0")
    step = max(facts[rank].step for rank in old)
    source = next(rank for rank in old if facts[rank].step == step)
    catch_up = tuple(rank for rank in old if facts[rank].step == step - 1 and facts[rank].held_step == step)
    return Agreement(step, source, catch_up, True, f"rank {source} has step {step}, the newest of {len(old)} survivors")


def asynchronous_source(facts: Sequence[Facts]) -> int | None:
    """The rank from which newcomers learn of the asynchronous mode the others are in; None in allreduce mode.

    A survivor that is not in it and behind was gone for long: a newcomer. One that is not behind has just left it.
    Raises the error on which the world is formed again: the others are about to leave, too.
    """
    inside = [rank for rank, f in enumerate(facts) if f.has_state and f.generation]
    if not inside:
        return None
    newest = max(facts[rank].step for rank in inside)
    if any(f.has_state and not f.generation and f.step >= newest for f in facts):
        raise worker_lost("some workers have left the asynchronous mode and some have not yet")
    return max(inside, key=lambda rank: (facts[rank].generation, -rank))


@dataclass(frozen=True)
class Taken:
    """What a job goes on from in memory. state: on the source only, as in a checkpoint."""

    step: int
    source: int
    reason: str
    state: bytes | None


@dataclass(frozen=True)
class Joined:
    """What came out of `join`.

    membership: in an asynchronous mode, the change of membership this world stands for. part: this host's number.
    rows_restored, rows_age (steps, mean): of a host that was lost, load_s: what that took; why_lost: why some of its
    rows did not come back.
    refilled: for each host that took over some of its rows: samples of the checkpoint, and how many.
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
    load_s: float = 0.0
    resumed: Report | None = None
    taken: Taken | None = None


def join(engine: Engine, world: World, job_id: str, has_state: bool) -> Joined:
    """Agree on a step, open the memory, place and fill the shards, and give the engine its mode. A collective.

    In an asynchronous mode survivors change nothing and newcomers become workers of it.
    """
    tables = engine.tables
    settings = {
        **tables.layout.describe(),
        "row optimizer": repr(tables.optimizer),
        "global_batch": engine.global_batch,
        "micro_batch": engine.micro_batch,
        "dense parameters": engine.dense.n,
        "row_average": engine.row_average,
        "compression": "none" if engine.compression is None else engine.compression.spec.exactly,
        "row_compression": str(engine.row_compression),
        "CheckpointCallback": None if engine.checkpoints is None else engine.checkpoints.callback.url,
        "GBACallback": None if engine.switching is None else engine.switching.agreed,
    }
    held = engine.mode.held if isinstance(engine.mode, AllreduceMode) else None
    held_step = held.step if held is not None else -1
    inside = engine.mode if isinstance(engine.mode, GbaMode) else None
    mine = Facts(
        has_state, engine.step, held_step, _host_number(tables.config.shard_dir), digest(settings), os.getpid(),
        0 if inside is None else inside.session.generation, 0 if inside is None else inside.stands_for,
    )  # fmt: skip
    facts = [Facts(bool(r[0]), *map(int, r[1:])) for r in world.gather("facts", mine.row())]
    _refuse_different_settings(world, facts, settings)
    source = asynchronous_source(facts)
    if source is not None:
        return _join_asynchronous(engine, world, facts, source)
    agreed = agree(facts)
    if isinstance(engine.mode, AllreduceMode) and held is not None:
        if world.rank in agreed.catch_up:
            engine.mode.apply_held()
        else:
            engine.mode.forget_held()
    if engine.compression is not None:
        engine.compression.world_formed()
        # (After an asynchronous mode survivors stand at different steps, and nobody was left behind.)
        was_left = isinstance(engine.mode, AllreduceMode) and mine.step < agreed.step
        if has_state and was_left and world.rank not in agreed.catch_up:
            engine.compression.clear()  # the world went on without this worker, and counted its rest as lost
    members = Membership(tuple(f.host for f in facts))
    here = members.order.index(mine.host)
    leads = members.lead_of(mine.host) == world.rank

    job_id, saved_step = _name_of_job(engine, world, agreed, job_id)
    engine.settings = mine.settings
    taken = None
    if engine.checkpoints is not None and engine.checkpoints.callback.resume and not agreed.is_restart:
        taken = _take_leftover(engine, world, job_id, leads, saved_step)
    if taken is not None:
        agreed = replace(agreed, step=taken.step, source=taken.source)
    if taken is not None and taken.state is not None:
        engine.key = leftover.key_of(job_folder(tables.config.shard_dir, job_id))
    engine.key = bytes.fromhex(world.broadcast("key", (engine.key or new_key()).hex().encode(), agreed.source).decode())
    if engine.checkpoints is not None:
        _take_place(engine, world, agreed, job_id, leads, taken)
    memory = _together(world, agreed.is_restart, "open", lambda: _open(engine, job_id))
    holdings = _gather_holdings(world, members, memory)
    if taken is None:
        _refuse_foreign_rows(agreed, holdings, memory)
    placement = place_shards(members, holdings)
    if leads:
        memory.end_old_writers({f.pid for f in facts if f.host == mine.host})
        handover.retire_servers(job_id, engine.key, memory.folder, mine.host)
    newest, missed = _close_torn_steps(agreed.step, placement, holdings, here, leads, memory)
    incoming = [s for s in placement.new if placement.host[s] == here] + [
        s for s, _, to in placement.moves if to == here
    ]
    number = 1 + max(int(holding.placed.max()) for holding in holdings)
    room = (lambda: _make_room(memory, incoming, number)) if leads and incoming else (lambda: None)
    _together(world, agreed.is_restart, "reserve", room)
    refilled = _fill_new_shards(engine, world, agreed, placement, here, leads, memory)
    _move_shards(world, members, placement, here, leads, memory, newest)
    outboxes = _open_outboxes(
        world, agreed, members, facts, memory
    )  # all shards are filled when all outboxes are there
    if leads:
        for shard, host in placement.drops:
            if host == here:
                memory.drop(shard)
    if engine.mode is not None:
        engine.mode.close()
    engine.traffic.mode = AllreduceMode.name
    engine.mode = AllreduceMode(
        world,
        members,
        placement,
        tables,
        outboxes,
        engine.row_average,
        engine.compression,
        engine.row_coder,
        engine.traffic,
    )
    if leads and (engine.switching is not None or engine.checkpoints is not None):
        config = tables.config
        process.write_settings(
            memory.folder, job_id, engine.key, tables.layout, tables.optimizer,
            alive_s=config.alive_s, lease_s=config.lease_s, grace_s=config.grace_s,
        )  # fmt: skip
        for index in range(1 if engine.switching is None else engine.switching.servers_per_host):
            process.ensure_running(memory.folder, index)
    rows_lost = 0
    if agreed.is_restart and agreed.step:
        rows_lost = sum(_rows_in(tables.layout, shard) for shard in placement.new) - refilled.rows
    return Joined(
        job_id, agreed.source, len(members.order), leads, agreed.is_restart, missed, rows_lost, mine.host, part=here,
        rows_restored=refilled.rows if agreed.is_restart else 0, rows_age=refilled.age,
        refilled=refilled.by_host, why_lost=refilled.why_not, load_s=refilled.seconds,
        resumed=refilled.report, taken=taken,
    )  # fmt: skip


def _join_asynchronous(engine: Engine, world: World, facts: list[Facts], source: int) -> Joined:
    """Tell newcomers of the mode the others are in. Survivors run it beside their training, newcomers before theirs."""
    mine = facts[world.rank]
    own = engine.mode.session if isinstance(engine.mode, GbaMode) else None
    told = world.broadcast("session", msgspec.msgpack.encode(own) if world.rank == source else None, source)
    session = msgspec.msgpack.decode(told, type=Session)
    members = Membership(tuple(f.host for f in facts))
    gone = {server.host for server in session.servers} - set(members.order)
    if gone:
        raise worker_lost("a host that holds shards has gone")
    is_new = mine.generation != session.generation
    memory = _together(world, True, "open", lambda: _open(engine, session.job))
    leads = members.lead_of(mine.host) == world.rank
    if is_new:
        engine.key = session.key
        if engine.mode is not None:
            engine.mode.close()
        handover.start(engine, session, world.rank, mine.host)
        assert not memory.is_closed
    number = max(f.membership for f in facts)
    return Joined(session.job, source, len(members.order), leads, True, 0, 0, mine.host, True, number)


def _name_of_job(engine: Engine, world: World, agreed: Agreement, job_id: str) -> tuple[str, int]:
    """The name of the job that this one goes on from, if there is a checkpoint, and its step. A collective."""
    checkpoints = engine.checkpoints

    def look() -> str:
        saved = None
        if checkpoints is not None and not agreed.is_restart and world.rank == agreed.source:
            saved = checkpoints.job_to_resume()
        return job_id if saved is None or engine.tables.config.job_id else saved

    if checkpoints is not None and not agreed.is_restart:
        job_id = _together(world, False, "read", look, "the checkpoints")
    saved_step = -1 if checkpoints is None else checkpoints.saved_step
    name, step = world.broadcast("job", f"{job_id} {saved_step}".encode(), agreed.source).decode().split()
    return name, int(step)


def _take_leftover(engine: Engine, world: World, job_id: str, leads: bool, saved_step: int) -> Taken | None:
    """What a job of this name that lost all its workers left in memory, if this one can go on from it. A collective.

    Otherwise the memory is removed. The order of the steps is told in `leftover`.
    """
    tables, checkpoints = engine.tables, engine.checkpoints
    assert checkpoints is not None
    n_shards, folder = tables.layout.n_shards, job_folder(tables.config.shard_dir, job_id)
    found, state = leftover.Found.nothing(n_shards), None

    def look() -> None:
        nonlocal found, state
        limit_s = checkpoints.callback.last_gasp_s + _FLUSH_MARGIN_S
        memory = tables.memory if leads else None  # open already when this process tried before and could not finish
        if leads and memory is None and leftover.look(folder, tables.layout, limit_s):
            memory = _open(engine, job_id)
            keeper.start(folder, tables.config.grace_s)  # the one it had may have been killed, too; two do no harm
        if memory is not None:
            with contextlib.suppress(ShardMemoryError):  # what is damaged is of no use
                found, state = leftover.found_in(memory)

    _together(world, False, "look at what was left in", look)
    everyone = [leftover.Found.of_row(row) for row in world.gather("left", found.row())]
    choice = leftover.to_go_on(everyone, engine.settings, saved_step)
    failure, taken = "", None
    if choice.rank is not None:
        enter = leftover.session_of(folder, state) if found.ready.any() else None
        try:
            if enter is not None:
                leftover.start_servers(folder, enter)
        except (GbaError, OSError) as error:
            failure = str(error)
        started = world.gather("servers started", np.array([not failure], dtype=np.int64)).all()
        whole, step = None, -1
        if world.rank == choice.rank and started:
            assert state is not None
            try:
                whole, step = leftover.whole_state(folder, job_id, state, enter, engine.dense.sizes, engine.names)
            except (GbaError, OSError) as error:
                failure = str(error)
        told = world.broadcast("goes on", f"{step} {failure}".encode(), choice.rank).decode()
        step, failure = int(told.partition(" ")[0]), told.partition(" ")[2]
        taken = Taken(step, choice.rank, choice.reason, whole) if step >= max(0, saved_step) else None
    if taken is None and tables.memory is not None:
        tables.memory.close()
        tables.memory = None
    if taken is None and (choice.reason or failure) and world.rank == 0:
        text = f"what a lost job left in memory is of no use: {failure or choice.reason}; the newest checkpoint is"
        engine.emit(Event("memory_left", 0, text, {}))
    return taken


def _take_place(engine: Engine, world: World, agreed: Agreement, job_id: str, leads: bool, taken: Taken | None) -> None:
    """Clear what a dead job of this name left on the hosts, and claim the place for checkpoints. A collective."""
    checkpoints, tables, writer = engine.checkpoints, engine.tables, ""
    assert checkpoints is not None
    if taken is not None and taken.state is not None:
        state = state_codec.decode(taken.state)
        writer = checkpoints.goes_on_from_memory(state.get("snapshot", state)["checkpoints"], taken.step)
    if not agreed.is_restart and taken is None:  # first: a server that is left gives signs of life for the dead job

        def clear() -> None:
            if leads and tables.memory is None:
                folder, limit_s = job_folder(tables.config.shard_dir, job_id), checkpoints.callback.last_gasp_s
                leftover.await_last_checkpoint(folder, limit_s + _FLUSH_MARGIN_S)
                clear_leftover(tables.config.shard_dir, job_id)

        _together(world, False, "clear", clear)
    is_source = world.rank == agreed.source
    act = (lambda: checkpoints.take_place(job_id, writer)) if is_source else (lambda: None)
    _together(world, agreed.is_restart, "use", act, "the place for checkpoints")
    told = world.broadcast("epoch", str(checkpoints.first_epoch).encode() if is_source else None, agreed.source)
    checkpoints.first_epoch = int(told)


@dataclass(frozen=True)
class _Refilled:
    """Rows that came from a checkpoint into new shards, over all hosts; age: in steps, mean. by_host: see `Joined`.

    seconds: of the host that took longest; why_not: what went wrong on the first host where something did
    """

    rows: int = 0
    age: float = 0.0
    by_host: tuple[tuple[int, int], ...] = ()
    seconds: float = 0.0
    why_not: str = ""
    report: Report | None = None  # of a job that goes on from a checkpoint as a whole


def _fill_new_shards(
    engine: Engine, world: World, agreed: Agreement, placement: Placement, here: int, leads: bool, memory: ShardMemory
) -> _Refilled:
    """Shards nobody holds: from the newest checkpoint, by each host's lead; without one, initial rows. A collective."""
    checkpoints = engine.checkpoints
    if checkpoints is None or not placement.new or not (agreed.is_restart or checkpoints.callback.resume):
        for shard in placement.new:
            if placement.server[shard] == world.rank:
                memory.init_shard(shard, agreed.step)
        return _Refilled()
    mine = [shard for shard in placement.new if placement.host[shard] == here] if leads else []
    now = Now(agreed.step) if agreed.is_restart else None  # a newcomer does not know the samples
    failure = ""

    def fill() -> Report | None:
        nonlocal failure
        report = None
        for shard in mine:
            memory.init_shard(shard, agreed.step, ready=False)
        try:
            report = checkpoints.fill(memory, mine, now) if mine else None
        except RecoveryError as error:
            if now is None:
                raise
            failure = str(error)
        if report is not None and now is None:
            checkpoints.check_fits(report.manifest.about)
        if report is None and now is not None:  # what came of an attempt that failed is not to stay
            for shard in mine:
                memory.init_shard(shard, agreed.step, ready=False)
        return report

    report = _together(world, agreed.is_restart, "fill", fill)
    facts = [0] * 8
    if report is not None:
        newest, age = report.manifest, round(report.age.mean * report.n_rows)
        facts[:6] = [newest.epoch, newest.number, report.step, report.n_rows, age, report.samples]
        facts[6] = round(report.seconds * 1e6)
    facts[7] = bool(failure)
    everyone = world.gather("filled", np.array(facts, dtype=np.int64))
    restored = everyone[everyone[:, 3] > 0]
    step = agreed.step
    if now is None and len(restored):
        if len({tuple(row[:3]) for row in restored.tolist()}) > 1:
            raise StateMismatch("the hosts restored different checkpoints: the newest is damaged in part, remove it")
        step = int(restored[0, 2])
    for shard in mine:
        memory.set_ready(shard, step)
    rows = int(everyone[:, 3].sum())
    found = _Refilled(rows, float(everyone[:, 4].sum() / max(1, rows)), seconds=float(everyone[:, 6].max()) / 1e6)
    if now is not None:
        failed = np.flatnonzero(everyone[:, 7])
        why_not = world.broadcast("why", failure.encode(), int(failed[0])).decode() if len(failed) else ""
        return replace(found, by_host=tuple((int(row[5]), int(row[3])) for row in restored), why_not=why_not)
    if report is not None and world.rank == agreed.source:
        checkpoints.goes_on_from(report)
    return replace(found, report=report if world.rank == agreed.source else None)


def _open_outboxes(
    world: World, agreed: Agreement, members: Membership, facts: Sequence[Facts], memory: ShardMemory
) -> dict[int, Outbox]:
    """The outboxes of this host's ranks, this rank's newly made. A collective."""
    if world.size == 1:
        return {}
    folder, layout = memory.folder, memory.layout
    n_words = sum(layout.n_shards * g.places * (2 + g.dim) + 2 * world.size for g in layout.groups)  # every row
    own, number = _together(
        world, agreed.is_restart, "make room for messages in", lambda: Outbox.create(folder, n_words)
    )
    numbers = world.gather("outboxes", np.array([number], dtype=np.int64))[:, 0]
    neighbours = [rank for rank in members.ranks_of(members.hosts[world.rank]) if rank != world.rank]
    boxes = {rank: Outbox.open(folder, facts[rank].pid, int(numbers[rank]), n_words) for rank in neighbours}
    if members.lead_of(members.hosts[world.rank]) == world.rank:
        ranks = [world.rank, *neighbours]
        remove_others(folder, {Outbox.path(folder, facts[rank].pid, int(numbers[rank])) for rank in ranks})
    return {world.rank: own, **boxes}


def _open(engine: Engine, job_id: str) -> ShardMemory:
    tables = engine.tables
    folder = job_folder(tables.config.shard_dir, job_id)
    if tables.memory is not None and (tables.memory.folder != folder or tables.memory.is_closed):
        tables.memory.close()
        tables.memory = None
    if tables.memory is None:
        tables.memory = ShardMemory.create_or_open(
            tables.config.shard_dir, job_id, tables.layout, tables.config.grace_s
        )
    return tables.memory


def _gather_holdings(world: World, members: Membership, memory: ShardMemory) -> list[Holding]:
    marks = memory.marks()
    everyone = world.gather("marks", np.concatenate([marks.ready, marks.begun, marks.finished, marks.placed]))
    return [Holding(*np.split(everyone[members.lead_of(host)], 4)) for host in members.order]


def _make_room(memory: ShardMemory, shards: list[int], number: int) -> None:
    memory.reserve(shards)
    for shard in shards:
        memory.place(shard, number)


def _close_torn_steps(
    step: int, placement: Placement, holdings: list[Holding], here: int, leads: bool, memory: ShardMemory
) -> tuple[dict[int, int], int]:
    """Bring the marks of shards that missed a step up to date, where they are held now.

    A shard whose worker died while applying a step has the step partly; one whose worker died before has it not.
    Returns (shard -> the step its marks now say, how many steps shards missed over all hosts).
    """
    holder = {shard: source for shard, source, _ in placement.moves}
    newest, missed = {}, 0
    for shard, home in enumerate(placement.host):
        if shard in placement.new:
            continue
        host = holder.get(shard, home)
        begun, finished = int(holdings[host].begun[shard]), int(holdings[host].finished[shard])
        newest[shard] = max(step, begun)
        missed += newest[shard] - finished
        if leads and host == here and newest[shard] > finished:
            memory.set_ready(shard, newest[shard])
    return newest, missed


def _move_shards(
    world: World,
    members: Membership,
    placement: Placement,
    here: int,
    leads: bool,
    memory: ShardMemory,
    newest: dict[int, int],
) -> None:
    """Copy shards to their new hosts. A copy counts when it is complete; until then the source is the shard."""
    for shard, source, target in placement.moves:
        sender, receiver = members.lead_of(members.order[source]), members.lead_of(members.order[target])
        region = memory.region(shard)
        if world.rank == receiver:
            memory.set_absent(shard)
        for at in range(PAGE_WORDS, len(region), _CHUNK_WORDS):
            splits = np.zeros(world.size, dtype=np.int64)
            words = np.empty(0, dtype=np.float32)
            if world.rank == sender:
                words = region[at : at + _CHUNK_WORDS].copy()
                splits[receiver] = len(words)
            received, _ = world.alltoall("move", words, splits)
            if world.rank == receiver:
                region[at : at + len(received)] = received
        if leads and here == target:
            memory.set_ready(shard, newest[shard])


def _together(
    world: World, is_restart: bool, name: str, act: Callable[[], T], what: str = "its host's shard memory"
) -> T:
    """Do something that may fail on one rank, and stop on all: nobody is left waiting for a worker that gave up.

    The survivors of a running job do not fail with a newcomer: they form a world without it.
    """
    failure: Exception | None = None
    try:
        result = act()
    except (GbaError, OSError) as error:
        failure = error
    failed = np.flatnonzero(world.gather(name, np.array([failure is not None], dtype=np.int64))[:, 0])
    if failure is not None:
        raise failure
    if len(failed):
        text = f"the worker of rank {failed[0]} could not {name} {what}; its log says why"
        raise worker_lost(text) if is_restart else ShardMemoryError(text)
    return result


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


def _refuse_foreign_rows(agreed: Agreement, holdings: list[Holding], memory: ShardMemory) -> None:
    last = max(int(np.max(h.begun * h.ready)) for h in holdings)
    if not agreed.is_restart and last > 0:
        raise ShardMemoryError(
            f"{memory.folder} was left by another job of this name: its rows are of step {last}; "
            f"remove it (rm -r {memory.folder}) or choose another GBA_HVD_JOB_ID"
        )


def _rows_in(layout: Layout, shard: int) -> int:
    return sum(len(range(shard, table.n_rows, layout.n_shards)) for table in layout.tables)


def _host_number(base: Path) -> int:
    """Equal for the workers that see the same folder of the same machine, and each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [boot.read_text() if boot.exists() else os.uname().nodename, str(base.resolve())]
    parts.append(str(next(p for p in (base, *base.resolve().parents) if p.exists()).stat().st_dev))
    processes = Path("/proc/self/ns/pid")
    parts.append(str(processes.stat().st_ino) if processes.exists() else "")
    return digest({"host": parts})
