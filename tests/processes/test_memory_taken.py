"""What others do to a job's memory: a second job of its name, a cleaner that removes it, a file that is cut short."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from .cluster import CONTAINER, Cluster, cluster, needs_containers, wait_for

pytestmark = [pytest.mark.processes]


def held(job: Cluster) -> Path:
    """The job's folder, when its worker waits."""
    job.start_alone()
    wait_for(lambda: job.ended or list(job.out.glob("held-by-go-*")), "the worker to be held")
    assert not job.ended, job.log()
    (folder,) = job.shard_dir.glob("gba-hvd-*")
    return folder


@pytest.mark.parametrize("same_host", [True, pytest.param(False, marks=pytest.mark.variant)])
def test_two_jobs_of_one_name_before_their_first_checkpoint(tmp_path: Path, same_host: bool) -> None:
    """On one host the memory shows it, on several the claim on the checkpoint location. The first one continues."""
    url = str(tmp_path / "store")
    plan: dict[str, Any] = {"horovod": False, "epochs": 1}
    if not same_host:
        plan |= {"checkpoint": {"url": url, "every_steps": 1000, "lease_s": 6.0}}
    name = {"GBA_HVD_JOB_ID": "mine"}
    with cluster(tmp_path / "first", name, **plan, holds={0: "go"}) as first:
        folder = held(first)
        second_plan = {**plan, "shard_dir": str(first.shard_dir)} if same_host else plan
        with cluster(tmp_path / "second", name, **second_plan) as second:
            second.start_alone()
            assert second.wait() != 0
            (worker,) = first.processes(only_workers=True)
            if same_host:
                assert f"ShardMemoryError: a running job (process {worker}) uses {folder}" in second.said()
                assert "GBA_HVD_JOB_ID" in second.said() and "Do not remove" in second.said()
                assert "rm -r" not in second.said()
            else:
                assert f"{url} is being written to by job 'mine." in second.said()
            assert not second.notes("committed")
        (first.out / "go").touch()
        assert first.wait() == 0, first.log()
        first.assert_nothing_left()
        first.assert_every_sample_once(epochs=1)


class Container(Cluster):
    """Its process has a namespace of processes of its own; files are the machine's."""

    def python(self) -> list[str]:
        """A worker that another process forks would be in that one's namespace."""
        return [*CONTAINER, sys.executable]


@needs_containers()
@pytest.mark.parametrize("with_checkpoints", [True, pytest.param(False, marks=pytest.mark.variant)])
def test_a_job_in_another_container_is_refused_at_once(tmp_path: Path, with_checkpoints: bool) -> None:
    """The lock shows that the memory is in use, where the numbers of its processes do not exist."""
    plan: dict[str, Any] = {"horovod": False, "epochs": 1}
    if with_checkpoints:
        plan["checkpoint"] = {"url": str(tmp_path / "store"), "every_steps": 1000}
    name = {"GBA_HVD_JOB_ID": "mine"}
    with cluster(tmp_path / "first", name, **plan, holds={0: "go"}) as first:
        folder = held(first)
        second = Container(tmp_path / "second", {**plan, "shard_dir": str(first.shard_dir)}, name)
        try:
            second.start_alone()
            assert second.wait() != 0
        finally:
            second.end()
        said = second.said()
        assert str(folder) in said and "another container" in said and "GBA_HVD_JOB_ID" in said, said
        assert "rm -r" not in said and "is waited for" not in said and not second.notes("committed")
        (first.out / "go").touch()
        assert first.wait() == 0, first.log()
        first.assert_nothing_left()
        first.assert_every_sample_once(epochs=1)


def test_a_folder_that_is_removed_is_reported_and_training_that_needs_no_server_goes_on(tmp_path: Path) -> None:
    with cluster(tmp_path, horovod=False, epochs=1, holds={3: "go"}) as job:
        shutil.rmtree(held(job))
        (job.out / "go").touch()
        assert job.wait() == 0, job.log()
        (reported,) = [event for event in job.notes("event") if event["event"] == "memory_removed"]
        assert "was removed while the job was using it" in reported["message"] and "RemoveIPC" in reported["message"]
        assert "[memory removed] step 4" in job.said()
        job.assert_nothing_left()
        job.assert_every_sample_once(epochs=1)


def test_a_folder_that_is_removed_under_servers_that_train_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    plan = {"gba": {"mode": "gba"}}
    environ = {"GBA_HVD_SERVER_S": "5"}
    with cluster(tmp_path / "job", environ, horovod=False, epochs=1, **plan, holds={3: "go"}) as job:
        folder = held(job)
        shutil.rmtree(folder)
        (job.out / "go").touch()
        assert job.wait() != 0
        last = job.said().rpartition("Traceback")[2]
        assert f"ShardMemoryError: {folder} was removed while the job was using it" in last
        assert "Start the job again" in last and "FileNotFoundError" not in last
        assert [end["end"] for end in job.notes("end")] == ["FAILED"]
        job.assert_nothing_left()


def test_a_shard_file_that_is_cut_short_ends_the_job_before_a_page_is_touched(tmp_path: Path) -> None:
    cut = {"point": "after apply", "do": "cut the file", "step": 5, "rank": 0}
    with cluster(tmp_path, horovod=False, epochs=1, faults=[cut]) as job:
        job.start_alone()
        assert job.wait() > 0
        assert job.fired() == 1
        assert re.search(r"ShardMemoryError: .*/shards was cut to 4,096 of [\d,]+ bytes", job.said())
        assert [end["end"] for end in job.notes("end")] == ["FAILED"]
        job.assert_nothing_left()


@pytest.mark.variant
def test_a_shard_file_that_is_cut_in_the_middle_of_a_step_does_not_kill_without_a_word(tmp_path: Path) -> None:
    cut = {"point": "before exchange", "do": "cut the file", "step": 5, "rank": 0}
    with cluster(tmp_path, horovod=False, epochs=1, faults=[cut]) as job:
        job.start_alone()
        assert job.wait() != 0
        assert job.fired() == 1
        assert "Fatal Python error: Bus error" in job.said() and "gba_hvd" in job.said()
        job.assert_nothing_left()
