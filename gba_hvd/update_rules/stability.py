"""How much staleness a learning rate bears: limits from theory, advice in a sentence, and the curvature they need.

Theory is that of delayed gradient descent on a quadratic, x <- x - lr * h * x_(d steps ago), h the curvature: stable
iff lr * h < 2 sin(pi / (2 (2d + 1))), fastest at lr * h = d^d / (d + 1)^(d + 1) (delay equations' characteristic roots;
see Yu, Chen and Poor, arXiv 2406.11159, for staleness in SGD). Ages that vary, and momentum, are in `delay_sequence`,
by which `advise` goes where the order of the ages is known, else in `delay_roots`. For Adagrad, Adam and the like the
curvature that counts is that of the preconditioned loss. Nothing here changes a learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gba_hvd.errors import BadInput
from gba_hvd.update_rules import delay_roots, delay_sequence
from gba_hvd.update_rules.delay_roots import not_negative
from gba_hvd.update_rules.delay_sequence import Arrivals

_NEAR = 0.5  # share of the limit from which on the noise of mini-batches may matter
_OLDEST_IN_HASTE = 64  # steps
_SETTLED = 0.9  # an eigenvector found: the Rayleigh quotient is this share of the growth, or more


def limit(delay: float) -> float:
    """The largest stable lr * curvature when every gradient is `delay` steps old: 2 without delay, 0.1845 at 8."""
    return 2 * math.sin(math.pi / (2 * (2 * not_negative(delay) + 1)))


def best(delay: float) -> float:
    """The lr * curvature of fastest convergence when every gradient is `delay` steps old: 1 without, 0.0433 at 8."""
    d = not_negative(delay)
    return math.exp(d * math.log(d) - (d + 1) * math.log(d + 1)) if d > 0 else 1.0


@dataclass(frozen=True)
class Advice:
    """How far a learning rate is from the stability limit.

    lr_limit:       largest stable learning rate: at these ages in this order (`delay_sequence`), or, where no order is
                    known, lr_limit_mean; infinite when the curvature is not positive
    lr_limit_mean:  that of the mean of the ages (`delay_roots`)
    lr_limit_plain: the plain formula's at the mean age, without momentum, for comparison
    lr_limit_worst: were every gradient as old as the oldest, or (`delay_roots.mean_square_limit`) were the ages drawn
                    at random, whichever is larger
    lr_best:        learning rate of fastest convergence, for the direction of largest curvature; NaN where that was
                    not worked out
    share:          lr / lr_limit; 1 and above is unstable
    n_arrivals:     steps whose ages and order lr_limit goes by; 0: none, or too few
    level:          "stable", "near" (half the limit, or, without an order, above the worst case's), "unstable"
    reason:         the sentence
    """

    lr: float
    lr_limit: float
    lr_limit_mean: float
    lr_limit_plain: float
    lr_limit_worst: float
    lr_best: float
    share: float
    n_arrivals: int
    level: str
    reason: str

    @property
    def is_stable(self) -> bool:
        return self.level != "unstable"


def advise(
    lr: float,
    curvature: float,
    ages: Mapping[int, float],
    momentum: float = 0.0,
    careful: bool = True,
    arrivals: Arrivals | None = None,
    ahead: float = 0.0,
    dampening: float = 0.0,
) -> Advice:
    """How far `lr` is from the limit at the loss's largest curvature.

    ages: histogram of the ages of the dense values that gradients were computed with, in steps; where only a mean is
    known, `delay_roots.at_mean`. careful: also work out ages drawn at random, which takes up to seconds, and the
    fastest rate where ages are over 64 steps, which takes seconds to minutes
    arrivals: the ages of the newest steps, in their order; then `ages` matters only if they are too few
    ahead: of rule look_ahead, its `steps`: gradients are of values so many steps ahead; 0 without it
    dampening: of the momentum, see `update_rules.momentum`; Adam has its first beta for both
    """
    if not 0 <= lr < math.inf or not math.isfinite(curvature) or not 0 <= dampening < 1:
        raise BadInput(
            f"lr must not be negative, curvature a number and dampening from 0 and below 1, got lr={lr}, "
            f"curvature={curvature} and dampening={dampening}"
        )
    ordered = arrivals if arrivals is not None and delay_sequence.is_enough(arrivals) else ()
    ages = delay_sequence.histogram(ordered) if ordered else ages
    p = delay_roots.shares(ages)
    mean, oldest = float((p * range(len(p))).sum()), len(p) - 1
    if curvature <= 0:
        text = f"stable: no direction is curved upwards (curvature {curvature:.3g}), no limit on the learning rate"
        return Advice(lr, math.inf, math.inf, math.inf, math.inf, math.inf, 0.0, len(ordered), "stable", text)
    drawn = delay_roots.mean_square_limit(ages, momentum, ahead) if careful else None
    worst = max(delay_roots.limit({oldest: 1}, momentum, ahead), drawn or 0.0)
    of_mean = delay_roots.limit(ages, momentum, ahead)
    if ordered:
        found = delay_sequence.stability(ordered, momentum, ahead)
    else:
        fastest = delay_roots.fastest(ages, momentum, ahead) if careful or oldest <= _OLDEST_IN_HASTE else math.nan
        found = delay_sequence.Stability(of_mean, fastest)
    at_limit, by_mean, at_worst, fastest = (
        value / (curvature * (1 - dampening)) for value in (found.limit, of_mean, worst, found.fastest)
    )
    plain = limit(mean) / curvature
    share = lr / at_limit
    is_near = share >= _NEAR or (not ordered and lr >= at_worst)
    level = "unstable" if share >= 1 else "near" if is_near else "stable"
    verdict = "near the limit" if level == "near" else level
    with_momentum = f", momentum {momentum:g}" if momentum else ""
    with_momentum += f", dampening {dampening:g}" if dampening else ""
    with_momentum += f", values {ahead:g} of a step ahead" if ahead else ""
    text = (
        f"{verdict}: learning rate {lr:.3g} is {_share(share)}x the limit {at_limit:.3g} for dense values {mean:.3g} "
        f"steps old in the mean (oldest {oldest}) and a curvature of {curvature:.3g}{with_momentum}; "
    )
    if ordered:
        text += f"this goes by the ages of {len(ordered)} steps in their order, by their mean it is {by_mean:.3g}; "
    else:
        why = "the order of the ages is not known"
        if arrivals:
            why = f"the order of {len(arrivals)} steps is too short, {delay_sequence.needed(arrivals)} are needed"
        text += f"{why}; were the ages drawn at random, it is at least {at_worst:.3g}; "
    text += f"the plain formula at the mean age says {plain:.3g}"
    if math.isfinite(fastest):
        text += f"; fastest near {fastest:.3g}"
    if level == "unstable":
        text += "; lower the learning rate, the number of workers or the lookahead, or stay in allreduce"
    return Advice(lr, at_limit, by_mean, plain, at_worst, fastest, share, len(ordered), level, text)


def largest_curvature(
    loss_fn: Callable[[], Tensor], parameters: Iterable[Tensor], iterations: int = 20, seed: int = 0
) -> float:
    """The largest eigenvalue of the loss's Hessian, by power iteration on Hessian-vector products.

    loss_fn: makes the loss, a scalar, from the current parameters; called once, so dropout and data stay the same
    parameters: dense ones, with requires_grad; `.grad` and the global random state are left alone
    Costs `iterations` backward passes through a backward pass, twice that near a saddle, where a negative eigenvalue is
    as large. An estimate from below: never above the true value, but for rounding.
    Raises BadInput when the loss is no finite scalar.
    """
    held = [p for p in parameters if p.requires_grad]
    if not held or iterations < 1:
        raise BadInput(
            f"give parameters that require a gradient and at least 1 iteration, got {len(held)} and {iterations}"
        )
    loss = loss_fn()
    if loss.numel() != 1 or not loss.requires_grad or not bool(torch.isfinite(loss).all()):
        raise BadInput(f"loss_fn must return one finite number computed from the parameters, got {loss.detach()}")
    slopes = torch.autograd.grad(loss, held, create_graph=True, allow_unused=True, materialize_grads=True)
    linked = [slope for slope in slopes if slope.requires_grad]  # the others do not change with the parameters

    def times_hessian(vector: list[Tensor]) -> list[Tensor]:
        with_grad = [v for slope, v in zip(slopes, vector, strict=True) if slope.requires_grad]
        return list(
            torch.autograd.grad(
                linked, held, grad_outputs=with_grad, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        )

    if not linked:
        return 0.0
    start = _random_direction(held, seed)
    largest, size = _dominant(times_hessian, start, iterations, shift=0.0)
    if largest >= _SETTLED * size:
        return largest
    # A negative eigenvalue hides the positive ones, or is mixed with one of its size (as in a product x * y). Moved up
    # by that size, the largest eigenvalue is the dominant one.
    moved, _ = _dominant(times_hessian, start, iterations, shift=size)
    return max(largest, moved - size)


def _dominant(
    times_hessian: Callable[[list[Tensor]], list[Tensor]], start: list[Tensor], iterations: int, shift: float
) -> tuple[float, float]:
    """The eigenvalue of H + shift that is largest by magnitude (Rayleigh quotient), and that magnitude (growth)."""
    vector, value, growth = start, 0.0, 0.0
    for _ in range(iterations):
        image = [h.detach() + shift * v for h, v in zip(times_hessian(vector), vector, strict=True)]
        value, growth = _dot(vector, image), math.sqrt(_dot(image, image))
        if growth == 0:
            break
        vector = [part / growth for part in image]
    return value, growth


def _random_direction(parameters: list[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]
    norm = math.sqrt(_dot(parts, parts))
    return [part / norm for part in parts]


def _dot(a: list[Tensor], b: list[Tensor]) -> float:
    return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


def _share(share: float) -> str:
    return f"{share:.2f}" if share >= 0.1 else f"{share:.2g}"
