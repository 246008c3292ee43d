"""Full or partial recovery of a lost host, decided once; and full recovery in a running job: all roll back together.

The rank whose state the others get (`Agreement.source`) decides, by `recovery.schedule.recovery_choice`, when the world
of the survivors forms and shards are missing. Partial recovery is in `restore_shards`. The order of a full one:

    1. decide    the source chooses, has read the checkpoint's training state, and broadcasts the decision
    2. agree     every rank notes it (`Rollback.decision`); a gather ends when all have: no row was touched before
    3. clear     each host leader removes the retained state, then marks every shard of its host absent, and gives those
                 that are placed there a number above all of the time before: a host that was lost and comes back with
                 the shards of a later step is not believed
    4. fill      each host leader fills all shards that are placed on its host, from the one manifest that the source
                 names; when all hosts have done so, the shards are marked as of the checkpoint's step
    5. roll back the source loads the training state and counts the recovery (`Rollback.number`), then `elastic` sends
                 its state to all; a rank that has it forgets the decision

A crash before 2 is complete: no row was touched. A rank that has the decision makes the next world carry it out; if
none has it, the next world decides by itself. From 3 until the source has begun 5: every survivor has the decision and
no state has the recovery behind it, so the next world begins at 3 again. After that: the state that has one recovery
more is the newer one (`agreement.agree`), at any step, and all shards are filled; the others get it. Shards of a host
that was lost meanwhile are missing, and that is decided on its own. If all workers die: shards are absent, or no state
is retained that belongs to them, so a restart takes the newest checkpoint.

Saves in flight end with the new claim, which comes before 1: without it, full recovery is ruled out. Servers of an
asynchronous mode were retired before 3 (`leave_ps.retire_servers`), so pushes and steps from before reach no row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from gba_hvd.checkpoint.job_checkpoints import CompleteCheckpoint, JobCheckpoints, checkpoints_of
from gba_hvd.comm.collectives import World
from gba_hvd.errors import GbaError, RecoveryFailed
from gba_hvd.membership.agreement import Agreement
from gba_hvd.shm import retained_state
from gba_hvd.shm.placement import HostShards, Placement
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.training.engine import Engine
from recovery.catalog.chains import Skipped
from recovery.errors import BadInput, Damaged, NotFound, RecoveryError
from recovery.restore import Report
from recovery.schedule.adaptive import JobMeasurements
from recovery.schedule.recovery_choice import RecoveryDecision

_LOWER_BITS = 32  # of a placement number; other changes of the placement count one by one
_FILLED, _DAMAGED, _FAILED = range(3)


@dataclass(frozen=True)
class Recovery:
    """What is done about shards that no host holds. checkpoint: on the source, if all roll back to it."""

    decision: RecoveryDecision
    checkpoint: CompleteCheckpoint | None = None

    @property
    def is_full(self) -> bool:
        return self.decision.strategy == "full"


@dataclass(frozen=True)
class RolledBack:
    """All shards are as of a checkpoint. rows: of them; age: in steps, mean, against the checkpoint's step.

    seconds: of the host that took longest. skipped: checkpoints that could not be used, and why.
    state, samples_lost: on the source: the training state, and samples lost in all recoveries (`JobMeasurements`)
    """

    manifest: str
    epoch: int
    number: int
    step: int
    rows: int
    age: float
    seconds: float
    skipped: tuple[str, ...] = ()
    state: bytes | None = field(default=None, repr=False)
    samples_lost: float = 0.0


def decide(engine: Engine, world: World, agreed: Agreement, placement: Placement) -> Recovery | None:
    """1 and 2; None where no shard is missing, or there are no checkpoints. A collective."""
    checkpoints, rollback = checkpoints_of(engine), engine.rollback
    is_begun = agreed.decider >= 0
    if checkpoints is None or not agreed.is_restart or not (is_begun or placement.new):
        return None
    mine: tuple[RecoveryDecision | None, CompleteCheckpoint | None] = None, None
    if world.rank == agreed.source and not is_begun:
        mine = checkpoints.decide_recovery(len(placement.new), engine.reports.seconds_since_step)
    if is_begun and rollback.decision is not None:
        mine = RecoveryDecision(**rollback.decision), None
    owner = agreed.decider if is_begun else agreed.source
    word = json.dumps(asdict(mine[0])).encode() if world.rank == owner and mine[0] is not None else None
    decision = RecoveryDecision(**json.loads(world.broadcast("recovery", word, owner)))
    if decision.strategy == "full":
        rollback.decision = asdict(decision)
        world.gather("recovery agreed", np.zeros(1, dtype=np.int64))
    return Recovery(decision, mine[1])


def roll_back(
    engine: Engine, world: World, agreed: Agreement, recovery: Recovery, placement: Placement,
    holdings: Sequence[HostShards], here: int, is_leader: bool, memory: ShardMemory,
) -> RolledBack:  # fmt: skip
    """3 and 4. A collective. holdings: before the shards were cleared.

    Raises RecoveryFailed on all ranks where no checkpoint can be read any more.
    """
    checkpoints = checkpoints_of(engine)
    assert checkpoints is not None
    mine = [shard for shard, host in enumerate(placement.host) if host == here] if is_leader else []
    if is_leader:
        retained_state.remove(memory.folder)  # first: it is of the rows that are about to go
        for shard in range(memory.layout.n_shards):
            memory.set_absent(shard)  # copies that were to move, too
        number = placement_number(holdings)
        for shard in mine:
            memory.place(shard, number)
    found, damaged, reasons = recovery.checkpoint, list[str](), list[str]()
    while True:
        why = ""
        if world.rank == agreed.source and found is None:
            found, why = _try(lambda: checkpoints.newest_complete(damaged))
        word = "" if found is None else found.manifest.name
        message = json.dumps([word, why]).encode() if world.rank == agreed.source else None
        name, why = json.loads(world.broadcast("going back", message, agreed.source))
        if not name:
            raise _failed(why, reasons)
        report, failure, outcome = _filled(checkpoints, memory, mine, name)
        facts = [outcome, 0, 0, 0, 0]
        if report is not None:
            age = round(report.age.mean * report.n_rows)
            facts[1:] = [report.n_rows, age, round(report.seconds * 1e6), report.step]
        everyone = world.gather("gone back", np.array(facts, dtype=np.int64))
        worst = int(everyone[:, 0].max())
        if worst == _FILLED:
            break
        words = [one.tobytes().decode() for one in world.gather_bytes("not gone back", failure.encode())]
        reasons += dict.fromkeys(filter(None, words))
        if worst == _FAILED:
            raise _failed("; ".join(reasons), [])
        damaged.append(name)
        found = None
    step, rows = int(everyone[:, 4].max()), int(everyone[:, 1].sum())
    for shard in mine:
        memory.set_ready(shard, step)
    mean_age, seconds = float(everyone[:, 2].sum() / max(1, rows)), float(everyone[:, 3].max()) / 1e6
    if found is None:  # not the source
        return RolledBack(name, 0, 0, step, rows, mean_age, seconds)
    newest = found.manifest
    return RolledBack(
        name, newest.epoch, newest.number, step, rows, mean_age, seconds, (*found.passed_over, *reasons), found.state,
        JobMeasurements.of_checkpoint(newest).samples_lost,
    )  # fmt: skip


def placement_number(holdings: Sequence[HostShards]) -> int:
    """Above that of any copy made before, also on hosts that are not here: full recoveries count in the upper half."""
    newest = max(int(holding.placed.max()) for holding in holdings)
    return ((newest >> _LOWER_BITS) + 1) << _LOWER_BITS


def _try(act: Callable[[], CompleteCheckpoint]) -> tuple[CompleteCheckpoint | None, str]:
    try:
        return act(), ""
    except (BadInput, RecoveryError) as error:
        return None, str(error)


def _filled(
    checkpoints: JobCheckpoints, memory: ShardMemory, mine: list[int], name: str
) -> tuple[Report | None, str, int]:
    """(report, what went wrong, how it ended) of this host."""
    try:
        memory.init_shards(mine, 0, ready=False)
        return (checkpoints.fill_from(memory, mine, name) if mine else None), "", _FILLED
    except (Damaged, NotFound) as error:
        return None, Skipped(name, str(error)).words, _DAMAGED
    except (GbaError, OSError) as error:
        return None, f"{name}: {type(error).__name__}: {error}", _FAILED


def _failed(why: str, reasons: list[str]) -> RecoveryFailed:
    causes = "; ".join([why, *reasons])
    return RecoveryFailed(
        f"full recovery was begun and no checkpoint could be read to its end: {causes}. The rows in memory are of no "
        "use. See that the checkpoint location can be read, and start the same command again: it resumes from the "
        "newest checkpoint that is whole"
    )
