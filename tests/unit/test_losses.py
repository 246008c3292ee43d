"""Softmax losses: against the formula, sample by sample; negatives of all workers against one process with them all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gba_hvd
from gba_hvd import BadInput, GbaError, StateMismatch
from gba_hvd.losses import local_reason
from gba_hvd.training.commit_fields import StepParticipant
from tests.unit.thread_world import EventLog, Workers


def vectors(n: int, seed: int = 1, width: int = 4) -> Tensor:
    return torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_formula(
    users: Tensor, items: Tensor, ids: list[int] | None = None, log_q: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """The loss of the docstring, with loops."""
    total, n = torch.zeros((), dtype=users.dtype), len(users)
    for i in range(n):
        logits = [users[i] @ items[j] / temperature - (0 if log_q is None else log_q[j]) for j in range(n)]
        counted = [logits[j] for j in range(n) if j == i or ids is None or ids[j] != ids[i]]
        total = total + torch.logsumexp(torch.stack(counted), 0) - logits[i]
    return total / n


@pytest.mark.parametrize("ids", [None, [3, 5, 3, 7, 3, 5]], ids=["distinct", "with equal items"])
@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("corrected", [False, True])
def test_the_in_batch_loss_and_its_gradients_are_the_formula_s(
    ids: list[int] | None, temperature: float, corrected: bool
) -> None:
    users, items = vectors(6).requires_grad_(), vectors(6, seed=2).requires_grad_()
    log_q = torch.log(torch.tensor([0.1, 0.2, 0.1, 0.3, 0.1, 0.2], dtype=torch.float64)) if corrected else None
    expected = by_formula(users, items, ids, log_q, temperature)
    item_ids = None if ids is None else torch.tensor(ids)
    loss = gba_hvd.in_batch_softmax(users, items, item_ids=item_ids, log_q=log_q, temperature=temperature)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(loss, [users, items]), torch.autograd.grad(expected, [users, items]), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.01])
def test_losses_of_half_precision_vectors_are_computed_in_float32(dtype: torch.dtype, temperature: float) -> None:
    users, items, negatives = ((10 * vectors(6, seed)).to(dtype).requires_grad_() for seed in (1, 2, 3))
    log_q = torch.linspace(-4, -1, 6)
    found = [
        gba_hvd.in_batch_softmax(users, items, log_q=log_q, temperature=temperature),
        gba_hvd.sampled_softmax(users, items, negatives, log_q=log_q, negative_log_q=log_q, temperature=temperature),
    ]
    exact = [vector.detach().double() for vector in (users, items, negatives)]
    expected = [
        gba_hvd.in_batch_softmax(*exact[:2], log_q=log_q, temperature=temperature),
        gba_hvd.sampled_softmax(*exact, log_q=log_q, negative_log_q=log_q, temperature=temperature),
    ]
    for loss, other in zip(found, expected, strict=True):
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(other.item(), rel=1e-5)
        loss.backward()
    assert users.grad is not None and users.grad.dtype == dtype and users.grad.isfinite().all()


def test_losses_are_computed_in_float32_under_autocast() -> None:
    users, items, negatives = (vectors(6, seed).float() for seed in (1, 2, 3))

    def losses() -> list[Tensor]:
        each_its_own = negatives.expand(6, 6, 4)
        return [
            gba_hvd.in_batch_softmax(users, items, temperature=0.05),
            gba_hvd.sampled_softmax(users, items, negatives, temperature=0.05),
            gba_hvd.sampled_softmax(users, items, each_its_own, temperature=0.05),
        ]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = losses()
    for loss, other in zip(found, losses(), strict=True):
        assert loss.dtype == torch.float32 and torch.equal(loss, other)


def test_a_batch_of_one_item_has_nothing_to_learn() -> None:
    users = vectors(3).requires_grad_()
    loss = gba_hvd.in_batch_softmax(users, vectors(3, 2), item_ids=torch.tensor([4, 4, 4]))
    (gradient,) = torch.autograd.grad(loss, [users])
    assert loss.item() == 0.0 and not gradient.any()


@pytest.mark.parametrize("each_its_own", [False, True])
def test_the_sampled_loss_is_the_formula_s(each_its_own: bool) -> None:
    users, items, n_samples = vectors(4), vectors(4, 2), 5
    negatives = vectors(4 * n_samples, 3).reshape(4, n_samples, 4) if each_its_own else vectors(n_samples, 3)
    ids, log_q = torch.tensor([1, 2, 3, 1]), torch.log(torch.tensor([0.5, 0.2, 0.3, 0.5], dtype=torch.float64))
    other_ids, other_q = torch.tensor([2, 9, 1, 9, 8]), -torch.arange(1.0, 6.0, dtype=torch.float64)
    if each_its_own:
        other_ids, other_q = other_ids.expand(4, -1), other_q.expand(4, -1)
    total = 0.0
    for i in range(4):
        own = negatives[i] if each_its_own else negatives
        positive = float(users[i] @ items[i] / 0.5 - log_q[i])
        found = [positive]
        for s in range(n_samples):
            if (other_ids[i] if each_its_own else other_ids)[s] != ids[i]:
                correction = (other_q[i] if each_its_own else other_q)[s]
                found.append(float(users[i] @ own[s] / 0.5 - correction))
        total += np.logaddexp.reduce(found) - positive
    loss = gba_hvd.sampled_softmax(
        users, items, negatives, item_ids=ids, negative_ids=other_ids, log_q=log_q, negative_log_q=other_q,
        temperature=0.5,
    )  # fmt: skip
    assert loss.item() == pytest.approx(total / 4, rel=1e-12)


@pytest.mark.parametrize("shape", [[], [1], [1, 1, 1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_temperature_may_be_trained(shape: list[int], dtype: torch.dtype) -> None:
    users, items, negatives = vectors(6), vectors(6, 2), vectors(5, 3)
    given = torch.nn.Parameter(torch.full(shape, 0.25, dtype=dtype))
    plain = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    logits = torch.cat([(users * items).sum(1, keepdim=True), users @ negatives.T], dim=1) / plain
    sampled = torch.nn.functional.cross_entropy(logits, torch.zeros(6, dtype=torch.int64))
    for loss, expected in (
        (gba_hvd.in_batch_softmax(users, items, temperature=given), by_formula(users, items, temperature=plain)),
        (gba_hvd.sampled_softmax(users, items, negatives, temperature=given), sampled),
    ):
        assert loss.shape == () and loss.item() == pytest.approx(expected.item(), rel=1e-12)
        (ours,), (theirs,) = torch.autograd.grad(loss, [given]), torch.autograd.grad(expected, [plain])
        assert ours.shape == given.shape and ours.item() == pytest.approx(theirs.item(), rel=1e-6)


B4, WRONG = torch.zeros(3, 4), torch.zeros(3, 5)


def sampled_with_q(negative_log_q: Tensor) -> Tensor:
    return gba_hvd.sampled_softmax(B4, B4, B4, log_q=torch.zeros(3), negative_log_q=negative_log_q)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gba_hvd.in_batch_softmax(B4, WRONG), r"float tensors .* float32 \[3, 4\] and float32 \[3, 5\]"),
        (lambda: gba_hvd.in_batch_softmax(B4.long(), B4.long()), "float tensors"),
        (lambda: gba_hvd.in_batch_softmax(B4[:0], B4[:0]), "float tensors"),
        (lambda: gba_hvd.in_batch_softmax(B4, B4, temperature=0.0), "temperature must be a finite number, more than 0"),
        (lambda: gba_hvd.in_batch_softmax(B4, B4, temperature=torch.tensor([0.0])), r"of one element, got 0\.0"),
        (lambda: gba_hvd.in_batch_softmax(B4, B4, temperature=torch.tensor(torch.nan)), "of one element, got nan"),
        (lambda: gba_hvd.in_batch_softmax(B4, B4, temperature=torch.tensor([1, 2.0])), r"got float32 \[2\]"),
        (lambda: gba_hvd.in_batch_softmax(B4, B4, temperature=torch.tensor(1)), r"got int64 \[\]"),
        (lambda: gba_hvd.sampled_softmax(B4, B4, B4, temperature=torch.tensor(-1.0)), r"of one element, got -1\.0"),
        (lambda: gba_hvd.in_batch_softmax(B4, B4, item_ids=torch.zeros(3)), r"item_ids must be an int64 tensor \[3\]"),
        (lambda: gba_hvd.in_batch_softmax(B4, B4, log_q=torch.zeros(2)), r"log_q must be a float tensor \[3\], got"),
        (lambda: gba_hvd.in_batch_softmax(B4, B4, log_q=torch.tensor([1.0, 0.0, 1.0]).log()), r"got -inf at .* \[1\]"),
        (lambda: gba_hvd.in_batch_softmax(B4, B4, negatives="all"), "'all'"),  # type: ignore[arg-type]
        (lambda: gba_hvd.in_batch_softmax(B4, B4, negatives="global"), "needs state="),
        (lambda: gba_hvd.in_batch_softmax(B4, B4, state=object()), "state= has no effect"),  # type: ignore[arg-type]
        (lambda: gba_hvd.sampled_softmax(B4, B4, WRONG), r"negatives must be a float tensor \[S, 4\] or \[3, S, 4\]"),
        (lambda: sampled_with_q(torch.full((3, 3), torch.nan)), r"negative_log_q must be finite, got nan at "),
        (lambda: gba_hvd.sampled_softmax(B4, B4, torch.zeros(2, 5, 4)), "of the 3 samples of users"),
        (lambda: gba_hvd.sampled_softmax(B4, B4, B4, log_q=torch.zeros(3)), "log_q and negative_log_q are needed"),
        (lambda: gba_hvd.sampled_softmax(B4, B4, B4, negative_ids=torch.zeros(3).long()), "item_ids and negative_ids"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        call()


# --- negatives of all workers ----------------------------------------------------------------------------------------


def test_negatives_come_from_all_workers_where_each_has_one_batch_in_the_step() -> None:
    assert local_reason(n_workers=2, in_step=2, in_full_step=2) == ""
    assert "asynchronous" in local_reason(2, 0, 2)
    assert local_reason(3, 8, 8) == "a step has 8 batches for 3 workers"
    assert local_reason(3, 3, 2) == "a step has 2 batches for 3 workers"
    assert "short last one" in local_reason(2, 1, 2)
    assert "measures" in local_reason(2, 4, 2)


def learn(job: Any, dataset: Any, epochs: int = 1, **how: Any) -> list[float]:
    """Learn which item a user takes, with vectors of the model's tables and a dense layer, and the temperature."""
    losses = []
    for job.state.epoch in range(epochs):
        for batch in gba_hvd.batches(dataset, job.state):
            job.optimizer.zero_grad()
            rows = job.model.embed(batch.ids)
            hidden = torch.tanh(job.model.mlp[0](torch.cat([rows["user"], rows["item"], batch.dense], dim=1)))
            item = hidden[:, :3] + rows["item"]
            log_q = -torch.arange(1.0, 8.0)[batch.ids["item"]]
            temperature = torch.exp(job.model.mlp[0].bias[:1] - 0.7)
            given = {"item_ids": batch.ids["item"], "log_q": log_q, "temperature": temperature, **how}
            loss = gba_hvd.in_batch_softmax(hidden[:, 3:] + rows["user"][:, :3], item, **given)
            loss.backward()
            job.optimizer.step(loss=loss)
            losses.append(loss.item())
    return losses


