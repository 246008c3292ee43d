"""The limits are where a delayed descent really stops converging, and the curvature is the Hessian's."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gba_hvd.errors import BadInput
from gba_hvd.update_rules import delay_roots
from gba_hvd.update_rules.delay_model import expected_ages, scaled, stops_helping
from gba_hvd.update_rules.stability import advise, best, largest_curvature, limit

DELAYS = range(17)


def size_after(product: float, delay: int, steps: int) -> float:
    """x <- x - product * x_(delay steps ago), from 1: the largest |x| of the last 100 steps."""
    past = deque([1.0] * (delay + 1), maxlen=delay + 1)
    sizes = [0.0]
    for step in range(steps):
        past.append(past[-1] - product * past[0])
        if step >= steps - 100:
            sizes.append(abs(past[-1]))
        if abs(past[-1]) > 1e6:
            return abs(past[-1])
    return max(sizes)


def slowest_mode(product: float, delay: int) -> float:
    """By what factor per step the recurrence shrinks in the long run: z^(d+1) = z^d - product."""
    coefficients = np.zeros(delay + 2)
    coefficients[:2] = 1, -1
    coefficients[-1] += product
    return float(np.abs(np.roots(coefficients)).max())


@pytest.mark.parametrize("delay", DELAYS)
def test_the_limit_is_where_the_recurrence_stops_converging(delay: int) -> None:
    assert size_after(0.98 * limit(delay), delay, 20_000) < 1e-2
    assert size_after(1.02 * limit(delay), delay, 20_000) > 1e2


@pytest.mark.parametrize("delay", DELAYS)
def test_the_best_is_where_the_recurrence_converges_fastest(delay: int) -> None:
    fastest = slowest_mode(best(delay), delay)
    assert fastest == pytest.approx(delay / (delay + 1), abs=0.02)
    assert fastest < slowest_mode(0.9 * best(delay), delay)
    assert fastest < slowest_mode(1.1 * best(delay), delay)


def test_known_values() -> None:
    assert limit(0) == pytest.approx(2)
    assert best(0) == 1
    assert limit(1) == pytest.approx(1)
    assert limit(8) == pytest.approx(0.1845, abs=5e-5)
    assert best(8) == pytest.approx(0.0433, abs=5e-5)


def test_long_delays_approach_the_continuous_theory() -> None:
    assert limit(1e6) * 1e6 == pytest.approx(math.pi / 2, rel=1e-5)
    assert best(1e6) * 1e6 == pytest.approx(1 / math.e, rel=1e-5)


@given(st.floats(0, 1e4))
def test_the_best_is_below_the_limit_and_more_delay_narrows_both(delay: float) -> None:
    assert best(delay) < limit(delay)
    assert limit(delay + 1) < limit(delay)
    assert best(delay + 1) < best(delay)


def test_advice_says_how_far_the_learning_rate_is_from_the_limit() -> None:
    advice = advise(lr=0.01, curvature=4.0, ages={1: 1})
    assert (advice.level, advice.is_stable) == ("stable", True)
    assert advice.lr_limit == advice.lr_limit_worst == pytest.approx(0.25)
    assert advice.lr_limit_plain == pytest.approx(0.25)
    assert advice.lr_best == pytest.approx(0.25 / 4, rel=1e-4)
    assert advice.share == pytest.approx(0.04)
    assert advice.reason.startswith(
        "stable: learning rate 0.01 is 0.04x the limit 0.25 for dense values 1 steps old in the mean (oldest 1)"
    )


def test_a_small_share_of_the_limit_is_not_shown_as_nothing() -> None:
    assert " is 0.00012x the limit 0.25 " in advise(lr=3e-5, curvature=4.0, ages={1: 1}).reason


@pytest.mark.parametrize(
    ("lr", "level"), [(0.04, "stable"), (0.12, "stable"), (0.13, "near"), (0.2499, "near"), (0.2501, "unstable")]
)
def test_advice_goes_from_stable_over_near_to_unstable(lr: float, level: str) -> None:
    advice = advise(lr, curvature=4.0, ages={1: 1})
    assert advice.level == level
    assert advice.is_stable == (level != "unstable")
    assert ("lower the learning rate" in advice.reason) == (level == "unstable")


@pytest.mark.slow
def test_ages_that_vary_much_are_near_the_limit_sooner() -> None:
    ages = {0: 1, 8: 1}
    advice = advise(0.48 * delay_roots.limit(ages), 1.0, ages)
    assert advice.lr_limit_worst < advice.lr < 0.5 * advice.lr_limit and advice.level == "near"


def test_in_haste_the_fastest_rate_is_left_out_where_ages_are_long() -> None:
    """As many roots as the largest age has steps are found for it, sixty times."""
    ages = {0: 199.0, 200: 1.0}
    advice = advise(0.1, 1.0, ages, careful=False)
    assert math.isnan(advice.lr_best) and "fastest" not in advice.reason
    assert advice.lr_limit == delay_roots.limit(ages)
    assert "fastest near" in advise(0.1, 1.0, {0: 199.0, 20: 1.0}, careful=False).reason


def test_a_loss_that_curves_downwards_limits_nothing() -> None:
    advice = advise(lr=10.0, curvature=-1.0, ages={3: 1})
    assert (advice.level, advice.share, advice.lr_limit) == ("stable", 0.0, math.inf)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((-0.1, 1.0, {0: 1}), "lr must not be negative"),
        ((0.1, float("nan"), {0: 1}), "curvature a number"),
        ((0.1, 1.0, {-1: 1}), "a histogram of ages"),
        ((0.1, 1.0, {}), "a histogram of ages"),
        ((0.1, 1.0, {1: 1}, 1.0), "momentum is a number from 0 and below 1"),
    ],
)
def test_advice_needs_possible_numbers(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        advise(*arguments)


# --- roots -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1, 2, 8, 40])
def test_for_one_delay_the_roots_say_what_the_plain_formula_says(delay: int) -> None:
    assert delay_roots.limit({delay: 3}) == pytest.approx(limit(delay), rel=1e-6)
    assert delay_roots.fastest({delay: 1}) == pytest.approx(best(delay), rel=1e-3)
    assert delay_roots.factor(0.9 * limit(delay), {delay: 1}) == pytest.approx(
        slowest_mode(0.9 * limit(delay), delay), rel=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    "ages", [{4: 1}, {3: 1, 4: 2, 5: 1}, {0: 9, 40: 1}, {2: 5, 3: 1, 20: 1}, {0: 1, 8: 1}], ids=str
)
def test_at_the_limit_the_largest_root_crosses_the_unit_circle(ages: dict[int, float], momentum: float) -> None:
    found = delay_roots.limit(ages, momentum)
    assert delay_roots.factor(0.99 * found, ages, momentum) < 1 < delay_roots.factor(1.01 * found, ages, momentum)
    drawn = delay_roots.mean_square_limit(ages, momentum)
    assert drawn is not None and drawn <= found


def test_without_delay_momentum_has_the_limit_of_heavy_ball() -> None:
    assert delay_roots.limit({0: 1}, 0.9) == pytest.approx(2 * 1.9)


def test_equal_means_with_different_tails_have_different_limits() -> None:
    narrow, wide = delay_roots.limit({4: 1}), delay_roots.limit({3: 9, 13: 1})
    assert abs(wide / narrow - 1) > 0.1


# --- what ages to expect, and how many workers help ------------------------------------------------------------------


def test_expected_ages_of_equal_workers() -> None:
    assert expected_ages([1.0] * 8, 1) == pytest.approx({7: 1.0})
    assert expected_ages([2.0] * 8, 8) == pytest.approx({0: 1 / 8, 1: 7 / 8})
    assert expected_ages([1.0], 4) == pytest.approx({0: 1.0})


def test_expected_ages_of_unequal_workers_are_those_of_every_chance_alone() -> None:
    """A worker of 5 s meets 5/3, 5/4 and 1 pushes of others: 3, and one more by 2/3 and by 1/4. One of 3 s meets 3/5,
    3/4 and 3/5."""
    ages, pushes = expected_ages([5.0, 3.0, 4.0, 5.0], 1), 1 / 5 + 1 / 3 + 1 / 4 + 1 / 5
    assert sum(ages.values()) == pytest.approx(1.0)
    assert ages[5] == pytest.approx(2 / 3 * 1 / 4 * (2 / 5) / pushes)
    assert ages[0] == pytest.approx(2 / 5 * 1 / 4 * 2 / 5 * (1 / 3) / pushes)


def test_a_slow_worker_finds_more_steps_of_the_others() -> None:
    ages = expected_ages([1.0, 1.0, 3.0], 1)
    assert max(ages) == 6 and ages[6] == pytest.approx(1 / 7)


@pytest.mark.slow
def test_more_workers_stop_helping_at_the_limit_or_at_a_full_server() -> None:
    def most(serve_s: float, lr: float) -> int:
        return stops_helping([scaled(n, [0.05], 1, 4, serve_s, lr, 1.0) for n in (1, 2, 4, 8, 16, 32)])

    assert most(0.0, 0.001) == 32
    assert most(0.0, 0.1) == 16, "the learning rate sets the limit"
    assert most(0.02, 0.001) == 4, "the server does"
    assert scaled(4, [0.05], 1, 4, 0.02, 0.001, 1.0).is_full
    assert most(0.0, 3.0) == 0


def test_a_step_that_ends_at_the_minimum_is_the_fastest_there_is() -> None:
    """One worker at lr x curvature = 1: all roots are 0."""
    assert scaled(1, [0.05], 1, 4, 0.0, 0.1, 10.0, condition=1.0).progress == math.inf
    usual = scaled(1, [0.05], 1, 4, 0.0, 0.1, 10.0)
    assert usual.progress == pytest.approx(-math.log(0.99) / 0.05), "the slowest direction counts"


@pytest.mark.slow
def test_what_the_tolerance_drops_takes_no_part() -> None:
    strict, mild = (scaled(8, [0.05] * 7 + [1.0], 8, tolerance, 0.0, 0.01, 1.0) for tolerance in (1, 100))
    assert strict.dropped_share > 0 == mild.dropped_share
    assert strict.age_mean < mild.age_mean


def quadratic(eigenvalues: list[float], seed: int = 3) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """x^T H x / 2 + b^T x with a Hessian of these eigenvalues, over two parameters of different shapes."""
    n = len(eigenvalues)
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    hessian = basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.T
    b = torch.randn(n, generator=generator, dtype=torch.float64)
    parts = [torch.ones(2, 2, dtype=torch.float64), torch.zeros(n - 4, dtype=torch.float64)]
    parameters = [part.requires_grad_() for part in parts]

    def loss() -> Tensor:
        x = torch.cat([p.reshape(-1) for p in parameters])
        value: Tensor = x @ hessian @ x / 2 + b @ x
        return value

    return loss, parameters


@pytest.mark.parametrize(
    ("eigenvalues", "largest"),
    [
        ([7.0, 3.0, 2.0, 1.0, 0.5, 0.0], 7.0),
        ([2.0, -9.0, 1.0, 0.5, 0.0, 0.0], 2.0),  # a saddle: the dominant eigenvalue is not the one asked for
        ([3.0, -3.0, 1.0, -1.0, 0.0, 0.0], 3.0),  # two of the same size
        ([-1.0, -8.0, -3.0, -4.0, -5.0, -6.0], -1.0),
        ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0], 0.0),
    ],
)
def test_the_largest_curvature_of_a_quadratic_is_its_largest_eigenvalue(
    eigenvalues: list[float], largest: float
) -> None:
    loss, parameters = quadratic(eigenvalues)
    found = largest_curvature(loss, parameters, iterations=100)
    assert found == pytest.approx(largest, abs=1e-3)
    assert found <= largest + 1e-9


def test_twenty_iterations_come_close_from_below() -> None:
    loss, parameters = quadratic([5.0, 4.0, 3.0, 2.0, 1.0, 0.5])
    assert 4.9 < largest_curvature(loss, parameters) <= 5.0 + 1e-9


def test_a_product_has_the_curvature_of_its_saddle() -> None:
    x, y = (torch.tensor(0.3, requires_grad=True) for _ in range(2))
    assert largest_curvature(lambda: x * y, [x, y]) == pytest.approx(1.0, abs=1e-4)


def test_the_model_is_left_alone_and_the_answer_repeats() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    inputs, labels = torch.randn(32, 4), torch.rand(32, 1).round()
    before = [p.detach().clone() for p in model.parameters()]
    random_state = torch.get_rng_state()

    def loss() -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(inputs), labels)

    found = [largest_curvature(loss, model.parameters(), seed=1) for _ in range(2)]
    assert found[0] == found[1] > 0
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_parameters_the_loss_does_not_use_or_is_linear_in_do_not_matter() -> None:
    used, linear, unused = (torch.ones(2, requires_grad=True) for _ in range(3))
    frozen = torch.ones(2)
    found = largest_curvature(lambda: (3 * used**2).sum() + linear.sum(), [used, linear, unused, frozen])
    assert found == pytest.approx(6.0)
    assert largest_curvature(linear.sum, [linear, unused]) == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1.0, 2.0]])
def test_a_loss_that_is_no_finite_number_is_refused(value: float | list[float]) -> None:
    p = torch.ones(1, requires_grad=True)
    with pytest.raises(BadInput, match="one finite number"):
        largest_curvature(lambda: p.sum() * torch.tensor(value), [p])


def test_a_loss_without_the_parameters_and_no_parameters_are_refused() -> None:
    p = torch.ones(1, requires_grad=True)
    with pytest.raises(BadInput, match="computed from the parameters"):
        largest_curvature(lambda: torch.tensor(1.0), [p])
    with pytest.raises(BadInput, match="require a gradient"):
        largest_curvature(p.sum, [])
