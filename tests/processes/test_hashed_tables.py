"""Hashed tables in real jobs: the same vocabulary in every mode, and what is left of it after each kind of loss."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gba_hvd.faults import FaultSchedule

from .alone import train_alone
from .cluster import NAMES, Cluster, assert_identical, assert_same_parameters, cluster, wait_for
from .test_checkpoints import HOLDS, LOCK_STEP, PATIENCE_S, events, let_go, saving, wait_for_two_checkpoints
from .test_elastic import fault
from .test_full_recovery import a_host_is_lost
from .test_memory_left import plan_of, run_until_the_worker_is_killed
from .test_switching import THERE_AND_BACK

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]
TWO = NAMES[:2]
# 300 users, some of whom are admitted and go again; and all of them for good.
FEW = {"hashed": {"capacity": 100, "admit_after": 2, "evict": "lfu", "fallback_rows": 8}}
ALL = {"hashed": {"capacity": 600, "fallback_rows": 8}}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What one worker arrives at in allreduce mode."""
    return train_alone(tmp_path_factory.mktemp("few") / "job", FEW).arrays


@pytest.fixture(scope="module")
def all_of_them(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return train_alone(tmp_path_factory.mktemp("all") / "job", ALL).arrays


@pytest.mark.parametrize("gba", [THERE_AND_BACK, pytest.param(LOCK_STEP, marks=pytest.mark.variant)])
def test_lock_step_and_a_switch_there_and_back_are_bit_for_bit_allreduce(
    few: dict[str, np.ndarray], tmp_path: Path, gba: dict[str, Any]
) -> None:
    result = train_alone(tmp_path / "gba", FEW, **gba)
    assert "gba" in result.modes
    assert_identical(result.arrays, few)
    assert 20 < len(few["user.ids"]) < 150


def test_a_function_of_ids_gives_the_same_first_rows_in_workers_and_servers(
    few: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1])  # where servers find the module of the function
    plan = {**FEW, "init_by_function": True}
    reference, result = train_alone(tmp_path / "allreduce", plan), train_alone(tmp_path / "gba", plan, **LOCK_STEP)
    assert "gba" in result.modes
    assert_identical(result.arrays, reference.arrays)
    assert np.array_equal(result.arrays["user.ids"], few["user.ids"])
    assert not np.allclose(result.arrays["user.weights"], few["user.weights"], atol=0.01)


@pytest.mark.parametrize("hashed", [{"evict": "ttl", "evict_after_steps": 3}, {"admit_after": 3}])
@pytest.mark.variant
def test_ttl_and_a_table_that_fills_up_are_the_same_in_both_modes(tmp_path: Path, hashed: dict[str, Any]) -> None:
    plan = {"hashed": {"capacity": 100, **hashed}}
    reference, result = train_alone(tmp_path / "allreduce", plan), train_alone(tmp_path / "gba", plan, **LOCK_STEP)
    assert_identical(result.arrays, reference.arrays)


@pytest.mark.variant
@pytest.mark.parametrize("point", ["after exchange", "before exchange", "after apply"])
def test_a_worker_that_is_killed_there_changes_neither_vocabulary_nor_model(
    few: dict[str, np.ndarray], tmp_path: Path, point: str
) -> None:
    with cluster(tmp_path, **FEW, faults=[fault(point)]) as job:
        job.run(lambda: job.start_elastic(TWO))
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=2)
        assert np.array_equal(job.arrays()["user.ids"], few["user.ids"])
        assert_same_parameters(job.arrays(), few)


def test_a_worker_that_is_killed_while_it_admits_leaves_a_vocabulary_that_others_continue_with(tmp_path: Path) -> None:
    faults = [fault("after commit", "mark", rank=0), {**fault("in vocabulary"), "once": "fault-0"}]
    with cluster(tmp_path, **FEW, faults=faults) as job:
        job.run(lambda: job.start_elastic(TWO))
        assert job.fired() == 2
        job.assert_every_sample_once(epochs=2)
        assert_is_a_vocabulary(job)
        assert job.result()["shard_steps_missed"] == 2


