"""Pooling of fetched rows, and its gradient: that of the distinct rows comes out merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gba_hvd import kernels

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

    def pooled(self) -> Tensor:
        """float32 [m, dim]"""
        rows, out = self.rows.detach().numpy(), torch.empty(len(self.offsets) - 1, self.rows.shape[1])
        if self.kind == "max":
            self._chosen = np.empty(out.shape, np.int32)
            kernels.pool_rows_max(rows, self.index, self.offsets, out.numpy(), self._chosen)
        else:
            kernels.pool_rows(rows, self.index, self.offsets, self._factors, self.kind == "mean", out.numpy())
        return out

    def rows_gradient(self, grad: Tensor) -> Tensor:
        """float32 [d, dim], of that of what `pooled` returned, float32 [m, dim]."""
        out, of_bags = torch.zeros(self.rows.shape), grad.contiguous().numpy()
        if self.kind == "max":
            assert self._chosen is not None
            kernels.pool_rows_max_backward(of_bags, self._chosen, out.numpy())
        else:
            kernels.pool_rows_backward(
                of_bags, self.index, self.offsets, self._factors, self.kind == "mean", out.numpy()
            )
        return out

    def weights_gradient(self, grad: Tensor) -> Tensor:
        """float32 [n]"""
        out, rows = torch.empty(len(self._factors)), self.rows.detach().numpy()
        kernels.pool_weights_backward(
            grad.contiguous().numpy(), rows, self.index, self.offsets, self.kind == "mean", out.numpy()
        )
        return out

    @property
    def _factors(self) -> np.ndarray:
        return _NO_WEIGHTS if self.weights is None else self.weights.detach().contiguous().numpy()


def pool(rows: Tensor, weights: Tensor | None, index: np.ndarray, offsets: np.ndarray, kind: str) -> Tensor:
    """float32 [m, dim], by autograd where something has a gradient; see `Pooling`."""
    if not rows.requires_grad and (weights is None or not weights.requires_grad):
        return Pooling(rows, index, offsets, weights, kind).pooled()
    return _Pool.apply(rows, weights, index, offsets, kind)  # type: ignore[no-any-return, no-untyped-call]


def stack(rows: Tensor, index: np.ndarray, n_fields: int, batch: int) -> Tensor:
    """rows float32 [d, dim], index int32 [F * B] -> float32 [B, F, dim], by autograd"""
    return _Stack.apply(rows, index, n_fields, batch)  # type: ignore[no-any-return, no-untyped-call]


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: np.ndarray, n_fields: int, batch: int) -> Tensor:
        ctx.index, ctx.shape, ctx.n_fields, ctx.batch = index, rows.shape, n_fields, batch
        out = torch.empty(batch, n_fields, rows.shape[1])
        kernels.stack_rows(rows.detach().numpy(), index, n_fields, batch, out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        out = torch.zeros(ctx.shape)
        kernels.stack_rows_backward(grads[0].contiguous().numpy(), ctx.index, ctx.n_fields, ctx.batch, out.numpy())
        return out, None, None, None


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor | None, index: np.ndarray, offsets: np.ndarray, kind: str
    ) -> Tensor:
        ctx.pooling = Pooling(rows.detach(), index, offsets, None if weights is None else weights.detach(), kind)
        return ctx.pooling.pooled()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        grad_weights = ctx.pooling.weights_gradient(grads[0]) if ctx.needs_input_grad[1] else None
        return ctx.pooling.rows_gradient(grads[0]), grad_weights, None, None, None
