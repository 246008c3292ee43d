"""The row optimizers of `embedding.row_optimizers`, on records that a device has read: the same formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from gba_hvd.embedding.row_optimizers import SGD, Adagrad, Adam, RowAdagrad, RowOptimizer

Update = Callable[[RowOptimizer, Tensor, Tensor, Tensor, float, int], None]


def can_update(optimizer: RowOptimizer) -> bool:
    """Whether a device has its formula; that of another one, or of one that derives from it, is the CPU's alone."""
    return type(optimizer) in _RULES


def update_(optimizer: RowOptimizer, records: Tensor, grad: Tensor, scale: float, lr: float, step: int) -> None:
    """As `RowOptimizer.update_`, of records float32 [n, record] and their gradient [n, dim]. It counts nothing."""
    dim = grad.shape[1]
    weights, slots = records[:, :dim], records[:, dim:-1]
    gradient = grad * scale
    decay = float(getattr(optimizer, "weight_decay", 0.0))
    if decay:
        gradient = gradient.add(weights, alpha=decay)
    _RULES[type(optimizer)](optimizer, weights, slots, gradient, lr, step)


def _sgd(optimizer: RowOptimizer, weights: Tensor, slots: Tensor, gradient: Tensor, lr: float, step: int) -> None:
    weights.sub_(gradient, alpha=lr)


def _adagrad(optimizer: RowOptimizer, weights: Tensor, slots: Tensor, gradient: Tensor, lr: float, step: int) -> None:
    assert isinstance(optimizer, Adagrad)
    slots.addcmul_(gradient, gradient)
    weights.addcdiv_(gradient, slots.sqrt().add_(optimizer.eps), value=-lr)


def _row_adagrad(
    optimizer: RowOptimizer, weights: Tensor, slots: Tensor, gradient: Tensor, lr: float, step: int
) -> None:
    assert isinstance(optimizer, RowAdagrad)
    slots.add_(gradient.square().mean(1, keepdim=True))
    weights.addcdiv_(gradient, slots.sqrt().add_(optimizer.eps), value=-lr)


def _adam(optimizer: RowOptimizer, weights: Tensor, slots: Tensor, gradient: Tensor, lr: float, step: int) -> None:
    assert isinstance(optimizer, Adam)
    (beta1, beta2), dim = optimizer.betas, weights.shape[1]
    first, second = slots[:, :dim], slots[:, dim:]
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(optimizer.eps)
    weights.addcdiv_(first, root, value=-lr / (1 - beta1**step))


_RULES: Mapping[type, Update] = {SGD: _sgd, Adagrad: _adagrad, RowAdagrad: _row_adagrad, Adam: _adam}
