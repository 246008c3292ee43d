"""Switching a running job between allreduce and asynchronous modes changes no value (invariant 4).

In lock-step (`lookahead=0`) the steps between two switches are those of allreduce mode, so the whole job must arrive
where a job without a switch does. A switch from allreduce comes exactly at its step; one from an asynchronous mode when
the coordinator, whose epoch ends after that step, has run dry.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .alone import train_alone
from .cluster import NAMES, Cluster, assert_identical, assert_same_parameters, cluster

pytestmark = [pytest.mark.processes]
THERE_AND_BACK: dict[str, Any] = {"mode": "allreduce", "lookahead": 0, "switch_at": {4: "gba", 17: "allreduce"}}
STEPS_OF_EPOCH = 11


def switches_by_worker(job: Cluster) -> list[list[tuple[str, int]]]:
    """(to, step) of every switch, for each worker."""
    by_pid: dict[int, list[tuple[str, int]]] = {}
    for line in job.notes("event"):
        assert line["event"] != "switch_failed", line
        if line["event"] == "switch":
            by_pid.setdefault(line["pid"], []).append((line["to"], line["step"]))
    return list(by_pid.values())


def assert_there_and_back(switches: list[tuple[str, int]]) -> None:
    (there, at), (back, later) = switches
    assert (there, at, back) == ("gba", 4, "allreduce")
    assert 17 <= later < 2 * STEPS_OF_EPOCH, "the switch back was to come within the second epoch"


@pytest.mark.parametrize("why", ["planned", ""])
def test_all_workers_end_where_a_required_mode_cannot_be_entered_and_name_who_failed(tmp_path: Path, why: str) -> None:
    with cluster(tmp_path, gba={"mode": "gba", "required": True}, entering_fails=why) as job:
        job.start_static(2)
        assert job.wait() == 1, job.log()
        assert (job.out / "entering failed").exists()
        required = "mode gba is required (GBACallback(required=True)) and was not entered: "
        assert required + (why or "GbaError('')") in job.said(), job.log()
        assert required + "the servers of the host of rank 0 could not take over; its log says why" in job.said()
        assert "allreduce continues" not in job.said()
        job.assert_nothing_left()


@pytest.mark.parametrize(
    ("dense", "rows", "row_average"), [("Adam", "Adam", "global"), ("momentum", "RowAdagrad", "contributors")]
)
def test_there_and_back_is_bit_for_bit_as_if_nothing_happened(
    tmp_path: Path, dense: str, rows: str, row_average: str
) -> None:
    plan = {"dense_optimizer": dense, "row_optimizer": rows, "row_average": row_average, "epochs": 3}
    reference = train_alone(tmp_path / "allreduce", plan)
    result = train_alone(tmp_path / "switching", plan, **THERE_AND_BACK)
    assert_there_and_back([(to, step) for _, to, step in result.switches])
    assert result.modes == {"allreduce", "gba"}
    assert result.step == reference.step == 3 * STEPS_OF_EPOCH
    assert_identical(result.arrays, reference.arrays)
    assert_identical(result.optimizer_arrays, reference.optimizer_arrays)
    assert result.samples == reference.samples


def test_larger_batches_in_allreduce_mode_change_no_result_and_no_position(
    reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Allreduce in three batches of 32 samples for two workers, gba in lock-step in six of 16, and back."""
    with cluster(tmp_path, gba=THERE_AND_BACK, follow_the_chief=True, sync_micro_batch=32) as job:
        job.run(lambda: job.start_static(2))
        assert {64, 32} <= {len(line["rows"]) for line in job.notes("attempt")}, "else each has 48"
        assert {len(line["rows"]) for line in job.notes("push")} == {16, 8}
        job.assert_every_sample_once(epochs=2)
        first, second = switches_by_worker(job)
        assert first == second
        assert_there_and_back(first)
        assert_same_parameters(job.arrays(), reference)


@pytest.mark.parametrize("mode", ["gba", "shadow"])
def test_a_worker_that_has_left_the_world_does_not_leave_the_mode_with_the_other(tmp_path: Path, mode: str) -> None:
    """It waits for the other one, which is not to wait for it in the world that it knows: both form the next one."""
    switches: dict[str, Any] = {"mode": "allreduce", "switch_at": {4: mode, 17: "allreduce"}}
    with cluster(tmp_path, gba=switches, follow_the_chief=True, world_changes_for=1) as job:
        job.run(lambda: job.start_elastic(NAMES[:1], slots=2))
        assert (job.out / "world-changed").exists()
        job.assert_every_sample_once(epochs=2)


def test_two_workers_there_and_back(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    key = tmp_path / "key"  # workers prove that they have it when they agree on the job's key
    key.write_text("0123456789abcdef" * 4)
    key.chmod(0o600)
    environ = {"GBA_HVD_KEY_FILE": str(key)}
    with cluster(tmp_path, environ, gba=THERE_AND_BACK, follow_the_chief=True) as job:
        job.run(lambda: job.start_static(2))
        job.assert_every_sample_once(epochs=2)
        first, second = switches_by_worker(job)
        assert first == second, "the workers did not switch at the same steps"
        assert_there_and_back(first)
        assert_same_parameters(job.arrays(), reference)


def test_switches_through_every_mode_account_for_every_sample(tmp_path: Path) -> None:
    """Steps of async and hop modes are of one micro-batch or a round, so their numbers run faster."""
    at = {3: "gba", 8: "allreduce", 13: "bsp", 18: "async", 60: "gba", 85: "hop_bs", 125: "hop_bw", 145: "allreduce"}
    # The other worker waits for the chief where a mode is to end: else one that looks late would miss the next one.
    with cluster(tmp_path, gba={"mode": "allreduce", "switch_at": at}, epochs=7, follow_the_chief=True) as job:
        job.run(lambda: job.start_static(2))
        job.assert_every_sample_once(epochs=7)
        first, second = switches_by_worker(job)
        assert first == second, "the workers did not switch at the same steps"
        reached = iter(mode for mode, _ in first)
        for mode in at.values():  # one asynchronous mode is left for another through allreduce
            assert mode in reached, f"{mode} was not reached, or not in turn: {first}"
        assert job.result()["mode"] == "allreduce"
