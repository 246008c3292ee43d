"""Memory is used again when nothing refers to it, and not before."""

from __future__ import annotations

import numpy as np
import torch

from gba_hvd.embedding.row_buffers import RowBuffers

ROWS, DIM = 10_000, 32


def test_memory_is_used_again_once_its_tensor_is_gone() -> None:
    buffers = RowBuffers()
    first = buffers.empty(ROWS, DIM)
    where = first.data_ptr()
    del first
    again = buffers.zeros(ROWS + 100, DIM)
    assert again.data_ptr() == where and again.shape == (ROWS + 100, DIM) and not again.any()


def test_an_array_or_view_of_it_keeps_the_memory() -> None:
    buffers = RowBuffers()
    tensor = buffers.zeros(ROWS, DIM)
    view = tensor.numpy()[5:7]
    where = tensor.data_ptr()
    del tensor
    assert buffers.empty(ROWS, DIM).fill_(1.0).data_ptr() != where
    assert not view.any()
    del view
    held = [buffers.empty(ROWS, DIM), buffers.empty(ROWS, DIM)]
    assert where in [one.data_ptr() for one in held]


def test_the_gradient_that_autograd_keeps_is_the_memory_it_was_given() -> None:
    buffers, given = RowBuffers(), []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, rows: torch.Tensor) -> torch.Tensor:
            return 2 * rows

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            found = buffers.zeros(ROWS, DIM).add_(2.0)
            given.append(found.data_ptr())
            return found

    rows = buffers.zeros(ROWS, DIM).requires_grad_()
    Doubled.apply(rows).sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None and [rows.grad.data_ptr()] == given
    kept = rows.grad.numpy()
    del rows
    buffers.empty(ROWS, DIM).fill_(7.0)
    buffers.empty(ROWS, DIM).fill_(7.0)
    assert np.array_equal(kept, np.full((ROWS, DIM), 2.0, np.float32))


def test_few_rows_are_left_to_the_allocator_and_much_too_long_memory_is_not_taken() -> None:
    buffers = RowBuffers()
    assert buffers.empty(3, 2).shape == (3, 2)
    long = buffers.empty(10 * ROWS, DIM)
    where = long.data_ptr()
    del long
    assert buffers.empty(ROWS, DIM).data_ptr() != where
