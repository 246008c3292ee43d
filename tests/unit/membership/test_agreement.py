"""The newest step wins, nobody goes back."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gba_hvd.comm.collectives import SoloWorld
from gba_hvd.embedding.initial_rows import InitialRows
from gba_hvd.errors import ShardMemoryError
from gba_hvd.membership.agreement import Agreement, ModeExitRace, RankState, agree, asynchronous_source
from gba_hvd.membership.join import JoinResult
from gba_hvd.membership.restore_shards import RestoredShards, restore_missing_shards
from gba_hvd.shm.placement import Placement
from recovery.errors import BadInput, Damaged, StoreError
from recovery.restore import Report, TrainingPoint
from recovery.restore.row_loader import Age

WITH_PLAIN_ROWS: Any = SimpleNamespace(tables=SimpleNamespace(initial_rows=InitialRows({}, 0.01)))


def old(step: int, held: int = -1) -> RankState:
    return RankState(True, step, held, host=1, settings=1, pid=1)


NEW = RankState(False, 0, -1, host=1, settings=1, pid=1)


@pytest.mark.parametrize(
    ("facts", "step", "source", "catch_up", "is_restart"),
    [
        ([NEW], 0, 0, (), False),
        ([NEW, NEW, NEW], 0, 0, (), False),
        ([old(5), NEW], 5, 0, (), True),
        ([NEW, old(5)], 5, 1, (), True),
        ([NEW, old(5), old(5)], 5, 1, (), True),
        ([old(4, held=5), old(5), NEW], 5, 1, (0,), True),
        ([old(5), old(4, held=5), old(4, held=5)], 5, 0, (1, 2), True),
        # Everybody holds step 6, nobody saw its result: it was not decided, and is computed again.
        ([old(5, held=6), old(5, held=6)], 5, 0, (), True),
        # A step behind without its gradients, or further behind: gone for longer, it takes the newest state.
        ([old(4), old(5)], 5, 1, (), True),
        ([old(2, held=3), old(5)], 5, 1, (), True),
        ([old(0), NEW], 0, 0, (), True),
    ],
)
def test_agreement(facts: list[RankState], step: int, source: int, catch_up: tuple[int, ...], is_restart: bool) -> None:
    agreed = agree(facts)
    assert agreed == Agreement(step, source, catch_up, is_restart, agreed.reason)


def test_the_agreement_says_why() -> None:
    assert agree([NEW]).reason == "a new job: everybody takes the values of rank 0"
    assert agree([NEW, old(7), old(6, held=7)]).reason == "rank 1 has step 7, the newest of 2 survivors"


def within(step: int, generation: int) -> RankState:
    return RankState(True, step, -1, host=1, settings=1, pid=1, generation=generation)


@pytest.mark.parametrize(
    ("facts", "source"),
    [
        ([NEW, NEW], None),
        ([old(5), NEW], None),
        ([NEW, within(5, 8), within(4, 8)], 1),
        ([within(5, 8), within(4, 9)], 1),  # whoever is in the newer mode knows it
        ([old(4), within(5, 8)], 1),  # gone for long
    ],
)
def test_who_informs_late_joiners_of_an_asynchronous_mode(facts: list[RankState], source: int | None) -> None:
    assert asynchronous_source(facts) == source


@pytest.mark.parametrize("step", [5, 6])
def test_a_world_that_forms_while_a_mode_is_left_is_formed_again(step: int) -> None:
    with pytest.raises(ModeExitRace, match="some workers have left the asynchronous mode and some have not yet"):
        asynchronous_source([within(5, 8), old(step)])


def test_facts_travel_as_a_row_of_numbers() -> None:
    facts = RankState(True, 5, 6, host=-(2**63), settings=2**63 - 1, pid=77, row_factor=0.1, refused=3)
    row = facts.row()
    assert RankState.of_row(row) == facts


def test_why_lost_rows_did_not_come_back_reaches_whoever_reports_it(make_tables: Any) -> None:
    """The lead of another host tried; rank 0 speaks."""
    memory = make_tables({"user": (20, 4)}).memory

    class TwoHosts(SoloWorld):
        """Rank 0 of two; the other one has failed to restore."""

        size = 2

        def gather(self, name: str, row: np.ndarray) -> np.ndarray:
            return np.stack([row, row])

        def gather_bytes(self, name: str, data: bytes) -> list[np.ndarray]:
            theirs = json.dumps([["m-3"], ["m-4: torn"], ["the store does not answer"]]).encode()
            return [np.frombuffer(words, np.uint8) for words in (data, theirs)]

    def fill(memory: Any, shards: Any, now: Any) -> None:
        assert now == TrainingPoint(7)

    checkpoints = SimpleNamespace(callback=SimpleNamespace(resume=True), fill=fill)
    placement = Placement((0, 0, 0), np.array([0, 0, 0]), (1,), (), ())
    engine: Any = SimpleNamespace(participant=lambda kind: checkpoints, model=WITH_PLAIN_ROWS)
    agreed = Agreement(7, 0, (), True, "")
    refilled = restore_missing_shards(engine, TwoHosts(), agreed, placement, here=0, is_leader=True, memory=memory)
    assert (refilled.rows, refilled.why_not) == (0, "the store does not answer")
    assert (refilled.manifests, refilled.skipped) == (("m-3",), ("m-4: torn",))
    assert memory.steps_of(1) == (7, 7)


def test_the_samples_that_restored_rows_lost_are_counted_to_the_fraction(make_tables: Any) -> None:
    """Each row's own last save counts: the mean is no whole number, and the portion lost may be small beside it."""
    memory = make_tables({"user": (20, 4)}).memory
    saved_samples = 156_000 / 170
    newest: Any = SimpleNamespace(name="m-9", epoch=1, number=9, step=9)
    chain: Any = SimpleNamespace(newest=newest)
    report = Report(chain, 170, 0, Age(0, 0.0, 3), None, saved_samples, None, 0, 1.0, None, ())
    checkpoints = SimpleNamespace(callback=SimpleNamespace(resume=True), fill=lambda *_: report)
    engine: Any = SimpleNamespace(participant=lambda kind: checkpoints, model=WITH_PLAIN_ROWS)
    placement = Placement((0, 0, 0), np.array([0, 0, 0]), (1,), (), ())
    agreed = Agreement(12, 0, (), True, "")
    refilled = restore_missing_shards(engine, SoloWorld(), agreed, placement, here=0, is_leader=True, memory=memory)
    assert refilled.by_host == ((saved_samples, 170),)
    joined = JoinResult("j", 0, 1, True, True, 0, 0, 0, rows_restored=170, refilled=refilled.by_host)
    assert joined.samples_lost(1096, 340) == (1096 - saved_samples) * 170 / 340


