"""Rates of allreduce and gba as they follow from workers' times."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd.errors import BadInput
from gba_hvd.switching.predictions import Rates, expected_drops, expected_maximum, expected_old_values, predicted

EVEN = Rates((0.1, 0.1, 0.1, 0.1), (2, 2, 2, 2), n_micro=8, exchange_s=0.01, serve_s=0.004)
STRAGGLER = replace(EVEN, seconds_per_micro=(0.1, 0.1, 0.6, 0.1))
times = st.floats(1e-3, 10.0)


@st.composite
def measured(draw: st.DrawFn) -> Rates:
    n = draw(st.integers(1, 8))
    shares = tuple(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n).filter(any)))
    seconds = tuple(draw(st.lists(times, min_size=n, max_size=n)))
    return Rates(seconds, shares, sum(shares), draw(st.floats(0, 1)), draw(st.floats(0, 1)), draw(st.floats(0, 1)))


def test_rates_follow_the_formulas() -> None:
    allreduce, gba = predicted(replace(STRAGGLER, dropped_share=0.1))
    assert allreduce == pytest.approx(8 / (2 * 0.6 + 0.01))
    assert gba == pytest.approx((3 / 0.104 + 1 / 0.604) * 0.9)


def test_allreduce_waits_for_the_largest_share_as_well_as_for_the_slowest_worker() -> None:
    uneven = Rates((0.1, 0.12), (5, 3), n_micro=8, exchange_s=0.0, serve_s=0.0)
    assert predicted(uneven)[0] == pytest.approx(8 / 0.5)


@pytest.mark.slow
@given(measured(), st.integers(0, 10))
def test_expected_drops_are_a_share_and_a_larger_tolerance_drops_no_more(rates: Rates, tolerance: int) -> None:
    drops = expected_drops(rates, tolerance)
    assert 0 <= expected_drops(rates, tolerance + 1) <= drops <= 1


def drops_by_simulation(seconds: list[float], n_micro: int, tolerance: int, steps: int) -> float:
    """The rules themselves: leases in order, token i // M, M pushes make a step, too stale ones are dropped."""
    working = [(t * (1 + 1e-3 * w), w, w) for w, t in enumerate(seconds)]
    heapq.heapify(working)
    leased, buffered, k, dropped = len(seconds), [], 0, 0
    while k < steps:
        now, worker, micro = heapq.heappop(working)
        buffered.append(micro)
        if len(buffered) == n_micro:
            dropped += sum(k - i // n_micro > tolerance for i in buffered)
            buffered, k = [], k + 1
        heapq.heappush(working, (now + seconds[worker], worker, leased))
        leased += 1
    return dropped / (steps * n_micro)


@pytest.mark.parametrize("n_micro", [4, 8, 16])
@pytest.mark.parametrize("factor", [1, 2, 5, 8, 10, 15, 20, 30, 40])
def test_expected_drops_agree_with_a_run_of_the_rules(n_micro: int, factor: float) -> None:
    seconds = (1.0, 1.0, 1.0, float(factor))
    rates = Rates(seconds, (n_micro // 4,) * 4, n_micro, 0.0, 0.0)
    run = drops_by_simulation(list(seconds), n_micro, tolerance=4, steps=400)
    assert expected_drops(rates, tolerance=4) == pytest.approx(run, abs=0.001)


@pytest.mark.slow
@given(measured(), st.integers(0, 10))
def test_old_values_are_a_share_and_a_larger_tolerance_admits_no_fewer(rates: Rates, tolerance: int) -> None:
    drops = expected_old_values(rates, tolerance)
    assert 0 <= expected_old_values(rates, tolerance + 1) <= drops <= 1 + 1e-9


def test_the_share_of_old_values_follows_from_the_workers_cycles() -> None:
    even = replace(EVEN, serve_s=0.0)  # 3 pushes of others meanwhile: 3 of 8 gradients see a step end
    assert expected_old_values(even, 0) == pytest.approx(3 / 8)
    assert expected_old_values(even, 1) == 0.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seconds_per_micro": ()}, "one per worker"),
        ({"seconds_per_micro": (0.1, 0.0, 0.1, 0.1)}, "must be positive"),
        ({"seconds_per_micro": (0.1, float("nan"), 0.1, 0.1)}, "must be positive"),
        ({"shares": (8,)}, "1 shares for 4 workers"),
        ({"shares": (2, 2, 2, 1)}, "add up to n_micro = 8"),
        ({"exchange_s": -1.0}, "must not be negative"),
        ({"serve_s": float("inf")}, "must not be negative"),
        ({"dropped_share": 1.5}, "within 0 and 1"),
    ],
)
def test_rates_that_cannot_be_are_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        replace(EVEN, **change)  # type: ignore[arg-type]


@given(st.lists(st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 7.0]), min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_expected_maximum_is_that_of_all_combinations_of_draws(samples: list[list[float]]) -> None:
    longest = max(map(len, samples))
    draws = np.array([own + [np.inf] * (longest - len(own)) for own in samples])
    by_hand = np.mean([max(combination) for combination in itertools.product(*samples)])
    assert expected_maximum(draws) == pytest.approx(by_hand)


def test_workers_that_are_slow_in_turn_make_every_allreduce_step_slow_and_cost_gba_their_mean_only() -> None:
    draws = np.tile([0.1, 0.1, 0.1, 0.3], (4, 1))  # a quarter of their times
    rates = replace(EVEN, seconds_per_micro=(0.15,) * 4, draws=draws, exchange_s=0.0, serve_s=0.0)
    allreduce, gba = predicted(rates)
    someone = 1 - 0.75**4
    assert allreduce == pytest.approx(8 / (2 * (0.3 * someone + 0.1 * (1 - someone))))
    assert gba == pytest.approx(4 / 0.15)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"draws": np.ones((3, 2))}, "times of each of the 4 workers"),
        ({"draws": np.full((4, 2), np.inf)}, "times of each of the 4 workers"),
        ({"achieved": 0.0}, "achieved must be positive"),
    ],
)
def test_measurements_that_cannot_be_are_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        replace(EVEN, **change)  # type: ignore[arg-type]
