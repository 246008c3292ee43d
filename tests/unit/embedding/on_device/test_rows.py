"""What the device reads and writes is what the CPU reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gba_hvd
from gba_hvd import EmbeddingTables
from gba_hvd.embedding.on_device.row_gradients import Found, MergedRowGrad, merge
from gba_hvd.embedding.on_device.rows import DeviceRows
from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.embedding.row_gradients import merge as merge_on_host

MakeTables = Callable[..., EmbeddingTables]
SIZES = {"user": (50, 4), "item": (90, 4), "ad": (30, 7)}
OPTIMIZERS: list[Any] = [
    gba_hvd.SGD(lr=0.3),
    gba_hvd.SGD(lr=0.3, weight_decay=0.1),
    gba_hvd.Adagrad(lr=0.2),
    gba_hvd.RowAdagrad(lr=0.2, weight_decay=0.01),
    gba_hvd.Adam(lr=0.1, weight_decay=0.01),
]


def rows_on(device: torch.device, tables: EmbeddingTables, hot_rows: int = 0) -> DeviceRows:
    assert tables.memory is not None
    return DeviceRows(tables.memory.flat, tables.layout, device, hot_rows)


def kept(rows: DeviceRows, keys: np.ndarray, group: int = 0) -> None:
    """Look keys up until there are copies of them."""
    for _ in range(20):
        before = rows.hits
        look_up(rows, group, keys)
        if rows.hits > before:
            return
    raise AssertionError("no copy was kept")


def look_up(rows: DeviceRows, group: int, keys: np.ndarray) -> tuple[Found, torch.Tensor, torch.Tensor]:
    return rows.look_up(group, torch.from_numpy(keys).to(rows.device))


def some_keys(tables: EmbeddingTables, n: int = 40, seed: int = 1) -> np.ndarray:
    """Keys of the first group, some of them more than once."""
    rng = np.random.default_rng(seed)
    columns = [("user", torch.from_numpy(rng.integers(0, 50, n))), ("item", torch.from_numpy(rng.integers(0, 90, n)))]
    return tables.keys_of(0, columns)


def in_memory(tables: EmbeddingTables, keys: np.ndarray) -> np.ndarray:
    assert tables.memory is not None
    out = np.empty((len(keys), tables.layout.groups[0].record), np.float32)
    tables.memory.gather(keys, tables.layout.groups[0], 0, out)
    return out


@pytest.mark.parametrize("hot_rows", [0, 16, 169, 170])
def test_looked_up_rows_are_those_in_memory(device: torch.device, make_tables: MakeTables, hot_rows: int) -> None:
    tables = make_tables(SIZES)
    rows, keys = rows_on(device, tables, hot_rows), some_keys(tables)
    for _ in range(12):
        found, index, weights = look_up(rows, 0, keys)
        assert found.keys[index].tolist() == keys.tolist()
        np.testing.assert_array_equal(weights.cpu().numpy(), in_memory(tables, found.keys.cpu().numpy())[:, :4])
    assert (rows.hits > 0) == (hot_rows > 0)
    rows.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize(("hot_rows", "knows"), [(0, True), (0, False), (1000, True), (1000, False), (16, True)])
def test_gradients_are_applied_as_the_cpu_applies_them(
    device: torch.device, make_tables: MakeTables, optimizer: Any, hot_rows: int, knows: bool
) -> None:
    """knows: the gradient comes with the records that the lookup has read"""
    ours, theirs = make_tables(SIZES, optimizer), make_tables(SIZES, optimizer)
    assert theirs.memory is not None
    rows = rows_on(device, ours, hot_rows)
    for step in range(1, 4):
        found, index, _ = look_up(rows, 0, some_keys(ours, seed=step))
        distinct = found.keys
        grad = torch.from_numpy(np.random.default_rng(step).normal(size=(len(distinct), 4)).astype(np.float32))
        counts = torch.bincount(index, minlength=len(distinct)).to(torch.int32)
        there = MergedRowGrad(distinct, grad.to(device), counts, found if knows else None)
        rows.apply(0, there, ours.optimizers, 0.5, optimizer.lr, step)
        rows.wait()
        keys = distinct.cpu().numpy()
        on_host = RowGrad(keys, grad.numpy(), counts.cpu().numpy().astype(np.uint32))
        group = theirs.layout.groups[0]
        gba_hvd.embedding.apply_rows.apply_rows(
            theirs.memory, theirs.optimizers, group, on_host, np.arange(3), scale=0.5, lr=optimizer.lr, number=step,
            step=step,
        )  # fmt: skip
        got, expected = in_memory(ours, keys), in_memory(theirs, keys)
        np.testing.assert_allclose(got[:, :-1], expected[:, :-1], rtol=1e-4, atol=5e-6)
        np.testing.assert_array_equal(got[:, -1].view(np.int32), expected[:, -1].view(np.int32))
        again = look_up(rows, 0, keys)[2]
        np.testing.assert_array_equal(again.cpu().numpy(), got[:, :4])
    rows.close()


@pytest.mark.parametrize("hot_rows", [100, 170])
def test_copies_that_are_forgotten_are_read_again(device: torch.device, make_tables: MakeTables, hot_rows: int) -> None:
    """170: of all rows"""
    tables = make_tables(SIZES)
    assert tables.memory is not None
    rows, keys = rows_on(device, tables, hot_rows), np.unique(some_keys(tables))
    kept(rows, keys)
    starts = tables.layout.record_starts(keys, tables.layout.groups[0]).astype(np.int64)
    tables.memory.flat[starts] = 7.0  # as a restored checkpoint would
    rows.forget()
    assert (look_up(rows, 0, keys)[2][:, 0] == 7.0).all()
    rows.close()


@pytest.mark.parametrize("weights", [(1.0,), (0.5,), (1.0, 0.25, 2.0)])
def test_merged_gradients_are_those_that_the_cpu_merges(device: torch.device, weights: tuple[float, ...]) -> None:
    rng, parts = np.random.default_rng(3), []
    for weight in weights:
        keys = np.sort(rng.choice(60, 30, replace=False))
        grad = RowGrad(keys, rng.normal(size=(30, 5)).astype(np.float32), rng.integers(1, 9, 30).astype(np.uint32))
        parts.append((grad, weight))
    there = [
        (
            MergedRowGrad(
                torch.from_numpy(grad.keys).to(device),
                torch.from_numpy(grad.values).to(device),
                torch.from_numpy(grad.accesses.astype(np.int32)).to(device),  # type: ignore[union-attr]
            ),
            weight,
        )
        for grad, weight in parts
    ]
    ours, theirs = merge(there).to_host(), merge_on_host(parts)
    order = np.argsort(theirs.keys)
    np.testing.assert_array_equal(ours.keys, theirs.keys[order])
    np.testing.assert_allclose(ours.values, theirs.values[order], rtol=1e-6, atol=1e-7)
    assert ours.accesses is not None and theirs.accesses is not None
    np.testing.assert_array_equal(ours.accesses, theirs.accesses[order])


def test_a_gradient_that_is_not_finite_is_named(device: torch.device) -> None:
    values = torch.zeros(4, 3, device=device)
    grad = MergedRowGrad(torch.tensor([3, 5, 8, 9], device=device), values)
    assert grad.non_finite() is None
    values[2, 1] = float("nan")
    assert grad.non_finite() == 8


def test_each_group_has_its_copies(device: torch.device, make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    rows = rows_on(device, tables, 160)
    ads = tables.keys_of(1, [("ad", torch.arange(20))])
    for _ in range(40):  # in turn, as the forward passes of a model do
        for group, keys in ((0, some_keys(tables)), (1, ads)):
            look_up(rows, group, keys)
    for group, keys in ((0, np.unique(some_keys(tables))), (1, ads)):
        hits = rows.hits
        look_up(rows, group, keys)
        assert rows.hits - hits > len(keys) / 2, f"group {group}"
    rows.close()


def test_without_copies_none_are_read(device: torch.device, make_tables: MakeTables) -> None:
    tables = make_tables(SIZES)
    rows, keys = rows_on(device, tables, 1000), np.unique(some_keys(tables))
    kept(rows, keys)
    rows.keep_copies(False)
    hits = rows.hits
    for _ in range(12):
        look_up(rows, 0, keys)
    assert rows.hits == hits
    rows.keep_copies(True)
    kept(rows, keys)
    rows.close()
