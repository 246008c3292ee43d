"""How replicas of the dense parameters become one again: the update formulas of ShadowSync, and their settings.

Only arithmetic on flat float32 tensors [n], in place. Who holds a replica, when it takes part in a round and who
carries the numbers is decided elsewhere (`replica`, `sync_thread`, `central_copy`). Formulas: ShadowSync, arXiv
2003.03477; w_i is a replica, w_ps the central copy, g the mean of all replicas:

    easgd   w_ps <- (1-a) w_ps + a w_i          then   w_i <- (1-a) w_i + a w_ps
    ma      g = mean of copies                  then   w_i <- (1-a) w_i + a g
    bmuf    w_glob <- w_glob + eta (g - w_glob) then   w_i <- (1-a) w_i + a w_glob

A worker keeps stepping while a round is in flight, so w_i is not the copy it was when the mixing comes. The formulas
as they stand weigh those newest updates with (1-a). The difference rule, w_i <- w_i + a (target - copy), applies them
in full, and with a mean as target it leaves the sum of all replicas as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gba_hvd.errors import BadInput, refuse_unknown

ALGORITHMS = ("easgd", "ma", "bmuf", "none")
MIXING = ("interpolate", "difference")


@dataclass(frozen=True)
class Averaging:
    """How the replicas of a job are synchronised.

    algorithm:  easgd, ma, bmuf; or none: replicas meet at the end of an epoch only
    elasticity: a, the share of the target that a replica takes on in a round; above 0, at most 1
    block_rate: eta of bmuf: how far the global copy goes towards the mean; above 0, at most 2
    mixing:     "interpolate": the formulas; "difference": updates made during a round are applied in full
    every:      local steps between rounds that training waits for; None: rounds in the background, never waited for
    pause_s:    least time between two rounds in the background

    Raises BadInput.
    """

    algorithm: str = "easgd"
    elasticity: float = 0.5
    block_rate: float = 0.9
    mixing: str = "interpolate"
    every: int | None = None
    pause_s: float = 0.02

    def __post_init__(self) -> None:
        refuse_unknown("sync", self.algorithm, ALGORITHMS)
        refuse_unknown("mixing", self.mixing, MIXING)
        if not _is_number(self.elasticity) or not 0 < self.elasticity <= 1:
            raise BadInput(
                f"elasticity must be above 0 and at most 1 (1: take the target whole), got {self.elasticity}"
            )
        if not _is_number(self.block_rate) or not 0 < self.block_rate <= 2:
            raise BadInput(f"block_rate must be above 0 and at most 2, got {self.block_rate}")
        if self.every is not None and (not isinstance(self.every, int) or self.every is True or self.every < 1):
            raise BadInput(f"every must be a whole number of local steps, 1 or more, got {self.every!r}")
        if not _is_number(self.pause_s) or not 0 <= self.pause_s < 3600:
            raise BadInput(f"pause_s must be from 0 to 3600 seconds, got {self.pause_s}")

    @property
    def is_collective(self) -> bool:
        """Whether all workers have to take part in a round together."""
        return self.algorithm in ("ma", "bmuf")


def interpolate_(values: Tensor, target: Tensor, share: float) -> Tensor:
    """values <- (1 - share) values + share target, in place. Exact where both are equal, and for share = 1."""
    return values.lerp_(target, share)


def add_difference_(values: Tensor, copy: Tensor, target: Tensor, share: float) -> Tensor:
    """values <- values + share (target - copy), in place: updates to `values` since `copy` are kept in full."""
    return values.add_(target - copy, alpha=share)


def bmuf_update_(global_copy: Tensor, mean: Tensor, block_rate: float) -> Tensor:
    """w_glob <- w_glob + eta (mean - w_glob), in place."""
    return global_copy.lerp_(mean, block_rate)


class MeanOfReplicas:
    """The mean of replicas that are submitted one after the other, and of their optimizers' states.

    Values and floating tensors of the state are averaged in float64; step counters and integers become the
    largest; for all other entries the first counts. Not thread-safe.
    """

    def __init__(self, n: int, n_tensors: int) -> None:
        self.n_replicas = 0
        self._sum = torch.zeros(n, dtype=torch.float64)
        self._states: list[dict[str, Any]] = [{} for _ in range(n_tensors)]  # sums, or the largest
        self._counts: list[dict[str, tuple[int, Any]]] = [{} for _ in range(n_tensors)]  # how many, and the dtype

    def add(self, values: Tensor, state: Sequence[Mapping[str, Any]]) -> None:
        """values: float32 [n]; state: of each tensor, as in `optimizer.state[p]`."""
        assert len(values) == len(self._sum) and len(state) == len(self._states)
        self.n_replicas += 1
        self._sum += values
        for found, counts, entries in zip(self._states, self._counts, state, strict=True):
            for key, value in entries.items():
                found[key] = _joined(key, found.get(key), value)
                counts[key] = counts.get(key, (0, None))[0] + 1, getattr(value, "dtype", None)

    def mean(self) -> tuple[Tensor, list[dict[str, Any]]]:
        """(values float32 [n], state of each tensor). At least one replica must be in."""
        assert self.n_replicas
        states = [
            {key: _divided(key, value, *counts[key]) for key, value in found.items()}
            for found, counts in zip(self._states, self._counts, strict=True)
        ]
        return (self._sum / self.n_replicas).float(), states


def _is_averaged(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and key != "step"


def _joined(key: str, before: Any, value: Any) -> Any:
    if _is_averaged(key, value):
        wide = value.to(torch.float64)
        return wide if before is None else before + wide
    if before is None:
        return value
    if isinstance(value, Tensor):
        return torch.maximum(before, value)
    if isinstance(value, int | float):
        return max(before, value)
    return before


def _divided(key: str, value: Any, n: int, dtype: Any) -> Any:
    return (value / n).to(dtype) if _is_averaged(key, value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
