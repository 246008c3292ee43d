"""Row gradients that stay in a device's memory until they are applied, or leave the worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gba_hvd.embedding.row_gradients import RowGrad


@dataclass(frozen=True)
class Found:
    """What a device has read of distinct keys.

    keys: int64 [d]; records: float32 [d, record]
    """

    keys: Tensor
    records: Tensor


@dataclass(frozen=True)
class DeviceRowGrad:
    """As `RowGrad`, of tensors. keys: int64 [n], distinct, ascending; values: float32 [n, dim]; accesses: int32 [n]

    found: the records of these keys, if they are known
    """

    keys: Tensor
    values: Tensor
    accesses: Tensor | None = None
    found: Found | None = None

    def to_host(self) -> RowGrad:
        """A copy. Waits for the device."""
        accesses = None if self.accesses is None else self.accesses.cpu().numpy().astype(np.uint32)
        return RowGrad(self.keys.cpu().numpy(), self.values.cpu().numpy(), accesses)

    def non_finite(self) -> int | None:
        """The key of a row whose gradient is NaN or infinite. Waits for the device."""
        if math.isfinite(float(self.values.sum())):
            return None
        bad = (~torch.isfinite(self.values)).any(1).nonzero()
        return int(self.keys[bad[0, 0]]) if len(bad) else None

    def squares(self) -> float:
        """The sum of the squares of all values, in float64. Waits for the device."""
        return float(torch.linalg.vector_norm(self.values, dtype=torch.float64)) ** 2 if len(self.keys) else 0.0


def from_sparse(grad: Tensor, keys: Tensor, counts_accesses: bool) -> DeviceRowGrad:
    """Waits for the device.

    grad: sparse [rows, dim], of all keys that were looked up; keys: int64 [n], these; counts_accesses: of each key
    """
    grad, accesses = grad.coalesce(), None
    distinct = grad.indices()[0]
    if counts_accesses:
        ordered = keys.sort().values
        first, end = (torch.searchsorted(ordered, distinct, right=right) for right in (False, True))
        accesses = (end - first).to(torch.int32)
    return DeviceRowGrad(distinct, grad.values(), accesses)


def on_host(grad: RowGrad | DeviceRowGrad) -> RowGrad:
    """The gradient itself, or a copy of one that a device has."""
    return grad.to_host() if isinstance(grad, DeviceRowGrad) else grad


def merge(parts: Sequence[tuple[DeviceRowGrad, float]]) -> DeviceRowGrad:
    """As `row_gradients.merge`: the weighted sum, added up in the order of the parts."""
    if len(parts) == 1:
        grad, weight = parts[0]
        return grad if weight == 1.0 else replace(grad, values=grad.values * weight)
    keys, number = torch.unique(torch.cat([part.keys for part, _ in parts]), return_inverse=True)
    first = parts[0][0].values
    values, at = first.new_zeros(len(keys), first.shape[1]), 0
    accesses = None
    if all(part.accesses is not None for part, _ in parts):
        accesses = torch.zeros(len(keys), dtype=torch.int32, device=keys.device)
    for part, weight in parts:
        rows = number[at : at + len(part.keys)]
        values.index_add_(0, rows, part.values, alpha=weight)
        if accesses is not None and part.accesses is not None:
            accesses.index_add_(0, rows, part.accesses)
        at += len(part.keys)
    return DeviceRowGrad(keys, values, accesses)
