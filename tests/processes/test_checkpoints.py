"""Jobs that save checkpoints: all of it is lost and comes back, or a host is lost and its rows come back."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .cluster import NAMES, Cluster, assert_identical, cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
TWO = NAMES[:2]
LOCK_STEP = {"mode": "gba", "lookahead": 0}
PATIENCE_S = 180.0


def saving(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    """lease_s: for so long a restarted job waits for signs of life of one that was killed."""
    return {"checkpoint": {"url": str(tmp_path / "checkpoints"), "every_steps": 2, "lease_s": 1.0, **settings}}


def events(job: Cluster, kind: str) -> list[dict[str, Any]]:
    return [line for line in job.notes("event") if line["event"] == kind]


def wait_for_two_checkpoints(job: Cluster) -> None:
    wait_for(lambda: job.ended or len(events(job, "checkpoint")) >= 2, "two checkpoints", PATIENCE_S)
    assert not job.ended, job.log()


def kill_all(job: Cluster) -> None:
    """Nobody gets to say goodbye."""
    for pid in job.processes():
        os.kill(pid, signal.SIGKILL)
    job.end()
    job.assert_nothing_left_but_memory()


@pytest.mark.parametrize("mode", ["allreduce", "gba"])
def test_a_job_that_was_killed_goes_on_as_if_nothing_had_happened(
    reference: dict[str, np.ndarray], tmp_path: Path, mode: str
) -> None:
    plan = saving(tmp_path) | ({"gba": LOCK_STEP} if mode == "gba" else {})
    with cluster(tmp_path / "first", **plan, sleep_s=0.3, horovod=False) as job:
        job.start_alone()
        wait_for_two_checkpoints(job)
        kill_all(job)
    with cluster(tmp_path / "second", **plan, horovod=False) as job:
        job.run(job.start_alone, PATIENCE_S)
        (resumed,) = events(job, "resumed")
        assert resumed["step"] >= 4
        result = job.result()
        assert result["total"] == result["applied"] == 2000
        assert_identical(job.arrays(), reference)
        assert events(job, "checkpoint")[-1]["saved_step"] == result["step"] == 22


def test_two_hosts_are_killed_in_gba_mode_and_go_on_with_every_sample_once(tmp_path: Path) -> None:
    plan = saving(tmp_path) | {"gba": {"mode": "gba"}, "own_memory_per_name": True, "epochs": 3}
    with cluster(tmp_path / "first", **plan, sleep_s=0.2) as job:
        job.start_elastic(TWO)
        wait_for_two_checkpoints(job)
        kill_all(job)
        before = job.notes("push")
    with cluster(tmp_path / "second", **plan) as job:
        job.run(lambda: job.start_elastic(TWO), PATIENCE_S)
        resumed = events(job, "resumed")[0]
        result = job.result()
        assert result["total"] == result["applied"] + result["dropped"] + result["lost"] == 3000
        epoch = job.notes("push")[0]["epoch"]
        assert resumed["step"] >= 4
        # After the restart comes exactly what the restored model had not seen of that epoch.
        rows = job.samples_of_epoch(epoch)
        assert len(rows) == len(set(rows)) == 1000 - 96 * (resumed["step"] - 11 * epoch)
        seen = {row for line in before if line["epoch"] == epoch for row in line["rows"]}
        assert set(range(1000)) - set(rows) <= seen


def test_a_lost_host_gets_its_rows_back_and_no_sample_is_lost(tmp_path: Path) -> None:
    with cluster(tmp_path, **saving(tmp_path), own_memory_per_name=True, epochs=4, sleep_s=0.2, wait_at_step=36) as job:
        job.start_elastic(TWO)
        wait_for_two_checkpoints(job)
        killed = job.processes_of_name(TWO[1])
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        back = wait_for(lambda: events(job, "rows_restored"), "the rows' return", PATIENCE_S)[0]
        (job.out / "go").touch()
        assert job.wait(180) == 0, job.log()
        job.assert_nothing_left()
        assert len(killed) >= 3, "a worker, its server and the keeper were to be killed"
        assert back["rows_restored"] in (170, 340) and back["rows_lost"] == 0
        assert 0 < back["pls"] < 1
        job.assert_every_sample_once(epochs=4)


def test_a_second_job_may_not_write_to_the_place_of_a_living_one(tmp_path: Path) -> None:
    plan = saving(tmp_path, lease_s=9.0)
    with cluster(tmp_path / "first", **plan, sleep_s=0.2, epochs=100, horovod=False) as first:
        first.start_alone()
        wait_for(lambda: events(first, "checkpoint"), "the first job's checkpoint", PATIENCE_S)
        with cluster(tmp_path / "second", **plan, horovod=False) as second:  # the same command, once more
            second.start_alone()
            assert second.wait(90) != 0
            assert "takeover=True" in second.log()
        n = len(first.notes("committed"))
        wait_for(lambda: len(first.notes("committed")) > n, "the first job to go on")


@pytest.mark.parametrize(
    ("url", "words"),
    [("s4://bucket/job", "s4"), ("/proc/nowhere", "cannot hold checkpoints")],
)
def test_a_place_that_cannot_be_used_is_told_before_training_begins(tmp_path: Path, url: str, words: str) -> None:
    with cluster(tmp_path, checkpoint={"url": url}, horovod=False) as job:
        job.start_alone()
        assert job.wait(60) != 0
        assert words in job.log()
        assert not job.notes("committed")
