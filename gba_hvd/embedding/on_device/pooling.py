"""Pooling by a device: torch's own operators, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gba_hvd.embedding.lookups import Lookup
from gba_hvd.embedding.on_device.host_view import to_device


def pool(rows: Tensor, index: Tensor, lookups: Sequence[Lookup], sparse: bool = False) -> Sequence[Tensor]:
    """Of each lookup float32 [m, dim], by autograd; each may go into a loss of its own, with its own backward pass.

    rows: float32 [d, dim]; index: int64 [n], of all keys of the lookups, one lookup after the other
    sparse: the gradient of `rows`, which then is of all keys; not possible where `takes_maximum`
    """
    weights = [one.weights for one in lookups if one.weights is not None]
    if not torch.is_grad_enabled() or not any(one.requires_grad for one in (rows, *weights)):
        return _pooled(rows, index, lookups, sparse)
    return _SeparateBackward.apply(lambda leaf: _pooled(leaf, index, lookups, sparse), sparse, rows, *weights)  # type: ignore[no-any-return, no-untyped-call]


class _SeparateBackward(torch.autograd.Function):
    """Results of one operator, each of which may have a backward pass of its own.

    of_all: each pass gives a gradient of the first input, `rows`, with zeros for results that have none
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[Tensor], Sequence[Tensor]], of_all: bool, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.of_all = of_all
        with torch.enable_grad():
            leaf = inputs[0].detach().requires_grad_()
            ctx.leaf, ctx.results, ctx.weights = leaf, compute(leaf), inputs[1:]
        return tuple(one.detach() for one in ctx.results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        asked = [(one, grad) for one, grad in zip(ctx.results, grads, strict=True) if grad is not None]
        inputs = [one for one in (ctx.leaf, *ctx.weights) if one.requires_grad]
        found = iter(
            torch.autograd.grad(
                [one for one, _ in asked], inputs, [grad for _, grad in asked], retain_graph=True, allow_unused=True
            )
        )
        of_rows, *of_weights = (next(found) if one.requires_grad else None for one in (ctx.leaf, *ctx.weights))
        rest = [one for one, grad in zip(ctx.results, grads, strict=True) if grad is None]
        if ctx.of_all and rest:
            zeros = [torch.zeros_like(one) for one in rest]
            of_rows = of_rows + torch.autograd.grad(rest, ctx.leaf, zeros, retain_graph=True)[0]
        return None, None, of_rows, *of_weights


def _pooled(rows: Tensor, index: Tensor, lookups: Sequence[Lookup], sparse: bool) -> list[Tensor]:
    starts = np.cumsum([0, *(len(one.keys) for one in lookups)]).tolist()
    found: dict[int, Tensor] = {}
    by_kind: dict[str, list[int]] = {}
    for number, one in enumerate(lookups):
        by_kind.setdefault(_kind(one), []).append(number)
    for kind, numbers in by_kind.items():
        some = [lookups[number] for number in numbers]
        part = index
        if len(numbers) < len(lookups):
            part = torch.cat([index[starts[number] : starts[number + 1]] for number in numbers])
        pooled = _pool(kind, rows, part, some, sparse)
        lengths = [len(one.offsets) - 1 for one in some]
        found.update(zip(numbers, pooled.split(lengths), strict=True))
    return [found[number] for number in range(len(lookups))]


def stack(rows: Tensor, index: Tensor, sparse: bool = False) -> Tensor:
    """rows float32 [d, dim], index int64 [B, F] -> float32 [B, F, dim], by autograd"""
    return functional.embedding(index, rows, sparse=sparse)


def takes_maximum(lookups: Sequence[Lookup]) -> bool:
    return any(one.pooling == "max" and _kind(one) == "max" for one in lookups)


def _kind(one: Lookup) -> str:
    """Lookups of one kind are pooled by one operator."""
    if one.weights is not None:
        return "weighted"
    is_single = len(one.keys) == len(one.offsets) - 1 and bool((np.diff(one.offsets) == 1).all())
    return "single" if is_single else one.pooling


def _pool(kind: str, rows: Tensor, index: Tensor, lookups: Sequence[Lookup], sparse: bool) -> Tensor:
    """float32 [m, dim], of the bags of all lookups"""
    if kind == "single":
        return functional.embedding(index, rows, sparse=sparse)
    offsets = [np.zeros(1, np.int64)]
    for one in lookups:
        offsets.append(one.offsets[1:] + offsets[-1][-1])
    cuts = to_device(np.concatenate(offsets), rows.device)
    mode, weights = kind, None
    if kind == "weighted":
        mode, weights = "sum", torch.cat([_factors(one, rows.device) for one in lookups])
    return functional.embedding_bag(
        index, rows, cuts, mode=mode, sparse=sparse, per_sample_weights=weights, include_last_offset=True
    )


def _factors(one: Lookup, device: torch.device) -> Tensor:
    """float32 [n], what each row of a sum or mean is multiplied by, by autograd."""
    assert one.weights is not None
    weights = one.weights.to(device, non_blocking=True)
    if one.pooling != "mean":
        return weights
    counts = np.diff(one.offsets)
    share = np.repeat(np.float32(1) / np.maximum(counts, 1).astype(np.float32), counts)
    return weights * to_device(share, device)