@pytest.mark.variant
def test_training_continues_when_the_server_is_killed(tmp_path: Path) -> None:
    kills = FaultSchedule().kill_server(host=0, at_step=5).kill_server(host=0, at_step=12)
    schedule = [one.entry() for one in kills.faults]
    with cluster(tmp_path, **FEW, gba={"mode": "gba"}, fault_schedule=schedule, epochs=3) as job:
        job.run(lambda: job.start_static(2))
        assert job.schedule_fired() == ["kill_server", "kill_server"]
        job.assert_every_sample_once(epochs=3)
        assert_is_a_vocabulary(job)


def assert_is_a_vocabulary(job: Cluster) -> None:
    ids = job.arrays()["user.ids"]
    assert 20 < len(ids) == len(np.unique(ids)) < 150


@pytest.mark.parametrize(
    "policy", ["mfu", *(pytest.param(policy, marks=pytest.mark.variant) for policy in ("delta", "ssu", "scar"))]
)
def test_a_host_that_was_lost_gets_its_ids_and_rows_back(tmp_path: Path, policy: str) -> None:
    """Out of a chain of partial saves."""
    plan = saving(tmp_path, policy=policy, total_samples=4000, recovery="partial")
    plan |= {"holds": HOLDS, "wait_at_step": 36, **FEW}
    with cluster(tmp_path, **plan, own_memory_per_name=True, epochs=4, sleep_s=0.05) as job:
        job.start_elastic(TWO, cooldown_s=600)
        let_go(job, n_servers=2)
        wait_for_two_checkpoints(job)
        job.kill(job.processes_of_name(TWO[1]))
        shutil.rmtree(job.shard_dir / TWO[1])
        back = wait_for(lambda: events(job, "rows_restored"), "the rows' return", PATIENCE_S)[0]
        (job.out / "go").touch()
        assert job.wait(PATIENCE_S) == 0, job.log()
        job.assert_nothing_left()
        assert back["rows_restored"] > 0 and back["rows_lost"] == 0
        assert {saved["kind"] for saved in events(job, "checkpoint")} >= {"full", policy}
        job.assert_every_sample_once(epochs=4)
        assert_is_a_vocabulary(job)


def test_with_full_recovery_all_ids_are_the_checkpoint_s(all_of_them: dict[str, np.ndarray], tmp_path: Path) -> None:
    with a_host_is_lost(tmp_path, TWO, {"recovery": "full", "strict": True}, **ALL) as (job, _, rows):
        (job.out / "go").touch()
        wait_for(lambda: job.ended or events(job, "resumed"), "the recovery", PATIENCE_S)
        last = events(job, "resumed")[-1]
        after = [line for line in job.notes("job") if line["pid"] == last["pid"] and line["time"] <= last["time"]][-1]
        assert {int(shard): digest for shard, digest in after["shards"].items()} == rows
        assert job.wait(PATIENCE_S) == 0, job.log()
        job.assert_every_sample_once(2)
        assert_same_parameters(job.arrays(), all_of_them)


@pytest.mark.variant
@pytest.mark.parametrize("mode", ["gba", "allreduce"])
def test_a_job_resumes_from_memory_as_if_nothing_had_happened(
    few: dict[str, np.ndarray], tmp_path: Path, mode: str
) -> None:
    with cluster(tmp_path / "job", {"GBA_HVD_GRACE_S": "120"}, **plan_of(tmp_path, mode), **FEW) as job:
        run_until_the_worker_is_killed(job)
        job.start_alone()
        assert job.wait(PATIENCE_S) == 0, job.log()
        (resumed,) = events(job, "resumed")
        assert resumed["from_memory"]
        assert_same_parameters(job.arrays(), few)
        job.assert_nothing_left()


