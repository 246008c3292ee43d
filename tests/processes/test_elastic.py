"""Workers die, leave and join at every point of a step; survivors never go back, no sample is lost or repeated."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .cluster import NAMES, Cluster, assert_same_parameters, cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
TWO = NAMES[:2]


def fault(point: str, do: str = "kill", step: int = 8, rank: int = 1) -> dict[str, Any]:
    return {"point": point, "do": do, "step": step, "rank": rank}


def assert_nobody_went_back(job: Cluster) -> None:
    by_worker: dict[int, list[int]] = {}
    for line in job.notes("committed"):
        by_worker.setdefault(line["pid"], []).append(line["committed"])
    for steps in by_worker.values():
        assert steps == sorted(set(steps))


@pytest.mark.parametrize("point", ["before exchange", "after exchange", "after apply"])
def test_a_worker_killed_there_changes_no_parameter(
    reference: dict[str, np.ndarray], tmp_path: Path, point: str
) -> None:
    with cluster(tmp_path, faults=[fault(point)]) as job:
        job.run(lambda: job.start_elastic(TWO))
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=2)
        assert_nobody_went_back(job)
        assert job.result()["shard_steps_missed"] == 0
        assert_same_parameters(job.arrays(), reference)
        (lost,) = (line["message"] for line in job.notes("event") if line["event"] == "worker_lost")
        assert "'background loop uncaught exception'" in lost and "are expected" in lost


def test_rank_0_killed_on_a_host_of_three_workers_changes_no_parameter(
    reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """The survivors' local ranks change, and they are not given up with it. What it warned of is still known."""
    faults = [fault("before exchange", do="warn", step=5, rank=0), fault("before exchange", rank=0)]
    with cluster(tmp_path, faults=faults) as job:
        job.run(lambda: job.start_elastic(NAMES[:1], slots=3))
        assert job.fired() == 2
        ends = [line["warnings"] for line in job.notes("event") if line["event"] == "finished"]
        kept = [[text for _, _, text in end["standing"] if text.startswith("planned")] for end in ends]
        assert any(kept), "the new rank 0 continues the account"
        job.assert_every_sample_once(epochs=2)
        assert_nobody_went_back(job)
        assert job.result()["shard_steps_missed"] == 0
        assert_same_parameters(job.arrays(), reference)


@pytest.mark.parametrize("point", ["posted", "after commit", "in apply"])
def test_a_worker_killed_when_it_has_posted_costs_its_shards_that_step_and_it_is_counted(
    tmp_path: Path, point: str
) -> None:
    """The step is decided in the memory of the host, whoever has seen it."""
    with cluster(tmp_path, n_shards=4, faults=[fault(point)]) as job:
        job.run(lambda: job.start_elastic(TWO))
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=2)
        assert_nobody_went_back(job)
        assert job.result()["shard_steps_missed"] == 2  # rank 1 served two of four shards
        died = "has died before its gradients were complete"
        assert died in job.said() or "left, or died, before it finished step" in job.said(), job.log()


def assert_the_step_was_computed_again(job: Cluster, reference: dict[str, np.ndarray]) -> None:
    """The planned fault happened, and left no trace in the samples and the parameters."""
    assert job.fired() == 1
    job.assert_every_sample_once(epochs=2)
    assert_nobody_went_back(job)
    assert job.result()["shard_steps_missed"] == 0
    dense = {name: values for name, values in reference.items() if name.startswith("dense.")}
    assert_same_parameters(job.arrays(), dense)


def test_a_worker_killed_before_the_commit_of_two_hosts_changes_no_parameter(
    reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    with cluster(tmp_path, faults=[fault("after exchange")], own_memory_per_name=True) as job:
        job.run(lambda: job.start_elastic(TWO, slots=2, max_np=4))
        assert_the_step_was_computed_again(job, reference)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("pull.keys begins", marks=pytest.mark.variant),
        "pull.keys waited",
        pytest.param("pull.rows waited", marks=pytest.mark.variant),
        pytest.param("rows begins", marks=pytest.mark.variant),
        "rows waited",
    ],
)
@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.variant)])
def test_a_worker_killed_while_two_hosts_exchange_rows_changes_no_parameter(
    reference: dict[str, np.ndarray], tmp_path: Path, point: str, rank: int
) -> None:
    """Of keys, when it has waited, it has sent how many, and not what."""
    with cluster(tmp_path, faults=[fault(point, rank=rank)], own_memory_per_name=True) as job:
        job.run(lambda: job.start_elastic(TWO, slots=2, max_np=4))
        assert_the_step_was_computed_again(job, reference)


