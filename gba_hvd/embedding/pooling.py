"""Pooling of fetched rows, and its gradient: that of the distinct rows comes out merged.

All features of a group of tables are one autograd function: their gradients are added up in one buffer, and not in one
for each feature that autograd then adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gba_hvd import kernels
from gba_hvd.embedding.row_buffers import RowBuffers

_NO_WEIGHTS = np.empty(0, dtype=np.float32)


@dataclass
class Pooling:
    """Bags of rows[index], cut by offsets, each pooled. Without autograd.

    rows: float32 [d, dim], distinct; index: int32 [n]; offsets: int64 [m + 1]; weights: float32 [n] or None, of a sum
    or mean; kind: "sum", "mean" or "max"
    """

    rows: Tensor
    index: np.ndarray
    offsets: np.ndarray
    weights: Tensor | None
    kind: str
    _chosen: np.ndarray | None = None

    @property
    def n_bags(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_reached(self) -> int:
        """The number of rows up to the last one that a bag has. Rows are numbered feature by feature."""
        return int(self.index.max(initial=-1)) + 1

    def pooled(self) -> Tensor:
        """float32 [m, dim]"""
        out = torch.empty(self.n_bags, self.rows.shape[1])
        self.pool_into(out.numpy()[:, None], 0)
        return out

    def pool_into(self, out: np.ndarray, field: int) -> None:
        """out: float32 [m, F, dim], of which [:, field] is written."""
        rows = self.rows.detach().numpy()
        if self.kind == "max":
            self._chosen = np.empty((len(out), out.shape[2]), np.int32)
            kernels.pool_rows_max(rows, self.index, self.offsets, field, out, self._chosen)
        else:
            kernels.pool_rows(rows, self.index, self.offsets, self._factors, self.kind == "mean", field, out)

    def add_rows_gradient(self, grad: np.ndarray, field: int, out: np.ndarray) -> None:
        """Add that of the rows, float32 [d, dim]. grad: float32 [m, F, dim], of which [:, field] is this feature's."""
        if self.kind == "max":
            assert self._chosen is not None
            kernels.pool_rows_max_backward(grad, field, self._chosen, out)
        else:
            kernels.pool_rows_backward(grad, field, self.index, self.offsets, self._factors, self.kind == "mean", out)

    def weights_gradient(self, grad: np.ndarray, field: int) -> Tensor:
        """float32 [n]. grad: as above"""
        out, rows = torch.empty(len(self._factors)), self.rows.detach().numpy()
        kernels.pool_weights_backward(grad, field, rows, self.index, self.offsets, self.kind == "mean", out.numpy())
        return out

    @property
    def _factors(self) -> np.ndarray:
        return _NO_WEIGHTS if self.weights is None else self.weights.detach().contiguous().numpy()


def of_bags(grad: Tensor) -> np.ndarray:
    """The gradient of one feature's bags, float32 [m, dim], as [m, 1, dim]."""
    return grad.contiguous().numpy()[:, None]


def pool(features: Sequence[Pooling], buffers: RowBuffers) -> Sequence[Tensor]:
    """Of each feature float32 [m, dim], by autograd where something has a gradient. They share `rows`.

    buffers: where the memory of the rows' gradient comes from
    """
    if not any(one.requires_grad for one in (features[0].rows, *(f.weights for f in features)) if one is not None):
        return [feature.pooled() for feature in features]
    return _Pool.apply(features[0].rows, features, False, buffers, *(f.weights for f in features))  # type: ignore[no-any-return, no-untyped-call]


def pool_stacked(features: Sequence[Pooling], buffers: RowBuffers) -> Tensor:
    """float32 [m, F, dim], by autograd: F features of m bags each, side by side."""
    return _Pool.apply(features[0].rows, features, True, buffers, *(f.weights for f in features))  # type: ignore[no-any-return, no-untyped-call]


def stack(rows: Tensor, index: np.ndarray, n_fields: int, batch: int, buffers: RowBuffers) -> Tensor:
    """rows float32 [d, dim], index int32 [F * B] -> float32 [B, F, dim], by autograd"""
    return _Stack.apply(rows, index, n_fields, batch, buffers)  # type: ignore[no-any-return, no-untyped-call]


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: np.ndarray, n_fields: int, batch: int, buffers: RowBuffers) -> Tensor:
        ctx.index, ctx.shape, ctx.n_fields, ctx.batch, ctx.buffers = index, rows.shape, n_fields, batch, buffers
        out = torch.empty(batch, n_fields, rows.shape[1])
        kernels.stack_rows(rows.detach().numpy(), index, n_fields, batch, out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        out = ctx.buffers.zeros(*ctx.shape)
        kernels.stack_rows_backward(grads[0].contiguous().numpy(), ctx.index, ctx.n_fields, ctx.batch, out.numpy())
        return out, None, None, None, None


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        features: Sequence[Pooling],
        is_stacked: bool,
        buffers: RowBuffers,
        *weights: Tensor | None,
    ) -> Tensor | tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.features, ctx.is_stacked, ctx.shape, ctx.buffers = features, is_stacked, rows.shape, buffers
        if not is_stacked:
            return tuple(feature.pooled() for feature in features)
        out = torch.empty(features[0].n_bags, len(features), rows.shape[1])
        for field, feature in enumerate(features):
            feature.pool_into(out.numpy(), field)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """A feature without a gradient is one that the loss does not depend on."""
        features, n_features = ctx.features, len(ctx.features)
        arrays = [None if grad is None else of_bags(grad) for grad in grads]
        places = [(array, 0) for array in arrays]
        if ctx.is_stacked:
            array = None if grads[0] is None else grads[0].contiguous().numpy()
            places = [(array, field) for field in range(n_features)]
        rows, weights = ctx.buffers.empty(*ctx.shape), [None] * n_features
        out, n_zeroed = rows.numpy(), 0
        for number, (feature, (grad, field)) in enumerate(zip(features, places, strict=True)):
            if grad is None:
                continue
            if (reached := feature.n_reached) > n_zeroed:  # in parts, each of which is still cached when it is added to
                out[n_zeroed:reached], n_zeroed = 0.0, reached
            feature.add_rows_gradient(grad, field, out)
            if ctx.needs_input_grad[4 + number]:
                weights[number] = feature.weights_gradient(grad, field)
        out[n_zeroed:] = 0.0
        return rows, None, None, None, *weights
