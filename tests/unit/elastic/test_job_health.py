"""What troubles a job, as the board of its host has it: through another rank 0 and another launch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd.callbacks import Callback, Event, Job, StepRecord
from gba_hvd.elastic.job_health import JobHealth
from gba_hvd.shm import job_board
from gba_hvd.shm.job_board import Board
from gba_hvd.training.job_state import LocalHost

STEP = StepRecord(5, 0, 8, 40, 0.1, 2, "allreduce", None)
FACTS: dict[str, Any] = {
    "name": "shop", "job": "shop.1", "workers": 2, "hosts": 1, "switchable": False, "checkpoints": "s3://b/shop",
}  # fmt: skip


def health(folder: Path, *others: Any) -> JobHealth:
    """Of a worker that leads its host."""
    engine: Any = SimpleNamespace(host=LocalHost(board=Board(folder, "allreduce", 0, **FACTS)), callbacks=[*others])
    found = JobHealth(engine)
    engine.callbacks.append(found)
    found.on_job(Job("shop.1", 0, 2, 0, "h", True))
    return found


def shown(folder: Path) -> dict[str, Any]:
    report = job_board.read(folder)
    assert report is not None
    found: dict[str, Any] = report["health"]
    return found


def warn(one: JobHealth, kind: str, step: int, text: str = "why", at: float = 0.0, **data: Any) -> None:
    one.on_event(Event(kind, step, text, data, level="warning", unix_s=at))


def saved(one: JobHealth, step: int, at: float) -> None:
    one.on_event(Event("checkpoint", step + 1, "", {"saved_step": step}, unix_s=at))


def test_warnings_of_one_kind_are_one_line_until_an_event_ends_them(tmp_path: Path) -> None:
    one = health(tmp_path)
    saved(one, 7, 50.0)
    for k in range(3):
        warn(one, "checkpoint_failed", 10 + k, f"attempt {k}", at=100.0 + k)
    warn(one, "rows_lost", 11, at=90.0)
    found = shown(tmp_path)
    assert (found["n"], found["over"], found["checkpoint"]) == (4, 0, {"step": 7, "unix_s": 50.0})
    (lost, failed) = found["standing"]
    assert (lost["kind"], failed["kind"], failed["n"], failed["message"]) == (
        "rows_lost", "checkpoint_failed", 3, "attempt 2",
    )  # fmt: skip
    assert (failed["since_unix_s"], failed["unix_s"], failed["step"]) == (100.0, 102.0, 12)
    saved(one, 14, 120.0)
    found = shown(tmp_path)
    assert (found["n"], found["over"]) == (4, 3)
    assert [warning["kind"] for warning in found["standing"]] == ["rows_lost"]


def test_options_without_effect_are_shown_for_each_mode(tmp_path: Path) -> None:
    one = health(tmp_path)
    for mode in ("ma", "bsp"):
        warn(one, "options_idle", 3, f"of {mode}", mode=mode, options=["tolerance"])
    assert [(found["message"], found["n"]) for found in shown(tmp_path)["standing"]] == [("of ma", 1), ("of bsp", 1)]


def test_workers_that_hang_are_told_apart(tmp_path: Path) -> None:
    one = health(tmp_path)
    for pid in (5, 6):
        warn(one, "worker_hangs", 3, pid=pid)
    one.on_event(Event("worker_works", 4, "", {"pid": 5}))
    (left,) = shown(tmp_path)["standing"]
    assert left["data"] == {"pid": 6}


def test_a_new_rank_0_on_the_host_continues_the_account(tmp_path: Path) -> None:
    first = health(tmp_path)
    saved(first, 7, 50.0)
    for k in range(3):
        warn(first, "checkpoint_failed", 10 + k)
    second = health(tmp_path)
    warn(second, "rows_lost", 13)
    assert (second.n, shown(tmp_path)["n"], shown(tmp_path)["checkpoint"]["step"]) == (4, 4, 7)
    saved(second, 14, 120.0)
    assert second.account(with_another=False) == {"n": 4, "over": 3, "standing": [["rows_lost", 13, "why"]]}
    saved(second, 14, 150.0)
    assert shown(tmp_path)["checkpoint"] == {"step": 14, "unix_s": 120.0}, "it is found by a new rank 0, and reported"
    third = health(tmp_path)
    third.on_step(STEP)
    assert third.n == 4


def test_another_launch_continues_the_account_and_an_older_state_does_not_replace_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = health(tmp_path / "a")
    older = first.state_dict()
    warn(first, "rows_lost", 5)
    second = health(tmp_path / "b")
    second.load_state_dict(first.state_dict())
    second.load_state_dict(older)
    assert second.account(with_another=True) == {"n": 2, "over": 0, "standing": [["rows_lost", 5, "why"]]}


def test_a_launch_that_resumed_has_the_checkpoint_that_it_began_with(tmp_path: Path) -> None:
    one = health(tmp_path)
    one.on_event(Event("resumed", 30, "", {"manifest": "m-30"}))
    assert shown(tmp_path)["checkpoint"] == {"step": 30, "unix_s": None}


def test_what_a_callback_cannot_do_is_shown_until_it_can(tmp_path: Path) -> None:
    tracker: Any = Callback()
    one = health(tmp_path, tracker, object())
    tracker.problem = "MLflow: records wait"
    one.on_step(STEP)
    assert shown(tmp_path)["problems"] == ["MLflow: records wait"]
    tracker.problem, one._next_look_s = "", 0.0
    one.on_step(STEP)
    assert shown(tmp_path)["problems"] == []


@pytest.mark.slow
@pytest.mark.parametrize("text", ["x" * 5000, "\u2028" * 5000])
def test_the_newest_warnings_are_shown_where_there_is_no_room_for_all(tmp_path: Path, text: str) -> None:
    one = health(tmp_path)
    for pid in range(60):
        warn(one, "worker_hangs", 3, text, at=float(pid), pid=pid)
    found = shown(tmp_path)
    assert found["n"] == 60 and 0 < len(found["standing"]) < 60
    assert found["standing"][-1]["data"] == {"pid": 59}


def test_a_worker_that_leads_no_host_counts_and_shows_nothing() -> None:
    engine: Any = SimpleNamespace(host=LocalHost(), callbacks=[])
    one = JobHealth(engine)
    warn(one, "rows_lost", 5)
    one.on_step(STEP)
    assert one.n == 1
