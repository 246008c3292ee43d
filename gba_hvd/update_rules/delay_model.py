"""What ages of dense values a number of workers causes, and at how many workers more of them stop helping.

While a worker computes one micro-batch, every other worker v pushes c_w / c_v times; c: seconds from push to push. A
step is M pushes, so a gradient is floor((j + n) / M) steps old when it is applied: n pushes of others since its worker
read the values, j of the M already there at that moment, any as likely. Limits and progress follow from the order, too:
`expected_arrivals` lets such workers push, with times that vary by a tenth. Arithmetic only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gba_hvd.errors import BadInput
from gba_hvd.update_rules import delay_sequence

_STEPS = 768  # of arrivals
_SHAPE = 100.0  # of the gamma law of a worker's times: a standard deviation of a tenth (DANA, arXiv 1907.11612)


def expected_ages(cycles_s: Sequence[float], n_micro: int) -> dict[int, float]:
    """{steps: share of the pushes} of workers that push every so many seconds; n_micro: M, pushes of a step."""
    if not cycles_s or n_micro < 1 or not all(0 < c < math.inf for c in cycles_s):
        raise BadInput(f"expected seconds above 0, one for each worker, and M of 1 or more, got {cycles_s}, {n_micro}")
    ages: dict[int, float] = {}
    of_cycle = {c: _ages_of(c, cycles_s, n_micro) for c in set(cycles_s)}
    pushes = sum(1 / c for c in cycles_s)
    for c in cycles_s:
        for age, share in of_cycle[c].items():
            ages[age] = ages.get(age, 0.0) + share / c / pushes
    return {age: share for age, share in sorted(ages.items()) if share > 1e-6}


def expected_arrivals(
    cycles_s: Sequence[float], n_micro: int, late: Sequence[bool] = (), seed: int = 0
) -> list[list[tuple[int, float]]]:
    """As of `delay_sequence`, of workers that push every so many seconds, gamma distributed; n_micro: M.

    late: by worker, whether its pushes are dropped: then they count as one of the M and add nothing.
    """
    if not cycles_s or n_micro < 1 or not all(0 < c < math.inf for c in cycles_s):
        raise BadInput(f"expected seconds above 0, one for each worker, and M of 1 or more, got {cycles_s}, {n_micro}")
    rng, slowest, pushes = np.random.default_rng(seed), max(cycles_s), sum(1 / c for c in cycles_s)
    oldest = slowest * pushes / n_micro
    needed_s = max(_STEPS, 6 * oldest) * n_micro / pushes + 2 * slowest
    times, workers = [], []
    for worker, cycle in enumerate(cycles_s):
        n = math.ceil(1.2 * needed_s / cycle) + 8
        took = cycle * rng.gamma(_SHAPE, 1 / _SHAPE, n)
        took[0] = cycle * rng.random()
        times.append(np.cumsum(took))
        workers.append(np.full(n, worker))
    until = min(float(of_worker[-1]) for of_worker in times)  # after that some are missing
    at, who = np.concatenate(times), np.concatenate(workers)
    order = np.argsort(at, kind="stable")
    order = order[at[order] <= until]
    who, found = who[order], []
    last: dict[int, int] = {}  # number of a worker's push before
    shares: dict[int, float] = {}
    is_late = dict(enumerate(late))
    for number, worker in enumerate(who.tolist()):
        step = number // n_micro
        if worker in last and not is_late.get(worker, False):
            age = step - (last[worker] + 1) // n_micro
            shares[age] = shares.get(age, 0.0) + 1 / n_micro
        last[worker] = number
        if (number + 1) % n_micro == 0:
            found.append(sorted(shares.items()))
            shares = {}
    return found[math.ceil(2 * oldest) + 1 :]  # the first pushes have no values of an earlier one


@dataclass(frozen=True)
class Scale:
    """What is expected of a number of workers.

    steps_per_s: global steps. age_mean: of the dense values, steps. dropped_share: of the pushes, by the tolerance
    lr_limit:    largest stable learning rate, of the pushes that count
    progress:    logarithm of the error's decrease in a second, in its slowest direction; 0 or less: it grows
    is_full:     the server serves pushes without pause: no worker more makes a step more
    """

    workers: int
    tolerance: int
    serve_s: float
    steps_per_s: float
    age_mean: float
    dropped_share: float
    lr_limit: float
    progress: float
    is_full: bool


def scaled(
    workers: int, micro_batch_s: Sequence[float], n_micro: int, tolerance: int, serve_s: float,
    lr: float, curvature: float, momentum: float = 0.0, condition: float = 100.0, ahead: float = 0.0,
    dampening: float = 0.0,
) -> Scale:  # fmt: skip
    """micro_batch_s: of the workers, repeated in turn; serve_s: the server's time for a push, one after the other.

    n_micro: M. curvature: the largest of the loss; the smallest that matters is curvature / condition. A push is
    dropped when its data is more than `tolerance` steps staler than the mean worker's (with M = 1, mode `async`, none).
    momentum, ahead, dampening: as of `stability.advise`
    """
    if workers < 1 or tolerance < 0 or serve_s < 0 or not curvature > 0 or not lr > 0 or not condition >= 1:
        raise BadInput(
            "expected at least 1 worker, a tolerance and seconds of 0 or more, and a learning rate and a curvature "
            f"above 0, got {workers}, {tolerance}, {serve_s}, {lr}, {curvature}"
        )
    cycles = [micro_batch_s[w % len(micro_batch_s)] + serve_s for w in range(workers)]
    free = sum(1 / c for c in cycles)
    is_full = serve_s > 0 and free * serve_s >= 1
    cycles = [c * max(1.0, free * serve_s) for c in cycles]
    pushes = sum(1 / c for c in cycles)
    late = [(c * pushes - workers) / n_micro > tolerance if n_micro > 1 else False for c in cycles]
    dropped = sum(1 / c for c, is_late in zip(cycles, late, strict=True) if is_late) / pushes
    ages: dict[int, float] = {}
    all_ages = {c: _ages_of(c, cycles, n_micro) for c in set(cycles)}
    for c, is_late in zip(cycles, late, strict=True):
        if not is_late:
            for age, share in all_ages[c].items():
                ages[age] = ages.get(age, 0.0) + share / c
    total = sum(ages.values())
    arrivals = expected_arrivals(cycles, n_micro, late)
    scale = curvature * (1 - dampening)
    product = lr * scale
    shrinks = -delay_sequence.growth(np.array([product, product / condition]), arrivals, momentum, ahead)
    lr_limit = delay_sequence.stability(arrivals, momentum, ahead).limit / scale
    return Scale(
        workers, tolerance, serve_s, pushes / n_micro, sum(a * n for a, n in ages.items()) / total, dropped,
        lr_limit, float(shrinks.min()) * pushes / n_micro, is_full,
    )  # fmt: skip


def stops_helping(scales: Sequence[Scale], worth: float = 1.01) -> int:
    """The number of workers after which none that was tried is `worth` times as fast. scales: of several numbers."""
    best = max(scale.progress for scale in scales)
    return min(scale.workers for scale in scales if scale.progress * worth >= best) if best > 0 else 0


def _ages_of(cycle_s: float, cycles_s: Sequence[float], n_micro: int) -> dict[int, float]:
    """`expected_ages` of the pushes of one worker."""
    others = list(cycles_s)
    others.remove(cycle_s)
    counts = np.array([cycle_s / c for c in others])
    p = np.ones(1)
    for part in counts - np.floor(counts + 1e-9):
        p = np.convolve(p, [1 - part, part]) if part > 1e-9 else p
    first = int(np.floor(counts + 1e-9).sum())
    ages: dict[int, float] = {}
    for more, share in enumerate(map(float, p)):
        age, into = divmod(first + more, n_micro)  # of the M that may be there already, so many make one step more
        ages[age] = ages.get(age, 0.0) + share * (n_micro - into) / n_micro
        if into:
            ages[age + 1] = ages.get(age + 1, 0.0) + share * into / n_micro
    return ages
