"""Batches that are read ahead, by reader processes: what a killed worker and a switch leave of the account.

What was read ahead for a step, a lease or a mode that does not come is thrown away; every sample still counts once.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from .cluster import NAMES, Cluster, assert_same_parameters, cluster, wait_for
from .workload import ParquetClicks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
TWO = NAMES[:2]
READERS = {"num_workers": 2}


def readers(job: Cluster) -> list[int]:
    """Processes that read, and those that fork them."""
    found = []
    for pid in job.processes():
        try:
            if b"gba_hvd.reading.reader_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def killed(step: int, point: str) -> dict[str, Any]:
    return {"point": point, "do": "kill", "step": step, "rank": 1}


def test_a_worker_killed_in_allreduce_mode_changes_no_parameter(
    reference: dict[str, np.ndarray], tmp_path: Path
) -> None:
    with cluster(tmp_path, faults=[killed(8, "before exchange")], reading=READERS) as job:
        job.start_elastic(TWO)
        wait_for(lambda: job.ended or len(readers(job)) >= 6, "two readers of each worker, and who forks them")
        assert job.wait() == 0, job.log()
        job.assert_nothing_left()
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=2)
        assert_same_parameters(job.arrays(), reference)


def test_a_worker_killed_in_gba_mode_costs_no_sample(tmp_path: Path) -> None:
    faults = [killed(0, "before push")]
    with cluster(tmp_path, gba={"mode": "gba"}, faults=faults, reading=READERS, sleep_s=0.02) as job:
        job.run(lambda: job.start_elastic(TWO))
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=2)


def test_a_stream_of_parquet_files_through_a_kill_and_two_switches(tmp_path: Path) -> None:
    url = ParquetClicks.write(tmp_path)
    gba = {"mode": "allreduce", "switch_at": {8: "gba", 17: "allreduce"}}
    plan = {"parquet": url, "reading": {"num_workers": 1}, "epochs": 3, "follow_the_chief": True}
    with cluster(tmp_path / "job", gba=gba, faults=[killed(4, "before exchange")], **plan) as job:
        job.run(lambda: job.start_elastic(TWO))
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=3)
        switched = {line["to"] for line in job.notes("event") if line["event"] == "switch"}
        assert switched == {"gba", "allreduce"}


def test_a_worker_killed_in_gba_mode_costs_no_sample_of_a_stream(tmp_path: Path) -> None:
    plan = {"parquet": ParquetClicks.write(tmp_path), "gba": {"mode": "gba"}, "sleep_s": 0.02}
    faults = [{"point": "before push of step", "do": "kill", "step": 4, "rank": 1}]
    with cluster(tmp_path / "job", faults=faults, **plan) as job:
        job.run(lambda: job.start_elastic(TWO))
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=2)


@pytest.mark.parametrize("what", ["parquet", pytest.param("shards", marks=pytest.mark.variant)])
def test_two_hosts_read_a_stream_in_both_modes(tmp_path: Path, what: str) -> None:
    plan: dict[str, Any] = {"gba": {"mode": "allreduce", "switch_at": {5: "gba"}}, "own_memory_per_name": True}
    plan |= {"parquet": ParquetClicks.write(tmp_path)} if what == "parquet" else {"shards": {}}
    with cluster(tmp_path / "job", **plan) as job:
        job.run(lambda: job.start_elastic(TWO))
        job.assert_every_sample_once(epochs=2)
        assert job.result()["mode"] == "gba"


@pytest.mark.parametrize(
    ("what", "missing"),
    [
        ("parquet", "3 on rank 0; 2 on rank 1, missing: {folder}/part-2.parquet"),
        ("shards", "20 on rank 0; 5 on rank 1, missing: shard-5, shard-6, shard-7, shard-8, shard-9 and 10 more"),
    ],
)
def test_what_workers_of_an_asynchronous_mode_do_not_all_have_is_named(tmp_path: Path, what: str, missing: str) -> None:
    """In an epoch that begins in that mode. Shards of a stream are found out as they are counted."""
    url = ParquetClicks.write(tmp_path)
    plan: dict[str, Any] = {"gba": {"mode": "gba"}, "sources_differ_in": 1, "sleep_s": 0.02}
    plan |= {"parquet": url, "fewer": url.replace("*", "part-[01]")} if what == "parquet" else {}
    plan |= {"shards": {}, "fewer": {"n_shards": 5}} if what == "shards" else {}
    with cluster(tmp_path / "job", **plan) as job:
        job.start_static(2)
        assert job.wait() != 0
        words = missing.format(folder=url.removesuffix("/*.parquet"))
        assert f"StateMismatch: the workers disagree about the files or shards of the dataset: {words}" in job.said()
        assert {line["to"] for line in job.notes("event") if line["event"] == "switch"} == {"gba"}


# --- resuming from a checkpoint --------------------------------------------------------------------------------------

KILLED_IN_THE_MIDDLE = {"1": "servers", "8": "saved", "14": "never"}


def a_killed_job(folder: Path, **plan: Any) -> None:
    """One worker, killed after a checkpoint in its first epoch or soon after."""
    with cluster(folder, sleep_s=0.02, holds=KILLED_IN_THE_MIDDLE, horovod=False, **plan) as job:
        job.start_alone()
        (job.out / "servers").touch()
        wait_for(lambda: job.ended or events(job, "checkpoint"), "a checkpoint")
        assert not job.ended, job.log()
        (job.out / "saved").touch()
        wait_for(lambda: job.ended or job.last_step() >= 10, "more steps")
        job.kill_all()


def saved_often(tmp_path: Path, mode: str) -> dict[str, Any]:
    checkpoint = {"url": str(tmp_path / "checkpoints"), "every_steps": 4, "policy": "full"}
    return {"checkpoint": checkpoint, **({} if mode == "allreduce" else {"gba": {"mode": mode}})}


def events(job: Cluster, kind: str) -> list[dict[str, Any]]:
    return [line for line in job.notes("event") if line["event"] == kind]


@pytest.mark.variant
@pytest.mark.parametrize("mode", ["allreduce", "gba"])
@pytest.mark.parametrize("what", ["parquet", "shards", "counted shards"])
def test_a_job_resumes_in_the_middle_of_a_stream(tmp_path: Path, what: str, mode: str) -> None:
    plan = saved_often(tmp_path, mode)
    plan |= {"parquet": ParquetClicks.write(tmp_path)} if what == "parquet" else {"shards": {"counts": "c" in what}}
    a_killed_job(tmp_path / "first", **plan)
    with cluster(tmp_path / "second", horovod=False, **plan) as job:
        job.run(job.start_alone)
        (resumed,) = events(job, "resumed")
        assert resumed["step"] >= 4
        result = job.result()
        assert result["total"] == result["applied"] + result["dropped"] == 2000


@pytest.mark.variant
def test_a_job_does_not_resume_on_another_days_files(tmp_path: Path) -> None:
    plan = {"parquet": ParquetClicks.write(tmp_path), **saved_often(tmp_path, "gba")}
    a_killed_job(tmp_path / "first", **plan)
    part = tmp_path / "clicks" / "part-1.parquet"
    table = pq.read_table(part)
    pq.write_table(table.take(list(reversed(range(len(table))))), part, row_group_size=64)
    with cluster(tmp_path / "second", horovod=False, **plan) as job:
        job.start_alone()
        assert job.wait() != 0
        assert "order or content of the dataset" in job.said() or "samples 1000, here" in job.said(), job.log()
        assert not job.notes("committed") and not job.pushes()


def test_a_job_of_one_worker_whose_storage_hangs_names_the_file(tmp_path: Path) -> None:
    with cluster(tmp_path, parquet=ParquetClicks.write(tmp_path), read_hangs=True, epochs=1) as job:
        job.start_static(1)
        named = r"reading \S+/clicks/\S+, row group \d+ "
        wait_for(lambda: re.search(rf"{named}has taken \d+ s and is not over", job.said()), "the warning")
        assert (job.out / "hangs").exists() and not job.notes("committed")
        (job.out / "go on").touch()
        assert job.wait() == 0, job.log()
        assert re.search(rf"{named}is over, after \d+ s", job.said())
        job.assert_every_sample_once(epochs=1)


# --- streams of unknown length ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [pytest.param(True, marks=pytest.mark.variant), False])
def test_a_stream_of_shards_through_a_kill_and_two_switches(tmp_path: Path, counts: bool) -> None:
    gba = {"mode": "allreduce", "switch_at": {9: "gba", 20: "allreduce"}}
    plan = {"shards": {"counts": counts}, "reading": {"num_workers": 1}, "epochs": 3, "follow_the_chief": True}
    with cluster(tmp_path, gba=gba, faults=[killed(4, "before exchange")], **plan) as job:
        job.run(lambda: job.start_elastic(TWO))
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=3)
        switched = {line["to"] for line in job.notes("event") if line["event"] == "switch"}
        assert switched == {"gba", "allreduce"}


@pytest.mark.variant
@pytest.mark.parametrize("mode", ["gba", "shadow", "bsp"])
def test_a_worker_killed_in_an_asynchronous_mode_costs_no_sample_of_a_stream_of_shards(
    tmp_path: Path, mode: str
) -> None:
    faults = [{"point": "before push", "do": "kill", "step": 1, "rank": 1}]
    plan = {"shards": {"counts": False}, "gba": {"mode": mode}, "sleep_s": 0.02, "epochs": 3, "workers_seen": 3}
    with cluster(tmp_path, faults=faults, **plan) as job:
        job.run(lambda: job.start_elastic(TWO))
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=3)