def test_a_worker_that_stays_stopped_while_two_hosts_exchange_rows_is_ended(
    reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Its connections stay open: the others learn of it from Horovod, which leaves the world."""
    environ, faults = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "15"}, [fault("rows begins", "stop")]
    with cluster(tmp_path, environ, faults=faults, own_memory_per_name=True) as job:
        job.run(lambda: job.start_elastic(TWO, slots=2, max_np=4))
        assert job.fired() == 1
        assert "Horovod has left the world" in job.said() and "it is killed" in job.said(), job.log()
        job.assert_every_sample_once(epochs=2)
        assert_nobody_went_back(job)
        assert job.result()["shard_steps_missed"] == 0
        dense = {name: values for name, values in reference.items() if name.startswith("dense.")}
        assert_same_parameters(job.arrays(), dense)


@pytest.mark.parametrize("point", ["after commit", pytest.param("in apply", marks=pytest.mark.variant)])
def test_a_worker_killed_after_the_commit_of_two_hosts_costs_its_shards_that_step(tmp_path: Path, point: str) -> None:
    # A worker that dies before another has the result may take it along: then the step is computed again.
    faults = [fault("after commit", "mark", rank=0), {**fault(point), "once": "fault-0"}]
    with cluster(tmp_path, n_shards=8, faults=faults, own_memory_per_name=True) as job:
        job.run(lambda: job.start_elastic(TWO, slots=2, max_np=4))
        assert job.fired() == 2
        job.assert_every_sample_once(epochs=2)
        assert_nobody_went_back(job)
        assert job.result()["shard_steps_missed"] == 2  # rank 1 served two of the four shards of its host


@pytest.mark.parametrize("rank", [0, 2])
def test_a_leader_killed_before_the_leaders_have_summed_changes_no_parameter(
    reference: dict[str, np.ndarray], tmp_path: Path, rank: int
) -> None:
    with cluster(tmp_path, faults=[fault("leaders sum", rank=rank)], own_memory_per_name=True) as job:
        job.run(lambda: job.start_elastic(TWO, slots=2, max_np=4))
        assert_the_step_was_computed_again(job, reference)
        assert job.said().count("training continues after the loss of a worker") == 1, job.log()


def test_a_leader_killed_before_it_hands_on_the_sum_costs_its_shards_that_step(tmp_path: Path) -> None:
    """The other host has the result; its neighbour misses it, and catches up from what it holds."""
    faults = [fault("after commit", "mark", rank=0), {**fault("leaders have summed", rank=2), "once": "fault-0"}]
    with cluster(tmp_path, n_shards=8, faults=faults, own_memory_per_name=True) as job:
        job.run(lambda: job.start_elastic(TWO, slots=2, max_np=4))
        assert job.fired() == 2
        assert "has died before it posted the sum of all hosts' gradients" in job.said(), job.log()
        job.assert_every_sample_once(epochs=2)
        assert_nobody_went_back(job)
        assert job.result()["shard_steps_missed"] == 2  # rank 2 served two of the four shards of its host


def test_a_neighbour_killed_when_it_has_posted_costs_its_shards_that_step(tmp_path: Path) -> None:
    with cluster(tmp_path, n_shards=8, faults=[fault("posted", rank=3)], own_memory_per_name=True) as job:
        job.run(lambda: job.start_elastic(TWO, slots=2, max_np=4))
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=2)
        assert_nobody_went_back(job)
        assert job.result()["shard_steps_missed"] == 2


def test_a_worker_that_stays_stopped_is_ended_and_the_others_continue(
    reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    environ = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "15"}
    with cluster(tmp_path, environ, faults=[fault("before exchange", "stop")]) as job:
        job.run(lambda: job.start_elastic(TWO))
        assert job.fired() == 1
        assert "has been stopped for 15 s" in job.said() and "it is killed" in job.said(), job.log()
        job.assert_every_sample_once(epochs=2)
        assert_nobody_went_back(job)
        assert job.result()["shard_steps_missed"] == 0
        assert_same_parameters(job.arrays(), reference)


def test_a_worker_that_is_stopped_while_it_applies_is_ended(tmp_path: Path) -> None:
    with cluster(tmp_path, {"GBA_HVD_TIMEOUT_S": "10"}, n_shards=4, faults=[fault("in apply", "stop")]) as job:
        job.run(lambda: job.start_elastic(TWO))
        assert job.fired() == 1
        assert "it is killed" in job.said(), job.log()
        job.assert_every_sample_once(epochs=2)
        assert job.result()["shard_steps_missed"] == 2


def test_a_survivor_that_misses_the_result_catches_up_from_what_it_holds(
    reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    with cluster(tmp_path, {"GBA_HVD_TIMEOUT_S": "10"}, faults=[fault("after commit", "lose the result")]) as job:
        job.run(lambda: job.start_elastic(TWO))
        assert job.fired() == 1
        assert job.result()["shard_steps_missed"] == 0
        job.assert_every_sample_once(epochs=2)
        assert_same_parameters(job.arrays(), reference)


def test_a_worker_killed_in_the_first_agreement(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    with cluster(tmp_path, faults=[fault("in sync", step=0, rank=0)]) as job:
        job.run(lambda: job.start_elastic(TWO))
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=2)
        assert_same_parameters(job.arrays(), reference)


def test_what_a_worker_failed_with_is_reported_by_those_that_go_on(tmp_path: Path) -> None:
    with cluster(tmp_path, faults=[fault("before exchange", "raise")]) as job:
        job.run(lambda: job.start_elastic(NAMES[:1], slots=2))
        assert job.fired() == 1
        reported = [line for line in job.notes("event") if line["event"] == "worker_failed"]
        assert [(one["rank"], one["why"]) for one in reported] == [(1, "RuntimeError: planned failure")], job.log()
        job.assert_every_sample_once(epochs=2)


def test_a_late_joiner_that_takes_too_long_to_start_is_reported_as_an_event(tmp_path: Path) -> None:
    """It breaks up the world that forms; the survivor says how long it stood still, and why."""
    environ = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"}
    with cluster(tmp_path, environ, wait_at_step=5, late_joiners_wait_for="broke up") as job:
        job.start_elastic(NAMES[:1])
        wait_for(lambda: list(job.out.glob("waiting-*")), "the worker at step 5")
        job.set_hosts(TWO)
        wait_for(lambda: job.notes("hosts_updated"), "Horovod's word of the new host")
        (job.out / "go").touch()
        wait_for(lambda: job.ended or "the world broke up while it formed" in job.said(), "a world that broke up")
        (job.out / "broke up").touch()
        assert job.wait() == 0, job.log()
        job.assert_nothing_left()
        first = job.notes("job")[0]["pid"]
        reported = [line for line in job.notes("event") if line["event"] == "world_late" and line["pid"] == first]
        assert reported and reported[0]["broken"] >= 1 and reported[0]["seconds"] >= 10.0, job.log()
        assert "[world late]" in job.said()
        job.assert_every_sample_once(epochs=2)


def test_a_late_joiner_killed_while_it_is_let_in(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    faults = [fault("before exchange", step=9), {**fault("in sync", step=0), "after": 0}]
    with cluster(tmp_path, faults=faults, wait_at_step=12) as job:
        job.start_elastic(TWO)
        # A survivor that forms the next world late finds the host in it, and gets no word.
        returned = lambda: job.notes("hosts_updated") or job.fired() == 2  # noqa: E731
        wait_for(lambda: job.ended or returned(), "Horovod's word of the returned host, or a late joiner there")
        (job.out / "go").touch()
        assert job.wait() == 0, job.log()
        job.assert_nothing_left()
        assert job.fired() == 2
        job.assert_every_sample_once(epochs=2)
        assert_same_parameters(job.arrays(), reference)


def test_a_worker_joins_in_mid_epoch_and_gets_everything(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    with cluster(tmp_path, wait_at_step=5) as job:
        job.start_elastic(NAMES[:1])
        wait_for(lambda: list(job.out.glob("waiting-*")), "the worker at step 5")
        job.set_hosts(TWO)
        wait_for(lambda: job.notes("hosts_updated"), "Horovod's word of the new host")
        (job.out / "go").touch()
        assert job.wait() == 0, job.log()
        job.assert_nothing_left()
        assert {line["workers"] for line in job.notes("committed")} == {1, 2}
        assert len({line["pid"] for line in job.notes("committed")}) == 2
        job.assert_every_sample_once(epochs=2)
        assert_same_parameters(job.arrays(), reference)
        kinds = [line["event"] for line in job.notes("event")]
        assert kinds.count("workers_awaited") == 1 and kinds.index("workers_awaited") < kinds.index("membership")
        assert "workers are let in: training pauses until they have started" in job.said()
        continues = [line for line in job.notes("event") if line["event"] == "training_continues"]
        assert len({line["pid"] for line in continues}) == 2 and len({line["step"] for line in continues}) == 1


def test_falling_below_min_np_and_growing_again_does_not_hang(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    """horovod #3494: survivors of a removal skip the state exchange that the late joiners wait in."""
    with cluster(tmp_path, wait_at_step=5) as job:
        job.start_elastic(TWO, min_np=2)
        wait_for(lambda: len(list(job.out.glob("waiting-*"))) == 2, "both workers at step 5")
        job.set_hosts(NAMES[:1])
        wait_for(lambda: job.notes("hosts_updated"), "Horovod's word of the removal")
        (job.out / "go").touch()
        wait_for(lambda: len(job.notes("interrupted")) == 2, "both workers to leave their loop")
        job.set_hosts((NAMES[0], NAMES[2]))
        assert job.wait() == 0, job.log()
        job.assert_nothing_left()
        assert len({line["pid"] for line in job.notes("committed")}) == 3
        job.assert_every_sample_once(epochs=2)
        assert_same_parameters(job.arrays(), reference)


def test_a_lost_host_costs_its_rows_and_it_is_said(tmp_path: Path) -> None:
    """Two names with a memory each: the survivor takes the lost shards over and counts what was reinitialised."""
    with cluster(tmp_path, own_memory_per_name=True, faults=[fault("before exchange")], wait_at_step=20) as job:
        job.start_elastic(TWO)
        event = wait_for(
            lambda: [e for e in job.notes("event") if e["event"] == "rows_lost"], "the word of the lost rows"
        )[0]
        (job.out / "go").touch()
        assert job.wait() == 0, job.log()
        job.assert_nothing_left()
        assert event["rows_lost"] in (
            170,
            340,
        )  # half of 340 rows; all of them if the host came back before the survivor asked
        job.assert_every_sample_once(epochs=2)


@pytest.mark.parametrize("memory_goes", [False, True])
def test_a_host_lost_in_gba_mode_takes_only_its_own_part_along(tmp_path: Path, memory_goes: bool) -> None:
    """Its rows start over, its dense tensors keep older optimizer state; what the other server held is taken over.

    With the memory gone, whoever replaces the killed worker has nothing to work with: the server is given up at once.
    """
    # Longer than a server that lives may say nothing, on a busy machine: that would cost its host's part, too.
    environ = {"GBA_HVD_SERVER_S": "600" if memory_goes else "12", "GBA_HVD_ALIVE_S": "1"}
    plan = {"own_memory_per_name": True, "gba": {"mode": "gba"}, "epochs": 6, "sleep_s": 0.03}
    with cluster(tmp_path, environ, **plan, holds={19: "killed"}) as job:  # all of it in the second epoch
        job.start_elastic(TWO)
        wait_for(lambda: job.ended or job.last_step() >= 15, "step 15")
        assert not job.ended, job.log()
        # Not the host of the coordinator: without that nobody learns of a late joiner.
        second = next(int(line["pid"].rpartition("-")[2]) for line in job.notes("rank") if line["rank"] == 1)
        name = next(name for name in TWO if second in job.processes_of_name(name))
        killed = job.processes_of_name(name)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        if memory_goes:
            shutil.rmtree(job.shard_dir / name)
        (job.out / "killed").touch()
        assert job.wait() == 0, job.log()
        job.assert_nothing_left()
        assert len(killed) >= 3, "a worker, its server and the keeper were to be killed"
        result, (lost,) = job.result(), job.notes("rows_lost")[:1]
        # None where whoever replaces the killed worker is there, with the memory, when the server is given up.
        assert lost["rows_lost"] in ((170, 340) if memory_goes else (0, 170, 340))
        if memory_goes:
            assert "came back without the shards they held" in job.said()
            assert len({line["pid"] for line in job.notes("rank")}) == 3, "no late joiner was to fail"
        assert result["total"] == result["applied"] + result["dropped"] + result["lost"] == 6000
        (old,) = (line["tensors"] for line in job.notes("event") if line["event"] == "dense_state_old")
        steps = [value for name, value in job.optimizer_arrays().items() if name.endswith(".step")]
        assert 0 < old < len(steps)
        assert sum(step >= result["step"] for step in steps) == len(steps) - old


@pytest.mark.parametrize("seed", [1])
def test_random_kills_lose_and_repeat_no_sample(tmp_path: Path, seed: int) -> None:
    """Of two workers in a world: with the last one that has the model, it would be gone."""
    rng = random.Random(seed)
    with cluster(tmp_path, epochs=8, sleep_s=0.05, holds={60: "go"}) as job:

        def together() -> list[int]:
            """The workers that have seen the newest step, if two live."""
            alive, newest = set(job.processes(only_workers=True)), job.last_step()
            seen = {
                int(line["pid"].rpartition("-")[2]) for line in job.notes("committed") if line["committed"] == newest
            }
            return sorted(alive & seen) if len(alive & seen) == 2 else []

        job.start_elastic(TWO)
        killed = 0
        for _ in range(2):
            target = job.last_step() + rng.randint(2, 12)
            held = lambda: list(job.out.glob("held-by-go-*"))  # noqa: E731
            there = lambda target=target: job.last_step() >= target and together()  # noqa: E731
            wait_for(lambda there=there, held=held: job.ended or there() or held(), f"two workers at step {target}")
            assert not job.ended, job.log()
            if workers := together():
                os.kill(rng.choice(workers), signal.SIGKILL)
                killed += 1
        (job.out / "go").touch()
        assert job.wait() == 0, job.log()
        job.assert_nothing_left()
        assert killed >= 1
        assert_nobody_went_back(job)
        job.assert_every_sample_once(epochs=8)
