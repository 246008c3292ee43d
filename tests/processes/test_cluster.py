"""What the tests of jobs take from the notes of workers: which samples of an epoch were computed, and how often."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes.cluster import Cluster


def job_with(folder: Path, *lines: dict[str, Any]) -> Cluster:
    job = Cluster(folder)
    text = "".join(json.dumps({"time": float(time), **line}) + "\n" for time, line in enumerate(lines))
    (job.out / "host-1.jsonl").write_text(text)
    return job


def push(micro: int, serial: int, *rows: int) -> dict[str, Any]:
    return {"push": micro, "serial": serial, "epoch": 0, "segment": 0, "rows": rows}


def step(number: int, world: int, *rows: int) -> list[dict[str, Any]]:
    return [
        {"attempt": number, "world": world, "rows": rows},
        {"committed": number, "world": world, "epoch": 0},
    ]


def test_a_push_that_died_with_its_coordinator_does_not_count_beside_the_step_that_computed_it_again(
    tmp_path: Path,
) -> None:
    job = job_with(tmp_path, push(0, 7, 0, 1), push(1, 8, 2, 3), {"restored": True}, *step(2, 1, 2, 3, 4, 5))
    assert job.samples_of_epoch(0) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("where", [0, 3])
def test_a_sample_that_two_modes_computed_without_a_failure_between_counts_twice(tmp_path: Path, where: int) -> None:
    lines = [push(0, 7, 0, 1), *step(2, 0, 0, 1)]
    lines.insert(where, {"restored": True})
    assert job_with(tmp_path, *lines).samples_of_epoch(0) == [0, 0, 1, 1]
