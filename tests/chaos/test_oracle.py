"""The oracle finds what is wrong, and only that."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import pytest
from gba_hvd_tools.chaos.oracle import Record, standstill, violations


def test_a_record_without_fault_passes(record: Record) -> None:
    assert violations(record) == []


def result_with(**changed: Any) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        assert record.result is not None
        record.result |= changed

    return change


def without_checkpoints_from(first: int) -> Callable[[Record], None]:
    return lambda record: record.checkpoints.__delitem__(slice(first, None))


def pause_of(seconds: float) -> Callable[[Record], None]:
    """After step 30; nothing is said in it."""

    def change(record: Record) -> None:
        record.steps = [(at + seconds * (step > 30), step) for at, step in record.steps]
        record.words = [(at + seconds * (at > 1040), level, text) for at, level, text in record.words]
        record.checkpoints = [at + seconds * (at > record.steps[29][0]) for at in record.checkpoints]

    return change


def with_(**changed: Any) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        for name, value in changed.items():
            setattr(record, name, value)

    return change


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (result_with(applied=4899), "applied + dropped + lost = 4999, the total is 5000"),
        (result_with(total=4984, applied=4884), "the account has 4984 samples, the job has 5000"),
        (result_with(applied=4804, lost=96), "96 samples lost, what happened explains 0"),
        (result_with(finite=False), "not finite"),
        (result_with(aucs=[0.5, 0.6]), "did not learn"),
        (with_(result=None), "there is no result"),
        (without_checkpoints_from(0), "there was no warning"),
        (without_checkpoints_from(15), "there was no warning"),
        (pause_of(50), "no step for 51 s after step 30, and not a word"),
        (with_(left=["4711: python -m gba_hvd.ps.server.server"]), "left behind: 4711"),
        (with_(left=["gba-hvd-1/ps-0.lock"]), "left behind: gba-hvd-1"),
        (with_(exit_code=1), "exit code 1, expected 0"),
        (with_(ends=["FAILED"]), "exit code 0, but the workers reported ['FAILED']"),
        (with_(limit=300.0, exit_code=-9), "still ran after 300 s"),
        (with_(tracked="RUNNING"), "the MLflow run is RUNNING, expected FINISHED"),
        (with_(tracked=None), "the MLflow run is not there"),
        (with_(steps=[]), "no step was ever made"),
        (with_(replay={"replayed": True, "wrong": "user[3, 1]: the job has 0.2"}), "replay: user[3, 1]"),
    ],
)
def test_what_is_broken_is_found(record: Record, breaks: Callable[[Record], Any], says: str) -> None:
    breaks(record)
    assert any(says in wrong for wrong in violations(record)), violations(record)


def test_a_long_pause_is_found_whatever_was_said(record: Record) -> None:
    pause_of(130)(record)
    record.words.append((1080.0, "warning", "waiting for worker 1"))
    assert any("no step for 131 s" in wrong for wrong in violations(record))


def test_where_starting_a_process_takes_long_so_may_replacing_one(record: Record) -> None:
    pause_of(50)(record)
    record.started -= 20
    assert violations(record) == []


def test_a_pause_in_which_something_was_said_passes(record: Record) -> None:
    pause_of(50)(record)
    record.words.append((1080.0, "info", "waiting for worker 1"))
    assert violations(record) == []
    assert standstill(record).words == ("waiting for worker 1",)


def test_an_old_checkpoint_of_which_somebody_warned_passes(record: Record) -> None:
    without_checkpoints_from(15)(record)
    record.words.append((1060.0, "warning", "the checkpoint failed"))
    assert violations(record) == []


@pytest.mark.parametrize(("standstills", "is_old"), [(4, False), (0, True)])
def test_standstills_make_no_checkpoint_old_and_steps_do(record: Record, standstills: int, is_old: bool) -> None:
    """Steps of 0.1 s for 4 s and four standstills of 5 s, after the newest checkpoint; or steps for 24 s."""
    n = 40 if standstills else 240
    gaps = [5.0 if standstills and k % (n // standstills) == 5 else 0.1 for k in range(n)]
    record.steps = [(1010.0 + at, k) for k, at in enumerate(accumulate(gaps, initial=0.0))]
    record.checkpoints = [1010.0]
    assert any("newest checkpoint" in wrong for wrong in violations(record)) is is_old


def test_a_warning_of_something_else_is_no_warning(record: Record) -> None:
    without_checkpoints_from(15)(record)
    record.words.append((1060.0, "warning", "MLflow: records wait"))
    assert violations(record) != []


def test_a_job_that_may_fail_must_say_so(record: Record) -> None:
    record.exit_code, record.ends = 1, []
    assert any("no worker reported that it failed" in wrong for wrong in violations(record, may_fail=True))
    record.ends = ["FAILED"]
    assert violations(record, may_fail=True) == []


def test_a_last_checkpoint_that_a_full_disk_refused_ends_the_job_and_says_so(record: Record) -> None:
    record.exit_code, record.ends = 1, ["NOT_SAVED", "FINISHED"]
    assert violations(record) == ["exit code 1, expected 0"]
    record.fired = [{"kind": "full_disk", "step": 8, "time": 1018.0}]
    assert violations(record) == []
    assert record.result is not None
    record.result["applied"] -= 16
    assert "applied + dropped + lost" in violations(record)[0]


def test_a_job_whose_only_worker_was_killed_ends(record: Record) -> None:
    record.exit_code, record.result, record.last_workers = 1, None, 1
    record.words.append((1200.0, "error", "ValueError: Horovod initialization failed"))
    record.fired = [{"kind": "kill", "step": record.steps[-1][1], "time": 1018.0}]
    assert violations(record) == []
    record.last_workers = 2
    assert violations(record) == ["exit code 1, expected 0"]


def test_where_starting_a_process_takes_long_what_was_not_sent_may_wait_in_the_spool_if_that_is_said(
    record: Record,
) -> None:
    record.tracked, record.spooled, record.started = None, True, record.steps[0][0] - 5.0
    record.words.append((1071.0, "info", "MLflow: NOT everything reached MLflow (35 records did not)"))
    assert "MLflow run is not there" in violations(record)[0]
    record.started -= 12.0
    assert violations(record) == []
    record.words.pop()
    assert "MLflow run is not there" in violations(record)[0]


def test_a_server_of_several_hosts_may_lose_one_step(record: Record) -> None:
    record.plan["apart"] = True
    record.fired = [{"kind": "kill_server", "step": 8, "time": 1018.0}]
    result_with(applied=4804, lost=96)(record)
    assert violations(record) == []
    result_with(applied=4803, lost=97)(record)
    assert violations(record) != []


def test_the_end_waits_in_the_spool_where_the_tracking_server_is_no_use(record: Record) -> None:
    record.plan["tracking"], record.tracked = "tracking_500", None
    assert any("spool" in wrong for wrong in violations(record))
    record.spooled = True
    assert violations(record) == []


def test_a_record_survives_its_file(record: Record) -> None:
    assert violations(Record(**json.loads(json.dumps(asdict(record))))) == []
