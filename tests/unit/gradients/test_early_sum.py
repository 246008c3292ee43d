"""Half of the dense gradient's sum begins during backward, and is what a sum after backward would have been."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gba_hvd.comm.groups import form_group
from gba_hvd.gradients import early_sum
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.gradients.early_sum import EarlySum, open_early_sum
from gba_hvd.shm.host_sum import SumThroughLeaders
from gba_hvd.shm.outbox import Outbox
from tests.unit.comm.test_groups import meet, on_all
from tests.unit.thread_world import ThreadWorld

HOSTS = [[0, 1], [2], [3]]
N_EXTRA, N_WORDS, STEPS = 2, 4096, 3  # extra: changed late, n_bad
SKIPS = "skips"


class Worker:
    def __init__(self, world: ThreadWorld, folder: Path) -> None:
        torch.manual_seed(0)
        self.rank, self.began = world.rank, []
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1))
        self.dense = DenseGradients(list(self.model.parameters()), N_EXTRA)
        here = next(ranks for ranks in HOSTS if self.rank in ranks)
        own, number = Outbox.create(folder, N_WORDS)
        (folder / f"rank{self.rank}").write_text(str(number))
        meet(world)
        boxes = {
            rank: own
            if rank == self.rank
            else Outbox.open(folder, os.getpid(), int((folder / f"rank{rank}").read_text()), N_WORDS)
            for rank in here
        }
        self.sums = SumThroughLeaders(self.rank, boxes, form_group("commit", world, [ranks[0] for ranks in HOSTS]))
        early = open_early_sum(self.dense, self.sums)
        assert early is not None
        self.early: EarlySum = early
        begin = self.sums.begin

        def note(values: Tensor, waits: bool = True) -> None:
            self.began.append(waits)
            begin(values, waits)

        self.sums.begin = note  # type: ignore[method-assign]

    def backward(self, step: int, scale: float = 1.0) -> None:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + self.rank))
        (self.model(x).square().sum() * scale).backward()

    def step(self, step: int, weight: float, then: Callable[[Worker, int], object]) -> tuple[Tensor, Tensor, bool]:
        """The expected sum's own part, the sum, and whether it was as sent."""
        dense = self.dense
        dense.clear_total_()
        self.early.forget()
        self.backward(step + 100)  # a micro-batch before the last
        dense.collect_()
        dense.add_micro_batch_(1.0)
        self.began.clear()
        if then(self, step) != SKIPS:
            dense.collect_()
            dense.add_micro_batch_(weight)
        mine = dense.total[: dense.n].clone()
        if not torch.isfinite(mine).all():
            dense.extra[1] = 1
        as_sent = self.early.sum_(self.sums.sum_, dense.extra[:1], dense.extra[1:])
        return mine, dense.total[: dense.n].clone(), as_sent


def plain(worker: Worker, step: int) -> None:
    worker.early.expect(0.5)
    worker.backward(step)
    assert worker.began == [False]


def fresh_gradients(worker: Worker, step: int) -> None:
    worker.model.zero_grad(set_to_none=True)
    plain(worker, step)


def clips_on_one(worker: Worker, step: int) -> None:
    plain(worker, step)
    if worker.rank == 3:
        nn.utils.clip_grad_norm_(worker.model.parameters(), 0.01)


def two_losses(worker: Worker, step: int) -> None:
    plain(worker, step)
    worker.backward(step + 50)


def has_no_batch(worker: Worker, step: int) -> str | None:
    if worker.rank in (0, 2):
        return SKIPS
    return plain(worker, step)


def computes_again(worker: Worker, step: int) -> None:
    """The loop was left with a micro-batch that had been computed."""
    if worker.rank == 1:
        worker.early.expect(0.5)
        worker.backward(step + 70)
        worker.dense.zero_()
        worker.early.forget()
        worker.early.expect(0.5)
        worker.backward(step)
        assert worker.began == [False]
    else:
        plain(worker, step)


def not_finite(worker: Worker, step: int) -> None:
    worker.early.expect(0.5)
    worker.backward(step, float("inf") if worker.rank == 1 else 1.0)


def half_is_unused(worker: Worker, step: int) -> None:
    """Then it begins when the step is complete."""
    worker.early.expect(0.5)
    worker.model[0](torch.ones(1, 5)).sum().backward()
    assert worker.began == []


CASES = {plain: True, fresh_gradients: True, has_no_batch: True, half_is_unused: True, not_finite: True,
         clips_on_one: False, two_losses: False, computes_again: False}  # fmt: skip


@pytest.mark.parametrize("then", CASES, ids=lambda then: then.__name__)
def test_the_sum_is_that_of_the_complete_gradients_on_all_workers_alike(
    then: Callable[[Worker, int], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(early_sum, "LEAST_BYTES", 0)

    def work(world: ThreadWorld) -> list[tuple[Tensor, Tensor, bool]]:
        worker = Worker(world, tmp_path)
        found = [worker.step(step, 0.5, then) for step in range(STEPS)]
        worker.early.close()
        meet(world)
        worker.sums.close()
        return found

    everyone = on_all(4, work)
    for step in range(STEPS):
        own, sums, as_sent = zip(*(of[step] for of in everyone), strict=True)
        assert as_sent == (CASES[then],) * 4
        assert all(one.equal(sums[0]) or then is not_finite for one in sums)
        torch.testing.assert_close(sums[0], torch.stack(own).sum(0), equal_nan=True, rtol=1e-5, atol=1e-6)


def test_small_gradients_and_those_of_one_host_are_summed_when_complete(tmp_path: Path) -> None:
    dense = DenseGradients([torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)], N_EXTRA)
    own, _ = Outbox.create(tmp_path, N_WORDS)

    class Leaders:
        def close(self) -> None:
            pass

    sums = SumThroughLeaders(0, {0: own}, Leaders())  # type: ignore[arg-type]
    assert open_early_sum(dense, sums) is None and open_early_sum(dense, None) is None
    sums.close()


def test_no_hook_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_sum, "LEAST_BYTES", 0)

    def work(world: ThreadWorld) -> int:
        worker = Worker(world, tmp_path)
        worker.early.close()
        worker.early.close()
        meet(world)
        worker.sums.close()
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in worker.model.parameters())

    assert on_all(4, work) == [0] * 4
