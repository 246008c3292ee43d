"""CPR's closed forms, by numbers and by what must hold of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.schedule import formulas

same = settings(derandomize=True, database=None, deadline=None)  # examples, however busy the machine is

H = 3600.0
seconds = st.floats(1.0, 1e7)


def test_an_example_by_hand():
    # A save of 6 minutes every 2 hours, a failure every 20 hours, 100 hours of training, 8 servers.
    assert formulas.expected_pls(2 * H, 20 * H, 8) == pytest.approx(0.5 * 2 / 160)
    assert formulas.best_full_interval_s(360, 20 * H) == pytest.approx(7200)
    assert formulas.interval_for_pls_s(0.1, 8, 28 * H) == pytest.approx(44.8 * H)
    assert formulas.lost_portion(50, 1000, 5) == pytest.approx(0.01)


@same
@given(seconds, seconds, st.floats(0.5, 2.0).filter(lambda factor: abs(factor - 1) > 1e-3))
def test_no_interval_costs_less_than_the_best_one(save_s, between_s, factor):
    best = formulas.best_full_interval_s(save_s, between_s)
    costs = [save_s * 1e6 / every + (5 + every / 2 + 7) * 1e6 / between_s for every in (best, best * factor)]
    assert costs[0] < costs[1]


def test_the_portion_of_a_job_is_that_of_a_long_one_where_it_ends_with_an_interval():
    whole = formulas.expected_pls_of_job(2 * H, 20 * H, 8, 10 * 2 * H)
    assert whole == pytest.approx(formulas.expected_pls(2 * H, 20 * H, 8))
    # 44.8 of 56 hours: a failure loses 22.4 hours in the first interval, 5.6 in what is left of the second.
    expected = (44.8 * 22.4 + 11.2 * 5.6) / 56 / (28 * 8)
    assert formulas.expected_pls_of_job(44.8 * H, 28 * H, 8, 56 * H) == pytest.approx(expected)


@same
@given(st.floats(1e-4, 0.9), st.integers(1, 10_000), seconds)
def test_the_interval_for_a_target_is_expected_to_meet_it(target, n_servers, between_s):
    every = formulas.interval_for_pls_s(target, n_servers, between_s)
    assert formulas.expected_pls(every, between_s, n_servers) == pytest.approx(target)
