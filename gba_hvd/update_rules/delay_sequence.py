"""Stability and speed of descent whose delays follow each other as they do in a job: the growth of a product.

Descent on curvature h, p = eta h, momentum m as in `torch.optim.SGD`. Step k applies gradients of several ages; c_kd is
the share of those that are d steps old, so sum_d c_kd is 1, or less where a gradient was dropped:

    v_(k+1) = m v_k + sum_d c_kd x_(k-d)
    x_(k+1) = x_k - p v_(k+1)

That is s_(k+1) = A_k(p) s_k with s_k = (x_k, ..., x_(k-D), v_k). The error shrinks iff the growth rate

    lambda(p) = lim 1/T log |A_T(p) ... A_1(p)|

is below 0. For arrivals that repeat after T steps, exp(T lambda) is the spectral radius of their product (the largest
Floquet multiplier of the period); for stationary random arrivals lambda is the same for almost all sequences, and a
long one gives it (Furstenberg and Kesten, 1960: the top Lyapunov exponent). Here the sequence that was measured is the
period, and its product is applied to a random start: three times, of which the last two count.

`delay_roots` replaces the A_k by their mean. That is exact when all gradients are equally old, and good when ages vary
by a step or two. But the age of a worker is not drawn in each step: the gradient of a slow worker comes at moments
of its own, once in many steps, and between two of them the error follows the fast workers alone. The growth of a
product is not that of the mean of its factors; the limit of the mean is too large or too small (docs/DELAY.md). Random
independent ages (`delay_roots.mean_square_limit`) have the same shares in another order, with a limit of its own.
Arithmetic only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gba_hvd.errors import BadInput
from gba_hvd.update_rules import delay_roots

Arrivals = Sequence[Sequence[tuple[int, float]]]  # by step: (age in steps, share of the step's divisor)

MOST = 1024  # steps of a sequence that a server keeps
_LEAST, _TIMES_OLDEST = 128, 4
_GRID, _FINE = 160, 24  # points of a search; the coarse ones are 3 % apart
_RESCALED = 32  # steps between two looks at the size, or a quarter of the oldest age
_COUNTED = 2  # times that the sequence is repeated


@dataclass(frozen=True)
class Stability:
    """limit: the smallest eta h at which the error grows. fastest: the one below it at which it shrinks fastest."""

    limit: float
    fastest: float


def needed(arrivals: Arrivals) -> int:
    """How many steps a sequence must have to be a period: 128, and four times its oldest age."""
    oldest = max((age for step in arrivals for age, _ in step), default=0)
    return max(_LEAST, _TIMES_OLDEST * (oldest + 1))


def is_enough(arrivals: Arrivals) -> bool:
    """Whether a sequence is long enough to be a period."""
    return len(arrivals) >= needed(arrivals)


def histogram(arrivals: Arrivals) -> dict[int, float]:
    """{age: sum of its shares}, as `delay_roots` takes it."""
    found: dict[int, float] = {}
    for step in arrivals:
        for age, share in step:
            found[age] = found.get(age, 0.0) + share
    return dict(sorted(found.items()))


def stability(arrivals: Arrivals, momentum: float = 0.0, ahead: float = 0.0) -> Stability:
    """Stability of a sequence. ahead: as of `delay_roots.limit`. Raises BadInput when it is none.

    The limit is searched from below on a grid of 3 %, then within a thousandth; a range narrower than the grid in which
    the error grows, and above which it shrinks again, can be missed.
    """
    _check(arrivals)
    of_mean = delay_roots.limit(histogram(arrivals), momentum, ahead)
    low, high = of_mean / 20, 2 * of_mean
    while True:
        products = np.geomspace(low, high, _GRID)
        rates = growth(products, arrivals, momentum, ahead)
        grows = np.flatnonzero(rates >= 0)
        if len(grows) and grows[0] > 0:
            break
        low, high = (low / 20, high) if len(grows) else (high, 20 * high)
        if not 1e-12 < low < 1e12:
            raise BadInput(f"no limit between {low:.3g} and {high:.3g} for {len(arrivals)} steps of arrivals")
    first = int(grows[0])
    fastest = float(products[int(np.argmin(rates[:first]))])
    fine = np.geomspace(products[first - 1], products[first], _FINE)
    at = int(np.argmax(growth(fine, arrivals, momentum, ahead) >= 0))
    return Stability(float(fine[at]), fastest)


def growth(products: np.ndarray, arrivals: Arrivals, momentum: float = 0.0, ahead: float = 0.0) -> np.ndarray:
    """lambda of each eta h: the logarithm of what the error is multiplied with in a step, below 0 where it shrinks.

    products: float64 [n]; float64 [n]. -inf where the error is 0 after some steps.
    """
    _check(arrivals)
    delay_roots.checked_momentum(momentum)
    if not len(products) or not np.isfinite(products).all() or (products < 0).any():
        raise BadInput(f"learning rate x curvature must be numbers, not negative, got {products}")
    if ahead:  # values a steps ahead at age d: x_(k-d) + a (x_(k-d) - x_(k-d-1))
        arrivals = [
            [pull for age, share in step for pull in ((age, (1 + ahead) * share), (age + 1, -ahead * share))]
            for step in arrivals
        ]
    steps = [
        (np.array([age for age, _ in step], int), np.array([share for _, share in step], float).reshape(-1, 1))
        for step in arrivals
    ]
    length = 1 + max(age for step in arrivals for age, _ in step)
    past = np.random.default_rng(0).normal(size=(length, 1)) * np.ones(len(products))  # a ring: x of the last steps
    velocity, newest, done = np.zeros(len(products)), 0, 0
    every = max(1, min(max(_RESCALED, length // 4), len(steps) // 4))
    total = np.zeros(len(products))
    # Logarithms of the size, from the second turn on: other directions of the start are gone by then.
    at, sizes = [], []
    for turn in range(1 + _COUNTED):
        for ages, shares in steps:
            if len(ages) == 1:
                pull = past[(newest - ages[0]) % length] * shares[0]
            else:
                pull = (past[(newest - ages) % length] * shares).sum(axis=0)
            velocity = momentum * velocity + pull
            following = past[newest] - products * velocity
            newest = (newest + 1) % length
            past[newest] = following
            done += 1
            if done % every == 0:
                total += _rescaled(past, velocity)
                if turn:
                    at.append(done)
                    sizes.append(total.copy())
    since = np.array(at) - np.mean(at)
    with np.errstate(invalid="ignore"):  # the slope, since the size also oscillates with the phase
        found: np.ndarray = since @ np.array(sizes) / (since @ since)
    found[np.isneginf(total)] = -math.inf
    return found


def _rescaled(past: np.ndarray, velocity: np.ndarray) -> np.ndarray:
    """Make the state of each product one of size 1, in place; the logarithm of the size it had."""
    size = np.sqrt((past**2).sum(axis=0) + velocity**2)
    with np.errstate(divide="ignore"):
        found: np.ndarray = np.log(size)
    size[size == 0] = 1.0
    past /= size
    velocity /= size
    return found


def _check(arrivals: Arrivals) -> None:
    if not any(arrivals):
        raise BadInput("expected the ages of the gradients of some steps, got none")
    for step in arrivals:
        for age, share in step:
            if isinstance(age, float) or age < 0 or not 0 < share < math.inf:
                raise BadInput(f"expected (age in steps, share), neither negative, got ({age}, {share})")
