"""The momentum of `torch.optim.SGD`, for the rules that take it over: its hyper-parameters by element, and its buffer.

Decided here: which settings of the optimizer such a rule can take over. Not decided: what becomes of the momentum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gba_hvd.update_rules.rule import DenseStart

SGD = "torch.optim.sgd:SGD"


@dataclass(frozen=True)
class Sgd:
    """Hyper-parameters of each element: float32 [n], or one number where all groups have the same.

    groups: int [n], optimizer group of each element
    """

    momentum: np.ndarray | np.float32
    weight_decay: np.ndarray | np.float32
    groups: np.ndarray

    @classmethod
    def of(cls, spec: Mapping[str, Any], groups: np.ndarray) -> Sgd:
        """spec: as of `torch_optimizers.spec_of`."""
        settings = [[g.get(name, 0.0) for g in spec["groups"]] for name in ("momentum", "weight_decay")]
        return cls(_by_element(settings[0], groups), _by_element(settings[1], groups), groups)

    def lr(self, lrs: Sequence[float]) -> np.ndarray | np.float32:
        return _by_element(lrs, self.groups)

    def decayed(self, gradient: np.ndarray, values: np.ndarray, share: float = 1.0) -> np.ndarray:
        """The gradient with (a share of) the weight decay's, as torch adds it."""
        if not np.any(self.weight_decay):
            return gradient
        decayed: np.ndarray = gradient + np.float32(share) * self.weight_decay * values
        return decayed


def why_not(rule: str, spec: Mapping[str, Any], takes_weight_decay: bool = True) -> str:
    """Why a rule that takes over momentum cannot be used with this optimizer; empty when it can."""
    fits = "torch.optim.SGD(..., momentum=0.9)"
    name = str(spec["class"]).rpartition(":")[2]
    if spec["class"] != SGD:
        return f"{rule} takes over the momentum of {fits}; {name} has another one, or none"
    for number, group in enumerate(spec["groups"]):
        if not group.get("momentum"):
            return f"{rule} takes over the optimizer's momentum, and group {number} of SGD has none: give it {fits}"
        for setting in ("dampening", "nesterov", "maximize"):
            if group.get(setting):
                return f"{rule} has a look-ahead of its own and knows no {setting}: leave it out of SGD, as in {fits}"
        if group.get("weight_decay") and not takes_weight_decay:
            return f"{rule} has workers make the momentum, without weight decay: leave it out, as in {fits}"
    return ""


def taken_over(optimizer: Mapping[str, Any], dense: DenseStart) -> tuple[Sgd, np.ndarray]:
    """The hyper-parameters of each element, and the momentum there is, float32 [n]."""
    return Sgd.of(optimizer, dense.group_of_elements()), buffer_of(dense.state, dense.sizes)


def buffer_of(state: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> np.ndarray:
    """float32 [n]: the momentum buffers in an optimizer's state, by tensor; zeros where there is none yet."""
    parts = [
        np.zeros(size, np.float32) if entries.get("momentum_buffer") is None
        else torch.as_tensor(entries["momentum_buffer"]).detach().cpu().to(torch.float32).numpy().ravel()
        for entries, size in zip(state, sizes, strict=True)
    ]  # fmt: skip
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _by_element(values: Sequence[float], groups: np.ndarray) -> np.ndarray | np.float32:
    if len(set(values)) == 1:
        return np.float32(values[0])
    found: np.ndarray = np.array(values, np.float32)[groups]
    return found
