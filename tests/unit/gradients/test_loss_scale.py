"""The loss scale of mixed precision: one for all workers, moved by global steps, as in torch with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gba_hvd
from gba_hvd import BadInput, GbaError, NonFiniteGradient
from gba_hvd.compression import error_feedback
from gba_hvd.gradients.loss_scale import LossScale
from tests.unit.modes.test_allreduce import check_same
from tests.unit.test_optimizer import Reference, check_equal
from tests.unit.thread_world import EventLog, Workers, miss_a_result

SETTINGS = {"init_scale": 2.0**10, "growth_interval": 3}
OVERFLOWS = {
    (0, 5),
    (0, 6),
    (1, 0),
    (2, 12),
}  # (epoch, micro-batch): two in one step, then a first and a short last one


def scaler_of(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{**SETTINGS, **settings})


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02, eps=1e-3)


def scaled(scaler: torch.amp.GradScaler, loss: torch.Tensor, overflows: bool) -> torch.Tensor:
    total: torch.Tensor = scaler.scale(loss)
    return total * float("inf") if overflows else total


class Job:
    """A training with a scaler, whose gradients overflow on request."""

    def __init__(self, make: Callable[..., Any], overflows: set[tuple[int, int]], **settings: Any) -> None:
        self.scaler = settings.pop("scaler", None) or scaler_of()
        more = {"grad_scaler": self.scaler, **settings.pop("more", {})}
        self.overflows, self.unscales_first, self.received = overflows, False, EventLog()
        self.job = make(more=more, scaler=self.scaler, **settings)
        self.job.state.register_callbacks([self.received])
        self.hooked: list[int] = []  # the steps that the hook ran after
        self.job.state.on_step(lambda: self.hooked.append(self.job.state.step))
        self.scales: list[float] = []  # after each global step, as the loop sees them

    def epoch(self, dataset: Any, epoch: int) -> None:
        for batch in gba_hvd.batches(dataset, self.job.state):
            step = self.job.state.step
            self.job.optimizer.zero_grad()
            loss = self.job.loss(batch)
            scaled(self.scaler, loss, (epoch, batch.index) in self.overflows).backward()
            if self.unscales_first:
                self.scaler.unscale_(self.job.optimizer)
            self.scaler.step(self.job.optimizer, loss=loss)
            self.scaler.update()
            if self.job.state.step > step:
                self.scales.append(self.scaler.get_scale())

    def train(self, dataset: Any, epochs: int) -> Job:
        for self.job.state.epoch in range(self.job.state.epoch, epochs):
            self.epoch(dataset, self.job.state.epoch)
        return self


class Plain(Reference):
    """The same in plain torch, over the global batch; micro-batches of 4, four of them a step."""

    def __init__(self, job: Any, clicker: Any, limit: float | None = None) -> None:
        super().__init__(job, clicker, adam, adam)
        self.scaler, self.scales, self._limit, self._at = scaler_of(), [], limit, (0, 0)  # type: ignore[var-annotated]

    def step(self, batch: gba_hvd.Batch) -> float:
        epoch, number = self._at
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.label)
        overflows = any((epoch, micro) in OVERFLOWS for micro in range(4 * number, 4 * number + 4))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        scaled(self.scaler, loss, overflows).backward()
        if self._limit is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            parameters = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self._limit)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())
        self._at = (epoch, number + 1) if len(batch) == 16 else (epoch + 1, 0)
        return loss.item()


# --- equal to torch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscales_first", [False, True])
@pytest.mark.parametrize("limit", [None, 0.05])
def test_steps_and_scale_are_those_of_torch_with_the_global_batch(
    training: Any, clicks: Any, clicker: Any, unscales_first: bool, limit: float | None
) -> None:
    """Also where steps are skipped, which Adam's bias correction does not count. 50 samples: the last step has 2."""
    settings = {"dense": adam, "rows": gba_hvd.SGD(lr=0.5), "more": {"max_norm": limit}, "epoch": 0}
    ours = Job(training, OVERFLOWS, **settings)
    ours.unscales_first = unscales_first
    reference = Plain(ours.job, clicker, limit)
    reference.optimizers[1] = torch.optim.SGD([e.weight for e in reference.embeddings.values()], lr=0.5)
    ours.train(clicks(50), 3)
    for epoch in range(3):
        reference.epoch(clicks(50), epoch, global_batch=16)
    check_equal(ours.job, reference)
    assert ours.scales == reference.scales
    assert sorted({2.0**8, 2.0**9, 2.0**10} - set(ours.scales)) == [], "it was to fall and to rise"
    account = ours.job.state.samples
    assert (account.total, account.applied, account.dropped) == (150, 150 - 16 - 16 - 2, 16 + 16 + 2)
    assert account.dropped_for == {"overflow": 16 + 16 + 2}
    state = ours.job.state.engine.progress.state_dict()
    del state["account"]["overflowed"], state["account"]["not_finite"]  # as older versions had it
    ours.job.state.engine.progress.load_state_dict(state)
    assert ours.job.state.samples.dropped_for == {"overflow": 16 + 16 + 2}
    assert account.steps_skipped == 3 and ours.job.state.step == 12
    assert len(ours.received.of("overflow")) == 3
    skipped = {event.step for event in ours.received.of("overflow")}
    assert ours.hooked == [step for step in range(1, 13) if step not in skipped], "schedules stand still there"


