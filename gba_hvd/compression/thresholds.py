"""Which elements of a tensor are sent: those at or above a threshold, and when the threshold is found again.

Top-k finds it at every step. DCT (arXiv 2010.08899) keeps it for `refresh_every` steps; meanwhile the share that is
sent follows the scale of the gradients. It is recorded, and when it has left keep / drift to keep * drift the threshold
is found again before its time.
"""

from __future__ import annotations

import math

import numpy as np

from gba_hvd.compression import kernels
from gba_hvd.compression.spec import Spec

_BETWEEN_EARLY = 4  # steps at least: finding a threshold costs several passes


class Thresholds:
    """One worker's thresholds, by tensor. density: the share of each tensor's elements that was sent last."""

    def __init__(self, spec: Spec, n_tensors: int) -> None:
        self._spec = spec
        self._least, self._aim = [0.0] * n_tensors, [spec.keep] * n_tensors
        self._age = [-1] * n_tensors  # steps since it was found; -1: never
        self.density = [0.0] * n_tensors
        self.n_found = 0

    def is_due(self, tensor: int) -> bool:
        """Whether the threshold has to be found before the next selection."""
        spec, age = self._spec, self._age[tensor]
        if spec.keep == 1.0:
            return False
        if not math.isfinite(self._least[tensor]):  # found among values that were none: nothing would ever pass it
            return True
        if age < 0 or spec.selector == "topk" or age >= spec.refresh_every:
            return True
        aim = self._aim[tensor]
        has_drifted = not aim / spec.drift <= self.density[tensor] <= aim * spec.drift
        return has_drifted and age >= _BETWEEN_EARLY

    def find(self, tensor: int, values: np.ndarray) -> None:
        """Make it what lets through the share `keep` of these, the largest; one of them at least."""
        kept = max(1, int(self._spec.keep * len(values)))
        self._least[tensor] = kth_largest(values, kept)
        self._age[tensor], self._aim[tensor] = 0, kept / len(values)
        self.n_found += 1

    def least(self, tensor: int) -> float:
        return self._least[tensor]

    def sent(self, tensor: int, n: int, of: int) -> None:
        """So many of its elements were selected."""
        self.density[tensor] = n / of
        self._age[tensor] = max(0, self._age[tensor]) + 1


def kth_largest(values: np.ndarray, k: int) -> float:
    """The k-th largest |value|, exactly. float32 or float64 [n], 1 <= k <= n."""
    if values.dtype == np.float32:
        return float(kernels.kth_largest(values, k))
    return float(np.partition(np.abs(values), len(values) - k)[len(values) - k])