def globally(job: Any, dataset: Any, **how: Any) -> list[float]:
    return learn(job, dataset, negatives="global", state=job.state, **how)


@pytest.mark.slow
@pytest.mark.parametrize(("n_workers", "sizes"), [(2, (12, 24)), (3, (8, 24))])
def test_global_negatives_give_the_gradients_of_one_process_with_the_global_batch(
    workers: Workers, on_host: Any, clicks: Any, n_workers: int, sizes: tuple[int, int]
) -> None:
    """Two full steps and one whose batches differ in size; of plain SGD, so parameters are sums of gradients."""
    settings = {"global_batch": 24, "micro_batch": 4, "rows": gba_hvd.SGD(lr=0.5)}
    jobs = [on_host("a", **settings, more={"sync_micro_batch": sizes[0]}) for _ in range(n_workers)]
    alone = on_host("alone", **settings, more={"sync_micro_batch": sizes[1]})
    dataset = clicks(48 + 19 if n_workers == 3 else 48 + 17)
    losses = workers.together(jobs, lambda job: globally(job, dataset))
    (expected,) = workers.together([alone], lambda job: learn(job, dataset))
    n_first = [sizes[0]] * n_workers
    assert np.average([each[0] for each in losses], weights=n_first) == pytest.approx(expected[0], rel=1e-6)
    for job in jobs:
        for name, values in alone.all_dense().items():
            np.testing.assert_allclose(job.all_dense()[name], values, rtol=1e-6, atol=1e-6, err_msg=name)
        for name, rows in alone.all_rows().items():
            np.testing.assert_allclose(job.all_rows()[name], rows, rtol=1e-6, atol=1e-6, err_msg=name)
    local = [on_host("b", **settings, more={"sync_micro_batch": sizes[0]}) for _ in range(n_workers)]
    workers.together(local, lambda job: learn(job, dataset))
    gap = max(np.abs(local[0].all_dense()[name] - value).max() for name, value in alone.all_dense().items())
    assert gap > 1e-3, "with negatives of the batch the parameters are others"


