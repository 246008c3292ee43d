"""Invariant 1: the number of workers, shards and hosts changes nothing in the mathematics."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from .cluster import NAMES, assert_same_parameters, cluster, wait_for

pytestmark = [pytest.mark.processes]


@pytest.mark.parametrize(("workers", "n_shards"), [(1, 7), (2, 1), (2, 4), (3, 7), (3, 4)])
def test_workers_and_shards_do_not_change_the_parameters(
    reference: dict[str, np.ndarray], tmp_path: Path, workers: int, n_shards: int
) -> None:
    with cluster(tmp_path, n_shards=n_shards) as job:
        arrays = job.run(lambda: job.start_static(workers)).arrays()
        assert_same_parameters(arrays, reference)
        job.assert_every_sample_once(epochs=2)


def test_rows_on_other_hosts_do_not_change_the_parameters(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    with cluster(tmp_path, n_shards=4, own_memory_per_name=True) as job:
        job.start_elastic(("localhost", "127.0.0.1"))
        assert job.wait() == 0, job.log()
        job.assert_nothing_left()
        arrays = job.arrays()
        assert job.notes("event")[0]["message"].startswith("2 workers on 2 hosts")
        assert_same_parameters(arrays, {name: value for name, value in reference.items() if name in arrays})
        assert len(arrays) == 4  # the dense parameters: the rows are on two hosts


def test_more_workers_than_micro_batches_is_said_and_harmless(tmp_path: Path) -> None:
    with cluster(tmp_path, global_batch=32, micro_batch=16, epochs=1) as job:
        job.run(lambda: job.start_static(3))
        assert "3 workers share 2 micro-batches a step: 1 stay idle" in job.said()
        job.assert_every_sample_once(epochs=1)


@pytest.mark.parametrize("launcher", ["static", "elastic"])
def test_who_waits_before_training_for_a_worker_that_is_slow_to_start_says_so(tmp_path: Path, launcher: str) -> None:
    with cluster(tmp_path, epochs=1, slow_to_start=1, long_waits_s=[1, 3]) as job:
        job.start_static(3) if launcher == "static" else job.start_elastic(NAMES[:1], slots=3)
        waits = r"rank {} has waited for \d+ s in the exchange of state before training .*: rank 1 has not come to it\."
        wait_for(lambda: all(re.search(waits.format(rank), job.said()) for rank in (0, 2)), "a line of each that waits")
        assert (job.out / "starts").exists()
        (job.out / "go on").touch()
        assert job.wait() == 0, job.log()
        job.assert_every_sample_once(epochs=1)
