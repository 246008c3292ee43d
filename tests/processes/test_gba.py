"""Asynchronous modes in static jobs: what they compute, and what faults cost them.

In lock-step (`lookahead=0`) a step of gba mode is the step of allreduce mode, bit for bit. So a job that ends with the
parameters of the reference has applied every micro-batch once, whatever happened to it on the way.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gba_hvd.faults import FaultSchedule
from gba_hvd.gba.under_way import UnderWay
from gba_hvd.ps import process
from gba_hvd.ps.protocol import Done

from .alone import train_alone
from .cluster import Cluster, assert_identical, cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
PATIENCE_S = 180.0  # on a busy machine processes take long to start
LOCK_STEP = {"mode": "gba", "lookahead": 0}
FREE = {"mode": "gba"}
FIFTY_STEPS = {"samples": 2392, "epochs": 2}  # twice 25 steps, the last one short and with half a micro-batch
OPTIMIZERS = [("SGD", "SGD"), ("momentum", "RowAdagrad"), ("Adagrad", "Adagrad"), ("Adam", "Adam")]


def plan_of(faults: FaultSchedule) -> list[dict[str, Any]]:
    return [fault.entry() for fault in faults.faults]


def finish(job: Cluster, workers: int) -> None:
    job.run(lambda: job.start_static(workers), PATIENCE_S)


def staleness(job: Cluster) -> dict[int, int]:
    return {int(steps): count for steps, count in job.result()["staleness"].items()}


def workers_of(job: Cluster) -> set[int]:
    return {line["rank"] for line in job.pushes()}


# --- what a step is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dense", "rows"), OPTIMIZERS)
def test_one_worker_in_lock_step_equals_allreduce(tmp_path: Path, dense: str, rows: str) -> None:
    plan = {**FIFTY_STEPS, "dense_optimizer": dense, "row_optimizer": rows}
    reference = train_alone(tmp_path / "allreduce", plan)
    result = train_alone(tmp_path / "gba", plan, **LOCK_STEP)
    assert (result.step, result.modes) == (50, {"gba"})
    assert_identical(result.arrays, reference.arrays)
    assert_identical(result.optimizer_arrays, reference.optimizer_arrays)
    assert result.samples == reference.samples


def test_three_workers_in_lock_step_equal_allreduce(tmp_path: Path) -> None:
    plan = {**FIFTY_STEPS, "dense_optimizer": "momentum", "row_optimizer": "RowAdagrad"}
    reference = train_alone(tmp_path / "alone", plan)
    with cluster(tmp_path / "job", gba=LOCK_STEP, **plan) as job:
        finish(job, 3)
        assert_identical(job.arrays(), reference.arrays)
        assert_identical(job.optimizer_arrays(), reference.optimizer_arrays)
        job.assert_every_sample_once(epochs=2, samples=2392)
        assert workers_of(job) == {0, 1, 2}
        assert staleness(job) == {0: 300}


def test_a_slow_worker_holds_nobody_up_and_still_contributes(tmp_path: Path) -> None:
    faults = plan_of(FaultSchedule().serve(seconds=0.02).slow(worker=2, factor=5))
    with cluster(tmp_path, gba=FREE, fault_schedule=faults, epochs=3) as job:
        finish(job, 3)
        job.assert_every_sample_once(epochs=3)
        assert job.result()["step"] == 33
        assert sum(staleness(job).values()) == 3 * 63
        shares = [sum(line["rank"] == rank for line in job.pushes()) for rank in range(3)]
        assert 0 < shares[2] < min(shares[:2]) / 2, shares
        assert min(job.result()["aucs"]) > 0.5


@pytest.mark.parametrize(
    "mode", ["async", "hop_bw", *(pytest.param(mode, marks=pytest.mark.variant) for mode in ("bsp", "hop_bs"))]
)
def test_the_baselines_account_for_every_sample(tmp_path: Path, mode: str) -> None:
    with cluster(tmp_path, gba={"mode": mode}, epochs=1) as job:
        finish(job, 3)
        job.assert_every_sample_once(epochs=1)
        result = job.result()
        assert result["mode"] == mode
        assert sum(staleness(job).values()) == 63
        if mode == "bsp":
            assert result["step"] == 11
        elif mode != "hop_bw":
            assert result["step"] == 63
        if mode != "hop_bw":
            assert result["dropped"] == 0


# --- the server dies or stalls ---------------------------------------------------------------------------------------


def test_pushes_that_wait_in_a_killed_server_are_computed_again(
    reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    kills = [[0, 8], [0, 15], [1, 33]]  # the third of six of a step, the fourth, the fourth
    with cluster(tmp_path, gba=LOCK_STEP, kill_server_after_push=kills) as job:
        finish(job, 2)
        assert job.fired() == 3
        job.assert_every_sample_once(epochs=2)
        assert job.result()["reissued"] >= 3
        assert (job.result()["applied"], job.result()["lost"]) == (2000, 0)
        assert_identical(job.arrays(), reference)


def test_a_push_whose_server_dies_before_it_is_reported_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server said it has the push; its successor hears that the push is done, but has it no more."""
    report, killed = UnderWay.report, []

    def kill_then_report(self: UnderWay, done: Done) -> None:
        if done.micro == 8 and not killed:
            pid = process.pid_of(self._client._folder, 0)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        report(self, done)

    monkeypatch.setattr(UnderWay, "report", kill_then_report)
    plan = {"epochs": 1}
    reference = train_alone(tmp_path / "allreduce", plan)
    result = train_alone(tmp_path / "gba", plan, **LOCK_STEP)
    assert len(killed) == 1
    assert result.samples == reference.samples
    assert_identical(result.arrays, reference.arrays)


