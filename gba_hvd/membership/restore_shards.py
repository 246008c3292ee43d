"""Shards that no host holds: filled from the newest checkpoint, or with initial rows."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np

from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.comm.collectives import World, all_or_none
from gba_hvd.embedding.initial_rows import InitialRows
from gba_hvd.errors import StateMismatch
from gba_hvd.membership.agreement import Agreement
from gba_hvd.shm.placement import Placement
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.training.engine import Engine
from recovery.errors import BadInput, RecoveryError
from recovery.restore import Report, TrainingPoint


@dataclass(frozen=True)
class RestoredShards:
    """Rows that came from a checkpoint into new shards, over all hosts; age: in steps, mean. by_host: see `JoinResult`.

    seconds: of the host that took longest; why_not: what went wrong on the first host where something did
    manifests: where they came from; skipped: newer checkpoints that could not be used, and why
    """

    rows: int = 0
    age: float = 0.0
    by_host: tuple[tuple[float, int], ...] = ()
    seconds: float = 0.0
    why_not: str = ""
    manifests: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    report: Report | None = None  # of a job that resumes completely from a checkpoint


def restore_missing_shards(
    engine: Engine,
    world: World,
    agreed: Agreement,
    placement: Placement,
    here: int,
    is_leader: bool,
    memory: ShardMemory,
) -> RestoredShards:
    """Shards that no host holds: from the newest checkpoint, by each host's leader; without one, initial rows. A
    collective."""
    checkpoints, initial = checkpoints_of(engine), engine.model.tables.initial_rows
    mine = [shard for shard in placement.new if placement.host[shard] == here] if is_leader else []
    if placement.new and initial.assigned:
        _refuse_different_rows(world, agreed, initial, is_leader)
    if checkpoints is None or not placement.new or not (agreed.is_restart or checkpoints.callback.resume):
        n_sharers = 1
        if initial.is_plain:
            mine = [shard for shard in placement.new if placement.rank[shard] == world.rank]
            n_sharers = len({placement.rank[shard] for shard in placement.new if placement.host[shard] == here})

        def init() -> None:
            memory.init_shards(mine, agreed.step, n_sharers=n_sharers)
            initial.release()

        if initial.is_plain or not placement.new:
            init()
        else:  # the user's functions and files, on the leaders only: neighbours need not have the same
            all_or_none(world, agreed.is_restart, "initialise", init)
        return RestoredShards()
    now = TrainingPoint(agreed.step) if agreed.is_restart else None  # a late joiner does not know the samples
    failure = ""

    def fill() -> Report | None:
        nonlocal failure
        report = None
        memory.init_shards(mine, agreed.step, ready=False)
        try:
            report = checkpoints.fill(memory, mine, now) if mine else None
        except (BadInput, RecoveryError) as error:  # not those of the shard memory: rows start over in it
            if now is None:
                raise
            failure = str(error)
        if report is not None and now is None:
            checkpoints.check_fits(report.manifest.about)
        if report is None and now is not None:  # what came of an attempt that failed is not to stay
            memory.init_shards(mine, agreed.step, ready=False)
        return report

    report = all_or_none(world, agreed.is_restart, "fill", fill)
    facts = [0] * 7
    if report is not None:
        newest, age = report.manifest, round(report.age.mean * report.n_rows)
        saved_samples = int(np.float64(report.saved_samples).view(np.int64))  # a mean: a fraction counts for each row
        facts[:6] = [newest.epoch, newest.number, report.step, report.n_rows, age, saved_samples]
        facts[6] = round(report.seconds * 1e6)
    everyone = world.gather("filled", np.array(facts, dtype=np.int64))
    restored = everyone[everyone[:, 3] > 0]
    step = agreed.step
    if now is None and len(restored):
        if len({tuple(row[:3]) for row in restored.tolist()}) > 1:
            raise StateMismatch("the hosts restored different checkpoints: the newest is damaged in part, remove it")
        step = int(restored[0, 2])
    initial.release()
    for shard in mine:
        memory.set_ready(shard, step)
    rows = int(everyone[:, 3].sum())
    found = RestoredShards(rows, float(everyone[:, 4].sum() / max(1, rows)), seconds=float(everyone[:, 6].max()) / 1e6)
    if now is not None:
        manifests, skipped, failures = _words_of_all(world, report, failure)
        saved_samples_by_host = np.ascontiguousarray(restored[:, 5]).view(np.float64)
        by_host = tuple(zip(saved_samples_by_host.tolist(), restored[:, 3].tolist(), strict=True))
        why_not = failures[0] if failures else ""
        return replace(found, by_host=by_host, why_not=why_not, manifests=manifests, skipped=skipped)
    if report is not None and world.rank == agreed.source:
        checkpoints.resume_point(report)
    return replace(found, report=report if world.rank == agreed.source else None)


def _refuse_different_rows(world: World, agreed: Agreement, initial: InitialRows, is_leader: bool) -> None:
    """Each host's leader fills its shards with the rows that it was given: they must be the same. A collective."""
    own = all_or_none(
        world, agreed.is_restart, "read the assigned", lambda: initial.digest() if is_leader else 0, "rows"
    )
    everyone = world.gather("assigned rows", np.array([is_leader, own], dtype=np.int64))
    ranks = np.flatnonzero(everyone[:, 0])
    differing = [int(rank) for rank in ranks if everyone[rank, 1] != everyone[ranks[0], 1]]
    if differing:
        raise StateMismatch(
            f"rows assigned to tables {initial.assigned} differ: the leaders of other hosts, ranks {differing}, have "
            f"others than rank {ranks[0]}. Seed the script (torch.manual_seed before the model is made), or read the "
            "rows from one file on all hosts"
        )


def _words_of_all(world: World, report: Report | None, failure: str) -> list[tuple[str, ...]]:
    """Manifests restored from, checkpoints passed over, failures: of all hosts, each once. A collective."""
    skipped = [] if report is None else [one.words for one in report.skipped]
    mine = [[] if report is None else [report.manifest.name], skipped, [failure] if failure else []]
    everyone = [json.loads(one.tobytes()) for one in world.gather_bytes("refilled", json.dumps(mine).encode())]
    return [tuple(dict.fromkeys(word for words in kind for word in words)) for kind in zip(*everyone, strict=True)]