@pytest.mark.parametrize(
    ("mode", "then"),
    [
        ("allreduce", {"capacity": 2000}),
        pytest.param("gba", {"capacity": 2000}, marks=pytest.mark.variant),
        pytest.param("allreduce", {"n_shards": 3}, marks=pytest.mark.variant),
    ],
)
def test_a_job_resumes_from_a_checkpoint_with_more_room_or_other_shards(
    all_of_them: dict[str, np.ndarray], tmp_path: Path, mode: str, then: dict[str, Any]
) -> None:
    plan = saving(tmp_path, strict=True) | ({"gba": LOCK_STEP} if mode == "gba" else {})
    holds, more = {**HOLDS, "20": "never"}, dict(then)
    with cluster(tmp_path / "first", **plan, **ALL, sleep_s=0.05, holds=holds, horovod=False) as job:
        job.start_alone()
        let_go(job)
        wait_for_two_checkpoints(job)
        job.kill_all()
    n_shards = more.pop("n_shards", 4)
    grown = {"hashed": {**ALL["hashed"], **more}, "n_shards": n_shards}
    with cluster(tmp_path / "second", **plan, **grown, horovod=False) as job:
        job.run(job.start_alone, PATIENCE_S)
        (resumed,) = events(job, "resumed")
        assert resumed["step"] >= 4 and resumed["rows_lost"] == 0
        arrays = job.arrays()
        assert np.array_equal(arrays["user.ids"], all_of_them["user.ids"])
        if n_shards == 4:
            assert_same_parameters(arrays, all_of_them)


@pytest.mark.parametrize(
    ("first", "second"),
    [(0, 0), pytest.param(2, 1, marks=pytest.mark.variant), (1, 2)],
    ids=["alone", "two workers, then one", "one worker, then two"],
)
def test_admission_and_eviction_go_on_from_a_checkpoint_as_if_nothing_had_happened(
    few: dict[str, np.ndarray], tmp_path: Path, first: int, second: int
) -> None:
    """All workers are killed. Ids that had been looked up once are admitted at their next lookup."""

    def start(job: Cluster, n_workers: int) -> None:
        job.start_static(n_workers) if n_workers else job.start_alone()

    plan = saving(tmp_path, strict=True, policy="full")
    holds = {**HOLDS, "20": "never"}
    with cluster(tmp_path / "first", **plan, **FEW, sleep_s=0.05, holds=holds, horovod=bool(first)) as job:
        start(job, first)
        let_go(job)
        wait_for_two_checkpoints(job)
        job.kill_all()
    with cluster(tmp_path / "second", **plan, **FEW, horovod=bool(second)) as job:
        job.run(lambda: start(job, second), PATIENCE_S)
        (resumed,) = events(job, "resumed")
        assert resumed["step"] >= 4 and resumed["rows_lost"] == 0
        assert not events(job, "vocabulary_changed")
        assert np.array_equal(job.arrays()["user.ids"], few["user.ids"])
        if first == second:
            assert_identical(job.arrays(), few)
        else:
            assert_same_parameters(job.arrays(), few)


def test_a_job_that_goes_on_with_other_settings_of_a_hashed_table_says_so(tmp_path: Path) -> None:
    plan, holds = saving(tmp_path, strict=True), {**HOLDS, "20": "never"}
    with cluster(tmp_path / "first", **plan, **FEW, sleep_s=0.05, holds=holds, horovod=False) as job:
        job.start_alone()
        let_go(job)
        wait_for_two_checkpoints(job)
        job.kill_all()
    other = {"hashed": {**FEW["hashed"], "init": 0.5, "admit_after": 3}}
    with cluster(tmp_path / "second", **plan, **other, horovod=False) as job:
        job.run(job.start_alone, PATIENCE_S)
        (changed,) = events(job, "vocabulary_changed")
        assert changed["changed"] == {"admit_after": [2, 3], "init": [0.01, 0.5]} and changed["counts_kept"]
        assert "init was 0.01 when the checkpoint was saved and is 0.5" in job.said()
