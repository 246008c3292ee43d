"""Compressed dense gradients between workers: nothing is lost through steps, failures, joins and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import gba_hvd
from gba_hvd import Compression, NonFiniteGradient, StateMismatch
from gba_hvd.comm.traffic import KINDS
from gba_hvd.compression import error_feedback
from gba_hvd.compression.bypass import Bypass, Cost, StepTiming, choose
from gba_hvd.compression.dense_exchange import DenseExchange
from gba_hvd.modes.allreduce_exchange import AllreduceExchange
from tests.unit.thread_world import EventLog, Workers, form_again, miss_a_result

SPECS = [
    Compression.dct(0.2, refresh_every=3),
    Compression.topk(0.2),
    Compression.dct(0.2).then(Compression.fp16),
    Compression.topk(0.2).then(Compression.int8),
    Compression.fp16,
    Compression.bf16,
    Compression.int8,
]


@dataclass
class Books:
    """Of every commit: what each worker brought, and what all took away."""

    brought: dict[int, list[np.ndarray]] = field(default_factory=dict)
    taken: dict[int, np.ndarray] = field(default_factory=dict)

    def balance(self, jobs: list[Any], lost: np.ndarray | float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """(all gradients, all that was applied and all that still waits)"""
        gradients = sum(sum(parts) for parts in self.brought.values())
        waiting = sum(job.state.engine.model.compression.feedback.residual for job in jobs)
        return np.asarray(gradients), np.asarray(sum(self.taken.values())) + waiting + lost


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    """Also lets the small tensors of the test's model be compressed."""
    monkeypatch.setattr(error_feedback, "MIN_ELEMENTS", 6)
    found, commit, apply_held = Books(), AllreduceExchange.commit, AllreduceExchange.apply_held

    def noting_commit(self: Any, dense: Any, fields: Any) -> None:
        assert self.held is not None
        step, mine = self.held.step, dense.total[: dense.n].numpy().copy()
        self.brought_last = step, mine
        commit(self, dense, fields)
        found.taken[step] = dense.total[: dense.n].numpy().copy()

    def noting_apply(self: Any, factor: float = 1.0) -> None:
        step, mine = self.brought_last
        assert self.held.step == step
        found.brought.setdefault(step, []).append(mine)
        apply_held(self, factor)

    monkeypatch.setattr(AllreduceExchange, "commit", noting_commit)
    monkeypatch.setattr(AllreduceExchange, "apply_held", noting_apply)
    return found


def train(job: Any, dataset: Any, epochs: int) -> None:
    for job.state.epoch in range(job.state.epoch, epochs):
        job.epoch(dataset)


def check_balance(books: Books, jobs: list[Any], spec: Any) -> None:
    gradients, found = books.balance(jobs)
    np.testing.assert_allclose(found, gradients, rtol=1e-4, atol=3e-4 if spec == Compression.fp16 else 1e-6)