def test_one_worker_has_all_samples_of_the_step(training: Any, clicks: Any) -> None:
    ours, plain = training(more={"sync_micro_batch": 16}), training(more={"sync_micro_batch": 16})
    assert globally(ours, clicks(40)) == pytest.approx(learn(plain, clicks(40)), rel=1e-6)


def test_a_short_last_step_that_leaves_workers_idle_has_the_negatives_of_the_batch(
    workers: Workers, on_host: Any, clicks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"global_batch": 24, "micro_batch": 4, "more": {"sync_micro_batch": 12}}
    jobs = [on_host("a", **settings) for _ in range(2)]
    workers.together(jobs, lambda job: globally(job, clicks(24 + 7), epochs=2))
    assert {job.state.step for job in jobs} == {4}
    said = [record.message for record in caplog.records if "negatives=" in record.message]
    assert len(said) == 1 and "short last one of an epoch" in said[0]


def test_steps_that_measure_micro_batches_have_the_negatives_of_the_batch(
    workers: Workers, on_host: Any, clicks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"global_batch": 16, "micro_batch": 4, "more": {"sync_micro_batch": 8}}
    jobs = [on_host("a", **settings) for _ in range(2)]
    for job in jobs:
        job.state.engine.register(Measures())
    losses = workers.together(jobs, lambda job: globally(job, clicks(16 * 6)))
    assert [len(each) for each in losses] == [7, 7]  # the fifth step in two micro-batches each
    assert "measures single micro-batches" in caplog.text


