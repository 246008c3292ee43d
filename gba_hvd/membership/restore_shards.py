"""Shards that nobody holds: filled from the newest checkpoint, or with initial rows."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np

from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.comm.collectives import World, all_or_none
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
    by_host: tuple[tuple[int, int], ...] = ()
    seconds: float = 0.0
    why_not: str = ""
    manifests: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    report: Report | None = None  # of a job that resumes completely from a checkpoint


def restore_missing_shards(
    engine: Engine, world: World, agreed: Agreement, placement: Placement, here: int, leads: bool, memory: ShardMemory
) -> RestoredShards:
    """Shards nobody holds: from the newest checkpoint, by each host's leader; without one, initial rows. A
    collective."""
    checkpoints = checkpoints_of(engine)
    if checkpoints is None or not placement.new or not (agreed.is_restart or checkpoints.callback.resume):
        for shard in placement.new:
            if placement.rank[shard] == world.rank:
                memory.init_shard(shard, agreed.step)
        return RestoredShards()
    mine = [shard for shard in placement.new if placement.host[shard] == here] if leads else []
    now = TrainingPoint(agreed.step) if agreed.is_restart else None  # a late joiner does not know the samples
    failure = ""

    def fill() -> Report | None:
        nonlocal failure
        report = None
        for shard in mine:
            memory.init_shard(shard, agreed.step, ready=False)
        try:
            report = checkpoints.fill(memory, mine, now) if mine else None
        except (BadInput, RecoveryError) as error:  # not those of the shard memory: rows start over in it
            if now is None:
                raise
            failure = str(error)
        if report is not None and now is None:
            checkpoints.check_fits(report.manifest.about)
        if report is None and now is not None:  # what came of an attempt that failed is not to stay
            for shard in mine:
                memory.init_shard(shard, agreed.step, ready=False)
        return report

    report = all_or_none(world, agreed.is_restart, "fill", fill)
    facts = [0] * 7
    if report is not None:
        newest, age = report.manifest, round(report.age.mean * report.n_rows)
        facts[:6] = [newest.epoch, newest.number, report.step, report.n_rows, age, report.samples]
        facts[6] = round(report.seconds * 1e6)
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
    found = RestoredShards(rows, float(everyone[:, 4].sum() / max(1, rows)), seconds=float(everyone[:, 6].max()) / 1e6)
    if now is not None:
        manifests, skipped, failures = _words_of_all(world, report, failure)
        by_host = tuple((int(row[5]), int(row[3])) for row in restored)
        why_not = failures[0] if failures else ""
        return replace(found, by_host=by_host, why_not=why_not, manifests=manifests, skipped=skipped)
    if report is not None and world.rank == agreed.source:
        checkpoints.resume_point(report)
    return replace(found, report=report if world.rank == agreed.source else None)


def _words_of_all(world: World, report: Report | None, failure: str) -> list[tuple[str, ...]]:
    """Manifests restored from, checkpoints passed over, failures: of all hosts, each once. A collective."""
    skipped = [] if report is None else [f"{one.name}: {one.why}" for one in report.skipped]
    mine = [[] if report is None else [report.manifest.name], skipped, [failure] if failure else []]
    everyone = [json.loads(one.tobytes()) for one in world.gather_bytes("refilled", json.dumps(mine).encode())]
    return [tuple(dict.fromkeys(word for words in kind for word in words)) for kind in zip(*everyone, strict=True)]
