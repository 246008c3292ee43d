"""Ages in their order: the growth is that of the product of the steps' matrices, and the limit is where it begins."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gba_hvd.errors import BadInput
from gba_hvd.update_rules import delay_roots, delay_sequence, stability
from gba_hvd.update_rules.delay_model import expected_ages, expected_arrivals
from gba_hvd.update_rules.delay_sequence import growth, histogram, is_enough


def alone(ages: list[int]) -> list[list[tuple[int, float]]]:
    """One gradient a step."""
    return [[(age, 1.0)] for age in ages]


def monodromy(product: float, arrivals: list[list[tuple[int, float]]], momentum: float) -> float:
    """The logarithm of the spectral radius of A_T ... A_1, per step, from the matrices themselves."""
    n = 1 + max(age for step in arrivals for age, _ in step)
    whole = np.eye(n + 1)
    for step in arrivals:
        pull = np.zeros(n + 1)
        pull[n] = momentum
        for age, share in step:
            pull[age] += share
        a = np.zeros((n + 1, n + 1))
        a[1:n, : n - 1] = np.eye(n - 1)
        a[0, 0] = 1.0
        a[0] -= product * pull
        a[n] = pull
        whole = a @ whole
    return math.log(np.abs(np.linalg.eigvals(whole)).max()) / len(arrivals)


SEQUENCES = {
    "one age": alone([3]),
    "a slow worker": alone([1, 1, 1, 1, 1, 6]),
    "all ages": alone([0, 4, 2, 2, 7, 1, 0]),
    "steps of two": [[(0, 0.5), (1, 0.5)], [(1, 1.0)], [(0, 0.5), (5, 0.5)]],
    "one dropped": [[(0, 0.5)], [(1, 1.0)], [], [(2, 0.5), (3, 0.5)]],
}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", SEQUENCES)
def test_the_growth_is_that_of_the_monodromy_matrix(name: str, momentum: float) -> None:
    arrivals = SEQUENCES[name]
    products = np.array([0.1, 0.3, 0.9])
    found = growth(products, arrivals * 400, momentum)
    expected = [monodromy(product, arrivals, momentum) for product in products]
    np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.mark.parametrize("delay", [0, 1, 2, 8, 40])
def test_for_one_age_the_limit_is_the_known_one(delay: int) -> None:
    found = delay_sequence.stability(alone([delay] * 600))
    assert found.limit == pytest.approx(stability.limit(delay), rel=0.01)
    assert found.fastest == pytest.approx(stability.best(delay), rel=0.05)


def test_momentum_without_delay_has_the_limit_of_heavy_ball() -> None:
    assert delay_sequence.stability(alone([0] * 600), 0.9).limit == pytest.approx(2 * 1.9, rel=0.01)


@pytest.mark.slow
def test_the_same_ages_in_another_order_have_another_limit() -> None:
    """Which neither their mean nor random ages can know, nor bound."""
    regular, other = alone(([0] * 8 + [8]) * 60), alone(([0] * 16 + [8] * 2) * 30)
    assert histogram(regular) == histogram(other)
    assert delay_sequence.stability(regular).limit == pytest.approx(1.0, rel=0.01)
    assert delay_sequence.stability(other).limit == pytest.approx(2.0, rel=0.01)
    drawn = delay_roots.mean_square_limit(histogram(regular))
    assert drawn is not None and drawn > 1.8
    assert delay_roots.limit(histogram(regular)) == pytest.approx(2.0)


@pytest.mark.parametrize("name", SEQUENCES)
def test_below_the_limit_a_descent_converges_and_above_it_diverges(name: str) -> None:
    arrivals = SEQUENCES[name] * 150
    limit = delay_sequence.stability(arrivals).limit
    for factor, converges in ((0.9, True), (1.1, False)):
        past = [1.0] * 10
        for step in arrivals * 8:
            past.append(past[-1] - factor * limit * sum(share * past[-1 - age] for age, share in step))
            if abs(past[-1]) > 1e6:
                break
        assert (max(map(abs, past[-8:])) < 0.5) == converges


def test_an_error_that_is_gone_has_no_growth() -> None:
    assert growth(np.array([1.0]), alone([0] * 200))[0] == -math.inf


def test_a_sequence_must_be_longer_than_what_it_looks_back_on() -> None:
    assert is_enough(alone([5] * 128)) and not is_enough(alone([5] * 127))
    assert is_enough(alone([60] * 244)) and not is_enough(alone([60] * 243))
    assert not is_enough([])


@pytest.mark.parametrize(
    ("arrivals", "says"),
    [([], "got none"), ([[]], "got none"), ([[(-1, 1.0)]], "neither negative"), ([[(1, math.inf)]], "neither")],
)
def test_what_is_no_sequence_is_refused(arrivals: list[list[tuple[int, float]]], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        growth(np.array([0.1]), arrivals)


def test_impossible_numbers_are_refused() -> None:
    for products, momentum in (([-0.1], 0.0), ([math.nan], 0.0), ([], 0.0), ([0.1], 1.0)):
        with pytest.raises(BadInput, match=r"learning rate x curvature|momentum is"):
            growth(np.array(products), alone([1]), momentum)


# --- what workers of known speeds cause -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cycles", "n_micro"), [([1.0] * 8, 1), ([1.0, 1.0, 3.0], 1), ([0.5, 1.0, 1.0, 2.0], 4), ([1.0], 2)], ids=str
)
def test_expected_arrivals_have_the_expected_ages(cycles: list[float], n_micro: int) -> None:
    arrivals = expected_arrivals(cycles, n_micro)
    assert is_enough(arrivals)
    assert all(sum(share for _, share in step) == pytest.approx(1.0) for step in arrivals)
    found, expected = histogram(arrivals), expected_ages(cycles, n_micro)
    means = [sum(age * n for age, n in ages.items()) / sum(ages.values()) for ages in (found, expected)]
    assert means[0] == pytest.approx(means[1], abs=0.15)


def test_pushes_of_a_late_worker_count_and_add_nothing() -> None:
    arrivals = expected_arrivals([1.0, 1.0, 1.0, 9.0], 4, [False, False, False, True])
    shares = [sum(share for _, share in step) for step in arrivals]
    assert min(shares) == pytest.approx(0.75) and max(shares) == pytest.approx(1.0)
    assert np.mean(shares) == pytest.approx(27 / 28, abs=0.01)


@pytest.mark.slow
def test_the_advice_goes_by_the_order_where_it_is_known() -> None:
    arrivals = expected_arrivals([0.3, 0.5, 1.0, 1.0, 2.0], 1)
    known = stability.advise(0.1, 1.0, {3: 1}, arrivals=arrivals)
    assert known.n_arrivals == len(arrivals)
    assert known.lr_limit == delay_sequence.stability(arrivals).limit
    assert known.lr_limit_mean == pytest.approx(delay_roots.limit(histogram(arrivals)))
    assert f"by the ages of {len(arrivals)} steps in their order" in known.reason
    short = stability.advise(0.1, 1.0, {3: 1}, arrivals=arrivals[:20])
    assert (short.n_arrivals, short.lr_limit) == (0, short.lr_limit_mean)
    assert f"the order of 20 steps is too short, {delay_sequence.needed(arrivals[:20])} are needed" in short.reason
    assert "the order of the ages is not known" in stability.advise(0.1, 1.0, {3: 1}).reason


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("ages", [{0: 1.0}, {0: 0.56, 1: 0.44}, {2: 1.0}])
def test_with_values_ahead_a_regular_sequence_has_the_limit_of_its_equation(
    ages: dict[int, float], momentum: float
) -> None:
    arrivals = [list(ages.items())] * 256
    found = delay_sequence.stability(arrivals, momentum, ahead=0.9)
    of_equation = delay_roots.limit(ages, momentum, 0.9)
    assert found.limit == pytest.approx(of_equation, rel=0.03)
    assert delay_roots.factor(0.99 * of_equation, ages, momentum, 0.9) < 1
    assert delay_roots.factor(1.01 * of_equation, ages, momentum, 0.9) > 1
    fastest = delay_roots.fastest(ages, momentum, 0.9)
    least = delay_roots.factor(fastest, ages, momentum, 0.9)
    assert all(least <= delay_roots.factor(p, ages, momentum, 0.9) for p in (0.9 * fastest, 1.1 * fastest))


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_with_values_ahead_the_squares_of_one_age_have_the_limit_of_its_equation(delay: int) -> None:
    for momentum in (0.0, 0.9):
        expected = delay_roots.limit({delay: 1}, momentum, 0.9)
        assert delay_roots.mean_square_limit({delay: 1}, momentum, 0.9) == pytest.approx(expected, rel=5e-3)


@pytest.mark.slow
def test_the_advice_goes_by_values_ahead() -> None:
    ages = {0: 56, 1: 44}
    without, with_it = (stability.advise(0.1, 1.0, ages, 0.9, ahead=ahead) for ahead in (0.0, 0.9))
    assert with_it.lr_limit == pytest.approx(delay_roots.limit(ages, 0.9, 0.9))
    assert with_it.lr_limit > 3 * without.lr_limit
    assert "momentum 0.9, values 0.9 of a step ahead" in with_it.reason and "ahead" not in without.reason
