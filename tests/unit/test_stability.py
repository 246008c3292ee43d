"""The limits are where a delayed descent really stops converging, and the curvature is the Hessian's."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gba_hvd.errors import BadInput
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
    advice = advise(lr=0.01, curvature=4.0, staleness_mean=1.0, staleness_max=8.0)
    assert (advice.level, advice.is_stable) == ("stable", True)
    assert advice.lr_limit == pytest.approx(0.25)
    assert advice.lr_limit_worst == pytest.approx(0.1845 / 4, rel=1e-3)
    assert advice.lr_best == pytest.approx(0.25 / 4)
    assert advice.share == pytest.approx(0.04)
    assert advice.reason == (
        "stable: learning rate 0.01 is 0.04x the limit 0.25 at a mean staleness of 1 steps and a curvature of 4; "
        "at the largest staleness, 8, the limit is 0.0461; fastest near 0.0625"
    )


@pytest.mark.parametrize(
    ("lr", "level"), [(0.04, "stable"), (0.05, "near"), (0.13, "near"), (0.2499, "near"), (0.2501, "unstable")]
)
def test_advice_goes_from_stable_over_near_to_unstable(lr: float, level: str) -> None:
    advice = advise(lr, curvature=4.0, staleness_mean=1.0, staleness_max=8.0)
    assert advice.level == level
    assert advice.is_stable == (level != "unstable")
    assert ("lower the learning rate" in advice.reason) == (level == "unstable")


def test_a_loss_that_curves_downwards_limits_nothing() -> None:
    advice = advise(lr=10.0, curvature=-1.0, staleness_mean=3.0, staleness_max=4.0)
    assert (advice.level, advice.share, advice.lr_limit) == ("stable", 0.0, math.inf)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((-0.1, 1.0, 0.0, 0.0), "lr must not be negative"),
        ((0.1, float("nan"), 0.0, 0.0), "curvature a number"),
        ((0.1, 1.0, -1.0, 0.0), "a delay must be"),
        ((0.1, 1.0, 3.0, 2.0), "above the largest"),
    ],
)
def test_advice_needs_possible_numbers(arguments: tuple[float, float, float, float], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        advise(*arguments)


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
