"""Full or partial recovery of a lost host: by CPR's estimate, unless the user said which."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from recovery.callback import CheckpointCallback
from recovery.errors import BadInput
from recovery.schedule import formulas
from recovery.schedule.adaptive import Goals, JobMeasurements, plan_interval
from recovery.schedule.recovery_choice import RecoveryDecision, Situation, choose_recovery

HOUR_S = 3600.0
GIVEN = Goals("delta", 0.125, mtbf_h=28.0)
SEEN = replace(JobMeasurements(), save_s=60.0, load_s=30.0, partial_load_s=10.0, reschedule_s=20.0)
NOW = Situation(n_bytes=10**9, n_servers=4, every_s=600.0, age_s=300.0, age_steps=100)


def chosen(seen: JobMeasurements = SEEN, given: Goals = GIVEN, **now: Any) -> RecoveryDecision:
    return choose_recovery(seen, given, replace(NOW, **now))


def test_partial_recovery_is_taken_where_work_would_be_done_again_at_length() -> None:
    found = chosen()
    assert found.strategy == "partial" and found.manifest == ""
    between_s = 28 * HOUR_S
    # Both strategies have the saves that the user asked for; they differ in loading and in the work that is done again.
    assert found.full - found.partial == pytest.approx((20.0 + 600.0 / 2) / between_s)
    assert found.expected_pls == pytest.approx(formulas.expected_pls(600.0, between_s, 4))
    assert found.reason.startswith("partial: partial recovery costs 0.5")
    assert "at the given interval, 600.0 s" in found.reason and "28.0 h between failures" in found.reason
    assert found.reason.endswith("expected PLS 0.000744, target 0.1")


def test_full_recovery_is_taken_where_hardly_anything_is_done_again() -> None:
    found = chosen(replace(SEEN, partial_load_s=30.0, reschedule_s=600.0), every_s=10.0, age_s=5.0)
    assert found.strategy == "full"
    assert found.reason.endswith("partial must cost 10% less without the saves, 30.000% of each")


def test_saves_that_the_user_asked_for_do_not_hide_what_a_failure_costs() -> None:
    """Far more goes into saving than into recovering, with both strategies."""
    found = chosen(every_s=100.0, age_s=50.0)
    assert found.strategy == "partial" and found.partial > 0.97 * found.full


def test_a_chief_that_was_lost_left_what_it_had_measured_in_its_checkpoint() -> None:
    survivor, left = (
        replace(JobMeasurements(), observed_s=50.0, load_s=1.0),
        replace(SEEN, observed_s=40.0, samples_lost=7.0),
    )
    for merged in (survivor.with_those_of(left), left.with_those_of(survivor)):
        assert merged == replace(survivor, save_s=60.0, partial_load_s=10.0, reschedule_s=20.0)


def test_a_checkpoint_that_is_older_than_its_interval_is_more_to_do_again() -> None:
    seen = replace(SEEN, partial_load_s=30.0, reschedule_s=600.0)
    found = chosen(seen, every_s=100.0, age_s=5 * HOUR_S)
    assert found.strategy == "partial" and "the newest complete checkpoint is 18,000 s old" in found.reason
    assert found.full - found.partial == pytest.approx(2.5 * HOUR_S / (28 * HOUR_S))


def test_full_recovery_is_taken_where_partial_recovery_would_lose_too_much() -> None:
    found = chosen(given=replace(GIVEN, target_pls=1e-6))
    assert found.strategy == "full"
    assert "the expected PLS of partial recovery is 0.000744, the target 1e-06" in found.reason


@pytest.mark.parametrize("asked", ["full", "partial"])
def test_what_the_user_asks_for_wins_and_both_estimates_are_told(asked: str) -> None:
    found = chosen(given=replace(GIVEN, strategy=asked))
    assert found.strategy == asked and found.reason.startswith(f"{asked}: it was asked for")
    assert found.full == chosen().full and found.partial == chosen().partial
    unmeasured = chosen(JobMeasurements(), replace(GIVEN, strategy=asked))
    assert (unmeasured.strategy, unmeasured.full) == (asked, None)
    assert unmeasured.reason.endswith("nothing was measured yet")


@pytest.mark.parametrize("asked", ["auto", "full"])
def test_without_a_checkpoint_to_go_back_to_recovery_is_partial_and_says_why(asked: str) -> None:
    found = chosen(given=replace(GIVEN, strategy=asked), why_not_full="there is none")
    assert found.strategy == "partial" and "full recovery is not possible: there is none" in found.reason
    assert ("full recovery was asked for, but" in found.reason) == (asked == "full")


def test_a_checkpoint_of_this_very_step_makes_partial_recovery_exact() -> None:
    found = chosen(given=replace(GIVEN, target_pls=1e-6), age_s=0.0, age_steps=0)
    assert found.strategy == "partial" and "nothing was trained since the checkpoint" in found.reason


def test_where_all_rows_were_lost_everything_goes_back() -> None:
    assert chosen(n_servers=1).reason.startswith("full: all rows were lost with the host")


def test_what_was_not_measured_is_assumed_and_said() -> None:
    assert "; assumed: loading takes as long as saving)" in chosen(replace(SEEN, load_s=None)).reason
    own = "; assumed: loading a lost host's rows takes as long as loading all)"
    assert own in chosen(replace(SEEN, partial_load_s=None)).reason
    assert "; assumed: " not in chosen().reason
    assert chosen(JobMeasurements()).reason == "partial: nothing was measured yet, so full recovery cannot be estimated"


def test_saves_that_leave_out_rows_make_complete_ones_rarer() -> None:
    """Bases, with partial saves of an eighth in between: nine intervals apart; a round of partial saves takes eight."""
    found = chosen(given=replace(GIVEN, policy="mfu"))
    assert found.expected_pls == pytest.approx(formulas.expected_pls(8 * 600.0, 28 * HOUR_S, 4))
    assert found.full - found.partial == pytest.approx((20.0 + 9 * 600.0 / 2) / (28 * HOUR_S))


def test_a_planned_interval_is_estimated_as_planned() -> None:
    pace = plan_interval(SEEN, GIVEN, NOW.n_bytes, 4)
    found = chosen(every_s=None, pace=pace)
    assert (found.strategy, found.full, found.partial) == (
        pace.plan.strategy, pytest.approx(pace.plan.full.overhead), pytest.approx(pace.plan.partial.overhead)
    )  # fmt: skip
    assert "at planned intervals of" in found.reason


CHEAP = replace(JobMeasurements(), save_s=0.005, load_s=0.005, reschedule_s=180.0)


def test_a_plan_for_several_hosts_takes_the_strategy_that_costs_less() -> None:
    """With saves that cost nothing, full recovery has hardly anything to redo: it saves often, all changes."""
    partial, full = plan_interval(SEEN, GIVEN, 10**9, 4), plan_interval(CHEAP, GIVEN, 10**9, 4)
    assert (partial.plan.strategy, full.plan.strategy) == ("partial", "full")
    assert full.interval_s < partial.interval_s
    assert "4 hosts: a lost one is recovered alone" in partial.reason and "full recovery would take" in partial.reason
    assert "4 hosts: with a lost one all roll back" in full.reason and "partial recovery would take" in full.reason
    assert plan_interval(CHEAP, replace(GIVEN, strategy="partial"), 10**9, 4).plan.strategy == "partial"


@pytest.mark.parametrize(("policy", "one_host", "kind"), [("mfu", "delta", "delta"), ("mfu", None, "delta"),
                                                          ("ssu", None, "full"), ("delta", None, "delta")])  # fmt: skip
def test_saves_for_full_recovery_leave_out_no_change(policy: str, one_host: str | None, kind: str) -> None:
    given = replace(GIVEN, policy=policy, one_host=one_host)
    assert plan_interval(CHEAP, given, 10**9, 4).kind == kind
    assert plan_interval(SEEN, given, 10**9, 4).kind == policy
    assert plan_interval(JobMeasurements(), replace(given, strategy="full"), 10**9, 4).kind == kind


def test_a_decision_travels_as_plain_values() -> None:
    found = replace(chosen(), strategy="full", manifest="m-3", step=3)
    assert RecoveryDecision(**json.loads(json.dumps(asdict(found)))) == found


def test_the_setting_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECOVERY_POLICY", raising=False)
    assert CheckpointCallback("place").given.strategy == "auto"
    with pytest.raises(BadInput, match="recovery 'whole' is not known: choose one of auto, full, partial"):
        CheckpointCallback("place", recovery="whole")
    assert CheckpointCallback("place", recovery="full").config.policy == "delta"
    for policy in ("mfu", "ssu", "scar"):
        with pytest.raises(BadInput, match="recovery='full' rolls back to checkpoints that leave out no change"):
            CheckpointCallback("place", recovery="full", policy=policy)
    monkeypatch.setenv("RECOVERY_POLICY", "mfu")
    with pytest.raises(BadInput, match="recovery='full'"):
        CheckpointCallback("place", recovery="full", every_s=5)


def test_an_interval_in_steps_is_one_in_seconds_too() -> None:
    assert CheckpointCallback("place").given_interval_s(0.5) is None
    assert CheckpointCallback("place", every_steps=10).given_interval_s(0.5) == 5.0
    assert CheckpointCallback("place", every_steps=10, every_s=2.0).given_interval_s(0.5) == 2.0
