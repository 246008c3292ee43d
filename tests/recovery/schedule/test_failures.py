"""How often servers fail: from few observations, from many, and drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recovery.errors import BadInput
from recovery.schedule.failures import Gamma, failure_times, fit, mean_time

H = 3600.0


def test_before_any_failure_the_assumption_holds_and_long_quiet_raises_it():
    assert mean_time(0, 0, 28 * H).mean_s == 28 * H
    assert mean_time(0, 0, 28 * H).reason == "28.0 h between failures, assumed: nothing was observed yet"
    assert mean_time(100 * H, 0, 28 * H).mean_s == 128 * H


def test_observations_outweigh_the_assumption_and_narrow_the_interval():
    few, many = mean_time(40 * H, 4, 100 * H), mean_time(4000 * H, 400, 100 * H)
    assert few.mean_s == pytest.approx(28 * H)
    assert many.mean_s == pytest.approx(10 * H, rel=0.03)
    assert many.high_s / many.low_s < 1.2 < few.high_s / few.low_s
    assert few.reason == (
        "28.0 h between failures (90 %: 15.3 to 71.2 h): 4 failures in 40.0 h, 100.0 h assumed before"
    )


def test_the_interval_holds_the_truth_nine_times_in_ten():
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        n = int(rng.poisson(20))
        found = mean_time(200 * H, n, 10 * H)
        held += found.low_s <= 10 * H <= found.high_s
    assert 0.85 <= held / 400 <= 0.97


@pytest.mark.parametrize("shape", [0.5, 1.0, 4.0])
def test_the_fit_finds_the_law_that_times_were_drawn_from(shape):
    found = fit(np.random.default_rng(1).gamma(shape, 7 * H / shape, 4000))
    assert found is not None
    assert found.shape == pytest.approx(shape, rel=4 * math.sqrt(2 / 4000))
    assert found.mean_s == pytest.approx(7 * H, rel=0.08)


def test_few_times_or_all_alike_are_taken_as_memoryless():
    assert fit([]) is None
    assert fit([3.0, 5.0]) == Gamma(1.0, 4.0)
    assert fit([5.0] * 20) == Gamma(1.0, 5.0)


@pytest.mark.parametrize("times", [[1.0, 0.0], [1.0, -2.0], [math.inf], [math.nan]])
def test_impossible_times_are_refused(times):
    with pytest.raises(BadInput, match="above 0"):
        fit(times)


@pytest.mark.parametrize("shape", [0.5, 1.0, 3.0])
def test_a_window_of_operation_has_as_many_failures_as_it_should_at_its_start_as_later(shape):
    trace = failure_times(Gamma(shape, 10 * H), 20 * H, 4000, np.random.default_rng(2))
    assert np.all(np.diff(trace[:, 0]) >= 0)
    assert set(np.unique(trace[:, 1]) % 1) == {0.0}
    for start in (0, 10):
        n = np.sum((trace[:, 0] >= start * H) & (trace[:, 0] < (start + 10) * H))
        assert n == pytest.approx(4000, abs=4 * math.sqrt(4000 / min(shape, 1)))


def test_traces_are_the_same_for_the_same_seed():
    traces = [failure_times(Gamma(0.7, H), 9 * H, 5, np.random.default_rng(3)) for _ in range(2)]
    assert np.array_equal(*traces)


def test_short_times_are_not_shown_as_nothing() -> None:
    reason = mean_time(90.0, 0, 180.0).reason
    assert "0.0 h" not in reason and "0 failures in 1.5 min, 3.0 min assumed before" in reason
