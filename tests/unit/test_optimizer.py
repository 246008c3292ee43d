"""A global batch in micro-batches is one big step of torch; schedulers drive both; bad numbers change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import gba_hvd
import recovery
from gba_hvd import BadInput, GbaError, NonFiniteGradient
from gba_hvd.epoch import EpochOrder, EpochPlan
from gba_hvd.training.step_hooks import StepHooks
from tests.unit.thread_world import EventLog


class Reference:
    """The same model in plain torch: one step per global batch, tables as `nn.Embedding`s."""

    def __init__(self, job: Any, clicker: Any, dense: Callable[..., Any], rows: Callable[..., Any]) -> None:
        job.state.ensure_synced()
        self.embeddings = {
            name: nn.Embedding.from_pretrained(torch.from_numpy(w), freeze=False) for name, w in job.all_rows().items()
        }
        self.model = clicker(lambda ids: {name: self.embeddings[name](column) for name, column in ids.items()})
        self.model.load_state_dict(job.model.state_dict())
        self.optimizers = [dense(list(self.model.parameters())), rows([e.weight for e in self.embeddings.values()])]

    def step(self, batch: gba_hvd.Batch) -> float:
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.label)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item()

    def epoch(self, dataset: Any, epoch: int, global_batch: int, seed: int = 0) -> list[float]:
        order, cut = EpochOrder(len(dataset), seed, epoch), EpochPlan(len(dataset), global_batch, 1)
        starts = range(0, len(dataset), global_batch)
        return [self.step(dataset.take(order.rows(start, cut.samples_of_step(i)))) for i, start in enumerate(starts)]


def check_equal(job: Any, reference: Reference) -> None:
    for name, parameter in reference.model.named_parameters():
        np.testing.assert_allclose(
            job.all_dense()[name], parameter.detach().numpy(), rtol=2e-4, atol=2e-6, err_msg=name
        )
    for name, rows in job.all_rows().items():
        expected = reference.embeddings[name].weight.detach().numpy()
        np.testing.assert_allclose(rows, expected, rtol=2e-4, atol=2e-6, err_msg=name)


RULES: list[Any] = [
    (gba_hvd.SGD(lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    (gba_hvd.Adagrad(lr=0.1, eps=1e-3), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3)),
]
DENSE: list[Any] = [
    lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-3),
    lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3, foreach=True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "dense"),
    [(RULES[0], DENSE[0]), (RULES[1], DENSE[1]), (RULES[0], DENSE[2])],
    ids=["sgd and momentum", "adagrad and adam", "sgd and adamw"],
)
@pytest.mark.parametrize("micro_batch", [16, 4, 1])
def test_micro_batches_make_the_step_of_their_global_batch(
    training: Any, clicks: Any, clicker: Any, rows: Any, dense: Any, micro_batch: int
) -> None:
    """50 samples in steps of 16: the last step of an epoch has 2."""
    job, dataset = training(rows=rows[0], dense=dense, micro_batch=micro_batch), clicks(50)
    reference = Reference(job, clicker, dense, rows[1])
    losses: list[Any] = []
    job.state.register_callbacks([LossesTo(losses)])
    expected = []
    for epoch in range(3):
        job.epoch(dataset)
        expected += reference.epoch(dataset, epoch, global_batch=16)
    assert job.state.step == 12
    assert (job.state.samples.total, job.state.samples.applied) == (150, 150)
    check_equal(job, reference)
    assert losses == pytest.approx(expected, rel=1e-4)


class LossesTo(gba_hvd.Callback):
    def __init__(self, losses: list[float | None]) -> None:
        self.losses = losses

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        self.losses.append(record.loss)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 15, 16, 17, 33])
def test_epochs_of_any_length(training: Any, clicks: Any, clicker: Any, n: int) -> None:
    job, dataset = training(), clicks(n)
    reference = Reference(job, clicker, lambda p: torch.optim.SGD(p, lr=0.5), RULES[0][1])
    for epoch in range(2):
        job.epoch(dataset, seed=4)
        reference.epoch(dataset, epoch, global_batch=16, seed=4)
    assert job.state.step == 2 * math.ceil(n / 16)
    check_equal(job, reference)


# --- loops people write ----------------------------------------------------------------------------------------------


def forward_first(job: Any, batch: gba_hvd.Batch) -> None:
    loss = job.loss(batch)
    job.optimizer.zero_grad()
    loss.backward()
    job.optimizer.step()


def zero_last(job: Any, batch: gba_hvd.Batch) -> None:
    job.loss(batch).backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def model_zero_grad(job: Any, batch: gba_hvd.Batch) -> None:
    job.model.zero_grad()
    job.loss(batch).backward()
    job.optimizer.step()


def never_zero(job: Any, batch: gba_hvd.Batch) -> None:
    job.loss(batch).backward()
    job.optimizer.step()


def two_halves(job: Any, batch: gba_hvd.Batch) -> None:
    job.optimizer.zero_grad()
    (0.25 * job.loss(batch)).backward()
    (0.75 * job.loss(batch)).backward()
    job.optimizer.step()


def peek_first(job: Any, batch: gba_hvd.Batch) -> None:
    with torch.no_grad():
        job.model(batch)
    job.model(batch)  # a forward pass without a backward pass
    job.micro_step(batch)


@pytest.mark.parametrize(
    "loop", [forward_first, zero_last, model_zero_grad, never_zero, two_halves, peek_first], ids=lambda f: f.__name__
)
def test_loops_of_every_style_train_the_same(training: Any, clicks: Any, clicker: Any, loop: Any) -> None:
    job, dataset = training(), clicks(30)
    reference = Reference(job, clicker, lambda p: torch.optim.SGD(p, lr=0.5), RULES[0][1])
    for batch in gba_hvd.batches(dataset, job.state):
        loop(job, batch)
    reference.epoch(dataset, 0, global_batch=16)
    check_equal(job, reference)


def test_step_hooks_run_once_for_each_global_step_also_after_loading(training: Any, clicks: Any) -> None:
    job, steps = training(dense=DENSE[1]), []
    job.optimizer.register_step_pre_hook(lambda *_: steps.append(job.state.step))
    job.epoch(clicks(32))
    assert steps == [0, 1]
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    job.epoch(clicks(32))
    assert steps == [0, 1, 2, 3]


def test_half_precision_models_count_their_samples(training: Any, clicks: Any) -> None:
    job = training(dense=lambda p: torch.optim.SGD([q.data.bfloat16().requires_grad_() for q in p], lr=0.1),
                   global_batch=1200, micro_batch=300)  # fmt: skip
    job.epoch(clicks(1001))
    assert job.state.samples.applied == 1001


# --- schedulers ------------------------------------------------------------------------------------------------------

BY_EPOCH: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "LambdaLR of two": lambda o: lr_scheduler.LambdaLR(o, [lambda e: 1 / (1 + e), lambda e: 0.5**e]),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.3, 0.7], total_steps=10),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", BY_EPOCH.values(), ids=BY_EPOCH)
def test_schedulers_drive_dense_parameters_and_rows(training: Any, clicks: Any, clicker: Any, make: Any) -> None:
    job, dataset = (
        training(dense=lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9), rows=gba_hvd.SGD(lr=0.7)),
        clicks(40),
    )
    reference = Reference(job, clicker, lambda p: torch.optim.SGD(p, lr=0.3), lambda p: torch.optim.SGD(p, lr=0.7))
    both = torch.optim.SGD(
        [
            {"params": list(reference.model.parameters()), "lr": 0.3, "momentum": 0.9},
            {"params": [e.weight for e in reference.embeddings.values()], "lr": 0.7},
        ],
        lr=1.0,
    )
    both.param_groups[1]["momentum"] = 0.0
    reference.optimizers = [both]
    ours, theirs = make(job.optimizer), make(both)
    for epoch in range(5):
        job.epoch(dataset)
        if "momentum" in both.param_groups[1]:
            both.param_groups[1]["momentum"] = 0.0  # a cycle of momentum is the dense optimizer's alone
        reference.epoch(dataset, epoch, global_batch=16)
        for scheduler in (ours, theirs):
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        assert [g["lr"] for g in job.optimizer.param_groups] == pytest.approx([g["lr"] for g in both.param_groups])
    check_equal(job, reference)
    assert job.optimizer.param_groups[-1]["lr"] != 0.7


def test_a_scheduler_on_step_runs_once_per_global_step(training: Any, clicks: Any, clicker: Any) -> None:
    job, dataset = training(rows=gba_hvd.SGD(lr=0.7)), clicks(40)
    scheduler = lr_scheduler.ExponentialLR(job.optimizer, 0.5)
    with pytest.raises(BadInput, match="ExponentialLR is not in the state"):
        job.state.on_step(scheduler.step)
    state = job.state = gba_hvd.elastic.TorchState(job.model, job.optimizer, scheduler=scheduler)
    state.on_step(scheduler.step)
    job.epoch(dataset)  # 40 samples: steps of 16, 16 and 8, in micro-batches of 4
    assert (state.step, scheduler.last_epoch) == (3, 3)
    assert job.optimizer.param_groups[-1]["lr"] == pytest.approx(0.7 / 8)


def test_a_late_joiner_runs_step_hooks_for_the_steps_its_scheduler_has_not_seen() -> None:
    seen: list[int] = []
    hooks = StepHooks()
    hooks.functions.append(lambda: seen.append(hooks.ran_until))
    hooks.ran_until = 4  # as the state that it loaded
    hooks.run(6)
    hooks.run(6)
    assert seen == [5, 6]


def test_a_scheduler_stepped_per_micro_batch_is_reported(
    training: Any, clicks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    job, dataset = training(), clicks(40)
    scheduler = lr_scheduler.ExponentialLR(job.optimizer, 0.99)
    state = job.state = gba_hvd.elastic.TorchState(job.model, job.optimizer, scheduler=scheduler)
    for batch in gba_hvd.batches(dataset, state):
        job.optimizer.zero_grad()
        job.model(batch).sum().backward()
        job.optimizer.step()
        scheduler.step()
    assert [record.getMessage() for record in caplog.records] == [
        "[scheduler too fast] step 1: the scheduler 'scheduler' stepped more often than global steps were made, so its "
        "schedule depends on the number of workers; call state.on_step(scheduler.step) instead of scheduler.step() in "
        "the loop"
    ]


OUTSIDE = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=100),  # which changes no rate here
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[100]
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_scheduler_outside_the_state_that_steps_per_micro_batch_is_reported_once(
    training: Any, clicks: Any, name: str
) -> None:
    job, log = training(epoch=0), EventLog()
    job.state.register_callbacks([log])
    scheduler = OUTSIDE[name](job.optimizer)
    for job.state.epoch in range(2):
        for batch in gba_hvd.batches(clicks(40), job.state):
            job.micro_step(batch)
            scheduler.step()
    (event,) = log.of("scheduler_too_fast")
    assert (event.level, event.step, event.data) == ("warning", 1, {"scheduler": name})
    assert f"the scheduler {name!r} stepped more often than global steps were made" in event.message


def test_schedulers_outside_the_state_may_step_once_per_epoch(training: Any, clicks: Any) -> None:
    job, log = training(epoch=0), EventLog()
    job.state.register_callbacks([log])
    schedulers = [BY_EPOCH[name](job.optimizer) for name in ("StepLR", "ReduceLROnPlateau")]
    for job.state.epoch in range(4):
        job.optimizer.param_groups[0]["lr"] *= 0.9  # by hand
        job.epoch(clicks(10))  # one step
        for scheduler, value in zip(schedulers, ([], [1.0]), strict=True):
            scheduler.step(*value)
    assert not log.of("scheduler_too_fast")


def test_steps_of_schedulers_count_from_the_begin_of_each_loop_and_those_of_other_optimizers_not_at_all() -> None:
    one, other = (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(2))
    mine, theirs, hooks = lr_scheduler.StepLR(one, 1), lr_scheduler.StepLR(other, 1), StepHooks()
    hooks.watch({}, 5)
    for optimizer in (one, other):
        optimizer.step()
    for _ in range(3):  # epochs that were complete when the job resumed
        hooks.loop_begins(one, 5)
        mine.step()
    hooks.loop_begins(one, 5)
    for _ in range(3):
        theirs.step()
    assert hooks.too_fast(6) == []
    mine.step()
    mine.step()
    assert hooks.too_fast(6) == ["StepLR"]
    assert hooks.too_fast(6) == []


class Rates(gba_hvd.Callback):
    def __init__(self) -> None:
        self.of_steps: list[tuple[float, ...]] = []

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        self.of_steps.append(record.dense_lrs)


def test_a_step_is_recorded_with_the_rates_that_it_used(training: Any, clicks: Any) -> None:
    job, rates = training(), Rates()
    job.state.register_callbacks([rates])
    job.state.on_step(lambda: job.optimizer.param_groups[0].update(lr=job.optimizer.param_groups[0]["lr"] / 2))
    job.epoch(clicks(40))
    assert rates.of_steps == [(0.5,), (0.25,), (0.125,)]
    engine = job.state.engine  # servers have made one more step
    position = msgspec.structs.replace(engine.progress.to_wire(), step=4)
    engine.observe(position)
    assert rates.of_steps[3:] == [(0.0625,)] and job.optimizer.param_groups[0]["lr"] == 0.03125


def test_a_group_without_parameters_has_no_rate_in_records(training: Any, clicks: Any) -> None:
    job, rates = training(dense=lambda p: torch.optim.SGD([{"params": []}, {"params": p, "lr": 0.5}], lr=9.0)), Rates()
    job.state.register_callbacks([rates])
    job.epoch(clicks(40))
    assert rates.of_steps == [(0.5,)] * 3


def test_a_scheduler_made_too_early_is_refused(training: Any) -> None:
    model, tables = nn.Linear(2, 1), training().tables
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(
        BadInput, match="scheduler was made for this optimizer already: make it after DistributedOptimizer"
    ):
        gba_hvd.DistributedOptimizer(optimizer, tables, global_batch=8, micro_batch=4)


# --- numbers that are not finite -------------------------------------------------------------------------------------


def poison_loss(job: Any, batch: gba_hvd.Batch) -> Tensor:
    loss: Tensor = job.loss(batch) * math.nan
    return loss


def poison_dense(job: Any, batch: gba_hvd.Batch) -> Tensor:
    loss: Tensor = job.loss(batch) + (job.model.mlp[0].bias - job.model.mlp[0].bias.detach()).sqrt().sum()
    return loss


def poison_row(job: Any, batch: gba_hvd.Batch) -> Tensor:
    row = job.tables({"item": torch.tensor([5])})["item"]
    loss: Tensor = job.loss(batch) + (row - row.detach()).sqrt().sum()
    return loss


@pytest.mark.parametrize(
    ("poison", "gives_loss", "message"),
    [
        (poison_loss, True, r"micro-batch 5: loss nan is not finite"),
        (poison_loss, False, r"micro-batch 5: gradient of mlp.0.weight is not finite"),
        (poison_dense, True, r"micro-batch 5: gradient of mlp.0.bias is not finite"),
        (poison_row, True, r"micro-batch 5: gradient of row 5 of table 'item' is not finite"),
    ],
)
@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_a_bad_number_stops_the_step_before_anything_changes(
    training: Any, clicks: Any, poison: Any, gives_loss: bool, message: str, zero: str
) -> None:
    job = training()
    source = gba_hvd.batches(clicks(64), job.state)
    for _ in range(4):
        job.micro_step(next(source))
    dense, rows = job.all_dense(), job.all_rows()

    def go_on() -> None:
        for batch in source:
            getattr(job, zero).zero_grad()
            loss = poison(job, batch) if batch.index == 5 else job.loss(batch)
            loss.backward()
            job.optimizer.step(loss=loss if gives_loss else None)

    where = rf"step 2 \(epoch 0, step 1 of it\), {message}\."
    with pytest.raises(NonFiniteGradient, match=rf"{where} The step was not applied: the model is as after step 1"):
        go_on()
    assert job.state.step == 1
    assert job.state.samples.applied == 16
    for name, value in {**job.all_dense(), **job.all_rows()}.items():
        assert np.array_equal(value, {**dense, **rows}[name])


def test_training_can_go_on_after_a_bad_number(training: Any, clicks: Any, clicker: Any) -> None:
    job, dataset = training(), clicks(64)
    reference = Reference(job, clicker, lambda p: torch.optim.SGD(p, lr=0.5), RULES[0][1])
    bad = False
    for attempt in range(2):
        try:
            for batch in gba_hvd.batches(dataset, job.state):
                loss = job.loss(batch) * (math.inf if attempt == 0 and batch.index == 6 else 1.0)
                loss.backward()
                job.optimizer.step(loss=loss)
        except NonFiniteGradient:
            bad = True
    assert bad
    assert job.state.step == 4
    reference.epoch(dataset, 0, global_batch=16)
    check_equal(job, reference)


def test_gradients_whose_sum_overflows_are_distinguished(training: Any, clicks: Any) -> None:
    job = training()

    def train() -> None:
        for batch in gba_hvd.batches(clicks(16), job.state):
            job.loss(batch).backward()
            job.model.mlp[2].bias.grad.fill_(3e38)
            job.optimizer.step()

    with pytest.raises(NonFiniteGradient, match="every micro-batch's gradient is finite, but their sum is not"):
        train()


# --- calls in the wrong place ----------------------------------------------------------------------------------------


def test_a_step_without_a_batch_is_refused(training: Any, clicks: Any) -> None:
    job = training()
    with pytest.raises(GbaError, match="needs a micro-batch: call it once for each batch"):
        job.optimizer.step()
    batch = next(gba_hvd.batches(clicks(), job.state))
    job.micro_step(batch)
    with pytest.raises(GbaError, match="needs a micro-batch"):
        job.optimizer.step()


@pytest.mark.parametrize("forgotten", [0, 3, 12])
def test_a_forgotten_step_is_noticed(training: Any, clicks: Any, forgotten: int) -> None:
    job = training()

    def train() -> None:
        for batch in gba_hvd.batches(clicks(50), job.state):
            if batch.index != forgotten:
                job.micro_step(batch)

    with pytest.raises(GbaError, match=rf"micro-batch {forgotten} was handed out, but optimizer.step\(\) was not") as e:
        train()
    assert str(e.value).endswith("micro_batch make a step. To skip one: zero_grad(), step(), no backward()")


def test_a_batch_that_is_skipped_has_a_gradient_of_0_and_leaves_its_rows(training: Any, clicks: Any) -> None:
    """As the error says: `zero_grad()` and `step()` without `backward()`."""

    def trained(skip: bool) -> dict[str, np.ndarray]:
        job = training(global_batch=8, micro_batch=4, rows=gba_hvd.Adam(lr=0.1, weight_decay=0.1))
        job.state.sync()
        before, users = job.all_rows()["user"], {}
        for batch in gba_hvd.batches(clicks(8), job.state):
            users[batch.index] = set(batch.ids["user"].tolist())
            job.optimizer.zero_grad()
            loss = job.loss(batch) * (1 - batch.index)
            if not (skip and batch.index):
                loss.backward()
            job.optimizer.step()
        assert job.state.step == 1 and users[1] - users[0]
        changed = np.flatnonzero(np.any(job.all_rows()["user"] != before, axis=1))
        assert {*changed.tolist()} == (users[0] if skip else users[0] | users[1])
        dense: dict[str, np.ndarray] = job.all_dense()
        return dense

    skipped, with_zeros = trained(skip=True), trained(skip=False)
    for name, values in with_zeros.items():
        np.testing.assert_allclose(skipped[name], values, rtol=1e-6)


def test_a_closure_is_refused(training: Any) -> None:
    with pytest.raises(BadInput, match="takes no closure"):
        training().optimizer.step(lambda: 0.0)


def test_an_optimizer_that_needs_a_closure_is_refused(training: Any) -> None:
    tables = training().tables
    with pytest.raises(BadInput, match="LBFGS needs a closure"):
        gba_hvd.DistributedOptimizer(
            torch.optim.LBFGS([torch.ones(1, requires_grad=True)]), tables, global_batch=8, micro_batch=4
        )


def test_an_optimizer_is_distributed_once(training: Any) -> None:
    job = training()
    with pytest.raises(BadInput, match="distributed already"):
        gba_hvd.DistributedOptimizer(job.optimizer, job.tables, global_batch=8, micro_batch=4)


def test_a_global_batch_that_does_not_divide_is_refused(training: Any) -> None:
    with pytest.raises(
        BadInput, match="global_batch must be a multiple of micro_batch, got 10 and 4; the nearest is 8"
    ):
        training(global_batch=10, micro_batch=4)


def test_the_optimizer_stays_what_it_was(training: Any) -> None:
    job = training(dense=DENSE[1])
    assert isinstance(job.optimizer, torch.optim.Adam)
    assert type(job.optimizer).__name__ == "Adam"
    assert job.optimizer.param_groups[-1]["lr"] == 0.5


def test_named_parameters_may_be_given_to_torch_itself(training: Any, clicks: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    distributed = gba_hvd.DistributedOptimizer(optimizer, training().tables, global_batch=8, micro_batch=4)
    assert distributed.param_groups[-1]["param_names"] == ["gba_hvd.embedding.tables"]


def test_callbacks_may_be_registered_in_any_order_but_not_within_a_step(training: Any, clicks: Any) -> None:
    """What all workers write on a commit stands in one order."""
    names = []
    for order in (1, -1):
        job = training()
        callbacks = [gba_hvd.GBACallback(), recovery.CheckpointCallback("memory://nowhere")]
        job.state.register_callbacks(callbacks[::order])
        names.append([participant.name for participant in job.state.engine.participants])
    assert names == [["mode requests", "checkpoints", "traffic"]] * 2
    job = training()
    next(gba_hvd.batches(clicks(50), job.state))
    with pytest.raises(GbaError, match="only between steps"):
        job.state.register_callbacks([gba_hvd.GBACallback()])


def test_a_loop_that_is_left_before_the_step_leaves_no_micro_batch_behind(training: Any, clicks: Any) -> None:
    job = training(epoch=0)
    for _ in gba_hvd.batches(clicks(50), job.state):
        break
    assert job.state.engine.is_within_step
    again = gba_hvd.batches(clicks(50), job.state)
    job.state.engine.mode._begin_step(EpochPlan(50, 16, 4), (0, 0), 0)  # as of a worker without a share
    assert not job.state.engine.is_within_step
    again.close()
