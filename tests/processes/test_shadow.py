"""Replicas of the dense parameters in real jobs: mode shadow, and its counterparts in the foreground.

Whatever the rounds do, the rows and the account are those of mode async. What is checked beside: that all workers leave
every epoch with the same values, bit for bit, through deaths at each point where replicas are submitted.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gba_hvd.faults import FaultSchedule

from .alone import train_alone
from .cluster import PATIENT, Cluster, assert_identical, cluster, wait_for
from .workload import Training

pytestmark = [pytest.mark.processes]
PATIENCE_S = 300.0  # on a busy machine processes take long to start
TWO_NAMES = ("localhost", "127.0.0.1")
VERY_PATIENT = {**PATIENT, "GBA_HVD_SERVER_S": "120"}  # so does a server's successor


def assert_one_model(job: Cluster, epochs: int) -> None:
    """After each epoch all workers have the same dense parameters, and other ones than after the epoch before.

    Not after one that ended in a mode without replicas: there a worker that is late sees what others did since.
    """
    after: dict[int, set[str]] = {}
    unlike = {line["of_epoch"] for line in job.notes("values") if line["mode"] in ("gba", "async")}
    for line in job.notes("values"):
        after.setdefault(line["of_epoch"], set()).add(line["values"])
    assert set(after) == set(range(epochs))
    together = [values for epoch, values in after.items() if epoch not in unlike]
    assert len(together) > epochs / 3  # a switch comes some steps late, so some more may end in other modes
    assert [len(values) for values in together] == [1] * len(together)
    assert len(set.union(*together)) == len(together)


def assert_learned(job: Cluster) -> None:
    assert max(job.result()["aucs"]) > 0.95


def rounds_reported(job: Cluster) -> list[dict[str, Any]]:
    return [line for line in job.notes("event") if "rounds_per_s" in line]


# --- one worker ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dense", "rows"), [("Adam", "Adagrad"), pytest.param("momentum", "SGD", marks=pytest.mark.variant)]
)
def test_one_worker_trains_as_without_replicas_bit_for_bit(tmp_path: Path, dense: str, rows: str) -> None:
    plan = {"dense_optimizer": dense, "row_optimizer": rows, "flush": True}
    plain = train_alone(tmp_path / "plain", {**plan, "global_batch": 16})
    asynchronous = train_alone(tmp_path / "async", plan, mode="async")
    for mode, options in (("shadow", {}), ("ma", {"every": 3})):
        shadow = train_alone(tmp_path / mode, plan, mode=mode, **options)
        assert shadow.modes == {mode} and shadow.samples == asynchronous.samples
        for other in (asynchronous, plain):
            assert_identical(shadow.arrays, other.arrays)
            assert_identical(shadow.optimizer_arrays, other.optimizer_arrays)


@pytest.mark.variant
def test_a_worker_that_was_alone_leaves_with_what_it_learned(tmp_path: Path) -> None:
    plan = {"flush": True, "global_batch": 16, "epochs": 2}
    plain = train_alone(tmp_path / "plain", plan)
    there_and_back = train_alone(
        tmp_path / "switching", plan, mode="allreduce", switch_at={5: "shadow", 90: "allreduce"}
    )
    assert [(was, to) for was, to, _ in there_and_back.switches] == [("allreduce", "shadow"), ("shadow", "allreduce")]
    assert_identical(there_and_back.arrays, plain.arrays)
    assert_identical(there_and_back.optimizer_arrays, plain.optimizer_arrays)


# --- several ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gba",
    [
        pytest.param({"mode": "shadow", "sync": "easgd"}, marks=pytest.mark.variant),
        {"mode": "shadow", "sync": "ma", "mixing": "difference", "servers_per_host": 2},
        pytest.param({"mode": "shadow", "sync": "bmuf"}, marks=pytest.mark.variant),
        pytest.param({"mode": "easgd", "every": 5}, marks=pytest.mark.variant),
        pytest.param({"mode": "ma", "every": 5}, marks=pytest.mark.variant),
        pytest.param({"mode": "shadow", "sync": "none"}, marks=pytest.mark.variant),
    ],
    ids=lambda gba: f"{gba['mode']} {gba.get('sync', '')}".strip(),
)
def test_workers_train_replicas_and_leave_each_epoch_with_one_model(tmp_path: Path, gba: dict[str, Any]) -> None:
    with cluster(tmp_path, PATIENT, gba=gba, epochs=4, sleep_s=0.02) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        job.assert_every_sample_once(epochs=4)
        assert job.result()["mode"] == gba["mode"] and job.result()["dropped"] == 0
        assert {line["rank"] for line in job.pushes()} == {0, 1}
        assert_one_model(job, epochs=4)
        assert_learned(job)
        reported = rounds_reported(job)
        assert gba.get("sync") == "none" or (reported and reported[-1]["rounds_dropped"] == 0)
        if "every" in gba:
            assert all(abs(line["steps_per_round"] - 5) < 2.5 for line in reported)


def test_a_round_that_waits_for_a_stopped_worker_names_it(tmp_path: Path) -> None:
    plan = {"gba": {"mode": "shadow", "sync": "ma"}, "epochs": 12, "sleep_s": 0.02, "long_waits_s": [1, 3]}
    with cluster(tmp_path, **plan) as job:
        job.start_static(2)
        (pid,) = wait_for(lambda: {push["pid"].rpartition("-")[2] for push in job.pushes() if push["rank"]}, "pushes")
        os.kill(int(pid), signal.SIGSTOP)
        waits = r"rank 0 has waited for \d+ s in a round of replicas: rank 1 has not come to it\..* Training continues"
        wait_for(lambda: re.search(waits, job.said()), "the warning")
        os.kill(int(pid), signal.SIGCONT)
        assert job.wait() == 0, job.log()


def test_plain_averaging_after_every_step_of_sgd_is_synchronous_sgd(tmp_path: Path) -> None:
    """Mode `ma` with its default elasticity. Rows stay as they are, since each push of rows is a step of its own."""
    plan = {"dense_optimizer": "SGD", "row_optimizer": "SGD", "row_lr": 0.0, "samples": 320, "in_step": True}
    with cluster(tmp_path, PATIENT, gba={"mode": "ma", "every": 1}, epochs=1, **plan) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        job.assert_every_sample_once(epochs=1, samples=320)
        by_rank = [[line["rows"] for line in job.pushes() if line["rank"] == rank] for rank in range(2)]
        arrays, training = job.arrays(), Training.of(plan)
    assert [len(micros) for micros in by_rank] == [10, 10]
    rows = {name: torch.from_numpy(arrays[f"{name}.weights"]) for name in ("user", "item")}
    optimizer = torch.optim.SGD(training.model.mlp.parameters(), lr=0.1)
    for pair in zip(*by_rank, strict=True):
        optimizer.zero_grad()
        for micro in pair:
            batch = training.dataset.take(np.array(micro))
            inputs = [rows[name][torch.as_tensor(batch.ids[name])] for name in rows]
            logits = training.model.mlp(torch.cat([*inputs, batch.dense], dim=1)).squeeze(1)
            (torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label) / len(pair)).backward()
        optimizer.step()
    for name, parameter in training.model.mlp.named_parameters():
        np.testing.assert_allclose(arrays[f"dense.mlp.{name}"], parameter.detach(), rtol=1e-4, atol=1e-6, err_msg=name)


def test_replicas_are_entered_and_left_live_from_and_to_every_other_mode(tmp_path: Path) -> None:
    at = {3: "shadow", 40: "gba", 70: "ma", 130: "allreduce", 145: "async", 185: "shadow", 240: "auto"}
    gba = {"mode": "allreduce", "sync": "ma", "every": 4, "switch_at": at}
    with cluster(tmp_path, PATIENT, gba=gba, epochs=8, sleep_s=0.01) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        job.assert_every_sample_once(epochs=8)
        by_worker: dict[int, list[tuple[str, int]]] = {}
        for line in job.notes("event"):
            assert line["event"] != "switch_failed", line
            if line["event"] == "switch":
                by_worker.setdefault(line["pid"], []).append((line["to"], line["step"]))
        first, second = by_worker.values()
        assert first == second, "the workers did not switch at the same steps"
        reached = iter(mode for mode, _ in first)
        assert all({"auto": "allreduce"}.get(mode, mode) in reached for mode in at.values()), first
        assert_one_model(job, epochs=8)
        assert_learned(job)


def test_an_evaluation_within_an_epoch_evaluates_the_central_copy_and_leaves_the_replica_alone(tmp_path: Path) -> None:
    gba = {"mode": "shadow", "sync": "none"}  # so that the central copy stays what the epoch before ended with
    with cluster(tmp_path, PATIENT, gba=gba, evaluate_after=[1, 40], sleep_s=0.02) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        (evaluated,) = job.notes("evaluated")
        (central,) = {line["values"] for line in job.notes("values") if line["of_epoch"] == 0}
        assert evaluated["evaluated"] == [central]
        assert evaluated["before"] == evaluated["after"] != central


# --- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["ma", pytest.param("easgd", marks=pytest.mark.variant)])
def test_a_worker_dies_its_leases_go_to_others_and_a_late_joiner_takes_part(tmp_path: Path, sync: str) -> None:
    faults = [fault.entry() for fault in FaultSchedule().serve(seconds=0.05).kill(worker=1, at_step=60).faults]
    plan: dict[str, Any] = {"fault_schedule": faults, "epochs": 6, "workers_seen": 3}
    with cluster(tmp_path, {**PATIENT, "GBA_HVD_LEASE_S": "200"}, gba={"mode": "shadow", "sync": sync}, **plan) as job:
        job.run(lambda: job.start_elastic(TWO_NAMES), PATIENCE_S)
        assert job.schedule_fired() == ["kill"]
        job.assert_every_sample_once(epochs=6)
        pids = {line["pid"] for line in job.pushes()}
        assert len(pids) == 3, "two workers and a late joiner"
        assert_one_model(job, epochs=6)
        assert_learned(job)
        late_joiner = max(pids, key=lambda pid: min(line["time"] for line in job.pushes() if line["pid"] == pid))
        joined = min(line["time"] for line in job.pushes() if line["pid"] == late_joiner)
        assert any(line["time"] > joined for line in rounds_reported(job)), "no rounds in the new world"


@pytest.mark.parametrize(
    "point",
    [
        "after submitting",
        *(pytest.param(p, marks=pytest.mark.variant) for p in ("before submitting", "all have submitted")),
    ],
)
def test_a_worker_that_dies_while_replicas_are_submitted_costs_its_replica_at_most(tmp_path: Path, point: str) -> None:
    fault = {"point": point, "step": 1, "rank": 1, "do": "kill"}
    with cluster(
        tmp_path, PATIENT, gba={"mode": "shadow", "sync": "ma"}, faults=[fault], epochs=5, sleep_s=0.02
    ) as job:
        job.run(lambda: job.start_elastic(TWO_NAMES), PATIENCE_S)
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=5)
        assert_one_model(job, epochs=5)
        assert_learned(job)


@pytest.mark.parametrize("point", ["all have submitted", pytest.param("after submitting", marks=pytest.mark.variant)])
def test_a_server_that_dies_while_replicas_are_submitted_goes_on_with_what_its_successor_has(
    tmp_path: Path, point: str
) -> None:
    fault = {"point": point, "step": 1, "rank": 1, "do": "kill the server"}
    with cluster(tmp_path, VERY_PATIENT, gba={"mode": "shadow"}, faults=[fault], epochs=3, sleep_s=0.02) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=3)
        assert_one_model(job, epochs=3)
        assert_learned(job)


@pytest.mark.variant
def test_a_server_that_is_killed_between_costs_no_replica(tmp_path: Path) -> None:
    gba = {"mode": "shadow"}
    with cluster(tmp_path, VERY_PATIENT, gba=gba, kill_server_after_push=[[1, 3, 3]], epochs=3, sleep_s=0.02) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        job.assert_every_sample_once(epochs=3)
        assert (job.out / "fault-server-0").exists()
        assert_one_model(job, epochs=3)
        assert_learned(job)


def test_a_worker_that_breaks_off_its_loop_keeps_nobody_waiting(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"break_off": [1, 0], "epochs": 3, "sleep_s": 0.02}
    with cluster(tmp_path, {**PATIENT, "GBA_HVD_LEASE_S": "1000"}, gba={"mode": "shadow"}, **plan) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        assert len([line for line in job.pushes(0) if line["rank"] == 1]) <= 2
        job.assert_every_sample_once(epochs=3)
        for epoch in (1, 2):
            assert len({line["values"] for line in job.notes("values") if line["of_epoch"] == epoch}) == 1
        assert_learned(job)


@pytest.mark.variant
def test_a_worker_whose_replica_comes_too_late_learns_so(tmp_path: Path) -> None:
    faults = [
        {"point": "before submitting", "step": 1, "rank": 1, "do": "wait for", "file": "fault-1"},
        {"point": "exported", "step": 1, "rank": 0, "do": "mark"},
    ]
    environ = {**PATIENT, "GBA_HVD_LEASE_S": "5"}  # so long the other one waits for it
    with cluster(tmp_path, environ, gba={"mode": "shadow"}, faults=faults, epochs=3, sleep_s=0.02) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        assert job.fired() == 2
        late = [line for line in job.notes("event") if line["event"] == "replica_late"]
        assert (1, 1) in {(line["rank"], line["of_epoch"]) for line in late}
        job.assert_every_sample_once(epochs=3)
        assert_one_model(job, epochs=3)


@pytest.mark.variant
def test_a_worker_that_leaves_the_mode_after_the_first_server_died_gets_what_the_others_got(tmp_path: Path) -> None:
    faults = [
        {"point": "after submitting", "step": 1, "rank": 1, "do": "wait for", "file": "fault-1"},
        {"point": "exported", "step": 1, "rank": 0, "do": "kill the server"},
    ]
    gba = {"mode": "shadow", "switch_at": {90: "allreduce"}}
    environ = {**VERY_PATIENT, "GBA_HVD_LEASE_S": "5"}
    with cluster(tmp_path, environ, gba=gba, faults=faults, epochs=3, sleep_s=0.02) as job:
        job.run(lambda: job.start_static(2), PATIENCE_S)
        assert job.fired() == 2
        switches = [(line["pid"], line["to"]) for line in job.notes("event") if line["event"] == "switch"]
        assert len(switches) == 4 and {to for _, to in switches[2:]} == {"allreduce"}
        assert not job.notes("restored")
        job.assert_every_sample_once(epochs=3)
        assert_one_model(job, epochs=3)
        assert_learned(job)


def test_a_worker_that_falls_out_of_the_mode_takes_the_central_copy_and_comes_back(tmp_path: Path) -> None:
    faults: list[dict[str, Any]] = [
        {"point": "before push", "step": 1, "rank": 1, "do": "lose the result"},
        {"point": "before push", "step": 1, "rank": 0, "do": "wait for", "file": "fault-0"},
    ]
    # The first one waits until the fault has happened, and from the third epoch on until the other one is back.
    plan: dict[str, Any] = {"faults": faults, "epochs": 5, "sleep_s": 0.02, "one_comes_back": True}
    with cluster(tmp_path, PATIENT, gba={"mode": "shadow", "sync": "ma"}, **plan) as job:
        job.run(lambda: job.start_elastic(TWO_NAMES), PATIENCE_S)
        assert job.fired() == 2
        job.assert_one_fell_out_and_came_back()
        job.assert_every_sample_once(epochs=5)
        assert_one_model(job, epochs=5)
        assert_learned(job)


@pytest.mark.variant
def test_workers_agree_that_a_round_was_left_behind_and_form_the_world_again_together(tmp_path: Path) -> None:
    gba = {"mode": "shadow", "sync": "ma", "switch_at": {90: "allreduce"}}
    with cluster(tmp_path, PATIENT, gba=gba, rounds_end_badly=1, epochs=3, sleep_s=0.02) as job:
        job.run(lambda: job.start_elastic(TWO_NAMES), PATIENCE_S)
        assert (job.out / "ended-badly").exists()
        assert not job.notes("restored"), "a worker went on in the world that the other one left"
        reported = [line for line in job.notes("event") if line["event"] == "membership"]
        assert len({line["pid"] for line in reported}) == 2
        job.assert_every_sample_once(epochs=3)
        assert_one_model(job, epochs=3)


def test_a_replica_that_diverges_ends_the_job_and_says_why(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"dense_optimizer": "SGD", "diverge_at_push": 30}
    with cluster(tmp_path, PATIENT, gba={"mode": "shadow"}, epochs=3, sleep_s=0.02, **plan) as job:
        job.start_static(2)
        assert job.wait(PATIENCE_S) != 0
        assert "is not finite any more" in job.said(), job.log()
        job.assert_nothing_left()
