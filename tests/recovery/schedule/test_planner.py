"""Full or partial recovery, how often to save, what to save next: by tables of cases, each with its reason."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.errors import BadInput
from recovery.schedule.planner import ChainSize, Costs, JobProfile, Objectives, estimate, next_kind, plan
from recovery.units import duration

same = settings(derandomize=True, database=None, deadline=None)  # examples, however busy the machine is

H = 3600.0
GB = 10**9
CPR = Objectives(rebase_at=math.inf)  # as the paper's formulas count saves
JOB = JobProfile(
    Costs(save_s=360, load_s=60, reschedule_s=180), 100 * GB, n_servers=8, between_failures_s=28 * H, total_s=56 * H
)


def test_the_papers_setting_is_planned_as_its_formulas_say():
    found = plan(JOB, CPR)
    assert (found.strategy, found.kind, found.r) == ("partial", "mfu", 0.125)
    assert found.interval_s == pytest.approx(44.8 * H / 8)
    assert found.full.overhead == pytest.approx(math.sqrt(2 * 360 / (28 * H)) + 240 / (28 * H))
    assert found.partial.overhead == pytest.approx(360 / (44.8 * H) + 240 / (28 * H))
    assert found.expected.pls == pytest.approx(0.1)
    assert found.reason == (
        "partial: partial recovery costs 0.46% of training time, full 8.69%; a round of saves every 44.8 h, "
        "expected PLS 0.1, target 0.1"
    )


@pytest.mark.parametrize(
    ("target", "r"), [(0.1, 1 / 32), (0.01, 1 / 16), (0.003, 1 / 8), (0.001, 1 / 2), (0.0005, 1 / 2)]
)
def test_the_share_is_picked_where_none_is_asked_for(target: float, r: float):
    found = plan(JOB, replace(CPR, r=None, target_pls=target, strategy="partial"))
    assert found.r == r
    assert found.interval_s == pytest.approx(r * found.partial.round_s)
    assert found.interval_s >= 600 or r == 1 / 2
    assert f"; {r:.3g} of the rows a save, so that one comes every {duration(found.interval_s)}" in found.reason


def test_a_picked_share_stays_while_its_saves_are_half_as_far_apart():
    objectives = replace(CPR, r=None, strategy="partial")
    now = plan(JOB, replace(objectives, target_pls=0.003))
    nearer, much_nearer = replace(objectives, target_pls=0.0025), replace(objectives, target_pls=0.001)
    assert (now.r, plan(JOB, nearer).r, plan(JOB, nearer, now).r) == (1 / 8, 1 / 4, 1 / 8)
    assert plan(JOB, much_nearer, now).r == 1 / 2


@pytest.mark.parametrize("r", [0.0, -0.1, 1.5])
def test_a_share_beyond_all_rows_or_of_none_is_refused(r: float):
    with pytest.raises(BadInput, match="a share of the rows, above 0 and at most 1"):
        replace(CPR, r=r)


CASES = {
    "one server: what is lost is everything": (
        replace(JOB, n_servers=1),
        replace(CPR, target_pls=0.001),
        "full",
        "full",
    ),
    "a hard target makes saves too frequent": (JOB, replace(CPR, target_pls=0.0005), "full", "full"),
    "a hard target, few rows change": (
        replace(JOB, costs=replace(JOB.costs, delta_share=0.05)),
        replace(CPR, target_pls=0.0005),
        "full",
        "delta",
    ),
    "most rows change: deltas gain nothing": (
        replace(JOB, costs=replace(JOB.costs, delta_share=0.8)),
        replace(CPR, strategy="full"),
        "full",
        "full",
    ),
    "asked for": (JOB, replace(CPR, strategy="full"), "full", "full"),
    "partial, all rows at each save": (JOB, replace(CPR, policy="full"), "partial", "full"),
    "thousands of servers": (replace(JOB, n_servers=4000, between_failures_s=H), CPR, "partial", "mfu"),
}


@pytest.mark.parametrize(("job", "objectives", "strategy", "kind"), CASES.values(), ids=CASES.keys())
def test_the_strategy_and_what_is_saved(job, objectives, strategy, kind):
    found = plan(job, objectives)
    assert (found.strategy, found.kind) == (strategy, kind)
    assert found.reason.startswith(f"{strategy}: ")


def test_the_margin_decides_what_is_near():
    near = replace(CPR, target_pls=0.005)  # an interval near full recovery's own
    gain = 1 - plan(JOB, near).partial.overhead / plan(JOB, near).full.overhead
    assert plan(JOB, replace(near, margin=gain - 0.01)).strategy == "partial"
    found = plan(JOB, replace(near, margin=gain + 0.01))
    assert found.strategy == "full"
    assert f"partial must cost {gain + 0.01:.0%} less" in found.reason


def test_saves_that_hardly_stall_make_saving_cheap_but_never_overlap():
    beside = replace(JOB, costs=replace(JOB.costs, stall_share=1e-6))
    found = plan(beside, replace(CPR, strategy="full"))
    assert found.interval_s == JOB.costs.save_s
    assert found.full.saving == pytest.approx(1e-6)


def test_a_longest_interval_is_kept_to_and_lowers_the_pls():
    found = plan(JOB, replace(CPR, max_interval_s=8 * H))
    assert found.interval_s == pytest.approx(H)
    assert found.expected.pls == pytest.approx(0.1 * 8 / 44.8)


def test_new_bases_are_counted():
    found = plan(JOB, replace(CPR, rebase_at=1.0))
    # A base and 8 eighths in 9 saves: 2 tables in 9/8 rounds.
    assert found.partial.saving == pytest.approx(plan(JOB, CPR).partial.saving * 2 / (9 / 8))
    assert found.bytes_per_day == pytest.approx(2 * 100 * GB * 24 / (44.8 * 9 / 8))


def test_what_is_stored_has_a_price():
    found = plan(JOB, Objectives(price_per_gb_month=0.02, price_per_1000_puts=0.005, kept_bases=3))
    assert found.stored_bytes == 2 * 3 * 100 * GB
    puts = 30 * found.bytes_per_day / (64 * 2**20)
    assert found.cost_per_month == pytest.approx(600 * 0.02 + puts / 1000 * 0.005)


@same
@given(st.lists(st.floats(0.85, 1.15), min_size=5, max_size=30))
def test_noise_in_the_measurements_changes_nothing(noise):
    """Around the point where both cost about the same, too."""
    objectives = replace(CPR, target_pls=0.0052, margin=0.3, leave_margin=-0.3)
    now = first = plan(JOB, objectives)
    for factor in noise:
        costs = replace(JOB.costs, save_s=360 * factor, load_s=60 / factor)
        now = plan(replace(JOB, costs=costs, between_failures_s=28 * H * factor), objectives, now)
        assert (now.strategy, now.interval_s) == (first.strategy, first.interval_s)


def test_a_change_that_lasts_is_followed():
    now = plan(JOB, CPR)
    later = plan(replace(JOB, between_failures_s=14 * H), CPR, now)
    assert later.interval_s == pytest.approx(now.interval_s / 2)
    harder = replace(CPR, target_pls=0.0001)
    assert plan(JOB, harder, now).strategy == "full"


@same
@given(
    st.floats(1, 1e4),
    st.floats(0, 1e4),
    st.floats(0, 1),
    st.integers(1, 5000),
    st.floats(60, 1e8),
    st.floats(1e-4, 0.5),
)
def test_every_plan_is_possible_and_within_its_target(save_s, load_s, stall, n_servers, between_s, target):
    costs = Costs(save_s, load_s, 10.0, stall_share=stall)
    found = plan(JobProfile(costs, GB, n_servers, between_s, 1e6), replace(CPR, target_pls=target))
    assert found.expected.round_s >= save_s
    assert found.partial.pls <= target * 1.001 or found.partial.round_s == save_s
    assert found.full.overhead <= estimate(
        JobProfile(costs, GB, n_servers, between_s, 1e6), "full", found.full.round_s * 1.5, CPR
    ).overhead * (1 + 1e-9)


@pytest.mark.parametrize(
    ("chain", "wanted", "kind", "why"),
    [
        (ChainSize(), "mfu", "full", "there is no base yet"),
        (ChainSize(100, 0, 0), "full", "full", "every save takes all rows"),
        (ChainSize(100, 10, 10, trusted=False), "delta", "full", "not known for sure"),
        (ChainSize(100, 70, 20), "delta", "delta", "0.0 MB of partial saves"),
        (ChainSize(100, 80, 20), "ssu", "ssu", "on a base of"),
        (ChainSize(100, 90, 20), "delta", "full", "a new one is cheaper to restore"),
        (ChainSize(100, 0, 110), "delta", "full", "a new one is cheaper to restore"),
    ],
)
def test_the_next_save(chain, wanted, kind, why):
    found, reason = next_kind(chain, wanted)
    assert found == kind
    assert reason.startswith(f"{kind}: ")
    assert why in reason


def test_a_chain_may_be_as_long_as_is_wanted():
    assert next_kind(ChainSize(100, 390, 10), "mfu", rebase_at=4)[0] == "mfu"
    assert next_kind(ChainSize(100, 10**9, 10), "mfu", rebase_at=math.inf)[0] == "mfu"


def test_costs_come_from_json():
    text = json.dumps({"save_s": 3, "load_s": 2.5, "reschedule_s": 1, "partial_load_s": None, "host": "a"})
    assert Costs.of_mapping(json.loads(text)) == Costs(3, 2.5, 1)


@pytest.mark.parametrize("values", [{}, {"save_s": 1, "load_s": 1}, {"save_s": "1", "load_s": 1, "reschedule_s": 1}])
def test_costs_that_are_missing_or_no_numbers_are_named(values):
    with pytest.raises(BadInput, match=r"missing|wrong"):
        Costs.of_mapping(values)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Costs(0, 1, 1),
        lambda: Costs(1, -1, 1),
        lambda: Costs(1, 1, 1, stall_share=1.1),
        lambda: replace(JOB, n_servers=0),
        lambda: replace(JOB, between_failures_s=0),
        lambda: Objectives(target_pls=0),
        lambda: Objectives(policy="lru"),
        lambda: Objectives(strategy="some"),
        lambda: Objectives(r=0),
        lambda: Objectives(margin=0.1, leave_margin=0.2),
        lambda: Objectives(price_per_gb_month=-1),
        lambda: Objectives(rebase_at=0),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(BadInput):
        make()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_pls": 0}, "target_pls is a portion of lost samples, above 0 and below 1, got 0"),
        ({"r": 1.5}, "a share of the rows, above 0 and at most 1, got 1.5"),
        ({"max_interval_s": 0}, "the longest interval is a number of seconds above 0, got 0"),
        ({"kept_bases": 0}, "the number of checkpoints that are kept is at least 1, got 0"),
    ],
)
def test_each_limit_of_an_objective_has_a_sentence_of_its_own(settings, words):
    with pytest.raises(BadInput, match=f"{words}$"):
        Objectives(**settings)
