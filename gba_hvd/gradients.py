"""Gradients on their way: row gradients merged per distinct row, dense ones in one buffer. No communication here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gba_hvd import kernels
from gba_hvd.errors import BadInput


@dataclass(frozen=True)
class RowGrad:
    """Gradient of some rows of one group of tables.

    keys:   int64   [n]       distinct (see `shard.layout` for what a key is), in order of first appearance
    values: float32 [n, dim]
    """

    keys: np.ndarray
    values: np.ndarray

    def non_finite(self) -> int | None:
        """The key of a row whose gradient is NaN or infinite."""
        if np.isfinite(float(torch.from_numpy(self.values).sum())):
            return None
        bad = np.flatnonzero(~np.isfinite(self.values).all(axis=1))
        return int(self.keys[bad[0]]) if len(bad) else None


def hash_slots(n: int) -> np.ndarray:
    """Scratch for `kernels.number_distinct` over n keys."""
    return np.full(1 << max(4, (2 * n - 1).bit_length()), -1, dtype=np.int32)


def distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(distinct keys [d], number of each key's distinct one int32 [n], the hash slots)."""
    slots, found, number = hash_slots(len(keys)), np.empty_like(keys), np.empty(len(keys), dtype=np.int32)
    count = kernels.number_distinct(keys, slots, found, number)
    return found[:count], number, slots


def merge(parts: Sequence[tuple[RowGrad, float]]) -> RowGrad:
    """Weighted sum of row gradients, one entry per distinct row."""
    if len(parts) == 1 and parts[0][1] == 1.0:
        return parts[0][0]
    keys, number, _ = distinct(np.concatenate([part.keys for part, _ in parts]))
    values = np.zeros((len(keys), parts[0][0].values.shape[1]), dtype=np.float32)
    at = 0
    for part, weight in parts:
        kernels.add_rows(part.values, number[at : at + len(part.keys)], np.float32(weight), values)
        at += len(part.keys)
    return RowGrad(keys, values)


def pack_by_owner(grads: Sequence[RowGrad], owner: np.ndarray, n_owners: int) -> tuple[np.ndarray, np.ndarray]:
    """One message for each owner of shards.

    Returns the float32 words of all messages in owner order, and the number of words of each, int64 [n_owners].

    A message is, for each group of tables: the number of rows (int64), their keys (int64), their values (float32).
    """
    starts, orders = [], []
    for grad in grads:
        start, order = np.empty(n_owners + 1, dtype=np.int64), np.empty(len(grad.keys), dtype=np.int32)
        kernels.order_by_owner(grad.keys, len(owner), owner, start, order)
        starts.append(start)
        orders.append(order)
    words = np.zeros(n_owners, dtype=np.int64)
    for grad, start in zip(grads, starts, strict=True):
        words += 2 + np.diff(start) * (2 + grad.values.shape[1])
    message = np.empty(int(words.sum()), dtype=np.float32)
    at = 0
    for rank in range(n_owners):
        for grad, start, order in zip(grads, starts, orders, strict=True):
            picked, dim = order[start[rank] : start[rank + 1]], grad.values.shape[1]
            n = len(picked)
            message[at : at + 2].view(np.int64)[0] = n
            keys = message[at + 2 : at + 2 + 2 * n].view(np.int64)
            values = message[at + 2 + 2 * n : at + 2 + (2 + dim) * n].reshape(n, dim)
            kernels.take_rows(grad.keys, grad.values, picked, keys, values)
            at += 2 + (2 + dim) * n
    return message, words


def unpack(message: np.ndarray, dims: Sequence[int]) -> list[RowGrad]:
    """The row gradients of one message, views into it."""
    grads, at = [], 0
    for dim in dims:
        n = int(message[at : at + 2].view(np.int64)[0])
        keys = message[at + 2 : at + 2 + 2 * n].view(np.int64)
        grads.append(RowGrad(keys, message[at + 2 + 2 * n : at + 2 + (2 + dim) * n].reshape(n, dim)))
        at += 2 + (2 + dim) * n
    return grads


