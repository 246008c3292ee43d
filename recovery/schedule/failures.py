"""How often servers fail: estimated from few observations, and drawn for simulations.

Times between failures are gamma-distributed: shape 1 is the memoryless case, below 1 failures come in bursts. Nothing
here reads a clock; randomness comes in as `rng`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recovery.errors import BadInput
from recovery.units import duration, durations

_FEWEST_FOR_SHAPE = 8  # with fewer times the shape's standard error is about half of it or more
_Z90 = 1.6448536269514722  # 5 % of a normal distribution lie above


@dataclass(frozen=True)
class Gamma:
    """A gamma distribution of times between failures: its shape, and its mean in seconds."""

    shape: float
    mean_s: float

    def __post_init__(self) -> None:
        if not (0 < self.shape < math.inf and 0 < self.mean_s < math.inf):
            raise BadInput(f"shape and mean_s must be above 0, got {self.shape} and {self.mean_s}")


@dataclass(frozen=True)
class MeanTime:
    """Mean time between failures: an estimate, its 90 % interval, and where it comes from."""

    mean_s: float
    low_s: float
    high_s: float
    n_failures: int
    reason: str


def mean_time(observed_s: float, n_failures: int, prior_s: float) -> MeanTime:
    """Estimate from `n_failures` in `observed_s` seconds, the time since the last failure included.

    The prior counts as one failure in `prior_s`. So without a failure the estimate begins at
    the prior and grows with the time that passes well, and after many the prior no longer matters. The interval is
    that of memoryless failures (gamma posterior of the rate), approximately; bursts make it too narrow.
    """
    if observed_s < 0 or n_failures < 0 or not 0 < prior_s < math.inf:
        raise BadInput(
            f"times and counts must not be negative and the prior above 0, got observed_s={observed_s}, "
            f"n_failures={n_failures}, prior_s={prior_s}"
        )
    events, time_s = 1.0 + n_failures, prior_s + observed_s
    mean_s, low_s, high_s = (time_s / rate for rate in (events, _quantile(events, _Z90), _quantile(events, -_Z90)))
    reason = f"{duration(mean_s)} between failures, assumed: nothing was observed yet"
    if observed_s > 0:
        likely = f"(90 %: {durations(low_s, high_s)})"
        reason = f"{n_failures} failures in {duration(observed_s)}, {duration(prior_s)} assumed before"
        reason = f"{duration(mean_s)} between failures {likely}: {reason}"
    return MeanTime(mean_s, low_s, high_s, n_failures, reason)


def fit(times_s: Sequence[float], fewest: int = _FEWEST_FOR_SHAPE) -> Gamma | None:
    """The most likely gamma distribution of times between failures; shape 1 of fewer than `fewest`, None of none.

    log(shape) - digamma(shape) = log(mean) - mean(log), by Newton's method from Minka's approximation. The shape's
    standard error is about shape * sqrt(2 / n) for n times.
    """
    times = np.asarray(times_s, np.float64)
    if not np.all((times > 0) & np.isfinite(times)):
        raise BadInput(f"times between failures must be above 0, got {times[~((times > 0) & np.isfinite(times))][0]}")
    if len(times) == 0:
        return None
    mean_s = float(times.mean())
    gap = math.log(mean_s) - float(np.log(times).mean())
    if len(times) < fewest or gap < 1e-9:  # all alike: no finite shape would do
        return Gamma(1.0, mean_s)
    import torch  # (not to estimate a mean)

    shape = (3 - gap + math.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
    for _ in range(20):
        x = torch.tensor(shape, dtype=torch.float64)
        digamma, trigamma = float(torch.special.digamma(x)), float(torch.special.polygamma(1, x))
        step = (math.log(shape) - digamma - gap) / (1 / shape - trigamma)
        shape = max(shape - step, shape / 2)
        if abs(step) < 1e-10 * shape:
            break
    return Gamma(shape, mean_s)


def failure_times(law: Gamma, until_s: float, n_servers: int, rng: np.random.Generator) -> np.ndarray:
    """Failures of `n_servers` alike and independent servers in [0, until_s).

    Returns float64 [F, 2]: time in seconds (ascending), number of the server. The window is cut out of a longer
    operation: the first failure comes by the equilibrium law, so that until_s / mean_s of each are expected, exactly.
    """
    scale = law.mean_s / law.shape
    times = rng.random(n_servers) * rng.gamma(law.shape + 1, scale, n_servers)
    servers = np.arange(n_servers)
    found: list[np.ndarray] = []
    while True:
        servers, times = servers[times < until_s], times[times < until_s]
        if len(times) == 0:
            break
        found.append(np.column_stack([times, servers]))
        times = times + rng.gamma(law.shape, scale, len(times))
    trace = np.concatenate(found) if found else np.empty((0, 2))
    return trace[np.argsort(trace[:, 0], kind="stable")]


def _quantile(shape: float, z: float) -> float:
    """The quantile of a gamma distribution with scale 1, at the normal quantile z (Wilson and Hilferty)."""
    return shape * max(1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape)), 1e-3) ** 3