def test_lazy_adam_of_rows_does_not_count_skipped_steps(training: Any, clicks: Any, clicker: Any) -> None:
    """Lazy Adam is Adam for rows that are in every batch: here users 0 and 1."""
    settings = {"dense": adam, "rows": gba_hvd.Adam(lr=0.02, eps=1e-3), "epoch": 0}
    dataset = clicks(64, users=2, items=1)
    ours = Job(training, {(0, 1), (0, 4)}, **settings)
    reference = Plain(ours.job, clicker)
    reference._at = (7, 0)
    ours.train(dataset, 1)
    order = gba_hvd.epoch.EpochOrder(64, 0, 0)
    for start in (32, 48):  # the two steps that did not overflow
        reference.step(dataset.take(order.rows(start, 16)))
    np.testing.assert_allclose(
        ours.job.all_rows()["user"][:2], reference.embeddings["user"].weight.detach().numpy()[:2], rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aa", "aaa", "ab"])
def test_an_overflow_on_one_worker_skips_the_step_on_all(
    workers: Workers, on_host: Any, clicks: Any, hosts: str
) -> None:
    jobs = [Job(lambda host=host, **settings: on_host(host, **settings), OVERFLOWS) for host in hosts]
    alone = Job(lambda **settings: on_host("alone", **settings), OVERFLOWS)
    workers.together(jobs, lambda one: one.train(clicks(50), 3))
    workers.together([alone], lambda one: one.train(clicks(50), 3))
    check_same([one.job for one in jobs], alone.job)
    for one in jobs:
        assert vars(one.job.state.samples) == vars(alone.job.state.samples)
        assert one.scaler.state_dict() == alone.scaler.state_dict()
        assert one.hooked == alone.hooked and len(one.hooked) == 12 - 3


@pytest.mark.slow
@pytest.mark.parametrize("misses", [0, 1])
def test_who_missed_that_a_step_is_skipped_does_not_apply_it(
    workers: Workers, on_host: Any, clicks: Any, misses: int
) -> None:
    """The second step overflows; one worker does not get the result of its commit."""
    jobs = [Job(lambda **settings: on_host("a", **settings), OVERFLOWS) for _ in range(2)]
    for one in jobs:
        one.state = one.job.state  # type: ignore[attr-defined]
        one.tables = one.job.tables  # type: ignore[attr-defined]
    miss_a_result(workers, jobs, misses, 2, lambda one: one.train(clicks(50), 2))
    workers.together(jobs, lambda one: one.train(clicks(50), 2))
    alone = Job(lambda **settings: on_host("alone", **settings), OVERFLOWS)
    workers.together([alone], lambda one: one.train(clicks(50), 2))
    check_same([one.job for one in jobs], alone.job)
    for one in jobs:
        assert vars(one.job.state.samples) == vars(alone.job.state.samples)
        assert one.scaler.state_dict() == alone.scaler.state_dict()


@pytest.mark.slow
def test_what_overflowed_does_not_stay_in_the_residual(
    workers: Workers, on_host: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_feedback, "MIN_ELEMENTS", 6)
    fewer = gba_hvd.Compression.topk(keep=0.5).always()
    settings = {"compression": fewer, "row_compression": fewer}
    jobs = [Job(lambda host=host, **more: on_host(host, **settings, **more), OVERFLOWS) for host in "ab"]
    workers.together(jobs, lambda one: one.train(clicks(50), 2))
    assert any(one.job.state.engine.model.compression.feedback.residual.any() for one in jobs)
    for one in jobs:
        assert np.isfinite(one.job.state.engine.model.compression.feedback.residual).all()
        assert np.isfinite(one.job.state.engine.model.row_coder.lost)
        assert one.job.state.samples.steps_skipped == 2
        assert all(np.isfinite(value).all() for value in one.job.all_dense().values())


# --- the scale -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"growth_factor": 1.7, "backoff_factor": 0.3}, {"init_scale": 2.0**127}])
def test_the_scale_moves_as_in_torch(settings: dict[str, float]) -> None:
    theirs = scaler_of(**settings)
    state = theirs.state_dict()
    ours = LossScale(growth_tracker=state.pop("_growth_tracker"), **state)
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflows in (0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0):
        theirs.scale(parameter.sum()).backward()
        parameter.grad = torch.tensor([float("inf") if overflows else 1.0])
        theirs.step(optimizer)
        theirs.update()
        ours.step(bool(overflows))
        assert list(ours.now[:2]) == [theirs.get_scale(), theirs._get_growth_tracker()]


def test_a_new_job_goes_on_with_the_scale_of_its_state(training: Any, clicks: Any) -> None:
    ours = Job(training, OVERFLOWS, epoch=0).train(clicks(50), 1)
    other = Job(training, set(), epoch=0)
    other.scaler.load_state_dict(ours.scaler.state_dict())
    assert other.scaler.state_dict() == ours.scaler.state_dict() != scaler_of().state_dict()
    assert other.job.state.engine.model.loss_scale == ours.job.state.engine.model.loss_scale
    third = Job(training, set(), epoch=0)
    third.job.state.engine.progress.load_state_dict(ours.job.state.engine.progress.state_dict())
    assert third.scaler.state_dict() == ours.scaler.state_dict()


@pytest.mark.slow
def test_training_ends_when_nothing_but_overflows_comes(training: Any, clicks: Any) -> None:
    ours = Job(training, {(epoch, micro) for epoch in range(40) for micro in range(13)}, epoch=0)
    with pytest.raises(NonFiniteGradient, match=r"step 101 .*not finite"):
        ours.train(clicks(50), 40)
    events = ours.received.of("overflow")
    assert len(events) == ours.job.state.samples.steps_skipped == 100
    assert (events[0].level, events[50].level) == ("info", "warning")
    assert "lower the learning rate" in events[50].message


def test_a_scaler_that_is_off_changes_nothing(training: Any, clicks: Any) -> None:
    ours = Job(training, set(), scaler=torch.amp.GradScaler("cpu", enabled=False), epoch=0).train(clicks(50), 1)
    assert ours.job.state.engine.model.loss_scale is None
    assert ours.job.state.samples.applied == 50


# --- what is refused -------------------------------------------------------------------------------------------------


def first_batch(job: Any, dataset: Any) -> tuple[Any, torch.Tensor]:
    batch = next(gba_hvd.batches(dataset, job.state))
    job.optimizer.zero_grad()
    return batch, job.loss(batch)


@pytest.mark.parametrize("unscales_first", [False, True])
def test_a_scaler_that_nobody_knows_is_refused(training: Any, clicks: Any, unscales_first: bool) -> None:
    job, scaler = training(), scaler_of()
    _, loss = first_batch(job, clicks(50))
    scaler.scale(loss).backward()
    if unscales_first:
        scaler.unscale_(job.optimizer)
    with pytest.raises(BadInput, match=r"a GradScaler that DistributedOptimizer does not know.*grad_scaler=scaler"):
        scaler.step(job.optimizer)


def misuse(name: str, ours: Job, loss: torch.Tensor) -> None:
    scaler, optimizer = ours.scaler, ours.job.optimizer
    if name == "not scaled":
        scaler.step(optimizer)
    big = scaler.scale(loss)
    big.backward()
    if name == "scaled loss":
        scaler.step(optimizer, loss=big)
    elif name == "scaled number":
        scaler.step(optimizer, loss=big.item())
    elif name == "optimizer.step":
        optimizer.step(loss=loss)
    elif name == "another optimizer":
        scaler.step(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
    elif name == "new scale":
        scaler.update(4.0)
    elif name == "setting":
        scaler.set_growth_interval(5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not scaled", r"no loss of this micro-batch was scaled: call scaler\.scale\(loss\)\.backward\(\)"),
        ("scaled loss", r"takes the loss itself, got it times the scale"),
        ("scaled number", r"takes the loss itself, got it times the scale"),
        ("optimizer.step", r"call scaler\.step\(optimizer\), not optimizer\.step"),
        ("another optimizer", r"this scaler belongs to the optimizer of DistributedOptimizer"),
        ("new scale", r"all workers agree on the loss scale: leave new_scale out"),
        ("setting", r"growth_interval is fixed once DistributedOptimizer has the scaler"),
    ],
)
def test_what_would_go_wrong_is_refused(training: Any, clicks: Any, name: str, message: str) -> None:
    ours = Job(training, set(), epoch=0)
    _, loss = first_batch(ours.job, clicks(50))
    with pytest.raises(BadInput, match=message):
        misuse(name, ours, loss)


def test_gradients_are_unscaled_once(training: Any, clicks: Any) -> None:
    ours = Job(training, set(), epoch=0)
    _, loss = first_batch(ours.job, clicks(50))
    ours.scaler.scale(loss).backward()
    before = [p.grad.clone() for p in ours.job.model.parameters()]
    ours.scaler.unscale_(ours.job.optimizer)
    for p, grad in zip(ours.job.model.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, grad / 2.0**10)
    with pytest.raises(RuntimeError, match=r"unscale_.. has already been called"):
        ours.scaler.unscale_(ours.job.optimizer)


@pytest.mark.parametrize("scaler", [3, "dynamic"])
def test_a_scaler_is_torchs(training: Any, scaler: Any) -> None:
    with pytest.raises(BadInput, match=r"grad_scaler must be a torch\.amp\.GradScaler, got"):
        training(more={"grad_scaler": scaler})


def test_a_scaler_serves_one_optimizer_and_no_threads(training: Any, clicks: Any) -> None:
    ours = Job(training, set(), epoch=0)
    with pytest.raises(BadInput, match="belongs to another DistributedOptimizer"):
        training(more={"grad_scaler": ours.scaler})
    with pytest.raises(GbaError, match="hogwild cannot scale losses"):
        gba_hvd.hogwild(clicks(50), ours.job.state, lambda model, batch: None)
