"""Row optimizers against torch's, on the rows a step touches; the others do not move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import gba_hvd
from gba_hvd import kernels
from gba_hvd.embedding.row_gradients import RowGrad, RowSum, add_in_order
from gba_hvd.embedding.row_optimizers import update_
from gba_hvd.errors import BadInput
from gba_hvd.shm.layout import Layout

N_ROWS, DIM, STEPS = 11, 5, 40
SIZES = {"before": (4, DIM), "table": (N_ROWS, DIM), "after": (3, DIM), "wide": (6, 8)}


class Rows:
    """A piece of memory with tables in it, and one table among them under test."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.layout = Layout.of(SIZES, optimizer.slots, n_shards=3, seed=0, init_std=1.0)
        self.flat = np.zeros(3 * self.layout.region_words, dtype=np.float32)
        self.group, self.base = self.layout.groups[0], self.layout.place_of_table["table"][1]
        self.values = np.random.default_rng(0).normal(size=(N_ROWS, DIM)).astype(np.float32)
        for row, value in enumerate(self.values):
            key = self.base + row
            at = (key % 3) * self.layout.region_words + self.group.at + key // 3 * self.group.record
            self.flat[at : at + DIM] = value
        self.untouched = self.flat.copy()

    def read(self, offset: int = 0, width: int = DIM) -> np.ndarray:
        """`width` words of every row's record, from its word `offset`."""
        out = np.empty((N_ROWS, width), dtype=np.float32)
        keys, group = np.arange(N_ROWS, dtype=np.int64) + self.base, self.group
        kernels.gather_rows(self.flat, self.layout.record_starts(keys, group), offset, out)
        return out

    def step(self, rows: np.ndarray, grad: np.ndarray, lr: float, step: int) -> None:
        """Hands the gradient over doubled with scale 1/2, in an order of its own."""
        order = np.random.default_rng(step).permutation(len(rows))
        values = np.ascontiguousarray(2 * grad[order], dtype=np.float32)
        self.optimizer.update_(
            self.flat, self.layout, self.group, RowGrad(rows[order] + self.base, values), 0.5, lr, step
        )


def some_steps(every_row: bool = False) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """(rows, their gradients, learning rate) of each step; row 0 is never touched unless all are."""
    rng = np.random.default_rng(1)
    steps = []
    for step in range(STEPS):
        rows = np.arange(N_ROWS) if every_row else np.sort(rng.permutation(np.arange(1, N_ROWS))[: rng.integers(1, 8)])
        steps.append((rows, rng.normal(size=(len(rows), DIM)).astype(np.float32), 0.1 / (1 + step / 10)))
    return steps


def run_torch(values: np.ndarray, make: Any, steps: list[Any], decay: float, sparse: bool = False) -> np.ndarray:
    weight = torch.from_numpy(values.copy()).requires_grad_()
    optimizer = make([weight])
    for rows, grad, lr in steps:
        optimizer.param_groups[0]["lr"] = lr
        touched = torch.from_numpy(grad) + decay * weight.detach()[rows]
        if sparse:
            weight.grad = torch.sparse_coo_tensor(
                torch.from_numpy(rows)[None], touched, weight.shape, check_invariants=True
            )
        else:
            weight.grad = torch.zeros_like(weight).index_put_((torch.from_numpy(rows),), touched)
        optimizer.step()
    return weight.detach().numpy()


