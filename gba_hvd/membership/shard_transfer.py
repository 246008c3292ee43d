"""The shards of each host while a world forms: what is held, what missed a step, and what moves to another host."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gba_hvd.comm.collectives import World, all_or_none
from gba_hvd.comm.groups import Group, NotConnected, form_group
from gba_hvd.errors import ShardMemoryError
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.membership.agreement import Agreement, RankState
from gba_hvd.shm.host_sum import HostSum, SumThroughLeaders
from gba_hvd.shm.job_folder import job_folder
from gba_hvd.shm.layout import PAGE_WORDS, Layout
from gba_hvd.shm.outbox import Outbox, remove_others
from gba_hvd.shm.placement import HostShards, Placement, WorkerTopology
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.training.engine import Engine

_MOST_IDS = 1 << 22  # without a row, in one worker's part of a step
_MOST_NUMBERS = 1 << 16  # that travel with the dense gradients
_CHUNK_WORDS = 4 << 20  # of a shard that moves to another host, per message


def open_memory(engine: Engine, job_id: str, key: bytes, is_leader: bool = False) -> ShardMemory:
    """key: the job's, which another job of the same name does not have; empty: no process may live in it yet.

    A job that this process has closed, and trains on, keeps its rows: its host's leader carries them over.
    """
    tables = engine.model.tables
    folder = job_folder(tables.config.shard_dir, job_id)
    if tables.memory is not None and tables.memory.folder != folder:
        tables.on_device.close()
        tables.memory.close()
        tables.memory = None
    if tables.memory is None or tables.memory.is_closed:
        memory = ShardMemory.create_or_open(
            tables.config.shard_dir, job_id, tables.layout, tables.config.grace_s, owner_of(key)
        )
        if tables.memory is not None:
            tables.on_device.close()
            if is_leader:
                _carry_over(memory, tables.memory)
        tables.memory = memory
    elif trouble := tables.memory.trouble():  # late joiners would find another file, or none
        raise ShardMemoryError(trouble)
    tables.memory.initial = tables.initial_rows
    return tables.memory


def _carry_over(memory: ShardMemory, closed: ShardMemory) -> None:
    try:
        memory.carry_over(closed)
    except BaseException:
        memory.close(remove=not memory.ready())
        raise


def owner_of(key: bytes) -> str:
    """A job's fingerprint, in the memory of its hosts."""
    return hashlib.sha256(b"gba_hvd owner " + key).hexdigest()[:32] if key else ""


def gather_holdings(world: World, members: WorkerTopology, memory: ShardMemory) -> list[HostShards]:
    marks = memory.marks()
    everyone = world.gather("marks", np.concatenate([marks.ready, marks.begun, marks.finished, marks.placed]))
    return [HostShards(*np.split(everyone[members.leader_of(host)], 4)) for host in members.order]


def refuse_foreign_rows(agreed: Agreement, holdings: list[HostShards], memory: ShardMemory) -> None:
    last = max(int(np.max(h.begun * h.ready)) for h in holdings)
    if not agreed.is_restart and last > 0:
        raise ShardMemoryError(
            f"{memory.folder} was left by another job of this name, which has ended: its rows are of step {last}; "
            f"remove it (rm -r {memory.folder}) or choose another GBA_HVD_JOB_ID"
        )


def close_torn_steps(
    step: int, placement: Placement, holdings: list[HostShards], here: int, is_leader: bool, memory: ShardMemory
) -> tuple[dict[int, int], int]:
    """Bring the marks of shards that missed a step up to date, where they are held now.

    A shard whose worker died while applying a step has the step partly; one whose worker died before has it not.
    Returns (shard -> the step of its marks now, how many steps shards missed over all hosts).
    """
    source_of = {shard: source for shard, source, _ in placement.moves}
    newest, missed = {}, 0
    for shard, home in enumerate(placement.host):
        if shard in placement.new:
            continue
        host = source_of.get(shard, home)
        begun, finished = int(holdings[host].begun[shard]), int(holdings[host].finished[shard])
        newest[shard] = max(step, begun)
        missed += newest[shard] - finished
        if is_leader and host == here and newest[shard] > finished:
            memory.set_ready(shard, newest[shard])
    return newest, missed