class Measures(StepParticipant):
    name, order, measures_micro_batches = "measures", 9, True

    def n_fields(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("settings", "n_workers", "message"),
    [
        ({"more": {"sync_micro_batch": 8}}, 1, r"2 batches for 1 workers \(of 8 samples\). Use sync_micro_batch=16"),
        ({}, 3, r"4 batches for 3 workers \(of 4 samples\). Choose a global_batch that is a multiple of 3 x 4"),
    ],
)
def test_settings_with_another_number_of_batches_are_refused(
    workers: Workers, on_host: Any, clicks: Any, settings: dict[str, Any], n_workers: int, message: str
) -> None:
    jobs = [on_host("a", **settings) for _ in range(n_workers)]

    def refused(job: Any) -> None:
        job.state.sync()
        with pytest.raises(BadInput, match=message):
            globally(job, clicks(64))

    workers.together(jobs, refused)


def test_a_lost_worker_leaves_the_negatives_of_the_batch_with_a_warning(
    workers: Workers, on_host: Any, clicks: Any
) -> None:
    settings = {"global_batch": 24, "micro_batch": 4, "more": {"sync_micro_batch": 12}}
    jobs, reported = [on_host("a", **settings) for _ in range(2)], EventLog()
    jobs[0].state.register_callbacks([reported])
    jobs[1].state.register_callbacks([EventLog()])
    workers.together(jobs, lambda job: globally(job, clicks(24)))
    jobs[0].state.on_reset()

    def resume(job: Any) -> None:
        job.state.sync()
        for job.state.epoch in (1, 2):
            for batch in gba_hvd.batches(clicks(24), job.state):
                job.optimizer.zero_grad()
                rows = job.model.embed(batch.ids)
                loss = gba_hvd.in_batch_softmax(
                    rows["user"][:, :3] + job.model.mlp[0](torch.zeros(9))[:3], rows["item"], negatives="global",
                    state=job.state,
                )  # fmt: skip
                loss.backward()
                job.optimizer.step()

    workers.together(jobs[:1], resume)
    (warned,) = reported.of("negatives_local")
    assert warned.level == "warning" and "2 batches for 1 workers" in warned.message


def test_workers_that_call_it_with_other_arguments_are_stopped(workers: Workers, on_host: Any, clicks: Any) -> None:
    jobs = [on_host("a", more={"sync_micro_batch": 8}) for _ in range(2)]

    def act(job: Any) -> None:
        job.state.sync()
        globally(job, clicks(32), **({"log_q": None} if job is jobs[1] else {}))

    for outcome in workers.outcomes(jobs, act):
        assert isinstance(outcome, StateMismatch) and "must make the same calls in each batch" in str(outcome)


def test_it_is_refused_outside_of_a_batch_and_for_some_of_its_samples(training: Any, clicks: Any) -> None:
    job = training(more={"sync_micro_batch": 16})
    job.state.sync()
    with pytest.raises(GbaError, match="between receiving one and optimizer"):
        gba_hvd.in_batch_softmax(B4, B4, negatives="global", state=job.state)
    for _ in gba_hvd.batches(clicks(16), job.state):
        with pytest.raises(BadInput, match="all 16 samples of the batch, got 3"):
            gba_hvd.in_batch_softmax(B4, B4, negatives="global", state=job.state)
        break


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ids_and_shares_on_the_cpu_go_with_vectors_on_a_gpu() -> None:
    users, items, others = vectors(3, 2), vectors(3, 2), vectors(4, 2)
    ids, log_q = torch.tensor([4, 4, 5]), torch.tensor([-1.0, -2.0, -3.0])
    pair: dict[str, Any] = {"item_ids": ids, "log_q": log_q}
    more = {"negative_ids": torch.tensor([4, 1, 2, 3]), "negative_log_q": torch.full((4,), -1.5)}
    for loss, given, named in (
        (gba_hvd.in_batch_softmax, (users, items), pair),
        (gba_hvd.sampled_softmax, (users, items, others), pair | more),
    ):
        there = loss(*(one.cuda() for one in given), **named)
        assert there.item() == pytest.approx(loss(*given, **named).item(), abs=1e-5)