def run_ours(rows: Rows, steps: list[Any]) -> np.ndarray:
    for number, (touched, grad, lr) in enumerate(steps, start=1):
        rows.step(touched, grad, lr, number)
    return rows.read()


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_sgd_is_torch_sgd(decay: float) -> None:
    rows = Rows(gba_hvd.SGD(lr=1.0, weight_decay=decay))
    expected = run_torch(rows.values, lambda p: torch.optim.SGD(p, lr=1.0), some_steps(), decay)
    np.testing.assert_allclose(run_ours(rows, some_steps()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adagrad_is_torch_adagrad(decay: float) -> None:
    rows = Rows(gba_hvd.Adagrad(lr=1.0, weight_decay=decay, eps=1e-3))
    expected = run_torch(rows.values, lambda p: torch.optim.Adagrad(p, lr=1.0, eps=1e-3), some_steps(), decay)
    np.testing.assert_allclose(run_ours(rows, some_steps()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adam_is_torch_sparse_adam(decay: float) -> None:
    betas = (0.8, 0.95)
    rows = Rows(gba_hvd.Adam(lr=1.0, betas=betas, weight_decay=decay))
    expected = run_torch(
        rows.values, lambda p: torch.optim.SparseAdam(p, lr=1.0, betas=betas), some_steps(), decay, sparse=True
    )
    np.testing.assert_allclose(run_ours(rows, some_steps()), expected, rtol=1e-4, atol=1e-5)


def test_adam_that_touches_every_row_is_torch_adam() -> None:
    rows = Rows(gba_hvd.Adam(lr=1.0, eps=1e-2))
    steps = some_steps(every_row=True)
    expected = run_torch(rows.values, lambda p: torch.optim.Adam(p, lr=1.0, eps=1e-2), steps, 0.0)
    np.testing.assert_allclose(run_ours(rows, steps), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_row_adagrad_keeps_one_sum_of_mean_squares(decay: float) -> None:
    rows = Rows(gba_hvd.RowAdagrad(lr=1.0, weight_decay=decay, eps=1e-3))
    expected, total = rows.values.astype(np.float64), np.zeros(N_ROWS)
    for touched, grad, lr in some_steps():
        g = grad + decay * expected[touched]
        total[touched] += np.mean(g**2, axis=1)
        expected[touched] -= lr * g / (np.sqrt(total[touched]) + 1e-3)[:, None]
    np.testing.assert_allclose(run_ours(rows, some_steps()), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rows.read(rows.group.slots[0], 1)[:, 0], total, rtol=1e-4)


EVERY_RULE = [gba_hvd.SGD, gba_hvd.Adagrad, gba_hvd.RowAdagrad, gba_hvd.Adam]


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_what_a_step_does_not_touch_does_not_change(rule: Any) -> None:
    rows = Rows(rule(lr=0.1, weight_decay=0.1))
    rows.step(np.array([4]), np.ones((1, DIM), np.float32), 0.1, step=1)
    assert 0 < np.count_nonzero(rows.flat != rows.untouched) <= rows.group.record
    assert np.array_equal(np.delete(rows.read(), 4, axis=0), np.delete(rows.values, 4, axis=0))


@dataclass(frozen=True)
class Doubled(gba_hvd.Adagrad):
    """Has an update of its own, which takes gradients that are added up."""

    def update_(self, flat: Any, layout: Any, group: Any, grad: RowGrad, scale: float, lr: float, step: int) -> None:
        super().update_(flat, layout, group, grad, 2 * scale, lr, step)


@pytest.mark.parametrize("rule", [*EVERY_RULE, Doubled])
@pytest.mark.parametrize("dim", [1, 16, 33])
def test_two_gradients_that_the_update_adds_up_give_the_bits_of_their_sum(rule: Any, dim: int) -> None:
    n_rows, optimizer, rng = 2_000, rule(lr=0.1, weight_decay=0.01), np.random.default_rng(3)
    layout = Layout.of({"table": (n_rows, dim)}, optimizer.slots, n_shards=3, seed=0, init_std=1.0)
    first, second = (
        RowGrad(rng.permutation(n_rows)[:n].astype(np.int64), rng.normal(size=(n, dim)).astype(np.float32))
        for n in (1_100, 700)
    )
    found = add_in_order([first, second])
    assert isinstance(found, RowSum)
    memory = rng.normal(size=3 * layout.region_words).astype(np.float32) ** 2
    together, apart = memory.copy(), memory.copy()
    for step in (1, 2):
        update_(optimizer, together, layout, layout.groups[0], found, 0.5, 0.1, step)
        optimizer.update_(apart, layout, layout.groups[0], found.added_up(), 0.5, 0.1, step)
    assert not np.array_equal(together, memory)
    assert together.tobytes() == apart.tobytes()


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_a_step_without_rows_is_no_trouble(rule: Any) -> None:
    rows = Rows(rule(lr=0.1))
    rows.step(np.empty(0, np.int64), np.empty((0, DIM), np.float32), 0.1, step=1)
    assert np.array_equal(rows.flat, rows.untouched)


@pytest.mark.parametrize("rule", EVERY_RULE)
@pytest.mark.parametrize("settings", [{"lr": -0.1}, {"lr": float("nan")}, {"lr": 0.1, "weight_decay": -1.0}], ids=str)
def test_negative_settings_are_refused(rule: Any, settings: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=f"{rule.__name__}: lr and weight_decay must not be negative"):
        rule(**settings)


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1)])
def test_adam_refuses_betas_that_never_forget(betas: tuple[float, float]) -> None:
    with pytest.raises(BadInput, match=r"Adam: betas must be in \[0, 1\)"):
        gba_hvd.Adam(lr=0.1, betas=betas)


@pytest.mark.parametrize("rule", [gba_hvd.SGD, gba_hvd.Adagrad, gba_hvd.RowAdagrad, gba_hvd.Adam])
def test_updates_are_counted_modulo_2_to_the_32(rule: Any) -> None:
    rows = Rows(rule(lr=0.1))
    counter = rows.group.record - 1
    words = rows.flat.view(np.uint32)
    key = rows.base + 2
    words[key % 3 * rows.layout.region_words + rows.group.at + key // 3 * rows.group.record + counter] = 2**32 - 2
    for step in range(1, 4):
        rows.step(np.array([1, 2]), np.ones((2, DIM), dtype=np.float32), 0.1, step)
    assert rows.read(counter, 1).view(np.uint32)[:4, 0].tolist() == [0, 3, 1, 0]
