"""How often a running job saves follows from what it measured, and stays as it is when little has changed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest

from recovery.callback import CheckpointCallback
from recovery.errors import BadInput
from recovery.format.manifest import Manifest
from recovery.rows import Column, Schema, Table
from recovery.schedule.adaptive import (
    ASSUMED_MTBF_H,
    FIRST_INTERVAL_S,
    LEAST_STALL_SHARE,
    Goals,
    JobMeasurements,
    plan_interval,
)
from recovery.schedule.costs import Costs
from recovery.schedule.formulas import best_full_interval_s, interval_for_pls_s

HOUR_S = 3600.0
GIVEN = Goals("delta", 0.125, mtbf_h=28.0, longest_s=100 * HOUR_S)
BYTES = 10**9


def seen(**figures: float) -> JobMeasurements:
    return replace(JobMeasurements(), **figures)


def test_until_a_save_was_measured_the_interval_is_a_fixed_one():
    found = plan_interval(JobMeasurements(), GIVEN, BYTES, 2)
    assert (found.interval_s, found.kind, found.plan) == (FIRST_INTERVAL_S, "delta", None)
    assert "until a save was measured" in found.reason


def test_several_hosts_save_as_often_as_the_target_pls_asks():
    found = plan_interval(seen(save_s=60.0), GIVEN, BYTES, 4)
    assert found.interval_s == pytest.approx(interval_for_pls_s(0.1, 4, 28 * HOUR_S))
    assert "4 hosts: a lost one is recovered alone" in found.reason
    assert "PLS 0.1 at a target of 0.1" in found.reason


def test_one_host_saves_as_often_as_costs_least():
    found = plan_interval(seen(save_s=60.0, delta_share=0.9), replace(GIVEN, policy="full"), BYTES, 1)
    assert found.interval_s == pytest.approx(best_full_interval_s(60 * LEAST_STALL_SHARE, 28 * HOUR_S))
    assert "one host: its loss is the job's" in found.reason


def test_small_saves_are_as_far_apart_as_what_each_takes_asks_for():
    """A delta of a hundredth of the rows does not take a hundredth of the time: the training state is always whole."""
    measured = seen(save_s=1.0, stall_s=0.05).saved("delta", 1.0, 1, 100)
    wanted = best_full_interval_s(0.05, 28 * HOUR_S)
    assert plan_interval(measured, GIVEN, BYTES, 1).interval_s == pytest.approx(wanted, rel=0.01)
    slow_store = seen(save_s=4.0, stall_s=0.0).saved("delta", 3.0, 1, 100)
    wanted = best_full_interval_s(3.0 * LEAST_STALL_SHARE, 28 * HOUR_S)
    assert plan_interval(slow_store, GIVEN, BYTES, 1).interval_s == pytest.approx(wanted, rel=0.01)


def test_the_loss_of_the_whole_job_bounds_the_interval():
    assert plan_interval(seen(save_s=60.0), replace(GIVEN, longest_s=900.0), BYTES, 4).interval_s == 900.0


def test_a_save_ends_before_the_next_begins():
    assert plan_interval(seen(save_s=5000.0), replace(GIVEN, longest_s=900.0), BYTES, 4).interval_s == 5000.0


def test_all_rows_are_saved_where_most_of_them_change_and_that_was_seen():
    assert plan_interval(seen(save_s=60.0), GIVEN, BYTES, 1).kind == "delta"  # else it would never be seen
    assert plan_interval(seen(save_s=60.0, delta_share=0.9), GIVEN, BYTES, 1).kind == "full"
    assert plan_interval(seen(save_s=60.0, delta_share=0.1), GIVEN, BYTES, 1).kind == "delta"


def test_the_interval_changes_with_measurements_but_not_with_noise():
    first = plan_interval(seen(save_s=60.0), GIVEN, BYTES, 1)
    noisy = plan_interval(seen(save_s=66.0), GIVEN, BYTES, 1, first)
    assert not noisy.differs_from(first)
    slow = plan_interval(seen(save_s=240.0), GIVEN, BYTES, 1, noisy)
    assert slow.differs_from(first)
    assert slow.interval_s == pytest.approx(2 * first.interval_s)


def test_failures_that_happen_shorten_the_interval():
    calm = plan_interval(seen(save_s=60.0), GIVEN, BYTES, 1)
    measured = seen(save_s=60.0)
    for hour in (1, 2, 3, 4):
        measured = measured.lost(hour * HOUR_S)
    assert measured.between_failures(28.0).mean_s == pytest.approx((28 + 4) / 5 * HOUR_S)
    assert plan_interval(measured, GIVEN, BYTES, 1, calm).interval_s < 0.6 * calm.interval_s
    assert "4 failures in 4.0 h" in plan_interval(measured, GIVEN, BYTES, 1).reason


def test_bursts_of_failures_are_reported_where_there_are_enough_of_them():
    measured = JobMeasurements()
    for hour in (1.0, 1.1, 1.2, 20.0, 20.1, 20.3, 60.0, 60.1, 60.2, 60.3):
        measured = measured.lost(hour * HOUR_S)
    assert "gamma law of shape 0." in measured.between_failures(None).reason


def test_what_was_not_seen_is_assumed_and_the_sentence_says_so():
    found = plan_interval(seen(save_s=60.0), replace(GIVEN, mtbf_h=None), BYTES, 1)
    assert f"{ASSUMED_MTBF_H:.1f} h between failures, assumed" in found.reason
    assert "assumed: loading takes as long as saving, 180 s to resume" in found.reason
    known = plan_interval(seen(save_s=60.0, load_s=5.0, reschedule_s=9.0), GIVEN, BYTES, 1)
    assert "; assumed: " not in known.reason
    assert known.plan.full.loading == pytest.approx(5.0 / (28 * HOUR_S))


def test_costs_are_what_was_measured():
    measured = JobMeasurements().saved("full", 20.0, 1000, 0).saved("delta", 3.0, 100, 1000)
    measured = replace(measured, stall_s=4.0, load_s=7.0, partial_load_s=2.0, reschedule_s=11.0)
    assert measured.costs() == Costs(20.0, 7.0, 11.0, 2.0, stall_share=0.2, delta_share=0.1, partial_stall_s=4.0)
    assert JobMeasurements().costs() is None
    assert seen(save_s=1.0, stall_s=5.0).costs().stall_share == 1.0


def test_what_was_measured_survives_a_checkpoint():
    measured = replace(JobMeasurements().saved("full", 20.0, 1000, 0), stall_s=4.0).lost(50.0).lost(80.0)
    assert JobMeasurements.of_mapping(json.loads(json.dumps(asdict(measured)))) == measured
    assert Costs.of_mapping(json.loads(json.dumps(asdict(measured.costs())))) == measured.costs()


def test_a_checkpoint_of_all_rows_says_what_it_took_itself():
    def manifest(kind: str, **about: object) -> Manifest:
        schema = Schema((Table("user", 3, (Column("weights", 2),)),), 1)
        return Manifest(1, 2, kind, None, 5, 50, 0.0, schema, (), None, about)

    reported = {"measured": asdict(seen(save_s=20.0, load_s=4.0))}
    assert JobMeasurements.of_checkpoint(manifest("full", save_s=30.0, **reported)) == seen(save_s=30.0, load_s=4.0)
    assert JobMeasurements.of_checkpoint(manifest("delta", save_s=3.0, **reported)) == seen(save_s=20.0, load_s=4.0)
    assert JobMeasurements.of_checkpoint(manifest("full", save_s="x", measured=7)) == JobMeasurements()


@pytest.mark.parametrize("nonsense", [{"save_s": "ten"}, {"save_s": -1}, {"save_s": True}, {"failures_s": 3}, {"x": 1}])
def test_what_makes_no_sense_counts_as_not_seen(nonsense):
    assert JobMeasurements.of_mapping(nonsense) == JobMeasurements()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mtbf_h": 0}, "mtbf_h"),
        ({"mtbf_h": math.inf}, "mtbf_h"),
        ({"target_pls": 1.5}, "target_pls"),
        ({"longest_s": 0}, "longest_s"),
        ({"every_s": 0}, "every_s"),
        ({"every_steps": 0}, "every_steps"),
    ],
)
def test_bad_objectives_are_refused_at_once(settings, words):
    with pytest.raises(BadInput, match=words):
        CheckpointCallback("memory://x", **settings)


def test_what_the_user_says_wins():
    assert not CheckpointCallback("memory://x", every_s=5).is_planned
    by_steps = CheckpointCallback("memory://x", every_steps=10)
    by_steps.began(0, 0.0)
    assert not by_steps.is_planned
    assert not by_steps.due(9, now_s=1e9)
    assert by_steps.due(10, now_s=0.0)


def test_a_planned_interval_counts_from_the_last_save():
    callback = CheckpointCallback("memory://x")
    assert callback.is_planned
    callback.began(1, 100.0)
    assert not callback.due(2, 100.0 + FIRST_INTERVAL_S - 1)
    assert callback.due(2, 100.0 + FIRST_INTERVAL_S)
    callback.planned_s = 40.0
    assert callback.due(2, 141.0)
    assert not callback.due(1, 141.0)  # the same step is not saved twice


def test_no_interval_is_longer_than_was_asked_for_before_a_save_was_measured_either():
    assert plan_interval(JobMeasurements(), GIVEN, BYTES, 2).interval_s == FIRST_INTERVAL_S
    found = plan_interval(JobMeasurements(), replace(GIVEN, longest_s=20.0), BYTES, 2)
    assert (found.interval_s, found.reason) == (20.0, "every 20 s until a save was measured")


def test_given_is_plain_values():
    assert json.loads(json.dumps(asdict(GIVEN))) == asdict(GIVEN)


def test_where_nobody_names_a_policy_several_hosts_save_what_is_used_most_and_one_host_all_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RECOVERY_POLICY", raising=False)
    callback = CheckpointCallback("place")
    assert (callback.config.policy, callback.given.one_host) == ("mfu", "delta")
    for measured in (JobMeasurements(), seen(save_s=60.0)):
        kinds = [plan_interval(measured, callback.given, BYTES, n).kind for n in (1, 2)]
        assert kinds == ["delta", "mfu"]
    assert CheckpointCallback("place", policy="scar").given.one_host is None
    assert plan_interval(JobMeasurements(), CheckpointCallback("place", policy="mfu").given, BYTES, 1).kind == "mfu"
    assert CheckpointCallback("place", row_fraction=0.25).given.r == 0.25
    with pytest.raises(BadInput, match=r"row_fraction=0\.25 has no effect with policy='delta'"):
        CheckpointCallback("place", every_s=60, row_fraction=0.25)
    assert CheckpointCallback("place", every_s=60).config.policy == "delta"
    monkeypatch.setenv("RECOVERY_POLICY", "full")
    assert CheckpointCallback("place").config.policy == "full"
