"""Threads that share a worker's replica, in one process with a real server: what is the same as with one thread, and
what each failure leaves behind. Jobs of several workers with threads: at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import gba_hvd
from gba_hvd.faults import FaultSchedule
from gba_hvd.modes.model_averaging import ModelAveragingMode

from .alone import Outcome, Watch, job_alone, outcome_of, train_alone
from .cluster import PATIENT, Cluster, assert_identical, cluster
from .workload import Training

TWO_NAMES = ("localhost", "127.0.0.1")
pytestmark = [pytest.mark.processes]
PATIENCE_S = 300.0
N = 4
SAMPLES, N_MICRO = 320, 20
PLAN = {"samples": SAMPLES}


class Compute:
    """What the threads run. Notes the samples and who computed them.

    first: called with each of the first micro-batches, `times` of them
    """

    def __init__(self, first: Callable[[], Any] = lambda: None, times: int = 0) -> None:
        self.rows: list[int] = []
        self.threads: dict[str, set[str]] = {}  # by mode
        self.elp: dict[str, set[int]] = {}  # by mode: samples computed at once
        self._first, self._left, self._door = first, times, threading.Lock()
        self.state: Any = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        mode = self.state.engine.mode
        with self._door:
            self.rows += batch.rows
            self.threads.setdefault(mode.name, set()).add(threading.current_thread().name)
            self.elp.setdefault(mode.name, set()).add(self.state.engine.elp)
            is_first, self._left = self._left > 0, self._left - 1
        if is_first:
            self._first()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def train(training: Training, watch: Watch, compute: Compute, epochs: int = 2, n_threads: int = N) -> Outcome:
    compute.state = training.state

    @gba_hvd.elastic.run
    def run(state: gba_hvd.elastic.TorchState) -> Outcome:
        for state.epoch in range(epochs):
            gba_hvd.hogwild(training.dataset, state, compute, n_threads=n_threads, seed=1)
            gba_hvd.evaluate(training.model, training.dataset, state, batch=64)
        return outcome_of(training, watch)

    outcome: Outcome = run(training.state)
    return outcome


@pytest.mark.parametrize("mode", ["shadow", "ma"])
def test_one_thread_is_the_plain_loop_bit_for_bit(tmp_path: Path, mode: str) -> None:
    plan = {**PLAN, "flush": True}
    plain = train_alone(tmp_path / "plain", plan, mode=mode)

    def flushed(model: nn.Module, batch: Any) -> Tensor:
        assert compute.state.engine.mode.servers is not None
        compute.state.engine.mode.servers.flush()  # the servers have applied the last one before this one is computed
        return Compute.__call__(compute, model, batch)

    with job_alone(tmp_path / "hogwild", plan, mode=mode) as (training, watch):
        compute = Compute()
        compute.state = training.state

        @gba_hvd.elastic.run
        def run(state: gba_hvd.elastic.TorchState) -> Outcome:
            for state.epoch in range(2):
                gba_hvd.hogwild(training.dataset, state, flushed, seed=1)
                gba_hvd.evaluate(training.model, training.dataset, state, batch=64)
            return outcome_of(training, watch)

        found: Outcome = run(training.state)
    assert found.samples == plain.samples and compute.threads == {mode: {"MainThread"}}
    assert_identical(found.arrays, plain.arrays)
    assert_identical(found.optimizer_arrays, plain.optimizer_arrays)


@pytest.mark.parametrize("settings", [{"mode": "shadow"}, {"mode": "ma", "every": 3}], ids=lambda s: s["mode"])
def test_threads_compute_at_once_and_every_sample_counts_once(tmp_path: Path, settings: dict[str, Any]) -> None:
    together = threading.Barrier(N, timeout=60)  # broken unless so many micro-batches are computed at once
    with job_alone(tmp_path / "job", PLAN, **settings) as (training, watch):
        compute = Compute(together.wait, times=N)
        outcome = train(training, watch, compute)
    assert sorted(compute.rows) == sorted(2 * list(range(SAMPLES)))
    assert outcome.samples == {**outcome.samples, "total": 2 * SAMPLES, "applied": 2 * SAMPLES}
    assert compute.threads == {settings["mode"]: {f"gba-hvd hogwild {number}" for number in range(N)}}
    steps = outcome.optimizer_arrays["0.step"]
    assert float(steps) == outcome.step == 2 * N_MICRO, "some step of the replica was lost"
    assert not [t for t in threading.enumerate() if t.name.startswith("gba-hvd")]


def test_threads_come_and_go_with_the_mode(tmp_path: Path) -> None:
    at = {2: "shadow", 10: "allreduce", 20: "shadow", 40: "gba"}
    plan = {**PLAN, "global_batch": 48}
    with job_alone(tmp_path / "job", plan, mode="allreduce", switch_at=at) as (training, watch):
        compute = Compute()
        outcome = train(training, watch, compute, epochs=6)
    assert {to for _, to, _ in outcome.switches} == {"shadow", "allreduce", "gba"}
    assert sorted(compute.rows) == sorted(6 * list(range(SAMPLES)))
    assert outcome.samples["applied"] + outcome.samples["dropped"] == 6 * SAMPLES
    assert all(name.startswith("gba-hvd hogwild") for name in compute.threads.pop("shadow"))
    assert compute.threads == {"allreduce": {"MainThread"}, "gba": {"MainThread"}}
    micro = training.state.engine.model.micro_batch
    assert compute.elp == {"allreduce": {micro}, "gba": {micro}, "shadow": {N * micro}}


def test_a_thread_that_fails_ends_the_loop_with_its_error_and_the_epoch_can_go_on(tmp_path: Path) -> None:
    class Planned(Exception):
        pass

    def fail() -> None:
        if not failed:
            failed.append(threading.current_thread().name)
            raise Planned

    failed: list[str] = []
    with job_alone(tmp_path / "job", PLAN, mode="shadow") as (training, watch):
        compute = Compute(fail, times=N_MICRO)

        @gba_hvd.elastic.run
        def run(state: gba_hvd.elastic.TorchState) -> Outcome:
            compute.state = state
            with pytest.raises(Planned):
                gba_hvd.hogwild(training.dataset, state, compute, n_threads=N, seed=1)
            mode = state.engine.mode
            assert isinstance(mode, ModelAveragingMode) and not mode.servers.replica.is_open, (
                "its replica was not submitted"
            )
            assert not [t for t in threading.enumerate() if t.name.startswith("gba-hvd hogwild")]
            gba_hvd.hogwild(training.dataset, state, compute, n_threads=N, seed=1)
            return outcome_of(training, watch)

        outcome: Outcome = run(training.state)
    assert failed and failed[0].startswith("gba-hvd hogwild")
    assert set(compute.rows) == set(range(SAMPLES))
    assert outcome.samples == {**outcome.samples, "total": SAMPLES, "applied": SAMPLES, "dropped": 0, "lost": 0}


def test_a_failure_ends_the_loop_also_while_it_waits_for_the_last_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease of the failed one would be given to nobody for long: the calling thread must not wait for that."""

    def compute(model: nn.Module, batch: Any) -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
        loss.backward()  # type: ignore[no-untyped-call]
        if batch.index == 0:
            assert last.wait(60)
            raise RuntimeError("planned failure")
        if batch.index == N_MICRO - 1:
            last.set()

    monkeypatch.setenv("GBA_HVD_LEASE_S", "1000")
    last = threading.Event()
    with job_alone(tmp_path / "job", PLAN, mode="shadow") as (training, _):

        @gba_hvd.elastic.run
        def run(state: gba_hvd.elastic.TorchState) -> None:
            gba_hvd.hogwild(training.dataset, state, compute, n_threads=2, seed=1)

        with pytest.raises(RuntimeError, match="planned failure"):
            run(training.state)


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("the model itself", gba_hvd.BadInput, "left no gradient in the model that it was given"),
        ("an evaluation", gba_hvd.GbaError, "between two epochs"),
    ],
)
def test_what_cannot_be_done_within_a_thread_is_refused(
    tmp_path: Path, what: str, error: type[Exception], words: str
) -> None:
    with job_alone(tmp_path / "job", PLAN, mode="shadow") as (training, _):

        def compute(model: nn.Module, batch: Any) -> None:
            if what == "an evaluation":
                gba_hvd.evaluate(model, training.dataset, training.state, batch=64)
            loss = nn.functional.binary_cross_entropy_with_logits(training.model(batch), batch.label)
            loss.backward()  # type: ignore[no-untyped-call]

        @gba_hvd.elastic.run
        def run(state: gba_hvd.elastic.TorchState) -> None:
            gba_hvd.hogwild(training.dataset, state, compute, n_threads=2, seed=1)

        with pytest.raises(error, match=words):
            run(training.state)