def with_contributors(grad: RowGrad) -> RowGrad:
    """The gradient with one more column, 1: summed, it counts the micro-batches that contain the row."""
    ones = np.ones((len(grad.keys), 1), dtype=np.float32)
    return RowGrad(grad.keys, np.hstack([grad.values, ones]))


def average_over_contributors(grad: RowGrad) -> RowGrad:
    """Divide each row by the sum of its contributors' weights, its last column."""
    return RowGrad(grad.keys, np.ascontiguousarray(grad.values[:, :-1] / grad.values[:, -1:]))


class DenseGradients:
    """The gradients of all dense parameters as one flat buffer, so that a step needs one allreduce.

    `p.grad` of every parameter is a view of `flat`; `total` collects the worker's micro-batches of a step and ends with
    `N_EXTRA` numbers that travel with them.

    flat:  [n]            gradient of the micro-batch, later of the step
    total: [n + n_extra]  weighted sum over micro-batches, at least float32
    """

    def __init__(self, parameters: Sequence[Tensor], n_extra: int) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        kinds = {(p.dtype, p.device) for p in self._parameters}
        if len(kinds) > 1:
            raise BadInput(f"dense parameters must share one dtype and device, got {sorted(map(str, kinds))}")
        dtype, device = next(iter(kinds)) if kinds else (torch.float32, torch.device("cpu"))
        self.n = sum(p.numel() for p in self._parameters)
        self.flat = torch.zeros(self.n, dtype=dtype, device=device)
        total_dtype = torch.promote_types(dtype, torch.float32)  # the numbers that travel along are counts
        self.total = torch.zeros(self.n + n_extra, dtype=total_dtype, device=device)
        self._views: list[Tensor] = []
        at = 0
        for p in self._parameters:
            self._views.append(self.flat[at : at + p.numel()].view_as(p))
            at += p.numel()
        self.zero_()

    @property
    def extra(self) -> Tensor:
        return self.total[self.n :]

    @property
    def parameters(self) -> list[Tensor]:
        return list(self._parameters)

    @property
    def sizes(self) -> list[int]:
        """Numbers in each parameter."""
        return [p.numel() for p in self._parameters]

    def resize_extra(self, n_extra: int) -> None:
        """Let another number of values travel with the gradients; `total` is empty afterwards."""
        if len(self.total) != self.n + n_extra:
            self.total = self.total.new_zeros(self.n + n_extra)

    def set_parameters_(self, which: Sequence[int], values: Tensor) -> None:
        """Overwrite some parameters, given by number; `values` [n] holds them one after the other."""
        at = 0
        with torch.no_grad():
            for number in which:
                p = self._parameters[number]
                p.copy_(values[at : at + p.numel()].view_as(p))
                at += p.numel()

    def zero_(self) -> None:
        """Clear the micro-batch's gradient and make every `p.grad` a view of `flat` again."""
        self.flat.zero_()
        for p, view in zip(self._parameters, self._views, strict=True):
            p.grad = view

    def collect_(self) -> None:
        """Bring the micro-batch's gradient to `flat`, also where `p.grad` is None or a tensor of somebody else's."""
        for p, view in zip(self._parameters, self._views, strict=True):
            if p.grad is not view:
                view.zero_() if p.grad is None else view.copy_(p.grad)

    def take_over_(self, other: DenseGradients) -> None:
        """Make the gradient that another one collected, of parameters of the same sizes, that of these parameters."""
        self.flat.copy_(other.flat)
        for p, view in zip(self._parameters, self._views, strict=True):
            p.grad = view

    def add_micro_batch_(self, weight: float) -> None:
        """total += weight * gradient of the micro-batch, which `collect_` brought to `flat`; then clear the latter."""
        if weight != 1.0:  # multiplied first, rounded as servers round it
            self.flat.mul_(weight)
        self.total[: self.n].add_(self.flat)
        self.zero_()

    def clear_total_(self) -> None:
        self.total.zero_()

    def non_finite(self, names: Sequence[str]) -> str | None:
        """Name of the first parameter whose gradient is NaN or infinite."""
        for name, view in zip(names, self._views, strict=True):
            if not bool(torch.isfinite(view).all()):
                return name
        return None
