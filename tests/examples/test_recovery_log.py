"""What a summary says of checkpoints and recoveries, whoever was chief when they happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctr.recovery_log import RecoveryLog, read_events, recovery_summary
from gba_hvd.callbacks import Event, Job

BACK = {"rows_restored": 340, "rows_lost": 0, "pls": 0.0025, "pls_total": 0.004, "age": 3.0}


def worker(out: Path, rank: int) -> RecoveryLog:
    log = RecoveryLog(out)
    log.on_job(Job("job", rank, 2, 0, "here", is_host_leader=True))
    return log


def saved(step: int) -> Event:
    facts: dict[str, Any] = {"url": "/c", "manifest": f"m-{step}", "kind": "full", "n_bytes": 10, "seconds": 0.5}
    return Event("checkpoint", step + 1, "words", {**facts, "saved_step": step})


def summary(out: Path) -> dict[str, Any]:
    return recovery_summary(RecoveryLog(out).events())


def test_a_survivor_that_becomes_chief_goes_on_with_the_count(tmp_path: Path) -> None:
    out = tmp_path / "not" / "yet"
    chief, survivor = worker(out, 0), worker(out, 1)
    chief.on_event(Event("started", 0, "words"))
    for step in (10, 20):
        chief.on_event(saved(step))
    chief.on_event(Event("rows_restored", 25, "words", BACK))
    survivor.on_event(Event("rows_restored", 25, "words", BACK))  # all get it, the chief writes it down
    survivor.on_job(Job("job", 0, 1, 0, "here", is_host_leader=True))
    survivor.on_event(saved(30))
    survivor.on_event(Event("checkpoint_failed", 41, "words", {"why": "disk full"}))
    last = {"saved_step": 30, "kind": "full", "n_bytes": 10, "url": "/c", "manifest": "m-30"}
    assert summary(out) == {
        "checkpoints": {"count": 3, "failed": 1, "last": last},
        "recoveries": [
            {
                "kind": "rows_restored",
                "step": 25,
                "rows_restored": 340,
                "rows_lost": 0,
                "pls": 0.0025,
                "pls_total": 0.004,
            }
        ],
    }


def test_a_job_that_goes_on_from_a_checkpoint_keeps_what_was_reported_before(tmp_path: Path) -> None:
    worker(tmp_path, 0).on_event(saved(10))
    second = worker(tmp_path, 0)
    second.on_event(Event("started", 10, "words"))
    second.on_event(Event("resumed", 10, "words", {"manifest": "m-10", "rows_restored": 500}))
    found = summary(tmp_path)
    assert found["checkpoints"]["count"] == 1
    assert found["recoveries"] == [
        {"kind": "resumed", "step": 10, "rows_restored": 500, "rows_lost": 0, "pls": None, "pls_total": None}
    ]


def test_a_new_job_in_the_same_folder_starts_over(tmp_path: Path) -> None:
    worker(tmp_path, 0).on_event(saved(10))
    worker(tmp_path, 0).on_event(Event("started", 0, "words"))
    assert summary(tmp_path) == {"checkpoints": {"count": 0, "failed": 0, "last": None}, "recoveries": []}


def test_rows_lost_beside_rows_restored_are_one_recovery(tmp_path: Path) -> None:
    chief, partly = worker(tmp_path, 0), {**BACK, "rows_lost": 30}
    for kind, facts in (("rows_restored", partly), ("rows_lost", partly), ("rows_lost", {"rows_lost": 7})):
        chief.on_event(Event(kind, 5, "words", facts))
    assert [(one["rows_restored"], one["rows_lost"]) for one in summary(tmp_path)["recoveries"]] == [(340, 30), (0, 7)]


def test_a_line_that_is_not_whole_is_not_read(tmp_path: Path) -> None:
    worker(tmp_path, 0).on_event(saved(10))
    file = tmp_path / "recovery.jsonl"
    file.write_text(file.read_text() + '{"event": "check')
    assert len(read_events(file)) == 1
