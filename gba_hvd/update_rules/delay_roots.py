"""Stability and speed of descent under a distribution of delays: the roots of its characteristic equation.

Descent on curvature h whose gradients are d steps old with probability p_d, momentum m as in `torch.optim.SGD`:

    z = 1 - eta h sum_d p_d z^-d                                   without momentum
    (z - 1)(z - m) + eta h z sum_d p_d z^-d = 0                    with it
    (z - 1)(z - m) + eta h z (1 + a - a / z) sum_d p_d z^-d = 0    with gradients of values a steps ahead (`look_ahead`)

stable iff all roots are inside the unit circle; the largest |root| is what an error is multiplied with in a step. (See
Yu, Chen and Poor, arXiv 2406.11159.) It is the equation of the mean: the delays are averaged, not drawn. Where they
vary much, single runs grow at smaller rates; `mean_square_limit` is that of delays drawn independently in each step.
The plain formula for one delay, `stability.limit`, is the special case of both. Arithmetic only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from gba_hvd.errors import BadInput

_PER_DELAY, _AT_LEAST = 64, 4096  # points of the circle
_AGES_IN_SQUARES = 64
_GOLDEN = (math.sqrt(5) - 1) / 2


def shares(ages: Mapping[int, float]) -> np.ndarray:
    """p_d, float64 [largest age + 1], from a histogram of ages in steps. Raises BadInput when it is none."""
    kept = {age: n for age, n in ages.items() if n}
    if not kept or any(isinstance(age, float) or age < 0 or not 0 < n < math.inf for age, n in kept.items()):
        raise BadInput(f"expected a histogram of ages, {{steps: how many}}, got {dict(ages)}")
    p = np.zeros(max(kept) + 1)
    for age, n in kept.items():
        p[age] = n
    found: np.ndarray = p / p.sum()
    return found


def not_negative(delay: float) -> float:
    """The delay; raises BadInput where it is none."""
    if not 0 <= delay < math.inf:
        raise BadInput(f"a delay must be a number of steps, not negative, got {delay}")
    return delay


def at_mean(age: float) -> dict[int, float]:
    """The distribution of the two whole numbers around an age whose mean it is."""
    below = math.floor(not_negative(age))
    return {below: 1 - (age - below), below + 1: age - below} if age > below else {below: 1.0}


def limit(ages: Mapping[int, float], momentum: float = 0.0, ahead: float = 0.0) -> float:
    """The largest stable eta h: below it all roots are inside the unit circle. ahead: see above, a.

    On the circle the equation gives eta h for every angle; the limit is the smallest that is real and positive.
    """
    p, m = _looking(shares(ages), ahead), checked_momentum(momentum)
    angles = np.linspace(0, math.pi, max(_AT_LEAST, _PER_DELAY * len(p)) + 1)[1:]
    crossings = [2 * (1 + m) / turned] if (turned := float((p * (-1.0) ** np.arange(len(p))).sum())) > 0 else []

    def crossed(z: np.ndarray) -> np.ndarray:
        found: np.ndarray = -(z - 1) * (z - m) / (z * _at(p, z))
        return found

    with np.errstate(divide="ignore", invalid="ignore"):
        products = crossed(np.exp(1j * angles))
        turns = np.flatnonzero(np.diff(np.signbit(products.imag)) & (products.real[1:] > 0))
        for first in turns:
            low, high = angles[first], angles[first + 1]
            negative = bool(products.imag[first] < 0)
            for _ in range(50):
                middle = (low + high) / 2
                value = crossed(np.exp(1j * np.array([middle])))[0]
                low, high = (middle, high) if bool(value.imag < 0) == negative else (low, middle)
            value = crossed(np.exp(1j * np.array([low])))[0]
            if value.real > 0 and abs(value.imag) < 1e-3 * value.real:  # else it jumps there: sum p_d z^-d is 0
                crossings.append(float(value.real))
    return min(crossings)


def mean_square_limit(ages: Mapping[int, float], momentum: float = 0.0, ahead: float = 0.0) -> float | None:
    """The largest eta h at which the mean square of the error shrinks if each step's age is drawn independently.

    Not above `limit`. None where the largest age is over 64 steps: the second moments of so long a past cost too much.
    """
    p, m = shares(ages), checked_momentum(momentum)
    if len(p) > _AGES_IN_SQUARES + 1:
        return None
    low, high = 0.0, limit(ages, momentum, ahead)
    if _square_growth(0.999 * high, p, m, ahead) < 1:
        return high
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if _square_growth(middle, p, m, ahead) < 1 else (low, middle)
    return low


def _square_growth(product: float, p: np.ndarray, momentum: float, ahead: float) -> float:
    """What the second moments of (x_k, x_(k-1), ...) are multiplied with in a step: power iteration on them."""
    n = max(2, len(p) + bool(ahead))
    drawn = np.pad(p, (0, n - len(p)))
    p = _looking(drawn, ahead)[:n]
    keeps = np.zeros(n)
    keeps[:2] = 1 + momentum, -momentum
    moments, growth = np.eye(n), []
    for _ in range(40 * n + 200):
        newest = (keeps - product * p) @ moments
        sizes = np.diag(moments)
        looked = (1 + ahead) ** 2 * sizes
        looked[:-1] += ahead**2 * sizes[1:] - 2 * ahead * (1 + ahead) * np.diag(moments, 1)
        square = keeps @ moments @ keeps - 2 * product * (keeps @ moments @ p) + product**2 * (drawn @ looked)
        moments[1:, 1:] = moments[:-1, :-1].copy()
        moments[0, 1:] = moments[1:, 0] = newest[:-1]
        moments[0, 0] = square
        size = float(np.abs(np.diag(moments)).max())
        if size == 0:
            return 0.0
        moments /= size
        growth.append(math.log(size))
    return math.exp(float(np.mean(growth[len(growth) // 2 :])))


def factor(product: float, ages: Mapping[int, float], momentum: float = 0.0, ahead: float = 0.0) -> float:
    """The largest |root| at this eta h: what the error is multiplied with in a step, above 1 where it grows."""
    p, m = _looking(shares(ages), ahead), checked_momentum(momentum)
    if not 0 <= product < math.inf:
        raise BadInput(f"learning rate x curvature must be a number, not negative, got {product}")
    coefficients = np.zeros(max(2, len(p)) + 1)  # times z^(D - 1), D the largest age, at least 1
    coefficients[:3] = 1, -(1 + m), m
    coefficients[1 : 1 + len(p)] += product * p
    return float(np.abs(np.roots(coefficients)).max())


def fastest(ages: Mapping[int, float], momentum: float = 0.0, ahead: float = 0.0) -> float:
    """The eta h whose error shrinks fastest."""
    low, high = 0.0, limit(ages, momentum, ahead)
    one, two = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    f_one, f_two = factor(one, ages, momentum, ahead), factor(two, ages, momentum, ahead)
    for _ in range(30):
        if f_one < f_two:
            high, two, f_two = two, one, f_one
            one = high - _GOLDEN * (high - low)
            f_one = factor(one, ages, momentum, ahead)
        else:
            low, one, f_one = one, two, f_two
            two = low + _GOLDEN * (high - low)
            f_two = factor(two, ages, momentum, ahead)
    return (low + high) / 2


def _looking(p: np.ndarray, ahead: float) -> np.ndarray:
    """What x_k, x_(k-1), ... count in a gradient whose values are so many steps ahead: p_d (1 + a - a / z) z^-d."""
    if not 0 <= ahead < math.inf:
        raise BadInput(f"ahead is a number of steps, not negative, got {ahead}")
    return np.convolve(p, [1 + ahead, -ahead]) if ahead else p


def _at(p: np.ndarray, z: np.ndarray) -> np.ndarray:
    """sum_d p_d z^-d"""
    found = np.zeros(len(z), complex)
    for age in np.flatnonzero(p):
        found += p[age] * z ** -float(age)
    return found


def checked_momentum(momentum: float) -> float:
    if not 0 <= momentum < 1:
        raise BadInput(f"momentum is a number from 0 and below 1, got {momentum}")
    return momentum
