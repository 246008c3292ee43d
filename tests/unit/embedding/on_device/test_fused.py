"""Triton's kernels do what torch's operators do. Without a GPU: TRITON_INTERPRET=1, with Triton installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gba_hvd
from gba_hvd import EmbeddingTables
from gba_hvd.embedding.apply_rows import apply_rows
from gba_hvd.embedding.on_device import fused
from gba_hvd.embedding.on_device.row_gradients import SortedKeys, SparseRowGrad, on_host
from gba_hvd.embedding.on_device.rows import DeviceRows

MakeTables = Callable[..., EmbeddingTables]
N_ROWS = 700
OPTIMIZERS: list[Any] = [
    gba_hvd.SGD(lr=0.3, weight_decay=0.1),
    gba_hvd.Adagrad(lr=0.2),
    gba_hvd.RowAdagrad(lr=0.2, weight_decay=0.01),
    gba_hvd.Adam(lr=0.1, weight_decay=0.01),
]


@pytest.fixture(autouse=True)
def _kernels_work(device: torch.device) -> None:
    if why := fused.obstacle(device, 16):
        pytest.skip(why)


def gradient(device: torch.device, n: int, dim: int, step: int, counts: bool, knows_order: bool) -> SparseRowGrad:
    """Half of the lookups, or most, are of two rows: their runs have many chunks."""
    rng = np.random.default_rng(step)
    share = 0.9 if n > 1000 else 0.5
    keys = torch.from_numpy(np.where(rng.random(n) < share, rng.integers(8, 10, n), rng.integers(0, N_ROWS, n)))
    values = torch.from_numpy(rng.normal(size=(n, dim)).astype(np.float32))
    with torch.sparse.check_sparse_tensor_invariants(False):
        grad = torch.sparse_coo_tensor(keys[None], values, (N_ROWS, dim)).to(device)
    looked_up = keys.to(device)
    return SparseRowGrad(grad, looked_up, counts, SortedKeys.of(looked_up) if knows_order else None)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize(("n", "dim"), [(1, 4), (33, 16), (1000, 5), (1000, 40), (5000, 3)])
def test_rows_are_changed_as_the_cpu_changes_them(
    device: torch.device, make_tables: MakeTables, optimizer: Any, n: int, dim: int
) -> None:
    ours, theirs = (make_tables({"a": (N_ROWS, dim)}, optimizer) for _ in range(2))
    assert ours.memory is not None and theirs.memory is not None
    rows = DeviceRows(ours.memory.flat, ours.layout, device, N_ROWS)
    of_all, group = rows.weights(0), theirs.layout.groups[0]
    assert of_all is not None and rows.is_fused(0)
    for step in range(1, 4):
        grad = gradient(device, n, dim, step, counts=step > 1, knows_order=step > 2)
        rows.apply(0, grad, ours.optimizers, 0.5, optimizer.lr, step)
        rows.finish(step)
        apply_rows(
            theirs.memory, theirs.optimizers, group, on_host(grad), np.arange(3), scale=0.5, lr=optimizer.lr,
            number=step, step=step,
        )  # fmt: skip
    rows.wait()
    everything, got, expected = np.arange(N_ROWS), *(np.empty((N_ROWS, group.record), np.float32) for _ in range(2))
    ours.memory.gather(everything, group, 0, got)
    theirs.memory.gather(everything, group, 0, expected)
    np.testing.assert_allclose(got[:, :-1], expected[:, :-1], rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(got[:, -1].view(np.int32), expected[:, -1].view(np.int32))
    np.testing.assert_array_equal(of_all[:N_ROWS].cpu().numpy(), got[:, :dim])
    rows.close()


def test_the_same_gradients_give_the_same_bits(device: torch.device, make_tables: MakeTables) -> None:
    found = []
    for _ in range(2):
        tables = make_tables({"a": (N_ROWS, 16)}, gba_hvd.Adagrad(lr=0.2))
        assert tables.memory is not None
        rows = DeviceRows(tables.memory.flat, tables.layout, device, N_ROWS)
        of_all = rows.weights(0)
        rows.apply(0, gradient(device, 4000, 16, 1, True, False), tables.optimizers, 1.0, 0.2, 1)
        assert of_all is not None
        found.append(of_all.cpu().numpy())
        rows.close()
    np.testing.assert_array_equal(*found)


def test_gradients_that_cannot_be_fused_are_applied_between_those_that_are(
    device: torch.device, make_tables: MakeTables
) -> None:
    tables = make_tables({"a": (N_ROWS, 16)}, gba_hvd.Adagrad(lr=0.2))
    assert tables.memory is not None
    rows, group = DeviceRows(tables.memory.flat, tables.layout, device, N_ROWS), tables.layout.groups[0]
    of_all = rows.weights(0)
    for step in range(1, 7):
        grad = gradient(device, 2000, 16, step, counts=True, knows_order=False)
        rows.apply(0, grad.merged if step % 2 else grad, tables.optimizers, 1.0, 0.2, step)
    rows.wait()
    got = np.empty((N_ROWS, group.record), np.float32)
    tables.memory.gather(np.arange(N_ROWS), group, 0, got)
    assert of_all is not None and np.isfinite(got).all()
    np.testing.assert_array_equal(of_all[:N_ROWS].cpu().numpy(), got[:, :16])
    rows.close()


@pytest.mark.parametrize("comes", ["the same", "another", "none"])
def test_what_was_applied_ahead_counts_only_if_it_comes(
    device: torch.device, make_tables: MakeTables, comes: str
) -> None:
    """none: the step was not applied, and the next lookup finds the rows as they were"""
    ours, theirs = (make_tables({"a": (N_ROWS, 16)}, gba_hvd.Adagrad(lr=0.2)) for _ in range(2))
    found = []
    for tables in (ours, theirs):
        assert tables.memory is not None
        rows = DeviceRows(tables.memory.flat, tables.layout, device, N_ROWS)
        rows.weights(0)
        first, second = (gradient(device, 500, 16, step, True, False) for step in (1, 2))
        if tables is ours:
            rows.apply_ahead(0, first, tables.optimizers, 1.0, 0.2, 1)
        if comes != "none":
            rows.apply(0, first if comes == "the same" else second, tables.optimizers, 1.0, 0.2, 1)
        rows.wait()
        of_all = rows.weights(0)
        assert of_all is not None
        in_memory = np.empty((N_ROWS, tables.layout.groups[0].record), np.float32)
        tables.memory.gather(np.arange(N_ROWS), tables.layout.groups[0], 0, in_memory)
        np.testing.assert_array_equal(of_all[:N_ROWS].cpu().numpy(), in_memory[:, :16])
        found.append(in_memory)
        rows.close()
    np.testing.assert_allclose(*found, rtol=1e-4, atol=2e-5)  # (other sums, where it was merged)


def test_wide_rows_are_changed_by_torch_s_operators(device: torch.device, make_tables: MakeTables) -> None:
    tables = make_tables({"a": (20, 300)}, gba_hvd.SGD(lr=0.2))
    assert tables.memory is not None
    rows = DeviceRows(tables.memory.flat, tables.layout, device, 20)
    rows.weights(0)
    assert not rows.is_fused(0) and "300" in fused.obstacle(device, 300)
    rows.close()