def test_training_goes_on_when_the_server_is_killed_and_stopped(tmp_path: Path) -> None:
    faults = FaultSchedule().kill_server(host=0, at_step=5).stop_server(host=0, at_step=12, seconds=3)
    faults = faults.kill_server(host=0, at_step=19)
    with cluster(tmp_path, gba=FREE, fault_schedule=plan_of(faults), epochs=3) as job:
        finish(job, 3)
        assert job.schedule_fired() == ["kill_server", "stop_server", "kill_server"]
        job.assert_every_sample_once(epochs=3)
        assert job.result()["lost"] <= 2 * 96  # at most the step that each kill tore


# --- a worker stalls, a push is lost ---------------------------------------------------------------------------------


def test_leases_of_a_stopped_worker_go_to_others_and_it_goes_on(
    reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    faults = plan_of(FaultSchedule().stop(worker=1, at_step=5, seconds=4))
    with cluster(tmp_path, gba=LOCK_STEP, fault_schedule=faults, sleep_s=0.05) as job:
        finish(job, 3)
        assert job.schedule_fired() == ["stop"]
        job.assert_every_sample_once(epochs=2)
        assert job.result()["reissued"] >= 1
        assert_identical(job.arrays(), reference)
        stopped = [line for line in job.pushes() if line["rank"] == 1]
        longest = max(b["time"] - a["time"] for a, b in pairwise(stopped))
        assert longest >= 4, "it did not stop, or did not go on"


def test_lost_and_late_pushes_change_nothing(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    faults = FaultSchedule().drop_push(worker=1, at_step=4).delay_push(worker=0, at_step=8, seconds=1)
    faults = faults.delay_push(worker=1, at_step=13, seconds=3)  # longer than a lease lasts
    with cluster(tmp_path, environ={"GBA_HVD_LEASE_S": "2"}, gba=LOCK_STEP, fault_schedule=plan_of(faults)) as job:
        finish(job, 2)
        assert job.schedule_fired() == ["drop_push", "delay_push", "delay_push"]
        assert [line["drop"] for line in job.pushes()].count(True) == 1
        job.assert_every_sample_once(epochs=2)
        assert job.result()["reissued"] >= 2
        assert_identical(job.arrays(), reference)


# --- numbers that are not finite -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_bad_micro_batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A job, run to its end, in which the loss of micro-batch 20 of the first epoch was no number."""
    with cluster(tmp_path_factory.mktemp("job") / "bad", gba=FREE, nan_micros=[20]) as job:
        finish(job, 2)
        yield job


def test_a_micro_batch_that_is_not_finite_is_dropped_and_counted(one_bad_micro_batch: Cluster) -> None:
    job = one_bad_micro_batch
    job.assert_every_sample_once(epochs=2)
    result = job.result()
    assert (result["dropped"], result["refused"], result["applied"]) == (16, 1, 1984)
    assert all(np.isfinite(values).all() for values in job.arrays().values())
    assert [line["push"] for line in job.pushes() if line["refused"]] == [20]


def test_a_micro_batch_that_is_not_finite_is_named(one_bad_micro_batch: Cluster) -> None:
    told = one_bad_micro_batch.log() + str(one_bad_micro_batch.notes("event"))
    assert re.search(r"micro-batch 20\b.*loss nan", told)


def test_a_job_whose_every_loss_is_not_finite_ends_with_an_error(tmp_path: Path) -> None:
    with cluster(tmp_path, gba=FREE, nan_micros=list(range(10, 10_000)), samples=20_000, epochs=1) as job:
        job.start_static(2)
        assert job.wait(PATIENCE_S) != 0
        ends = job.notes("end")
        assert [end["end"] for end in ends] == ["FAILED", "FAILED"], ends
        assert any("loss nan" in end["error"] for end in ends), ends
        job.assert_nothing_left()


# --- however it ends, nothing remains --------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGINT, True), (signal.SIGKILL, False)])
def test_nothing_is_left_when_the_launcher_is_ended(tmp_path: Path, number: signal.Signals, to_group: bool) -> None:
    with cluster(tmp_path, gba=FREE, epochs=1000, sleep_s=0.01) as job:
        job.start_static(2)
        assert job.launcher is not None
        wait_for(lambda: len(job.pushes()) > 20, "training", PATIENCE_S)
        assert len(job.processes()) > len(job.processes(only_workers=True)), "no server to be left behind"
        if to_group:
            os.killpg(job.launcher.pid, number)  # what Ctrl-C in a terminal does
        else:
            job.launcher.send_signal(number)
        job.wait(60)  # what horovodrun returns then is its own affair
        assert "FINISHED" not in [end["end"] for end in job.notes("end")]
        job.assert_nothing_left()


def test_nothing_is_left_when_a_worker_fails_and_its_error_is_shown(tmp_path: Path) -> None:
    faults = plan_of(FaultSchedule().raise_(worker=1, at_step=5))
    with cluster(tmp_path, gba=FREE, fault_schedule=faults, epochs=1000) as job:
        job.start_static(2)
        assert job.wait(PATIENCE_S) != 0
        assert job.schedule_fired() == ["raise"]
        assert "worker 1 raises at step 5" in job.log()
        job.assert_nothing_left()
