"""Numbers of saves, and when one that is waited for is there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd import BadInput
from gba_hvd.callbacks import Event
from gba_hvd.checkpoint import save_schedule
from gba_hvd.checkpoint.save_schedule import SaveSchedule
from gba_hvd.comm.wait_notices import Patience
from gba_hvd.membership import JoinResult
from gba_hvd.ps.messages import JobPosition, SaveFacts, SaveState, SaveStatus
from recovery import CheckpointCallback
from recovery.schedule.adaptive import IntervalPlan, JobMeasurements


class Chief:
    """A schedule, and what it told."""

    def __init__(self, **settings: Any) -> None:
        self.events: list[Event] = []
        self.engine: Any = SimpleNamespace(
            world=SimpleNamespace(rank=0),
            progress=SimpleNamespace(step=5),
            host=SimpleNamespace(server=None),
            emit=self.events.append,
        )
        self.schedule = SaveSchedule(
            self.engine, CheckpointCallback("/nowhere", every_steps=4, policy="mfu", **settings)
        )

    def saves(self, kind: str, became: SaveState, step: int = 5, why: str = "") -> int:
        """Ask for a checkpoint and hear what became of it; returns its number."""
        number = self.schedule.next_number(step)
        self.schedule.asked(number, step)
        self.schedule.poll(saved(number, kind, became, step, why))
        return number


def saved(number: int, kind: str, state: SaveState = "done", step: int = 5, why: str = "") -> SaveStatus:
    return SaveStatus(1, number, state, SaveFacts(manifest=f"m-{number}", kind=kind, saved_step=step, why=why))


def test_a_number_is_the_step_s_and_never_one_that_a_save_had_before() -> None:
    """One that leaves nothing out follows one that did; it fails, and is made again, under another number."""
    chief = Chief()
    assert chief.saves("mfu", "done") == 5
    assert chief.saves("delta", "failed", why="the store is away") == 6
    assert chief.saves("delta", "failed", why="the store is away") == 7
    assert chief.saves("full", "done") == 8
    assert chief.saves("mfu", "done", step=6) == 9
    assert chief.saves("mfu", "done", step=20) == 20


def test_failures_for_one_reason_are_reported_ever_less_often_and_counted_when_a_save_succeeds() -> None:
    chief = Chief()
    for step in range(10, 20):
        chief.saves("delta", "failed", step=step, why=f"manifests/{step}.json: refused")
    chief.saves("delta", "failed", step=20, why="the bucket is gone")
    chief.saves("full", "done", step=21)
    chief.saves("full", "done", step=22)
    failed = [event.message for event in chief.events if event.kind == "checkpoint_failed"]
    assert failed == [
        "the checkpoint of step 10 was not saved: manifests/10.json: refused",
        "2 checkpoints in a row, from step 10 to 11, were not saved: manifests/11.json: refused",
        "4 checkpoints in a row, from step 10 to 13, were not saved: manifests/13.json: refused",
        "8 checkpoints in a row, from step 10 to 17, were not saved: manifests/17.json: refused",
        "the checkpoint of step 20 was not saved: the bucket is gone",
    ]
    done = [event.message.partition("; ")[2] for event in chief.events if event.kind == "checkpoint"]
    assert done == ["11 before it were not", ""]


def test_a_coordinator_that_is_ahead_of_the_chief_has_numbers_after_the_chief_s_step() -> None:
    chief = Chief()
    chief.schedule.asked(5, 5)
    chief.schedule.poll(saved(8, "mfu", step=8))
    assert chief.schedule.next_number(6) == 9


def test_a_chief_that_took_over_marks_the_checkpoint_that_it_finds() -> None:
    chief = Chief()
    chief.schedule.poll(saved(5, "full"))
    assert chief.saves("delta", "done", step=9) == 9
    assert [event.data.get("found", False) for event in chief.events if event.kind == "checkpoint"] == [True, False]


def test_a_chief_that_took_over_did_not_ask_for_what_an_earlier_chief_had_saved() -> None:
    """In allreduce mode all workers take part in asking."""
    chief = Chief()
    chief.engine.world.rank = 1
    chief.schedule.asked(5, 5)
    chief.engine.world.rank = 0
    chief.schedule.world_formed(forget=True)
    chief.schedule.poll(saved(5, "full"))
    assert [event.data.get("found", False) for event in chief.events if event.kind == "checkpoint"] == [True]


def test_a_checkpoint_that_is_in_flight_when_a_chief_takes_over_is_a_new_one() -> None:
    chief = Chief()
    chief.schedule.poll(saved(5, "full", "running"))
    chief.schedule.poll(saved(5, "full"))
    assert [event.data.get("found", False) for event in chief.events if event.kind == "checkpoint"] == [False]


@pytest.mark.slow
def test_the_failure_of_an_earlier_save_is_not_that_of_the_one_that_is_waited_for() -> None:
    chief = Chief()
    assert chief.saves("mfu", "failed", why="the store is away") == 5
    chief.schedule.asked(6, 5)
    heard = iter([saved(5, "mfu", "failed"), saved(6, "delta", "running"), saved(6, "delta")])
    chief.schedule.await_saved(lambda: next(heard), 5, timeout_s=60.0)
    assert list(heard) == []
    assert chief.schedule.has(5) and chief.schedule.why_not_saved(5) == ""


def test_a_wait_for_the_last_checkpoint_is_reported_once_and_a_short_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(save_schedule, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: None))
    chief = Chief()
    chief.saves("mfu", "failed", why="the store is away")
    chief.events.clear()
    chief.schedule.asked(6, 5)

    def pass_by(steps: list[float]) -> Any:
        def latest() -> SaveStatus:
            now[0] += steps.pop(0)
            return saved(6, "delta", "running" if steps else "done")

        return latest

    chief.schedule.await_saved(pass_by([1.0, 1.0]), 5, timeout_s=600.0)
    assert [one.kind for one in chief.events] == ["checkpoint"]
    chief.schedule.asked(7, 6)
    chief.schedule._failures.text(5, "the store is away")
    chief.events.clear()

    def slow() -> SaveStatus:
        now[0] += 2.0
        return saved(7, "delta", "running" if now[0] < 20 else "done", step=6)

    chief.schedule.await_quiet(slow, 600.0)
    chief.schedule.await_saved(slow, 6, timeout_s=600.0)
    waited, *others = chief.events
    assert (waited.kind, waited.level) == ("checkpoint_awaited", "info")
    assert "waiting for the checkpoint of step 6, for 600 s at most; the one before" in waited.message
    assert "was not saved: the store is away" in waited.message
    assert [one.kind for one in others] == ["checkpoint"]


def test_what_failed_before_a_worker_leaves_is_made_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    chief = Chief()
    chief.engine.signals = SimpleNamespace(preempt_deadline_s=None)
    mode: Any = SimpleNamespace(contact=SimpleNamespace(worker_leaves=True, position=JobPosition(step=5)))
    assert chief.schedule.is_due_before_a_leave(mode)
    chief.saves("delta", "failed", why="the store is away")
    assert not chief.schedule.is_due_before_a_leave(mode)
    monkeypatch.setattr(save_schedule, "_AGAIN_S", 0.0)
    assert chief.schedule.is_due_before_a_leave(mode)
    chief.saves("full", "done")
    assert not chief.schedule.is_due_before_a_leave(mode)


def test_a_checkpoint_of_the_step_before_is_none_of_the_step_at_which_a_worker_leaves() -> None:
    chief = Chief()
    chief.engine.signals = SimpleNamespace(preempt_deadline_s=None)
    mode: Any = SimpleNamespace(contact=SimpleNamespace(worker_leaves=True, position=JobPosition(step=5)))
    chief.saves("mfu", "done")
    assert chief.saves("delta", "done") == 6
    chief.engine.progress.step = 6
    assert chief.schedule.is_due_before_a_leave(mode)
    assert not chief.schedule.has(6) and chief.schedule.why_not_saved(6)


def test_who_leaves_may_be_a_step_ahead_of_the_chief() -> None:
    """It waits for a checkpoint of its own step, which the coordinator knew of when it said that somebody leaves."""
    chief = Chief()
    chief.engine.signals = SimpleNamespace(preempt_deadline_s=None)
    chief.saves("delta", "done")
    mode: Any = SimpleNamespace(contact=SimpleNamespace(worker_leaves=True, position=JobPosition(step=6)))
    assert chief.schedule.is_due_before_a_leave(mode)


def test_what_is_due_counts_from_where_the_job_starts_however_far_it_is_when_the_chief_looks_first() -> None:
    chief = Chief()
    chief.schedule.world_formed(forget=True)
    assert not chief.schedule.is_due_at(8) and chief.schedule.is_due_at(9)
    chief.schedule.asked(9, 9)
    chief.engine.progress.step = 11
    chief.schedule.world_formed(forget=True)  # of this chief, so no new count
    assert not chief.schedule.is_due_at(12) and chief.schedule.is_due_at(13)


def test_who_becomes_the_chief_counts_from_there() -> None:
    chief = Chief()
    chief.engine.world.rank = 1
    chief.schedule.world_formed(forget=True)
    chief.engine.world.rank, chief.engine.progress.step = 0, 100
    chief.schedule.world_formed(forget=True)
    assert not chief.schedule.is_due_at(103) and chief.schedule.is_due_at(104)


@pytest.mark.parametrize(("number", "age"), [(5, 0), (6, 0)])
def test_the_age_of_the_newest_checkpoint_is_counted_from_its_step(number: int, age: int) -> None:
    chief = Chief()
    chief.schedule.asked(number, 5)
    chief.schedule.poll(saved(number, "delta"))
    chief.schedule.look_at_age(lambda: "")
    told = [event.data for event in chief.events if event.kind == "rates"]
    assert [one["checkpoint_age_steps"] for one in told] == [age]


def test_a_late_checkpoint_has_what_its_store_meets() -> None:
    chief = Chief()
    chief.schedule.world_formed(forget=True)
    chief.schedule._late, chief.engine.progress.step = Patience(first_s=0.0), 50
    chief.schedule.asked(5, 5)
    chief.schedule.poll(saved(5, "full", "running", why="no answer (tried 1 of 5 times)"))
    chief.schedule.look_at_age(lambda: "")
    (late,) = [event for event in chief.events if event.kind == "checkpoint_late"]
    assert late.data["why"] == "that of step 5 is still being saved: no answer (tried 1 of 5 times)"


def test_after_going_back_a_save_of_before_counts_no_more_and_a_failed_part_of_a_new_one_is_reported() -> None:
    chief = Chief()
    assert chief.saves("delta", "done", step=20) == 20
    chief.schedule.void_before(2)
    chief.schedule.rolled_back(5)
    assert chief.schedule.in_force(saved(20, "delta", step=20)) is None
    chief.schedule.asked(chief.schedule.next_number(5), 5)
    chief.schedule.part_failed()
    assert [event.kind for event in chief.events] == ["checkpoint", "checkpoint_failed"]


def test_a_second_lost_host_adds_to_the_samples_of_the_first_and_a_return_takes_those_of_the_checkpoint() -> None:
    schedule = Chief().schedule
    first = JoinResult("j", 0, 1, True, True, 0, 0, host=0, rows_restored=25, refilled=((300.0, 20), (400.0, 5)))
    second = replace(first, rows_restored=10, rows_lost=5, refilled=((640.0, 10),))
    schedule.host_was_lost(1.0, 2.0, first.samples_lost(400, 50))
    assert schedule.samples_lost == (100 * 20) / 50
    schedule.host_was_lost(1.0, 2.0, second.samples_lost(700, 50))
    assert schedule.samples_lost == 40 + (60 * 10 + 700 * 5) / 50
    resumed = JobMeasurements.of_mapping(json.loads(json.dumps(asdict(schedule.seen()))))
    assert (resumed.samples_lost, len(resumed.failures_s)) == (schedule.samples_lost, 2), "as a checkpoint has it"
    schedule.rolled_back_to(40.0, 1.0, 3.0)
    schedule.host_was_lost(None, None, second.samples_lost(700, 50))
    assert schedule.samples_lost == 40 + (60 * 10 + 700 * 5) / 50, "the second loss was gone back on, then came again"


@pytest.mark.parametrize(
    ("settings", "is_said"), [({"policy": "mfu"}, True), ({"policy": "delta"}, False), ({}, False)]
)
def test_a_policy_that_was_named_and_that_the_plan_does_not_use_is_reported_once(
    settings: dict[str, Any], is_said: bool
) -> None:
    chief = Chief()
    schedule = SaveSchedule(chief.engine, CheckpointCallback("/nowhere", **settings))
    chief.engine.reports = SimpleNamespace(once=chief.events.append)
    for kind in ("mfu", "full"):
        schedule._say_that_the_policy_is_idle(IntervalPlan(8.0, kind, "one host: its loss is the job's"))
    assert [event.kind for event in chief.events] == ["policy_idle"] * is_said
    for event in chief.events:
        assert event.level == "warning" and event.data == {"policy": "mfu", "kind": "full", "hosts": 1}
        assert "policy='mfu' is not used now: the plan has saves of kind 'full', since partial saves" in event.message
        assert "give every_s or every_steps" in event.message


@pytest.mark.parametrize("interval", [{"every_s": 30.0}, {"every_steps": 4}], ids=str)
def test_a_limit_of_the_planned_interval_is_refused_beside_one_that_is_given(interval: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"longest_s=5 limits an interval that is planned, and every_s(teps)? gives"):
        CheckpointCallback("/nowhere", longest_s=5, **interval)
    CheckpointCallback("/nowhere", **interval)
    CheckpointCallback("/nowhere", longest_s=5)
