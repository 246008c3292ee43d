"""Full recovery in a running job: which state is the newest, which checkpoints count, and what is forgotten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gba_hvd.checkpoint.job_checkpoints as checkpoints_module
from gba_hvd import GBACallback
from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.job_checkpoints import JobCheckpoints
from gba_hvd.epoch import SampleAccount
from gba_hvd.membership.agreement import RankState, agree
from gba_hvd.membership.full_recovery import placement_number
from gba_hvd.ps.messages import SaveFacts, SaveStatus
from gba_hvd.shm import retained_state
from gba_hvd.shm.placement import HostShards
from gba_hvd.switching.requested_mode import AskedMode
from gba_hvd.training.job_state import Rollback
from recovery import CheckpointCallback, state_codec
from recovery.catalog import claims
from recovery.errors import BadInput, NotFound
from recovery.format.manifest import Manifest
from recovery.restore import TrainingPoint
from recovery.storage.open import open_store
from recovery.testing import SMALL, Saver
from recovery.torch_rows.tensor_rows import RowParts, TensorRows

OLD = RankState(True, 12, -1, host=1, settings=1, pid=1)
AGREED = replace(OLD, rollbacks_agreed=1)  # has the decision, and its state is from before
BACK = replace(OLD, step=8, rollbacks=1, rollbacks_agreed=1)  # has gone back
STATE = state_codec.encode(dict.fromkeys(("model", "optimizer", "values", "position", "callbacks")))
NEW = RankState(False, 0, -1, host=1, settings=1, pid=1)


@pytest.mark.parametrize(
    ("facts", "step", "source", "decider"),
    [
        ([OLD, OLD], 12, 0, -1),
        # Nobody has gone back, but rows may have been overwritten: that is done again, at the first rank that knows.
        ([OLD, AGREED], 12, 0, 1),
        ([NEW, AGREED, AGREED], 12, 1, 1),
        # One has: it is newer than all that have not, at a lower step.
        ([AGREED, BACK], 8, 1, -1),
        ([BACK, OLD, NEW], 8, 0, -1),
        ([AGREED, replace(BACK, step=9), BACK], 9, 1, -1),
        # The next recovery of a job that went back before.
        ([BACK, replace(BACK, rollbacks_agreed=2)], 8, 0, 1),
    ],
)
def test_a_state_that_went_back_more_often_is_newer(
    facts: list[RankState], step: int, source: int, decider: int
) -> None:
    agreed = agree(facts)
    assert (agreed.step, agreed.source, agreed.decider) == (step, source, decider)
    assert ("full recovery that is not complete" in agreed.reason) == (decider >= 0)


def test_nobody_applies_what_it_holds_of_a_state_that_was_gone_back_on() -> None:
    assert agree([replace(OLD, step=7, held_step=8), BACK]).catch_up == ()
    assert agree([replace(BACK, step=7, held_step=8), BACK]).catch_up == (0,)


def test_the_numbers_travel_with_the_other_facts() -> None:
    facts = replace(BACK, row_factor=0.1, generation=3, membership=2, rollbacks_agreed=2)
    assert RankState.of_row(np.asarray(facts.row())) == facts


def test_a_worker_that_takes_over_a_state_forgets_what_it_had_decided() -> None:
    source, mine = Rollback(1, unreported={"step": 8}), Rollback(0, {"strategy": "full"})
    assert (source.agreed_number, mine.agreed_number) == (1, 1)
    mine.load(source.shared())
    assert mine == source
    mine.load(Rollback(1).shared())  # the source has reported it; this worker has not
    assert mine.unreported == {"step": 8}
    mine.load(None)  # of a version before
    assert mine.number == 0


def test_samples_that_are_trained_again_count_once() -> None:
    saved, now = SampleAccount(total=768, applied=768), SampleAccount(total=1096, applied=1090, dropped=6, redone=50)
    saved.rolled_back(now)
    assert (saved.total, saved.applied + saved.dropped + saved.lost, saved.redone) == (768, 768, 50 + 328)
    same = SampleAccount(total=10, applied=10)
    same.rolled_back(SampleAccount(total=10, applied=10))
    assert same.redone == 0


def test_what_is_placed_by_a_full_recovery_counts_more_than_any_copy_before() -> None:
    def held(*placed: int) -> HostShards:
        return HostShards(*[np.ones(len(placed), np.int64)] * 3, np.array(placed))

    first = placement_number([held(1, 7), held(3, 0)])
    assert first == 2**32
    assert placement_number([held(first, first + 5), held(9, 9)]) == 2**33, "changes in between count one by one"


# --- checkpoints -----------------------------------------------------------------------------------------------------


class Place:
    """A job that saves full, delta and mfu checkpoints of rows whose values say when."""

    def __init__(self, url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.events = open_store(str(url)), list[Event]()
        self.rows = TensorRows({"t": RowParts(torch.zeros(5, 2))})
        monkeypatch.setattr(checkpoints_module, "ShardRows", lambda *_, **__: self.rows)
        model = SimpleNamespace(tables=SimpleNamespace(memory=None))
        engine: Any = SimpleNamespace(progress=SimpleNamespace(step=3), emit=self.events.append, model=model, mode=None)
        self.job = JobCheckpoints(engine, CheckpointCallback(str(url), policy="mfu", every_s=9, lease_s=0.1))
        monkeypatch.setattr(self.job, "check_fits", lambda about: None)
        self.job.claim_location("job")

    def save(self, epoch: int, *kinds: str, state: bytes = STATE) -> list[Manifest]:
        source = TensorRows({"t": RowParts(torch.full((5, 2), float(epoch)))})
        saver = Saver(source, self.store, replace(SMALL, policy="mfu"), epoch=epoch)
        return [saver.save(kind, state) for kind in kinds]

    @property
    def newest(self) -> str:
        return self.job.newest_complete().manifest.name


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path / "store", monkeypatch)


def test_a_job_goes_back_to_a_checkpoint_that_leaves_out_no_change(place: Place) -> None:
    with pytest.raises(NotFound, match="has no checkpoint of this job that leaves out no change"):
        place.job.newest_complete()
    made = place.save(1, "full", "delta", "mfu", "mfu")
    found = place.job.newest_complete()
    assert (found.manifest.name, found.state, found.passed_over) == (made[1].name, STATE, ())
    assert place.job.newest_complete(damaged=[made[1].name]).manifest.name == made[0].name


def test_a_checkpoint_whose_state_is_damaged_is_passed_over_and_named(place: Place, tmp_path: Path) -> None:
    first, second = place.save(1, "full", "full")
    assert second.state is not None
    (tmp_path / "store" / second.state.name).write_bytes(bytes(second.state.n_bytes))
    found = place.job.newest_complete()
    assert found.manifest.name == first.name and second.name in found.passed_over[0]


@pytest.mark.parametrize(
    ("state", "why"), [(b"junk", "its 4 bytes of training"), (state_codec.encode({"model": 1}), "lacks optimizer")]
)
def test_a_checkpoint_whose_state_is_no_training_state_is_passed_over_and_named(
    place: Place, state: bytes, why: str
) -> None:
    (first,), (second,) = place.save(1, "full"), place.save(2, "full", state=state)
    place.job.load_location({"first_epoch": 1, "epochs": [1, 2], "resumed_epoch": 0})
    found = place.job.newest_complete()
    assert (found.manifest.name, found.state) == (first.name, STATE)
    assert second.name in found.passed_over[0] and why in found.passed_over[0]


def test_a_job_whose_place_was_not_claimed_again_does_not_go_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save in flight under the old claim could still become a checkpoint, of rows of two times."""
    place.save(1, "full")

    def refused(*_: Any, **__: Any) -> claims.Claim:
        raise NotFound("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(claims, "claim", refused)
        place.job.claim_location("job")
    with pytest.raises(BadInput, match="could not be claimed"):
        place.job.newest_complete()
    place.job.claim_location("job")
    assert place.newest


def test_no_row_comes_from_a_checkpoint_that_was_gone_back_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    base, *_ = place.save(1, "full", "mfu")
    place.job.claim_location("job")  # the world of the survivors
    place.job.rolled_back_to(base.epoch, base.number)
    report = place.job.fill(None, [0], TrainingPoint(3))  # type: ignore[arg-type]
    assert report is not None and report.manifest.name == base.name
    place.save(2, "full", "mfu")  # after the recovery
    report = place.job.fill(None, [0], TrainingPoint(3))  # type: ignore[arg-type]
    assert report is not None and report.manifest.epoch == 2 and report.manifest.kind == "mfu"
    later = JobCheckpoints(place.job._engine, place.job.callback)  # a worker that joins later
    later.load_location(place.job.location())
    assert later.schedule.in_force(SaveStatus(1, 9, "done")) is None
    assert not later._is_of_this_job(1, base.number + 1) and later._is_of_this_job(2, 2)


def test_reports_of_saves_from_before_are_ignored(place: Place) -> None:
    schedule, before = place.job.schedule, SaveStatus(1, 9, "done", SaveFacts(kind="full", saved_step=9))
    schedule.poll(before)
    assert [event.kind for event in place.events] == ["checkpoint"] and schedule.has(9)
    place.job.claim_location("job")
    place.job.rolled_back_to(1, 8)
    place.job.rolled_back(8)
    assert not schedule.has(9) and schedule.in_force(before) is None
    schedule.poll(before)
    assert len(place.events) == 1
    assert not place.job.callback.due(8, 1e9) and place.job.callback.due(9, 1e9), "the next one is due as usual"
    after = SaveStatus(2, 9, "failed", SaveFacts(why="no room"))
    schedule.poll(after)
    assert place.events[-1].kind == "checkpoint_failed"


def test_a_retained_state_of_later_steps_is_removed(tmp_path: Path) -> None:
    retained_state.StateRetainer(tmp_path, 1, 0.5).keep(12, 0, lambda: b"state")
    assert retained_state.read(tmp_path) is not None
    retained_state.remove(tmp_path)
    retained_state.remove(tmp_path)
    assert retained_state.read(tmp_path) is None


# --- modes -----------------------------------------------------------------------------------------------------------


def test_changes_of_mode_after_the_checkpoint_come_again() -> None:
    callback = GBACallback(mode="allreduce", switch_at={5: "gba", 10: "async"})
    assert [callback.mode_request(step, "allreduce") is None for step in (4, 5, 10)] == [True, False, False]
    callback.rolled_back(7)
    assert callback.mode == "gba" and callback.mode_request(8, "gba") is None
    request = callback.mode_request(10, "gba")
    assert request is not None and request[0] == "async"
    callback.rolled_back(3)
    assert callback.mode == "allreduce" and callback.mode_request(4, "allreduce") is None


def test_what_an_operator_asked_for_stays() -> None:
    callback = GBACallback(mode="allreduce", switch_at={5: "gba"})
    callback.mode_request(5, "allreduce")
    callback.pin("async")
    callback.rolled_back(8)
    assert callback.mode == "async"


def test_a_switch_is_tried_again_as_soon_as_after_any_failure() -> None:
    callback = GBACallback(mode="gba")
    callback.failed(100, "no server")
    callback.rolled_back(50)
    assert 50 < callback.paused_until < 100


def test_steps_that_come_again_do_not_count_twice_as_asked_for() -> None:
    asked = AskedMode("gba", {})
    for step in (1, 2, 3):
        asked.step(step, "allreduce")
    asked.rolled_back(1)
    asked.step(2, "gba")
    (told,) = asked.shortfall(10, "")
    assert (told.data["steps_in_it"], told.data["steps_asked"]) == (1, 4)
