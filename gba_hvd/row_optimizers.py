"""Optimizers of embedding rows: one pass over the rows a step touched, in place in shard memory.

The same objects serve every mode. A row that a step does not touch does not change (Adam is lazy: its moments decay
only when its row is touched, as in `torch.optim.SparseAdam`). `weight_decay` is L2, on touched rows only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from gba_hvd import kernels
from gba_hvd.errors import BadInput
from gba_hvd.gradients import RowGrad
from gba_hvd.shard.layout import Group, Layout, SlotSpec


class RowOptimizer(Protocol):
    """Hyper-parameters of the rows' update, and the update itself."""

    slots: ClassVar[tuple[SlotSpec, ...]]

    @property
    def lr(self) -> float: ...

    def update_(
        self, flat: np.ndarray, layout: Layout, group: Group, grad: RowGrad, scale: float, lr: float, step: int
    ) -> None:
        """Apply scale * grad to the rows. `lr` is the scheduled learning rate, `step` counts from 1."""


@dataclass(frozen=True)
class _Rule:
    lr: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr >= 0 or not self.weight_decay >= 0:
            raise BadInput(
                f"{type(self).__name__}: lr and weight_decay must not be negative, "
                f"got {self.lr} and {self.weight_decay}"
            )

    def _arguments(
        self, flat: np.ndarray, layout: Layout, group: Group, grad: RowGrad, scale: float, lr: float, *own: float
    ) -> tuple[Any, ...]:
        """What a kernel takes: the same for all, then the rule's own numbers."""
        rows = (flat, flat.view(np.uint32), layout.places(grad.keys, group), grad.values)
        numbers = map(np.float32, (lr, self.weight_decay, *own))
        return (*rows, np.float32(scale), group.record, *numbers)


@dataclass(frozen=True)
class SGD(_Rule):
    """w -= lr * g"""

    slots: ClassVar[tuple[SlotSpec, ...]] = ()

    def update_(
        self, flat: np.ndarray, layout: Layout, group: Group, grad: RowGrad, scale: float, lr: float, step: int
    ) -> None:
        kernels.apply_sgd(*self._arguments(flat, layout, group, grad, scale, lr))


@dataclass(frozen=True)
class Adagrad(_Rule):
    """s += g^2; w -= lr * g / (sqrt(s) + eps), element-wise (`torch.optim.Adagrad`)."""

    eps: float = 1e-10
    slots: ClassVar[tuple[SlotSpec, ...]] = (SlotSpec("sum"),)

    def update_(
        self, flat: np.ndarray, layout: Layout, group: Group, grad: RowGrad, scale: float, lr: float, step: int
    ) -> None:
        kernels.apply_adagrad(*self._arguments(flat, layout, group, grad, scale, lr, self.eps))


@dataclass(frozen=True)
class RowAdagrad(_Rule):
    """Adagrad with one sum per row: s += mean(g^2) (row-wise Adagrad of FBGEMM and DLRM)."""

    eps: float = 1e-8
    slots: ClassVar[tuple[SlotSpec, ...]] = (SlotSpec("sum", per_row=True),)

    def update_(
        self, flat: np.ndarray, layout: Layout, group: Group, grad: RowGrad, scale: float, lr: float, step: int
    ) -> None:
        kernels.apply_row_adagrad(*self._arguments(flat, layout, group, grad, scale, lr, self.eps))


@dataclass(frozen=True)
class Adam(_Rule):
    """Lazy Adam: `torch.optim.Adam` on the touched rows; the bias correction counts the job's steps."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    slots: ClassVar[tuple[SlotSpec, ...]] = (SlotSpec("exp_avg"), SlotSpec("exp_avg_sq"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise BadInput(f"Adam: betas must be in [0, 1), got {self.betas}")

    def update_(
        self, flat: np.ndarray, layout: Layout, group: Group, grad: RowGrad, scale: float, lr: float, step: int
    ) -> None:
        beta1, beta2 = self.betas
        own = (self.eps, beta1, beta2, 1 - beta1**step, 1 - beta2**step)
        kernels.apply_adam(*self._arguments(flat, layout, group, grad, scale, lr, *own))
