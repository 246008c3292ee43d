"""Pooling and its gradient, on memory that was used before, against the sums written out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from gba_hvd.embedding.pooling import Pooling, pool, pool_stacked
from gba_hvd.embedding.row_buffers import RowBuffers

OFFSETS = np.array([0, 3, 3, 7, 8], np.int64)


class UsedBuffers(RowBuffers):
    """Memory that holds what an earlier step left."""

    def empty(self, n_rows: int, dim: int) -> Tensor:
        return torch.full((n_rows, dim), float("nan"))


def features_of(dim: int, kind: str, is_weighted: bool) -> list[Pooling]:
    """Three features of 12 rows, of which the last two are looked up by no bag."""
    rng = np.random.default_rng(5)
    rows = torch.from_numpy(rng.normal(size=(12, dim)).astype(np.float32)).requires_grad_()
    weights = torch.from_numpy(rng.random(8).astype(np.float32)) if is_weighted else None
    numbers = [[0, 1, 2, 2, 3, 0, 4, 1], [2, 0, 5, 6, 6, 7, 5, 4], [8, 8, 8, 9, 0, 1, 9, 2]]
    return [Pooling(rows, np.array(some, np.int32), OFFSETS, weights, kind) for some in numbers]


def expected(feature: Pooling, grad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bags, gradient of the rows), value by value, in float32. grad: [bags, dim]"""
    rows = feature.rows.detach().numpy()
    bags, of_rows = np.zeros_like(grad), np.zeros_like(rows)
    for bag, (lo, hi) in enumerate(pairwise(feature.offsets)):
        for i in range(lo, hi):
            weight = np.float32(1) if feature.weights is None else feature.weights.numpy()[i]
            weight *= np.float32(1 / (hi - lo)) if feature.kind == "mean" else np.float32(1)
            bags[bag] += weight * rows[feature.index[i]]
            of_rows[feature.index[i]] += weight * grad[bag]
    return bags, of_rows


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize("dim", [3, 8, 16, 24, 64])
def test_bags_of_every_width_are_sums_of_their_rows(dim: int, kind: str, is_weighted: bool) -> None:
    features = features_of(dim, kind, is_weighted)
    grad = np.random.default_rng(6).normal(size=(4, 3, dim)).astype(np.float32)
    stacked = pool_stacked(features, UsedBuffers())
    stacked.backward(torch.from_numpy(grad))
    found = [expected(feature, grad[:, field]) for field, feature in enumerate(features)]
    bags = np.stack([bags for bags, _ in found], axis=1)
    np.testing.assert_allclose(stacked.detach().numpy(), bags, rtol=1e-5, atol=1e-6)
    of_rows = features[0].rows.grad
    assert of_rows is not None
    np.testing.assert_allclose(of_rows.numpy(), sum(rows for _, rows in found), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]], ids=str)
@pytest.mark.parametrize("unused", [0, 1, 2])
def test_rows_of_a_feature_that_the_loss_ignores_have_no_gradient_of_it(order: list[int], unused: int) -> None:
    features = [features_of(4, "sum", False)[i] for i in order]
    features = [Pooling(features[0].rows, one.index, one.offsets, None, "sum") for one in features]  # (of one leaf)
    pooled = pool(features, UsedBuffers())
    sum((3.0 * bags).sum() for i, bags in zip(order, pooled, strict=True) if i != unused).backward()  # type: ignore[union-attr]
    threes = np.full((4, 4), 3, np.float32)
    found = sum(expected(feature, threes)[1] for i, feature in zip(order, features, strict=True) if i != unused)
    of_rows = features[0].rows.grad
    assert of_rows is not None
    np.testing.assert_allclose(of_rows.numpy(), found, rtol=1e-6)
