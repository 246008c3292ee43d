"""When a job should change between allreduce and gba: predicted rates, and a decision that says why.

`decide` is a function of where the job stands, what was measured and the options. It neither measures nor switches:
the engine passes `Rates`, stores the `Stance` between calls, and carries a switch out at a step boundary. A gain has
to be large enough, for long enough, and not too soon after the last switch, so that noise moves nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from gba_hvd.errors import BadInput
from gba_hvd.mode_names import known_mode
from gba_hvd.update_rules.delay_model import expected_ages


@dataclass(frozen=True)
class Options:
    """When a switch pays.

    enter_gain: to gba when it is predicted at least this many times as fast as allreduce
    leave_gain: back to allreduce when gba is predicted less than this many times as fast
    patience:   global steps for which the prediction must hold
    min_stay:   global steps in a mode before it is left, the first mode of the job included
    warm_up_steps: global steps of the job before gba is entered: early steps suffer most from old values
    """

    enter_gain: float = 1.05
    leave_gain: float = 1.0
    patience: int = 5
    min_stay: int = 20
    warm_up_steps: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.leave_gain <= self.enter_gain < math.inf:
            raise BadInput(
                "leave_gain must be positive and not above enter_gain (or the job would switch back and forth), "
                f"got leave_gain={self.leave_gain} and enter_gain={self.enter_gain}"
            )
        if self.patience < 1 or self.min_stay < 0:
            raise BadInput(
                f"patience must be at least 1 step and min_stay not negative, got {self.patience} and {self.min_stay}"
            )
        if self.warm_up_steps < 0:
            raise BadInput(f"warm_up_steps must not be negative, got {self.warm_up_steps}")


@dataclass(frozen=True)
class Rates:
    """What is known of the job's speed.

    seconds_per_micro: t_w, a recent median of seconds per micro-batch, by worker
    shares:            n_w, micro-batches of an allreduce step that a worker computes, by worker; their sum is M
    n_micro:           M, micro-batches of a global batch
    exchange_s:        of an allreduce step, what follows the last micro-batch
    serve_s:           t_ps, what a micro-batch costs a worker in gba beside computing: lease, pull, push
    dropped_share:     of the pushes in gba, those that staleness drops; measured, or from `expected_drops`
    sync_share:        t_w in an allreduce step, as a share of t_w: below 1 where larger batches are computed there
    """

    seconds_per_micro: tuple[float, ...]
    shares: tuple[int, ...]
    n_micro: int
    exchange_s: float
    serve_s: float
    dropped_share: float = 0.0
    sync_share: float = 1.0

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


def predicted(rates: Rates) -> tuple[float, float]:
    """Micro-batches/s in (allreduce, gba).

    allreduce: M / (sync_share max_w(n_w t_w) + t_exchange): all wait for the slowest.
    gba:       sum_w 1 / (t_w + t_ps), less what staleness drops: no worker waits.
    """
    slowest_s = max(n * t for n, t in zip(rates.shares, rates.seconds_per_micro, strict=True))
    return rates.n_micro / (rates.sync_share * slowest_s + rates.exchange_s), sum(_push_rates(rates)) * (
        1 - rates.dropped_share
    )


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


@dataclass(frozen=True)
class Decision:
    """The mode to be in from now on, and why. `gain`: how many times as fast as allreduce gba is predicted to be.

    kind: of the reason: "switch"; or why it stays: "gain" (the other mode is not predicted fast enough), "patience",
    "min_stay" or "warm_up" (it is, but not for long enough, or too soon)
    """

    mode: str
    reason: str
    gain: float
    kind: str

    @property
    def is_switch(self) -> bool:
        return self.kind == "switch"


@dataclass(frozen=True)
class Stance:
    """Where the job stands between decisions.

    mode:       "allreduce" or "gba"
    since_step: the step at which it was entered
    in_favour:  decisions in a row, the last one included, that would rather be in the other mode
    """

    mode: str
    since_step: int
    in_favour: int = 0


def decide(stance: Stance, step: int, rates: Rates, options: Options) -> tuple[Decision, Stance]:
    """Stay or switch, at global step `step`, and the stance for the next decision. To be called once per global step.

    When the decision's mode is not the stance's, switch, and measure again, into a new `RecentRates`: times taken in
    the other mode do not count. Raises BadInput when the job is in a mode that is never entered automatically.
    """
    known_mode(stance.mode, ("allreduce", "gba"))
    allreduce, gba = predicted(rates)
    gain, other = gba / allreduce, "gba" if stance.mode == "allreduce" else "allreduce"
    favours_other = gain >= options.enter_gain if other == "gba" else gain < options.leave_gain
    now = replace(stance, in_favour=stance.in_favour + 1 if favours_other else 0)
    stayed = step - stance.since_step

    if not favours_other:
        limit = f"enter at {options.enter_gain:.2f}x" if other == "gba" else f"leave below {options.leave_gain:.2f}x"
        text = f"stay in {stance.mode}: gba predicted {gain:.2f}x as fast, {limit}"
        return Decision(stance.mode, text, gain, "gain"), now
    finding = f"{_slowest(rates)}, {_prediction(other, gain, rates, options)}"
    if now.in_favour < options.patience:
        wait = f"for {now.in_favour} of {options.patience} steps"
        return Decision(stance.mode, f"stay in {stance.mode}: {finding} {wait}", gain, "patience"), now
    if stayed < options.min_stay:
        wait = f"but only {stayed} of {options.min_stay} steps in {stance.mode}"
        return Decision(stance.mode, f"stay in {stance.mode}: {finding}, {wait}", gain, "min_stay"), now
    if other == "gba" and step < options.warm_up_steps:
        wait = f"but the warm-up takes {options.warm_up_steps} steps, this is {step}"
        return Decision(stance.mode, f"stay in {stance.mode}: {finding}, {wait}", gain, "warm_up"), now
    return Decision(other, f"to {other}: {finding} for {now.in_favour} steps", gain, "switch"), Stance(other, step)


def _slowest(rates: Rates) -> str:
    times = rates.seconds_per_micro
    worker = max(range(len(times)), key=times.__getitem__)
    if len(times) == 2:  # their median is the mean of both: under 2x, however slow the one is
        return f"worker {worker} takes {times[worker] / min(times):.1f}x the time of worker {1 - worker}"
    return f"worker {worker} takes {times[worker] / median(times):.1f}x the median"


def _prediction(other: str, gain: float, rates: Rates, options: Options) -> str:
    """With the limit that it passed: gba is left while it is still somewhat faster, for a small gain costs quality."""
    drops = f" with {rates.dropped_share:.1%} dropped as stale" if rates.dropped_share else ""
    if other == "gba":
        return f"predicted {gain:.2f}x faster{drops}"
    return f"gba predicted {gain:.2f}x as fast{drops}, below the {options.leave_gain:.2f}x it is kept for,"


class RecentRates:
    """The last `n` seconds-per-micro-batch of each worker, and their medians: one odd micro-batch moves nothing."""

    def __init__(self, n: int = 9) -> None:
        if n < 1:
            raise BadInput(f"n must be at least 1 micro-batch, got {n}")
        self._n = n
        self._seconds: dict[int, deque[float]] = {}

    def add(self, worker: int, seconds: float) -> None:
        self._seconds.setdefault(worker, deque(maxlen=self._n)).append(seconds)

    def median(self, worker: int) -> float | None:
        """Seconds per micro-batch; None when nothing was measured yet."""
        seconds = self._seconds.get(worker)
        return median(seconds) if seconds else None

    def medians(self, workers: Iterable[int]) -> tuple[float, ...] | None:
        """One per worker, for `Rates.seconds_per_micro`; None until every one of them has been measured."""
        found = [self.median(worker) for worker in workers]
        known = tuple(seconds for seconds in found if seconds is not None)
        return known if len(known) == len(found) else None
