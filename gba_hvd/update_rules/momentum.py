"""The momentum of an optimizer, as the equations of stability take it.

    v <- m v + (1 - d) g        x <- x - lr v        d: dampening, as in `torch.optim.SGD`

The first moment of Adam and its kind is that with m = d = beta1, so the largest stable learning rate is 1 / (1 - beta1)
times that of plain momentum; the curvature that counts is that of the preconditioned loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Momentum:
    value: float = 0.0
    dampening: float = 0.0

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Momentum:
        """The largest of the groups' momenta, or first betas. spec: as of `torch_optimizers.spec_of`."""
        return max((_of_group(group) for group in spec["groups"]), key=lambda one: one.value, default=cls())


def first_beta(group: Mapping[str, Any]) -> float:
    """Of a group of an optimizer, as `torch_optimizers.spec_of` writes it; 0 where it has none."""
    betas = group.get("betas") or ()
    betas = betas["tuple"] if isinstance(betas, Mapping) else betas
    return float(betas[0]) if betas else 0.0


def _of_group(group: Mapping[str, Any]) -> Momentum:
    if beta := first_beta(group):
        return Momentum(beta, beta)
    momentum = float(group.get("momentum") or 0.0)
    return Momentum(momentum, float(group.get("dampening") or 0.0) if momentum else 0.0)