def test_running_statistics_are_each_thread_s_own_and_the_user_is_warned(tmp_path: Path) -> None:
    with job_alone(tmp_path / "job", PLAN, mode="shadow") as (training, watch):
        norm = nn.BatchNorm1d(1, affine=False)
        training.model.mlp.append(norm)
        compute = Compute(threading.Barrier(N, timeout=60).wait, times=N)  # each thread computes one of the first
        with pytest.warns(UserWarning, match=r"writes buffers \(mlp\.3\.running_mean"):
            train(training, watch, compute)
    n_seen = int(norm.num_batches_tracked)  # type: ignore[arg-type]
    assert 0 < n_seen < 2 * N_MICRO, "those of one thread"
    assert norm.running_mean is not None and norm.running_mean.isfinite().all()


# --- several workers -------------------------------------------------------------------------------------------------


def assert_one_model_and_every_sample_once(job: Cluster, epochs: int) -> None:
    job.assert_every_sample_once(epochs)
    for epoch in range(epochs):
        assert len({line["values"] for line in job.notes("values") if line["of_epoch"] == epoch}) == 1
    assert max(job.result()["aucs"]) > 0.95


@pytest.mark.parametrize(
    "gba",
    [
        pytest.param({"mode": "shadow", "sync": "easgd"}, marks=pytest.mark.variant),
        pytest.param({"mode": "ma", "every": 6}, marks=pytest.mark.variant),
        {"mode": "shadow", "sync": "ma", "switch_at": {80: "allreduce", 100: "shadow"}},
    ],
    ids=["easgd", "in the foreground", "a switch there and back"],
)
def test_workers_with_threads_leave_each_epoch_with_one_model(tmp_path: Path, gba: dict[str, Any]) -> None:
    faults = [fault.entry() for fault in FaultSchedule().serve(seconds=0.03).faults]
    with cluster(tmp_path, PATIENT, gba=gba, fault_schedule=faults, threads=3, epochs=4) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        assert {line["rank"] for line in job.pushes()} == {0, 1}
        assert_one_model_and_every_sample_once(job, epochs=4)
        assert not [line for line in job.notes("event") if line["event"] in ("switch_failed", "replica_late")]
        switches = {line["to"] for line in job.notes("event") if line["event"] == "switch"}
        assert switches == {gba["mode"], *gba.get("switch_at", {}).values()}


