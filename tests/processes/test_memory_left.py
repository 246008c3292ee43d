"""Jobs that lost all their workers, but not their host: they resume from memory, or it is saved before it goes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recovery.catalog.chains import Chain, chains
from recovery.catalog.rollback import plan_rollback, roll_back
from recovery.storage.open import open_store
from recovery.storage.store import manifest_names

from .cluster import NAMES, Cluster, assert_identical, cluster, wait_for
from .test_checkpoints import LOCK_STEP, PATIENCE_S, events

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]
KILLED_AT = 9  # in the first epoch
KILLED_BY_THE_TEST = {"holds": {1: "go", KILLED_AT + 1: "killed"}}  # at the latest there: the job must not end before


def plan_of(tmp_path: Path, mode: str, point: str = "before exchange") -> dict[str, Any]:
    """One checkpoint before the worker is killed: in allreduce mode by itself, in gba mode by the test."""
    plan: dict[str, Any] = {
        "checkpoint": {"url": str(tmp_path / "checkpoints"), "every_steps": 5, "lease_s": 60.0},
        "horovod": False,
        "holds": {1: "go"},
        "sleep_s": 0.1,
    }
    if mode == "gba":
        return plan | {"gba": LOCK_STEP} | KILLED_BY_THE_TEST
    return plan | {"faults": [{"point": point, "step": KILLED_AT, "rank": 0, "do": "kill"}]}


def run_until_the_worker_is_killed(job: Cluster) -> None:
    """The server and the keeper live on, for the grace period."""
    job.start_alone()
    wait_for(lambda: job.ended or any(job.shard_dir.glob("*/ps-0.address")), "the server", PATIENCE_S)
    (job.out / "go").touch()
    if "faults" not in job.plan:
        wait_for(lambda: job.ended or job.last_step() >= KILLED_AT, f"step {KILLED_AT}", PATIENCE_S)
        assert job.launcher is not None and not job.ended, job.log()
        job.launcher.kill()
    assert job.wait(PATIENCE_S) == -signal.SIGKILL, job.log()
    (job.out / "killed").touch()
    if float(job.environ["GBA_HVD_GRACE_S"]) > PATIENCE_S / 2:  # else the last checkpoint shows that it did
        assert job.processes(), "the server is to live on"
    wait_for_a_checkpoint(job)


def wait_for_a_checkpoint(job: Cluster) -> None:
    """In the store: the workers, who may be dead or held, need not know of it."""
    place = Path(job.plan["checkpoint"]["url"])
    wait_for(lambda: any(place.glob("manifests/*.json")), "a checkpoint", PATIENCE_S)


def end_all_workers(job: Cluster) -> None:
    assert job.launcher is not None and not job.ended, job.log()
    job.launcher.kill()  # first: nobody is to learn of what follows
    for pid in job.processes(only_workers=True):
        with contextlib.suppress(ProcessLookupError):  # who was started by the launcher may end with it
            os.kill(pid, signal.SIGKILL)
    job.launcher.wait(PATIENCE_S)
    (job.out / "killed").touch()


@pytest.mark.parametrize("mode", ["gba", pytest.param("allreduce", marks=pytest.mark.variant)])
def test_a_job_goes_on_from_memory_as_if_nothing_had_happened(
    reference: dict[str, np.ndarray], tmp_path: Path, mode: str
) -> None:
    with cluster(tmp_path / "job", {"GBA_HVD_GRACE_S": "120"}, **plan_of(tmp_path, mode)) as job:
        run_until_the_worker_is_killed(job)
        stood = job.last_step()
        job.start_alone()  # does not wait for lease_s: it knows that the dead job is dead
        assert job.wait(PATIENCE_S) == 0, job.log()
        (resumed,) = events(job, "resumed")
        assert resumed["from_memory"] and resumed["step"] >= stood >= KILLED_AT - 1
        result = job.result()
        assert result["total"] == result["applied"] == 2000 and result["step"] == 22
        assert_identical(job.arrays(), reference)
        job.assert_nothing_left()


@pytest.mark.variant  # minutes: Horovod's own time-outs
def test_a_late_joiner_goes_on_when_the_only_worker_dies_while_it_joins(tmp_path: Path) -> None:
    """Its first world is never formed; it asks for a place in the next one, and takes the checkpoint, or memory."""
    plan = {"checkpoint": plan_of(tmp_path, "allreduce")["checkpoint"], "wait_at_step": KILLED_AT - 1}
    plan["late_joiners_wait_for"] = "the worker stands still"
    with cluster(tmp_path / "job", {"GBA_HVD_GRACE_S": "10"}, **plan) as job:
        job.start_elastic(NAMES[:1], cooldown_s=600)
        wait_for(lambda: job.ended or list(job.out.glob("waiting-*")), f"step {KILLED_AT - 1}", PATIENCE_S)
        wait_for(lambda: any(job.shard_dir.glob("*/ps-0.address")), "the server", PATIENCE_S)
        (alone,) = joining(job)
        job.set_hosts(NAMES[:2])
        wait_for(lambda: job.ended or job.notes("hosts_updated"), "Horovod's word of the new host", PATIENCE_S)
        (job.out / "go").touch()
        wait_for(lambda: job.ended or len(joining(job)) == 2, "the late joiner", PATIENCE_S)
        os.kill(alone, signal.SIGSTOP)  # in the world that is to be formed
        (job.out / "the worker stands still").touch()
        asks_again = "asking for a place in the next one"
        wait_for(lambda: job.ended or asks_again in job.log(), "the late joiner to give that world up", PATIENCE_S)
        os.kill(alone, signal.SIGKILL)
        assert job.wait(PATIENCE_S) == 0, job.log()
        (resumed,) = events(job, "resumed")
        assert resumed["step"] >= KILLED_AT - 1
        result = job.result()
        assert result["total"] == result["applied"] == 2000 and result["step"] == 22
        job.assert_nothing_left()


def joining(job: Cluster) -> set[int]:
    """Workers that were about to call hvd.init()."""
    return {int(path.name.rpartition("-")[2]) for path in job.out.glob("joins-*")}


@pytest.mark.variant
def test_a_job_of_one_worker_that_was_interrupted_goes_on_from_memory(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "allreduce")
    plan["faults"] = [{"point": "before exchange", "step": KILLED_AT, "rank": 0, "do": "int"}]
    with cluster(tmp_path / "job", {"GBA_HVD_GRACE_S": "120"}, **plan) as job:
        job.start_alone()
        wait_for(lambda: job.ended or any(job.shard_dir.glob("*/ps-0.address")), "the server", PATIENCE_S)
        (job.out / "go").touch()
        assert job.wait(PATIENCE_S) != 0 and job.fired() == 1, job.log()
        job.start_alone()
        assert job.wait(PATIENCE_S) == 0, job.log()
        (resumed,) = events(job, "resumed")
        assert resumed["from_memory"] and resumed["step"] == KILLED_AT - 1
        result = job.result()
        assert result["total"] == result["applied"] == 2000 and result["step"] == 22
        job.assert_nothing_left()


def test_memory_of_a_job_that_was_interrupted_is_not_used_after_a_rollback(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "allreduce")
    plan["faults"] = [{"point": "before exchange", "step": KILLED_AT, "rank": 0, "do": "int"}]
    plan["checkpoint"] |= {"every_steps": 2, "keep_last": 9}
    with cluster(tmp_path / "job", {"GBA_HVD_GRACE_S": "120"}, **plan) as job:
        job.start_alone()
        wait_for(lambda: job.ended or any(job.shard_dir.glob("*/ps-0.address")), "the server", PATIENCE_S)
        (job.out / "go").touch()
        assert job.wait(PATIENCE_S) != 0 and job.fired() == 1, job.log()
        store = open_store(plan["checkpoint"]["url"])
        first = manifest_names(store)[0]
        back_to = roll_back(store, plan_rollback(store, first))
        assert back_to.step < KILLED_AT - 1
        job.start_alone()
        assert job.wait(PATIENCE_S) == 0, job.log()
        (resumed,) = events(job, "resumed")
        assert (resumed["step"], resumed["manifest"]) == (back_to.step, back_to.name)
        (left,) = events(job, "memory_left")
        assert "it is of before `gba-hvd checkpoint rollback`; the newest checkpoint is used" in left["message"]
        assert job.result()["step"] == 22
        job.assert_nothing_left()


@pytest.mark.parametrize(
    "point", ["in apply", *(pytest.param(p, marks=pytest.mark.variant) for p in ("after commit", "after apply"))]
)
def test_a_step_that_some_shards_have_is_not_applied_to_them_again(tmp_path: Path, point: str) -> None:
    plan = plan_of(tmp_path, "allreduce", point)
    with cluster(tmp_path / "job", {"GBA_HVD_GRACE_S": "120"}, **plan) as job:
        run_until_the_worker_is_killed(job)
        job.start_alone()
        assert job.wait(PATIENCE_S) == 0, job.log()
        (resumed,) = events(job, "resumed")
        assert resumed["from_memory"] and resumed["step"] == KILLED_AT - 1
        result = job.result()
        assert result["total"] == result["applied"] == 2000 and result["step"] == 22
        # Killed while they were applied, all four shards have the step begun, none has it for sure.
        assert result["shard_steps_missed"] == resumed["shard_steps_missed"] == (4 if point == "in apply" else 0)


@pytest.mark.parametrize("point", ["entered", pytest.param("kept", marks=pytest.mark.variant)])
def test_a_job_killed_where_an_asynchronous_mode_begins_goes_on_from_there(
    reference: dict[str, np.ndarray], tmp_path: Path, point: str
) -> None:
    """The servers have taken over and made no step; the state is kept as of allreduce mode, or as of theirs."""
    plan = plan_of(tmp_path, "allreduce", point)
    plan["gba"] = {**LOCK_STEP, "mode": "allreduce", "switch_at": {KILLED_AT: "gba"}}
    with cluster(tmp_path / "job", {"GBA_HVD_GRACE_S": "120"}, **plan) as job:
        run_until_the_worker_is_killed(job)
        assert (job.fired(), job.last_step(), job.pushes()) == (1, KILLED_AT, [])
        job.start_alone()
        assert job.wait(PATIENCE_S) == 0, job.log()
        (resumed,) = events(job, "resumed")
        assert resumed["from_memory"] and resumed["step"] >= KILLED_AT - 1
        result = job.result()
        assert result["total"] == result["applied"] == 2000 and result["step"] == 22
        assert job.pushes(), "the rest is to be asynchronous"
        assert_identical(job.arrays(), reference)
        job.assert_nothing_left()


@pytest.mark.variant
@pytest.mark.parametrize("late", [1, 0])
def test_two_hosts_of_which_one_had_entered_an_asynchronous_mode_go_on_from_memory(tmp_path: Path, late: int) -> None:
    plan = plan_of(tmp_path, "allreduce") | {"horovod": True, "own_memory_per_name": True}
    plan["gba"] = {"mode": "allreduce", "switch_at": {KILLED_AT: "gba"}}
    plan["faults"] = [{"point": "before entering", "step": KILLED_AT, "rank": late, "do": "wait for", "file": "never"}]
    with cluster(tmp_path / "job", {"GBA_HVD_GRACE_S": "120"}, **plan) as job:
        job.start_elastic(NAMES[:2])
        wait_for(lambda: len(list(job.shard_dir.glob("*/*/ps-0.address"))) == 2, "two servers", PATIENCE_S)
        (job.out / "go").touch()
        entered = lambda: job.fired() and any(job.shard_dir.glob("*/*/ps-0.session"))  # noqa: E731
        wait_for(lambda: job.ended or entered(), "one server that has entered", PATIENCE_S)
        end_all_workers(job)
        assert len(list(job.shard_dir.glob("*/*/ps-0.session"))) == 1
        job.start_elastic(NAMES[:2])
        assert job.wait(PATIENCE_S) == 0, job.log()
        resumed = events(job, "resumed")[0]
        assert resumed["from_memory"] and resumed["step"] >= KILLED_AT - 1
        result = job.result()
        assert result["total"] == result["applied"] + result["dropped"] + result["lost"] == 2000
        job.assert_nothing_left()


@pytest.mark.variant
@pytest.mark.parametrize("mode", ["gba", "allreduce"])
def test_two_hosts_go_on_from_their_memories_together(tmp_path: Path, mode: str) -> None:
    plan = plan_of(tmp_path, mode) | {"faults": [], "horovod": True, "own_memory_per_name": True} | KILLED_BY_THE_TEST
    with cluster(tmp_path / "job", {"GBA_HVD_GRACE_S": "120"}, **plan) as job:
        job.start_elastic(NAMES[:2])
        wait_for(lambda: len(list(job.shard_dir.glob("*/*/ps-0.address"))) == 2, "two servers", PATIENCE_S)
        (job.out / "go").touch()
        wait_for_a_checkpoint(job)
        end_all_workers(job)
        stood = job.last_step()
        job.start_elastic(NAMES[:2])
        assert job.wait(PATIENCE_S) == 0, job.log()
        resumed = events(job, "resumed")[0]
        assert resumed["from_memory"] and resumed["step"] >= stood - 1  # or the step was applied by one of them only
        result = job.result()
        assert result["total"] == result["applied"] + result["dropped"] + result["lost"] == 2000
        job.assert_nothing_left()


@pytest.mark.parametrize(
    "mode", ["allreduce", *(pytest.param(mode, marks=pytest.mark.variant) for mode in ("gba", "just entered"))]
)
def test_the_server_saves_what_it_has_before_the_memory_goes(
    reference: dict[str, np.ndarray], tmp_path: Path, mode: str
) -> None:
    plan = plan_of(tmp_path, mode)
    if mode == "just entered":
        plan = plan_of(tmp_path, "allreduce", "entered")
        plan["gba"] = {**LOCK_STEP, "mode": "allreduce", "switch_at": {KILLED_AT: "gba"}}
    plan["checkpoint"]["lease_s"] = 1.0
    with cluster(tmp_path / "first", {"GBA_HVD_GRACE_S": "6"}, **plan) as job:
        run_until_the_worker_is_killed(job)
        stood = job.last_step()
        wait_for(lambda: not job.processes(), "the end of the server", PATIENCE_S)
        job.assert_nothing_left()
    newest = next(iter(chains(open_store(tmp_path / "checkpoints"))))
    assert isinstance(newest, Chain)
    assert newest.newest.step >= stood >= KILLED_AT - 1
    assert newest.newest.about["last_gasp"]
    for name in ("faults", "holds", "sleep_s"):
        plan.pop(name, None)
    with cluster(tmp_path / "second", **plan) as job:
        job.run(job.start_alone, PATIENCE_S)
        (resumed,) = events(job, "resumed")
        assert resumed["step"] == newest.newest.step
        assert_identical(job.arrays(), reference)


@pytest.mark.variant
def test_a_job_whose_chief_had_changed_goes_on_in_the_epoch_it_was_in(tmp_path: Path) -> None:
    """The state that is kept is of the epoch that was in flight, though another worker had begun to keep it."""
    plan = plan_of(tmp_path, "gba") | {"horovod": True, "epochs": 4, "holds": {1: "go", 30: "killed"}}
    with cluster(tmp_path / "job", {"GBA_HVD_GRACE_S": "120"}, **plan) as job:
        job.start_elastic(NAMES[:2])
        wait_for(lambda: any(job.shard_dir.glob("*/ps-0.address")), "the server", PATIENCE_S)
        (job.out / "go").touch()
        wait_for(lambda: job.ended or job.last_step() >= 3, "step 3", PATIENCE_S)
        chief = next(line["pid"] for line in job.notes("rank") if line["rank"] == 0)
        os.kill(int(chief.rpartition("-")[2]), signal.SIGKILL)
        wait_for(lambda: job.ended or any(push["epoch"] == 2 for push in job.pushes()), "the third epoch", PATIENCE_S)
        end_all_workers(job)
        job.start_elastic(NAMES[:2])
        assert job.wait(PATIENCE_S) == 0, job.log()
        assert events(job, "resumed")[0]["from_memory"]
        assert job.result()["total"] == job.result()["applied"] == 4000
        for epoch in range(4):
            assert job.samples_of_epoch(epoch) == list(range(1000)), f"epoch {epoch}"


@pytest.mark.variant
def test_a_worker_that_dies_while_the_job_goes_on_from_memory_costs_nothing_of_it(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "allreduce") | {"faults": [], "horovod": True} | KILLED_BY_THE_TEST
    with cluster(tmp_path / "job", {"GBA_HVD_GRACE_S": "120"}, **plan) as job:
        job.start_elastic(NAMES[:2])
        wait_for(lambda: any(job.shard_dir.glob("*/ps-0.address")), "the server", PATIENCE_S)
        (job.out / "go").touch()
        wait_for_a_checkpoint(job)
        end_all_workers(job)
        stood = job.last_step()
        job.plan["faults"] = [{"point": "in sync", "step": 0, "rank": 1, "do": "kill"}]
        job.plan_file.write_text(json.dumps(job.plan))
        job.start_elastic(NAMES[:2])
        assert job.wait(PATIENCE_S) == 0, job.log()
        assert job.fired() == 1
        resumed = events(job, "resumed")[-1]
        assert resumed["from_memory"] and resumed["step"] >= stood - 1
        assert job.result()["total"] == job.result()["applied"] == 2000


@pytest.mark.variant
def test_rows_that_a_worker_died_in_are_in_the_last_checkpoint(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "allreduce", "in apply")
    with cluster(tmp_path / "first", {"GBA_HVD_GRACE_S": "6"}, **plan) as job:
        run_until_the_worker_is_killed(job)
        wait_for(lambda: not job.processes(), "the end of the server", PATIENCE_S)
        job.assert_nothing_left()
    newest = next(iter(chains(open_store(tmp_path / "checkpoints"))))
    assert isinstance(newest, Chain)
    assert newest.newest.step == KILLED_AT - 1 and newest.newest.about["last_gasp"]
