"""Clipping the gradient of a global step by its norm: the formulas, and nothing that communicates.

The gradient of a step is what the optimizers are given: g for the dense parameters and r for the rows of all tables,
each divided as `row_average` says. A step's factors are numbers from 0 to 1 that g and r are multiplied by:

    max_norm alone          f = min(1, max_norm / (sqrt(|g|^2 + |r|^2) + 1e-6)), for g and for r
    max_row_norm given      f = min(1, max_row_norm / (|r| + 1e-6)) for r alone, and
                            f = min(1, max_norm / (|g| + 1e-6)) for g alone; 1 where there is no max_norm

The norm is the 2-norm over all elements, and 1e-6 stands there as in `torch.nn.utils.clip_grad_norm_`: `max_norm` alone
equals that function over dense parameters and tables, called once for the gradient of the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from gba_hvd.errors import BadInput

_EPS = 1e-6


@dataclass(frozen=True)
class Clip:
    """The limits; None: no limit of this kind. Raises BadInput for one that is not a positive, finite number."""

    max_norm: float | None = None
    max_row_norm: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and math.isfinite(value) and value > 0):
                raise BadInput(f"{name} must be a positive, finite number, or None for no clipping, got {value!r}")

    @property
    def is_none(self) -> bool:
        return self.max_norm is None and self.max_row_norm is None

    def __str__(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in vars(self).items() if value is not None)

    def factors(self, dense_squares: float, row_squares: float) -> Factors:
        """What a step's gradients are multiplied by. dense_squares: |g|^2, row_squares: |r|^2, over all servers.

        A norm that is not finite clips nothing: such a gradient is refused elsewhere, by name.
        """
        norm = math.sqrt(dense_squares + row_squares)
        if not math.isfinite(norm):
            return Factors(1.0, 1.0, norm)
        if self.max_row_norm is None:
            factor = _limited(norm, self.max_norm)
            return Factors(factor, factor, norm)
        dense, rows = math.sqrt(dense_squares), math.sqrt(row_squares)
        return Factors(_limited(dense, self.max_norm), _limited(rows, self.max_row_norm), norm)


@dataclass(frozen=True)
class Factors:
    """Factors of one step. norm: of its gradient, dense and rows together, before clipping."""

    dense: float = 1.0
    rows: float = 1.0
    norm: float | None = None


def squares(values: Iterable[np.ndarray]) -> float:
    """The sum of the squares of all numbers in these arrays, in float64. Infinite or NaN where one of them is."""
    norms = (torch.linalg.vector_norm(torch.from_numpy(v), dtype=torch.float64) for v in values if v.size)
    return float(sum(float(norm) ** 2 for norm in norms))


def _limited(norm: float, limit: float | None) -> float:
    return 1.0 if limit is None else min(1.0, limit / (norm + _EPS))
