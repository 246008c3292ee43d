"""Copies of a model that share its parameters, and what each thread keeps to itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gba_hvd
from gba_hvd.averaging.shared_model import SharedModel
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.ps.worker.lease_prefetch import LeasePrefetcher


class Scorer(nn.Module):
    """Two layers, a frozen scale, and a count of its forward passes."""

    def __init__(self, tables: gba_hvd.EmbeddingTables) -> None:
        super().__init__()
        self.tables, self.mlp = tables, nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("n_passes", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        assert isinstance(self.n_passes, Tensor)
        self.n_passes += 1
        scores: Tensor = self.mlp(self.tables({"user": ids})["user"]) * self.scale
        return scores.sum()


@pytest.fixture
def tables(make_tables: Callable[..., gba_hvd.EmbeddingTables]) -> gba_hvd.EmbeddingTables:
    return make_tables({"user": (10, 4)})


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


IDS = torch.tensor([1, 2, 2])


def test_a_step_of_the_model_is_a_step_of_its_copies_and_gradients_are_each_ones_own(
    tables: gba_hvd.EmbeddingTables,
) -> None:
    model = Scorer(tables)
    copies = [SharedModel(model, trained(model), tables) for _ in range(2)]
    for each in copies:
        each.clear()
    copies[0].module(IDS).backward()
    assert copies[0].has_gradient and all(p.grad is None for p in (*trained(model), *trained(copies[1].module)))
    dense = DenseGradients(trained(model), 0)
    copies[0].dense.collect_()
    dense.take_over_(copies[0].dense)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for ours, theirs in zip(model.parameters(), copies[1].module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert copies[1].module.scale is model.scale and copies[1].module.tables is tables


def test_a_step_between_forward_and_backward_of_another_thread_is_no_error(tables: gba_hvd.EmbeddingTables) -> None:
    model = Scorer(tables)
    copy = SharedModel(model, trained(model), tables)
    copy.clear()
    loss = copy.module(IDS)
    model(IDS).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    loss.backward()
    assert copy.has_gradient


def test_a_copy_that_no_backward_pass_has_reached_says_so(tables: gba_hvd.EmbeddingTables) -> None:
    model = Scorer(tables)
    copy = SharedModel(model, trained(model), tables)
    copy.clear()
    model(IDS).backward()
    assert not copy.has_gradient


def test_buffers_are_each_copy_s_own_until_they_are_brought_home(tables: gba_hvd.EmbeddingTables) -> None:
    model = Scorer(tables)
    first, second = (SharedModel(model, trained(model), tables) for _ in range(2))
    first.module(IDS), first.module(IDS), second.module(IDS)
    assert (int(model.n_passes), int(second.module.n_passes)) == (0, 1)  # type: ignore[arg-type]
    assert first.bring_buffers_to(model) == ["n_passes"] and int(model.n_passes) == 2  # type: ignore[arg-type]
    assert first.bring_buffers_to(model) == []


def test_a_parameter_that_the_model_does_not_have_is_refused(tables: gba_hvd.EmbeddingTables) -> None:
    model, apart = Scorer(tables), nn.Parameter(torch.zeros(2, 7))
    with pytest.raises(gba_hvd.BadInput, match=r"1 parameters that the state's model does not have.*\(2, 7\)"):
        SharedModel(model, [*trained(model), apart], tables)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_a_copy_would_lose_are_refused(tables: gba_hvd.EmbeddingTables, kind: str) -> None:
    model = Scorer(tables)
    getattr(model.mlp[0].weight, kind)(lambda _: None)
    with pytest.raises(gba_hvd.BadInput, match="hooks on its gradient"):
        SharedModel(model, trained(model), tables)


def test_a_model_that_cannot_be_copied_is_refused(tables: gba_hvd.EmbeddingTables) -> None:
    model = Scorer(tables)
    model.door = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(gba_hvd.BadInput, match=r"cannot be copied.*n_threads=1"):
        SharedModel(model, trained(model), tables)


def test_threads_that_keep_apart_find_their_own_row_gradients(tables: gba_hvd.EmbeddingTables) -> None:
    """Both have run their forward pass before one of them takes gradients."""
    both = threading.Barrier(2, timeout=30)
    found: dict[int, list[int]] = {}

    def compute(row: int) -> None:
        with tables.apart():
            tables({"user": torch.tensor([row])})["user"].sum().backward()  # type: ignore[no-untyped-call]
            both.wait()
            found[row] = [int(k) for grads in tables.take_gradients() for grad in grads for k in grad.keys]

    threads = [threading.Thread(target=compute, args=(row,)) for row in (3, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {row: len(keys) for row, keys in found.items()} == {3: 1, 8: 1} and found[3] != found[8]
    assert tables.take_gradients() == [[]], "nothing is left with the others"


def test_rows_of_other_hosts_are_those_of_the_thread(tables: gba_hvd.EmbeddingTables) -> None:
    common = tables.remote
    with tables.apart() as passes:
        assert tables.remote is passes.remote is not common
        tables.remote = passes.remote = [None]
    assert tables.remote is common


def test_whoever_waits_for_an_item_is_freed_by_a_failure() -> None:
    freed: list[BaseException] = []
    fetching, may_end = threading.Event(), threading.Event()

    def fetch() -> np.ndarray:
        fetching.set()
        assert may_end.wait(30)
        return np.zeros(1)

    ahead = LeasePrefetcher(fetch)

    def wait() -> None:
        try:
            ahead.next()
        except ValueError as error:
            freed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert fetching.wait(30)
    ahead.fail(ValueError("of another thread"))
    waiting.join(30)
    assert len(freed) == 1 and ahead.is_closed
    may_end.set()
    ahead.close()
