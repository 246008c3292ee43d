"""Row gradients that stay in a device's memory until they are applied, or leave the worker."""

from __future__ import annotations

import functools
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


class DeviceRowGrad:
    """The gradient of some rows of a group, in a device's memory: `MergedRowGrad` or `SparseRowGrad`."""

    @property
    def merged(self) -> MergedRowGrad:
        """One gradient for each row. May wait for the device."""
        raise NotImplementedError

    @property
    def total(self) -> Tensor:
        """float32, a scalar: the sum of all values. NaN or infinite if one of them is."""
        numbers: Tensor = self.values  # type: ignore[attr-defined]
        return numbers.sum()

    def to_host(self) -> RowGrad:
        """A copy. Waits for the device."""
        one = self.merged
        accesses = None if one.accesses is None else one.accesses.cpu().numpy().astype(np.uint32)
        return RowGrad(one.keys.cpu().numpy(), one.values.cpu().numpy(), accesses)

    def non_finite(self) -> int | None:
        """The key of a row whose gradient is NaN or infinite. Waits for the device."""
        if math.isfinite(float(self.total)):
            return None
        one = self.merged
        bad = (~torch.isfinite(one.values)).any(1).nonzero()
        return int(one.keys[bad[0, 0]]) if len(bad) else None

    def squares(self) -> float:
        """The sum of the squares of all values of rows, in float64. Waits for the device."""
        values = self.merged.values
        return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2 if len(values) else 0.0


@dataclass(frozen=True)
class MergedRowGrad(DeviceRowGrad):
    """As `RowGrad`, of tensors. keys: int64 [n], distinct, ascending; values: float32 [n, dim]; accesses: int32 [n]

    found: the records of these keys, if they are known
    """

    keys: Tensor
    values: Tensor
    accesses: Tensor | None = None
    found: Found | None = None

    @property
    def merged(self) -> MergedRowGrad:
        return self


@dataclass(frozen=True)
class SortedKeys:
    """keys: int64 [n], ascending; order: int64 [n], where each of them was before"""

    keys: Tensor
    order: Tensor

    @classmethod
    def of(cls, keys: Tensor) -> SortedKeys:
        return cls(*keys.sort())


@dataclass(frozen=True, eq=False)
class SparseRowGrad(DeviceRowGrad):
    """A gradient for each lookup; those of a row are to be added up.

    grad: sparse [rows, dim], not coalesced; looked_up: int64 [n], the keys; counts_accesses: of each row, its lookups
    known_order: the keys in the order of the gradients, sorted, if that was done before
    """

    grad: Tensor
    looked_up: Tensor
    counts_accesses: bool
    known_order: SortedKeys | None = None

    @functools.cached_property
    def merged(self) -> MergedRowGrad:
        """Waits for the device."""
        grad, accesses = self.grad.coalesce(), None
        distinct = grad.indices()[0]
        if self.counts_accesses:
            ordered = self.looked_up.sort().values
            first, end = (torch.searchsorted(ordered, distinct, right=right) for right in (False, True))
            accesses = (end - first).to(torch.int32)
        return MergedRowGrad(distinct, grad.values(), accesses)

    @property
    def values(self) -> Tensor:
        """float32 [n, dim], of the lookups"""
        return self.grad._values()

    @functools.cached_property
    def sorted(self) -> SortedKeys:
        return self.known_order or SortedKeys.of(self.grad._indices()[0])

    @property
    def has_one_of_each(self) -> bool:
        """Of each lookup; else a second backward pass has added its own."""
        return len(self.values) == len(self.looked_up)


RowGrads = Sequence[Sequence[RowGrad | DeviceRowGrad]]  # of a micro-batch: per group of tables those of each pass


def on_host(grad: RowGrad | DeviceRowGrad) -> RowGrad:
    """The gradient itself, or a copy of one that a device has."""
    return grad.to_host() if isinstance(grad, DeviceRowGrad) else grad


def merge(parts: Sequence[tuple[DeviceRowGrad, float]]) -> DeviceRowGrad:
    """As `row_gradients.merge`: the weighted sum, added up in the order of the parts."""
    if len(parts) == 1 and parts[0][1] == 1.0:
        return parts[0][0]
    merged = [(part.merged, weight) for part, weight in parts]
    if len(merged) == 1:
        grad, weight = merged[0]
        return replace(grad, values=grad.values * weight)
    keys, number = torch.unique(torch.cat([part.keys for part, _ in merged]), return_inverse=True)
    first = merged[0][0].values
    values, at = first.new_zeros(len(keys), first.shape[1]), 0
    accesses = None
    if all(part.accesses is not None for part, _ in merged):
        accesses = torch.zeros(len(keys), dtype=torch.int32, device=keys.device)
    for part, weight in merged:
        rows = number[at : at + len(part.keys)]
        values.index_add_(0, rows, part.values, alpha=weight)
        if accesses is not None and part.accesses is not None:
            accesses.index_add_(0, rows, part.accesses)
        at += len(part.keys)
    return MergedRowGrad(keys, values, accesses)