def refill_failing_with(error: Exception, memory: Any) -> RestoredShards:
    """What is restored into a running job's new shards when the store's rows arrive in part, then `error` is raised."""

    def fill(memory: Any, shards: Any, now: Any) -> None:
        memory.flat[:] = 7.0
        raise error

    checkpoints = SimpleNamespace(callback=SimpleNamespace(resume=True), fill=fill)
    placement = Placement((0, 0, 0), np.array([0, 0, 0]), (0, 1, 2), (), ())
    engine: Any = SimpleNamespace(participant=lambda kind: checkpoints, model=WITH_PLAIN_ROWS)
    agreed = Agreement(0, 0, (), True, "")
    return restore_missing_shards(engine, SoloWorld(), agreed, placement, here=0, is_leader=True, memory=memory)


@pytest.mark.parametrize("error", [StoreError("planned"), Damaged("planned"), BadInput("planned")], ids=repr)
def test_a_checkpoint_that_cannot_be_restored_costs_the_lost_rows_and_not_the_job(
    make_tables: Any, error: Exception
) -> None:
    memory = make_tables({"user": (20, 4)}).memory
    before = memory.flat.copy()
    assert refill_failing_with(error, memory).why_not == "planned"
    for group in memory.layout.groups:
        at = slice(group.at, group.at + group.record)
        assert (memory.flat[at] == before[at]).all()  # rows start over


def test_shard_memory_that_fails_during_a_restore_is_no_failure_of_the_checkpoint(make_tables: Any) -> None:
    with pytest.raises(ShardMemoryError, match="no space"):
        refill_failing_with(ShardMemoryError("no space"), make_tables({"user": (20, 4)}).memory)