def check_replicas(jobs: list[Any]) -> None:
    for job in jobs[1:]:
        for name, value in job.all_dense().items():
            assert np.array_equal(value, jobs[0].all_dense()[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("hosts", ["aa", "aba"])
def test_all_gradients_are_applied_or_wait_and_replicas_stay_equal(
    workers: Workers, on_host: Any, clicks: Any, books: Books, spec: Any, hosts: str
) -> None:
    jobs = [on_host(host, compression=spec.always()) for host in hosts]
    workers.together(jobs, lambda job: train(job, clicks(50), 3))
    assert any(job.state.engine.model.compression.feedback.residual.any() for job in jobs)
    check_balance(books, jobs, spec)
    check_replicas(jobs)
    assert {job.state.step for job in jobs} == {12}


@pytest.mark.slow
@pytest.mark.parametrize("spec", [Compression.dct(1.0), Compression.topk(1.0), Compression.none], ids=str)
def test_keeping_everything_trains_the_same_model(
    workers: Workers, on_host: Any, clicks: Any, books: Books, spec: Any
) -> None:
    jobs = [on_host(host, compression=spec.always()) for host in "aab"]
    plain = [on_host(host) for host in "ccd"]
    for some in (jobs, plain):
        workers.together(some, lambda job: train(job, clicks(50), 3))
    for name, value in jobs[0].all_dense().items():
        np.testing.assert_allclose(value, plain[0].all_dense()[name], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("coder", [Compression.bf16, Compression.int8], ids=str)
@pytest.mark.parametrize("selector", [Compression.dct(1.0), Compression.topk(1.0)], ids=str)
def test_a_selector_that_keeps_everything_leaves_the_value_coder_as_it_is(
    workers: Workers, on_host: Any, clicks: Any, books: Books, selector: Any, coder: Any
) -> None:
    jobs = [on_host(host, compression=selector.then(coder).always()) for host in "aab"]
    alone = [on_host(host, compression=coder.always()) for host in "ccd"]
    for some in (jobs, alone):
        workers.together(some, lambda job: train(job, clicks(50), 3))
    for name, value in jobs[0].all_dense().items():
        assert np.array_equal(value, alone[0].all_dense()[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("spec", [Compression.dct(0.2), Compression.fp16, Compression.int8], ids=str)
def test_a_residual_that_is_not_finite_is_named_by_all_workers(
    workers: Workers, on_host: Any, clicks: Any, books: Books, spec: Any
) -> None:
    jobs = [on_host(host, compression=spec.always()) for host in "aab"]
    workers.together(jobs, lambda job: train(job, clicks(50), 1))
    exchange = jobs[1].state.engine.model.compression
    span = exchange._all.spans[0]
    exchange.feedback.residual[span.at.start] = np.nan
    exchange.feedback._residual_is_empty = False
    before = jobs[0].all_dense()
    for job in jobs:
        job.state.epoch = 1
    outcomes = workers.outcomes(jobs, lambda job: train(job, clicks(50), 2))
    assert all(isinstance(outcome, NonFiniteGradient) for outcome in outcomes), outcomes
    assert f"the residual of {exchange.feedback.names[span.tensor]} is not finite" in str(outcomes[1])
    assert "resume from the newest checkpoint" in str(outcomes[1])
    assert all("step 5" in str(o) and "on worker 1" in str(o) for o in (outcomes[0], outcomes[2]))
    assert all(np.array_equal(value, before[name]) for name, value in jobs[0].all_dense().items())


@pytest.mark.parametrize("spec", [Compression.fp16, Compression.dct(0.2)], ids=str)
def test_a_gradient_that_is_refused_does_not_wait(
    workers: Workers, on_host: Any, clicks: Any, books: Books, spec: Any
) -> None:
    """Nor does what was written for the tensors before the one that is not finite, when the world shrinks to one."""
    jobs = [on_host(host, compression=spec.always()) for host in "ab"]
    most = np.finfo(np.float32).max

    def spoilt(job: Any) -> None:
        job.state.sync()
        exchange = job.state.engine.model.compression
        span = exchange._all.spans[-1]
        exchange.feedback.residual[span.at] = most
        job.state.engine.model.dense.parameters[span.tensor].register_hook(lambda grad: grad.fill_(most))
        train(job, clicks(50), 1)

    outcomes = workers.outcomes(jobs, spoilt)
    assert all(isinstance(outcome, NonFiniteGradient) for outcome in outcomes), outcomes
    for job in jobs:
        exchange = job.state.engine.model.compression
        exchange.feedback.residual[:] = 0
        exchange.feedback.begin()
        exchange.feedback.flush_all(np.zeros_like(exchange.feedback.residual), exchange._all.spans)
        exchange.feedback.settle()
        assert not exchange.feedback.residual.any()


@pytest.mark.slow
@pytest.mark.parametrize("spec", [Compression.topk(0.01).always(), Compression.topk(0.01)], ids=["always", "bypass"])
def test_tensors_under_256_elements_go_as_they_are(workers: Workers, on_host: Any, clicks: Any, spec: Any) -> None:
    jobs = [on_host(host, compression=spec) for host in "ab"]
    plain = [on_host(host) for host in "cd"]
    for some in (jobs, plain):
        workers.together(some, lambda job: train(job, clicks(50), 3))
    for name, value in jobs[0].all_dense().items():
        assert np.array_equal(value, plain[0].all_dense()[name])


def test_a_world_of_one_trains_as_without_a_compressor(
    on_host: Any, workers: Workers, clicks: Any, books: Books
) -> None:
    (job, plain) = on_host("a", compression=Compression.topk(0.01)), on_host("b")
    for one in (job, plain):
        workers.together([one], lambda job: train(job, clicks(50), 2))
    for name, value in job.all_dense().items():
        assert np.array_equal(value, plain.all_dense()[name])


@pytest.mark.slow
@pytest.mark.parametrize("misses", [0, 1])
def test_a_worker_that_missed_the_result_of_a_step_settles_what_it_sent(
    workers: Workers, on_host: Any, clicks: Any, books: Books, misses: int
) -> None:
    spec = Compression.topk(0.2).then(Compression.int8)
    jobs = [on_host(host, compression=spec.always()) for host in "aab"]
    miss_a_result(workers, jobs, misses, 2, lambda job: train(job, clicks(50), 2))
    go_on(jobs, workers, clicks)
    check_balance(books, jobs, spec)
    check_replicas(jobs)


@pytest.mark.slow
def test_a_step_that_nobody_saw_decided_is_rolled_back(
    workers: Workers, on_host: Any, clicks: Any, books: Books
) -> None:
    spec = Compression.dct(0.2, refresh_every=2)
    jobs, fired = [on_host(host, compression=spec.always()) for host in "aab"], []

    def run_into_it(job: Any) -> None:
        job.state.sync()
        gather = job.state.world.gather_bytes

        def gather_and_fail(name: str, data: bytes) -> Any:
            parts = gather(name, data)
            if job.state.step == 2:
                fired.append(job)
                job.state.world.meeting.barrier.abort()
                raise ConnectionError("the network went away")
            return parts

        job.state.world.gather_bytes = gather_and_fail
        train(job, clicks(50), 2)

    workers.outcomes(jobs, run_into_it)
    assert fired and {job.state.step for job in jobs} == {2}
    form_again(jobs)
    go_on(jobs, workers, clicks)
    check_balance(books, jobs, spec)
    check_replicas(jobs)


def go_on(jobs: list[Any], workers: Workers, clicks: Any) -> None:
    workers.together(jobs, lambda job: train(job, clicks(50), 2))
    assert {job.state.step for job in jobs} == {8}


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [True, False])
def test_what_a_worker_that_leaves_had_not_sent_is_counted_and_late_joiners_begin_with_none(
    workers: Workers, on_host: Any, clicks: Any, books: Books, is_known: bool
) -> None:
    spec, received = Compression.topk(0.1), EventLog()
    jobs = [on_host(host, compression=spec.always()) for host in "aab"]
    jobs[0].state.register_callbacks([received])
    workers.together(jobs, lambda job: train(job, clicks(50), 1))
    residual = jobs[1].state.engine.model.compression.feedback.residual.copy()
    changed = [jobs[2], jobs[0], on_host("c", compression=spec.always())]
    for job in jobs:
        job.state.on_reset()
        if not is_known:  # an asynchronous mode began since the last commit
            job.state.engine.model.compression.forget_known()
    workers.together(changed, lambda job: job.state.sync())
    assert not changed[2].state.engine.model.compression.feedback.residual.any()
    (reported,) = received.of("residual_lost")
    assert reported.data["workers"] == 1
    assert reported.data["residual"] > 0 if is_known else reported.data["residual"] is None
    workers.together(changed, lambda job: train(job, clicks(50), 2))
    gradients, found = books.balance(changed, lost=residual)
    np.testing.assert_allclose(found, gradients, rtol=1e-4, atol=1e-6)
    assert len(received.of("residual_lost")) == 1


def test_a_job_that_shrinks_to_one_worker_sends_what_waited(
    workers: Workers, on_host: Any, clicks: Any, books: Books
) -> None:
    jobs = [on_host(host, compression=Compression.topk(0.1).always()) for host in "aa"]
    workers.together(jobs, lambda job: train(job, clicks(50), 1))
    residual = jobs[1].state.engine.model.compression.feedback.residual.copy()
    jobs[0].state.on_reset()
    workers.together(jobs[:1], lambda job: train(job, clicks(50), 2))
    assert not jobs[0].state.engine.model.compression.feedback.residual.any()
    gradients, found = books.balance(jobs[:1], lost=residual)
    np.testing.assert_allclose(found, gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_has_what_all_workers_had_not_sent(
    workers: Workers, on_host: Any, clicks: Any, books: Books
) -> None:
    jobs = [on_host(host, compression=Compression.topk(0.1).always()) for host in "ab"]
    states = workers.together(jobs, lambda job: (train(job, clicks(50), 1), rest_of(job))[1])
    again = on_host("c", compression=Compression.topk(0.1).always()).state.engine.model.compression
    again.load_state(states[0])
    expected = sum(job.state.engine.model.compression.feedback.residual for job in jobs)
    assert np.array_equal(again.feedback.residual, expected) and expected.any()


def rest_of(job: Any) -> Any:
    return job.state.engine.model.compression.state(job.state.world)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_stops_all_and_leaves_the_rest(
    workers: Workers, on_host: Any, clicks: Any, books: Books
) -> None:
    jobs = [on_host(host, compression=Compression.topk(0.2).always()) for host in "ab"]
    residuals: dict[Any, np.ndarray] = {}

    def poison(job: Any) -> None:
        for batch in gba_hvd.batches(clicks(50), job.state):
            residuals[job] = job.state.engine.model.compression.feedback.residual.copy()
            loss = job.loss(batch) * (float("nan") if batch.index == 9 else 1.0)
            loss.backward()
            job.optimizer.step(loss=loss)

    results = workers.outcomes(jobs, poison)
    assert all(isinstance(result, NonFiniteGradient) for result in results), results
    for job in jobs:
        assert np.array_equal(job.state.engine.model.compression.feedback.residual, residuals[job])


def test_workers_with_different_compressors_are_stopped(workers: Workers, on_host: Any, clicks: Any) -> None:
    jobs = [on_host("a", compression=Compression.int8), on_host("a", compression=Compression.dct(0.1))]
    results = workers.outcomes(jobs, lambda job: job.state.sync())
    assert all(isinstance(result, StateMismatch) for result in results)
    assert "compression int8, here dct(keep=0.1" in str(results[1])


@pytest.mark.slow
def test_bytes_are_counted_by_direction_mode_and_kind(
    workers: Workers, on_host: Any, clicks: Any, books: Books
) -> None:
    dense = {}
    for spec in (Compression.none, Compression.int8.always()):
        jobs, received = [on_host(host, compression=spec) for host in "ab"], EventLog()
        jobs[0].state.register_callbacks([received])
        workers.together(jobs, lambda job: train(job, clicks(50), 1))
        (reported,) = received.of("traffic")
        assert set(reported.data["bytes"]) >= {
            "sent_allreduce_dense",
            "received_allreduce_dense",
            "sent_allreduce_header",
        }
        dense[spec] = reported.data["bytes"]["sent_allreduce_dense"]
    n = jobs[0].state.engine.model.dense.n
    assert dense[Compression.none] == 4 * 4 * n
    assert dense[Compression.int8.always()] < 4 * 4 * n


@pytest.mark.slow
def test_the_account_of_all_workers_rides_on_the_commit(
    workers: Workers, on_host: Any, clicks: Any, books: Books
) -> None:
    """A commit has what was counted before it; the bytes of the commit itself come with the next one."""
    jobs, received = [on_host(host) for host in "ab"], EventLog()
    jobs[0].state.register_callbacks([received])
    workers.together(jobs, lambda job: train(job, clicks(50), 2))
    accounts = [job.state.engine.progress.traffic for job in jobs]
    assert accounts[0] == accounts[1]
    counted = [job.state.engine.traffic.so_far() for job in jobs]
    still_to_come = [job.state.engine.traffic.report() for job in jobs]
    for number, (direction, kind) in enumerate((way, kind) for way in ("sent", "received") for kind in KINDS):
        n_bytes = sum(of_worker.get((direction, "allreduce", kind), 0) for of_worker in counted)
        assert accounts[0]["allreduce"][number] + sum(of_worker[number] for of_worker in still_to_come) == n_bytes
    assert accounts[0]["allreduce"][0] > 0
    newest = received.of("traffic")[-1]
    assert newest.data["all_workers"]["sent_allreduce_dense"] == accounts[0]["allreduce"][0]


# --- whether it pays -------------------------------------------------------------------------------------------------


def drive(
    bypass: Bypass, seconds: Callable[[bool, int], float], steps: int, later: int = 0
) -> tuple[list[bool], list[str]]:
    """later: by how many steps what a step took is seen later."""
    done: list[bool] = []
    reasons = []
    for step in range(steps):
        done.append(any(bypass.tensors_next()))
        if step < later:
            continue
        compressed = done[step - later]
        took = seconds(compressed, step - later)
        waits = StepTiming(10 * took, 0.0, 0.1)  # of a worker that came early
        decision = bypass.saw(compressed, [StepTiming(took, 0.0, 0.1), waits])
        if decision is not None:
            reasons.append(decision.reason)
    return done, reasons


@pytest.mark.parametrize("pays", [True, False])
def test_the_faster_way_is_taken_and_the_other_seldom_tried(pays: bool) -> None:
    done, reasons = drive(Bypass(["w"]), lambda compressed, _: 0.010 if compressed == pays else 0.030, 3000)
    assert set(done[:12]) == {True, False}
    assert done[12] is pays
    assert 2 <= done[12:].count(not pays) <= 0.015 * 3000
    assert ("compressed:" in reasons[0]) is pays
    assert "10.0 ms" in reasons[0] and "30.0 ms" in reasons[0]


def test_a_way_that_costs_much_is_tried_less_often() -> None:
    dear, _ = drive(Bypass(["w"]), lambda compressed, _: 0.01 if compressed else 1.0, 2000)
    assert dear[12:].count(False) == 0


@pytest.mark.parametrize(("noise_s", "compress"), [(0.0005, True), (0.004, False)])
def test_a_gain_that_may_be_chance_is_none(noise_s: float, compress: bool) -> None:
    rng = np.random.default_rng(0)
    noise = [float(n) for n in rng.uniform(-1, 1, 100) * noise_s]
    done, _ = drive(Bypass(["w"]), lambda c, step: (0.010 if c else 0.012) + noise[step], 50)
    assert done[12] is compress


def test_a_link_that_changes_is_noticed() -> None:
    done, reasons = drive(Bypass(["w"]), lambda c, step: 0.010 if c == (step < 500) else 0.011, 3000)
    assert done[12] and not done[-1]
    assert any("as they are" in reason for reason in reasons)


@pytest.mark.parametrize("later", [0, 1, 2])
def test_one_lucky_step_changes_nothing(later: int) -> None:
    """Of the way that is tried again, one of two steps is quick by chance."""
    bypass, tried = Bypass(["w"]), [0]

    def seconds(compressed: bool, step: int) -> float:
        if step < 40 or not compressed:
            return 0.030 if compressed else 0.010
        tried[0] += 1
        return 0.001 if tried[0] == 1 else 0.030

    done, _ = drive(bypass, seconds, 260, later)
    assert tried[0] >= 2 and not any(done[-10:])


def test_a_forced_compressor_is_never_bypassed() -> None:
    assert all(drive(Bypass(["w"], is_forced=True), lambda compressed, _: float(compressed), 100)[0])


@pytest.mark.parametrize(
    ("cost", "s_per_byte", "compress"),
    [
        (Cost(0.001, 1_000_000), 1e-8, True),  # 10 ms for the bytes saved, at 100 MB/s
        (Cost(0.001, 1_000_000), 1e-10, False),  # 0.1 ms: a fast network
        (Cost(0.001, 10_000), 1e-8, False),  # a small tensor
        (Cost(0.001, 0.0), 1e-3, False),
        (Cost(0.0, 1.0), 0.0, False),
    ],
)
def test_a_tensor_is_compressed_if_its_bytes_would_take_longer_than_the_coding(
    cost: Cost, s_per_byte: float, compress: bool
) -> None:
    (verdict,) = choose([cost], s_per_byte)
    assert verdict.compress is compress
    assert f"{1000 * cost.codec_s:.2f} ms to compress" in verdict.reason


def test_tensors_that_do_not_pay_are_bypassed_and_named() -> None:
    """8 MB saved take 80 ms of wire; of the second tensor's coding that is not worth it."""
    bypass, decision = Bypass(["large", "slow", "tiny"]), None
    costs = [Cost(0.005, 7_000_000), Cost(0.050, 990_000), Cost(0.001, 10_000)]
    assert bypass.tensors_next() == (True, True, True)
    for _ in range(12):
        compressed = any(bypass.tensors_next())
        took = StepTiming(0.010 if compressed else 0.090, 0.056 if compressed else 0.0, 0.2)
        decision = bypass.saw(compressed, [took, took], costs if bypass.decides_next else ())
    assert decision is not None and decision.compress and decision.changed
    assert bypass.tensors_next() == (True, False, False)
    assert set(decision.bypassed) == {"slow", "tiny"}
    assert "2 of 3 tensors go as they are: slow (50.00 ms to compress, 9.90 ms for the bytes saved)" in decision.reason


def test_nothing_is_compressed_if_no_tensor_pays() -> None:
    bypass, decision = Bypass(["a", "b"]), None
    for _ in range(12):
        compressed = any(bypass.tensors_next())
        took = StepTiming(0.010 if compressed else 0.011, 0.02 * compressed, 0.2)
        decision = bypass.saw(compressed, [took], [Cost(0.01, 1000.0)] * 2 if bypass.decides_next else ())
    assert decision is not None and not decision.compress and not decision.bypassed
    assert bypass.tensors_next() == (False, False)


@pytest.mark.slow
def test_a_tensor_that_is_bypassed_alone_takes_its_rest_along(
    workers: Workers, on_host: Any, clicks: Any, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [(False, True, True), (True, True, True), (True, False, True), (False,) * 3, (True, True, True)]

    def in_turn(self: Bypass) -> tuple[bool, ...]:
        return turns[self._n_seen % len(turns)]  # 10 before the last of the 12 steps

    monkeypatch.setattr(Bypass, "tensors_next", in_turn)
    spec = Compression.topk(0.1)
    jobs = [on_host(host, compression=spec) for host in "aab"]
    workers.together(jobs, lambda job: train(job, clicks(50), 3))
    check_balance(books, jobs, spec)
    check_replicas(jobs)
    first, second, _ = jobs[0].state.engine.model.compression._all.spans
    waiting = [
        [job.state.engine.model.compression.feedback.residual[span.at].any() for job in jobs]
        for span in (first, second)
    ]
    assert not any(waiting[0]) and any(waiting[1])


@pytest.mark.slow
def test_all_workers_bypass_alike_and_lose_nothing(
    workers: Workers, on_host: Any, clicks: Any, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: dict[Any, list[bool]] = {}

    def note(name: str, way: bool) -> None:
        method = getattr(DenseExchange, name)

        def noting(self: Any, *arguments: Any) -> Any:
            ways.setdefault(self, []).append(way)
            return method(self, *arguments)

        monkeypatch.setattr(DenseExchange, name, noting)

    note("_sum_compressed_", True)
    note("_sum_plain_", False)
    spec = Compression.topk(0.2)
    jobs, received = [on_host(host, compression=spec) for host in "aab"], EventLog()
    jobs[0].state.register_callbacks([received])
    workers.together(jobs, lambda job: train(job, clicks(50), 4))
    first, *others = ways.values()
    assert len(others) == 2 and all(other == first for other in others)
    assert {True, False} == set(first)
    assert len(received.of("compression")) == 1
    check_balance(books, jobs, spec)
    check_replicas(jobs)