def test_a_worker_that_dies_with_several_micro_batches_in_hand_costs_no_sample(tmp_path: Path) -> None:
    faults = [fault.entry() for fault in FaultSchedule().serve(seconds=0.05).kill(worker=1, at_step=60).faults]
    plan: dict[str, Any] = {"fault_schedule": faults, "epochs": 6, "workers_seen": 3, "threads": 3}
    gba = {"mode": "shadow", "sync": "ma"}
    with cluster(tmp_path, {**PATIENT, "GBA_HVD_LEASE_S": "200"}, gba=gba, **plan) as job:
        job.run(lambda: job.start_elastic(TWO_NAMES), PATIENCE_S)
        assert job.schedule_fired() == ["kill"]
        assert len({line["pid"] for line in job.pushes()}) == 3, "two workers and a late joiner"
        assert_one_model_and_every_sample_once(job, epochs=6)


@pytest.mark.variant
def test_a_worker_with_threads_that_falls_out_of_the_mode_comes_back(tmp_path: Path) -> None:
    faults: list[dict[str, Any]] = [
        {"point": "before push", "step": 1, "rank": 1, "do": "lose the result"},
        {"point": "before push", "step": 1, "rank": 0, "do": "wait for", "file": "fault-0"},
    ]
    schedule = [fault.entry() for fault in FaultSchedule().serve(seconds=0.05).faults]
    plan: dict[str, Any] = {
        "faults": faults,
        "fault_schedule": schedule,
        "threads": 3,
        "epochs": 5,
        "one_comes_back": True,
    }
    with cluster(tmp_path, PATIENT, gba={"mode": "shadow"}, **plan) as job:
        job.run(lambda: job.start_elastic(TWO_NAMES), PATIENCE_S)
        assert job.fired() == 2
        job.assert_one_fell_out_and_came_back()
        assert_one_model_and_every_sample_once(job, epochs=5)
