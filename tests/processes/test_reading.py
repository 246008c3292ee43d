"""Batches that are read ahead, by reader processes: what a killed worker and a switch leave of the account.

What was read ahead for a step, a lease or a mode that does not come is thrown away; every sample still counts once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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