def reserve(
    world: World, agreed: Agreement, placement: Placement, holdings: list[HostShards], here: int, is_leader: bool,
    memory: ShardMemory, bytes_per_row: int = 0,
) -> None:  # fmt: skip
    """Each host's leader makes room for the shards that come to it, and numbers this placement. A collective.

    bytes_per_row: see `ShardMemory.reserve`
    """
    incoming = [s for s in placement.new if placement.host[s] == here]
    incoming += [s for s, _, to in placement.moves if to == here]
    number = 1 + max(int(holding.placed.max()) for holding in holdings)

    def make_room() -> None:
        if is_leader and incoming:
            memory.reserve(incoming, bytes_per_row)
            for shard in incoming:
                memory.place(shard, number)

    all_or_none(world, agreed.is_restart, "reserve", make_room)


def move_shards(
    world: World,
    members: WorkerTopology,
    placement: Placement,
    here: int,
    is_leader: bool,
    memory: ShardMemory,
    newest: dict[int, int],
) -> None:
    """Copy shards to their new hosts. A copy counts when it is complete; until then the source is the shard."""
    for shard, source, target in placement.moves:
        sender, receiver = members.leader_of(members.order[source]), members.leader_of(members.order[target])
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
        if is_leader and here == target:
            memory.set_ready(shard, newest[shard])


@dataclass(frozen=True)
class Carriers:
    """What carries gradients, and rows between hosts, in one world. Owned by the exchange that is made with it.

    outboxes: of this host's ranks, this rank's newly made; host_sum: adds up dense gradients
    workers: connects those of several hosts; apart: why they are not, so that Horovod does it all
    """

    outboxes: Mapping[int, Outbox] = field(default_factory=dict)
    host_sum: HostSum | None = None
    workers: Group | None = None
    apart: str = ""


def open_carriers(
    world: World,
    agreed: Agreement,
    members: WorkerTopology,
    facts: Sequence[RankState],
    memory: ShardMemory,
    dense: DenseGradients,
) -> Carriers:
    """A collective."""
    if world.size == 1:
        return Carriers()
    folder, layout = memory.folder, memory.layout
    # Every row: its key and gradient, and a word each for contributors and accesses. Ids of a hashed table may be more
    # than its rows.
    most = [layout.n_shards * g.rows_per_shard + (g.hashed is not None) * _MOST_IDS for g in layout.groups]
    n_words = [sum(n * (2 + g.dim + 2) + 2 * world.size for n, g in zip(most, layout.groups, strict=True))]
    n_words.append(dense.total.element_size() // 4 * (dense.n + _MOST_NUMBERS))
    here = members.ranks_of(members.hosts[world.rank])
    # A leader posts what is decided already.
    is_late = len(members.order) > 1 and here[0] == world.rank and len(here) > 1

    def create() -> list[tuple[Outbox, int]]:
        return [Outbox.create(folder, n_words[0]), Outbox.create(folder, n_words[1], reserved=is_late)]

    own = all_or_none(world, agreed.is_restart, "make room for messages in", create)
    numbers = world.gather("outboxes", np.array([number for _, number in own], dtype=np.int64))
    messages, sums = [
        {world.rank: mine}
        | {rank: Outbox.open(folder, facts[rank].pid, of_rank[rank], n) for rank in here if rank != world.rank}
        for n, (mine, _), of_rank in zip(n_words, own, numbers.T.tolist(), strict=True)
    ]
    if here[0] == world.rank:
        remove_others(folder, {box.path for boxes in (messages, sums) for box in boxes.values()})
    if len(members.order) == 1:
        return Carriers(messages, HostSum(world.rank, sums))
    try:
        leaders, workers = _connect(world, [members.leader_of(host) for host in members.order])
    except NotConnected as error:
        sums[world.rank].close()
        return Carriers(messages, apart=str(error))
    return Carriers(messages, SumThroughLeaders(world.rank, sums, leaders), workers)


def _connect(world: World, leaders: Sequence[int]) -> tuple[Group | None, Group]:
    """The group of the hosts' leaders, and that of all workers. A collective. Raises NotConnected, on all."""
    of_leaders = form_group("commit", world, leaders)
    if len(leaders) == world.size:
        assert of_leaders is not None
        return of_leaders, of_leaders
    try:
        workers = form_group("rows", world, range(world.size))
    except NotConnected:
        if of_leaders is not None:
            of_leaders.close()
        raise
    assert workers is not None
    return of_leaders, workers


def rows_in(layout: Layout, shard: int) -> int:
    return sum(len(range(shard, table.n_rows, layout.n_shards)) for table in layout.tables)
