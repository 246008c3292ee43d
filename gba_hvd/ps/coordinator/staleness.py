"""How much a gradient still counts when the model has moved on since its micro-batch was due.

Staleness is in global steps: the steps applied so far, less the token of the micro-batch. A micro-batch that is ahead
of its step (a negative staleness) counts as fresh. Which pushes make a step is decided in `ledger`; the weight enters
the gradient where the step is applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gba_hvd.errors import BadInput
from recovery.registry import Registry


class Weighting(Protocol):
    """f(token, k) of GBA (arXiv 2205.11048), as a function of k - token.

    A class that a distribution registers in `gba_hvd.staleness_weightings` is constructed with the tolerance, an int of
    0 or more, in steps; it raises BadInput where it cannot use that. It keeps no state: every call gives the same.
    """

    def weight(self, staleness: int) -> float:
        """From 0 (dropped) to 1 (counts in full), never rising with staleness."""


def _check(tolerance: int) -> None:
    if not isinstance(tolerance, int) or isinstance(tolerance, bool) or tolerance < 0:
        raise BadInput(f"tolerance (the paper's iota) must be a number of steps, 0 or more, got {tolerance!r}")


@dataclass(frozen=True)
class Threshold:
    """1 up to `tolerance` steps (iota in the paper), 0 beyond: GBA's rule."""

    tolerance: int = 4

    def __post_init__(self) -> None:
        _check(self.tolerance)

    def weight(self, staleness: int) -> float:
        return 1.0 if staleness <= self.tolerance else 0.0


@dataclass(frozen=True)
class LinearDecay:
    """1 - s / (tolerance + 1): falls evenly and is 0 for the same staleness as `Threshold`."""

    tolerance: int = 4

    def __post_init__(self) -> None:
        _check(self.tolerance)

    def weight(self, staleness: int) -> float:
        return max(0.0, 1.0 - max(0, staleness) / (self.tolerance + 1))


@dataclass(frozen=True)
class InverseDecay:
    """1 / (1 + s): nothing is dropped."""

    def weight(self, staleness: int) -> float:
        return 1.0 / (1 + max(0, staleness))


@dataclass(frozen=True)
class Unweighted:
    """1, however stale."""

    def weight(self, staleness: int) -> float:
        return 1.0


WEIGHTINGS: Registry[Weighting] = Registry(
    "gba_hvd.staleness_weightings",
    "staleness weighting",
    Weighting,
    {
        "threshold": Threshold,
        "linear": LinearDecay,
        "inverse": lambda tolerance: InverseDecay(),
        "none": lambda tolerance: Unweighted(),
        # By distance, not by steps: the rule `gap_aware` damps gradients where steps are applied.
        "gap_aware": lambda tolerance: Unweighted(),
    },
    arguments=("tolerance",),
)


def weighting(name: str, tolerance: int = 4) -> Weighting:
    """The weighting of that name, one of `WEIGHTINGS`; `tolerance` in steps, for those that have one.

    Raises BadInput for another name, and for a tolerance that is not an integer from 0.
    """
    _check(tolerance)
    return WEIGHTINGS.get(name)(tolerance)
