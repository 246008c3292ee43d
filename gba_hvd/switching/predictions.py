"""How fast a job would be in allreduce and in gba, from what was measured of its workers. Arithmetic only.

In allreduce all wait for the slowest of times that vary, so its rate follows from their distribution: workers that are
equally fast on average, and slow at different moments, make every step slow. In gba no worker waits: means are enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from gba_hvd.errors import BadInput
from gba_hvd.update_rules.delay_model import expected_ages


@dataclass(frozen=True)
class StepWaits:
    """What recent allreduce steps waited for, means over them in seconds, odd times included. For the reason only.

    worker: for which the others waited longest, all steps together; n_slowest: steps in which it was the slowest one,
    of n_steps. median_s: of the median worker; slowest_s: of the slowest one of each step
    """

    worker: int
    n_slowest: int
    n_steps: int
    median_s: float
    slowest_s: float


@dataclass(frozen=True)
class Rates:
    """What was measured of the job's speed.

    seconds_per_micro: t_w, a recent mean of seconds per micro-batch, by worker
    shares:            n_w, micro-batches of an allreduce step that a worker computes, by worker; their sum is M
    n_micro:           M, micro-batches of a global batch
    exchange_s:        of an allreduce step, what follows the last micro-batch
    serve_s:           t_ps, what a micro-batch costs a worker in gba beside computing: lease, pull, push
    dropped_share:     of the pushes in gba, those that staleness drops; measured, or from `expected_drops`
    sync_share:        t_w in an allreduce step, as a share of t_w: below 1 where larger batches are computed there
    draws:             float [workers, n], recent times of allreduce steps, each a mean over n_w micro-batches, in
                       seconds per micro-batch, inf where there is none; None: always t_w
    achieved:          micro-batches/s that the job makes in the mode it is in; None: not measured yet
    at_s:              seconds of training until now, in all modes together
    waits:             what recent steps waited for, in allreduce; None: not known
    stopped:           share of the time that each worker is stopped, as of `short_steps.Stopped`: part of t_w, and not
                       of draws. (): none is
    steps:             global steps for which one measurement stands
    awaited:           workers that were lost lately and may still be replaced, in gba
    """

    seconds_per_micro: tuple[float, ...]
    shares: tuple[int, ...]
    n_micro: int
    exchange_s: float
    serve_s: float
    dropped_share: float = 0.0
    sync_share: float = 1.0
    draws: np.ndarray | None = field(default=None, compare=False)
    achieved: float | None = None
    at_s: float = 0.0
    waits: StepWaits | None = None
    stopped: tuple[float, ...] = ()
    steps: float = 1.0
    awaited: int = 0

    def __post_init__(self) -> None:
        if not self.seconds_per_micro or not all(0 < t < math.inf for t in self.seconds_per_micro):
            raise BadInput(f"seconds_per_micro must be positive, one per worker, got {self.seconds_per_micro}")
        if len(self.shares) != len(self.seconds_per_micro):
            raise BadInput(f"{len(self.shares)} shares for {len(self.seconds_per_micro)} workers: give one each")
        if self.n_micro < 1 or min(self.shares) < 0 or sum(self.shares) != self.n_micro:
            raise BadInput(f"shares must add up to n_micro = {self.n_micro} (at least 1), got {self.shares}")
        if not 0 <= self.exchange_s < math.inf or not 0 <= self.serve_s < math.inf:
            raise BadInput(f"exchange_s and serve_s must not be negative, got {self.exchange_s} and {self.serve_s}")
        if not 0 <= self.dropped_share <= 1:
            raise BadInput(f"dropped_share must be within 0 and 1, got {self.dropped_share}")
        if not 0 < self.sync_share < math.inf:
            raise BadInput(f"sync_share must be positive, got {self.sync_share}")
        if self.stopped and (len(self.stopped) != len(self.shares) or not all(0 <= p < 1 for p in self.stopped)):
            raise BadInput(f"stopped must be shares of the time, 0 to below 1, one per worker, got {self.stopped}")
        if self.draws is not None and (len(self.draws) != len(self.shares) or (self.draws.min(axis=1) == np.inf).any()):
            raise BadInput(f"draws must be times of each of the {len(self.shares)} workers, got {self.draws}")
        if self.achieved is not None and not 0 < self.achieved < math.inf:
            raise BadInput(f"achieved must be positive, or None while it is not known, got {self.achieved}")


def predicted(rates: Rates) -> tuple[float, float]:
    """Micro-batches/s in (allreduce, gba).

    allreduce: M / (sync_share E[max_w(n_w t_w)] + t_exchange): all wait for the slowest; t_w: any of a worker's times;
               of that, the share of the time in which the worker that is stopped for longest runs
    gba:       sum_w 1 / (t_w + t_ps), less what staleness drops: no worker waits; t_w: the mean
    """
    draws = np.asarray(rates.seconds_per_micro)[:, None] if rates.draws is None else rates.draws
    n_w = np.asarray(rates.shares)
    slowest_s = expected_maximum(draws[n_w > 0] * n_w[n_w > 0, None])
    allreduce = rates.n_micro / (rates.sync_share * slowest_s + rates.exchange_s)
    runs = 1 - max(rates.stopped, default=0.0)
    return allreduce * runs, sum(_push_rates(rates)) * (1 - rates.dropped_share)


def expected_maximum(draws: np.ndarray) -> float:
    """Mean of the largest of one draw from each of several samples, all draws independent and equally likely; exact.

    draws: float [samples, n], inf where a sample has fewer values; each has one or more. E = sum_i v_i (P(v_i) -
    P(v_(i-1))) over all values v in order, where P(x) = prod_w F_w(x), and F_w(x) is the share of sample w that is not
    above x.
    """
    in_order = np.sort(draws, axis=1)
    least = float(in_order[:, 0].max())  # below it P is 0
    n_below = (in_order <= least).sum(axis=1)
    log_p = float(np.log(n_below / (in_order < np.inf).sum(axis=1)).sum())
    is_above = (in_order > least) & (in_order < np.inf)
    ranks = np.maximum(1, np.arange(in_order.shape[1]))
    gains = np.broadcast_to(np.log((ranks + 1) / ranks), in_order.shape)[is_above]  # of F_w, where it passes the value
    above = in_order[is_above]
    order = np.argsort(above, kind="stable")
    p = np.exp(log_p + np.concatenate(([0.0], np.cumsum(gains[order]))))
    return float(least * p[0] + above[order] @ np.diff(p))


def expected_drops(rates: Rates, tolerance: int) -> float:
    """Share of the pushes (0 to 1) that a staleness threshold of `tolerance` steps would drop in gba.

    A step is M pushes, dropped ones included, so while a worker is at one micro-batch about
    (t_w + t_ps) * sum_v 1/(t_v + t_ps) / M steps pass. What it pushes is dropped when that exceeds the tolerance.
    On the safe side by up to one step: a push of 4.5 steps is often only 4 steps stale.
    """
    pushes = _push_rates(rates)
    steps_per_s = sum(pushes) / rates.n_micro
    return sum(rate for rate in pushes if steps_per_s / rate > tolerance) / sum(pushes)


def expected_old_values(rates: Rates, tolerance: int) -> float:
    """Share of the pushes (0 to 1) computed with dense values more than `tolerance` steps old, in gba."""
    by_age = expected_ages([t + rates.serve_s for t in rates.seconds_per_micro], rates.n_micro)
    return sum(share for age, share in by_age.items() if age > tolerance) / sum(by_age.values())


def _push_rates(rates: Rates) -> list[float]:
    """Pushes/s in gba, by worker."""
    return [1 / (t + rates.serve_s) for t in rates.seconds_per_micro]
