"""Jobs whose workers look rows up as a GPU does, on a CPU: with copies of hot rows, while others write the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .cluster import Cluster, assert_same_parameters, cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
ON = {"GBA_HVD_DEVICE_ROWS": "on"}
LOCK_STEP = {"mode": "gba", "lookahead": 0}


def said(job: Cluster) -> list[str]:
    return [line["message"] for line in job.notes("event") if line["event"] == "device_rows"]


@pytest.mark.parametrize(("workers", "plan"), [(1, {}), (3, {}), (2, {"gba": LOCK_STEP})], ids=["one", "three", "gba"])
def test_they_train_the_same_model(
    reference: dict[str, np.ndarray], tmp_path: Path, workers: int, plan: dict[str, Any]
) -> None:
    with cluster(tmp_path, ON, hot_rows=100, **plan) as job:
        arrays = job.run(lambda: job.start_static(workers)).arrays()
        assert_same_parameters(arrays, reference)
        job.assert_every_sample_once(epochs=2)
        assert "cpu reads the rows in the host's memory" in said(job)[0]
        is_alone = workers == 1
        assert any("hot_rows has no effect" in text for text in said(job)) != is_alone


@pytest.mark.parametrize("point", ["after exchange", "after apply"])
def test_one_that_is_killed_changes_no_parameter(reference: dict[str, np.ndarray], tmp_path: Path, point: str) -> None:
    """The survivor, alone for a while, applies rows by its device; then there are two again."""
    faults = [{"point": point, "do": "kill", "step": 5, "rank": 1}]
    with cluster(tmp_path, ON, hot_rows=100, faults=faults) as job:
        job.run(lambda: job.start_elastic(("localhost", "127.0.0.1")))
        assert job.fired() == 1
        job.assert_every_sample_once(epochs=2)
        assert_same_parameters(job.arrays(), reference)


def test_rows_on_several_hosts_are_looked_up_by_the_cpu_which_is_said(tmp_path: Path) -> None:
    with cluster(tmp_path, ON, hot_rows=100, n_shards=4, own_memory_per_name=True) as job:
        job.start_elastic(("localhost", "127.0.0.1"))
        assert job.wait() == 0, job.log()
        job.assert_every_sample_once(epochs=2)
        assert any("rows are on several hosts" in text and "hot_rows has no effect" in text for text in said(job))
