"""Gradients of dense parameters, where the model is on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gba_hvd.embedding.on_device.host_view import number_of
from gba_hvd.gradients.dense_gradients import DenseGradients


@pytest.mark.parametrize("is_sparse", [False, True])
def test_gradients_of_all_kinds_of_parameters_are_collected(device: torch.device, is_sparse: bool) -> None:
    embedding, used, unused = nn.Embedding(5, 2, sparse=is_sparse), nn.Linear(2, 1), nn.Linear(3, 1)
    model = nn.ModuleList([embedding, used, unused]).to(device)
    dense = DenseGradients(list(model.parameters()), 0)
    for _ in range(2):
        dense.zero_()
        used(embedding(torch.tensor([1, 1, 4], device=device))).sum().backward()
        dense.collect_()
        table, weight, bias, *rest = dense.flat.split(dense.sizes)
        expected = torch.zeros(5, 2, device=device).index_add_(
            0, torch.tensor([1, 1, 4], device=device), used.weight.detach().expand(3, 2)
        )
        torch.testing.assert_close(table.view(5, 2), expected)
        rows = embedding.weight.detach()
        torch.testing.assert_close(weight, 2 * rows[1] + rows[4])
        assert bias.item() == 3 and not any(one.any() for one in rest)
        dense.total.zero_()
        dense.add_micro_batch_(1.0)
        dense.make_step_(0.5)
        for p, view in zip(dense.parameters, dense.flat.split(dense.sizes), strict=True):
            torch.testing.assert_close(p.grad, view.view_as(p))
        torch.testing.assert_close(embedding.weight.grad, 0.5 * expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_of_one_element_has_any_shape(device: torch.device, shape: tuple[int, ...]) -> None:
    assert number_of(torch.full(shape, 2.5, device=device, requires_grad=True))() == 2.5
    assert number_of(2.5)() == 2.5 and number_of(None)() is None
