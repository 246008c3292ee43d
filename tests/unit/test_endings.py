"""What a job is told to have ended with, and of whom it learns why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd import GBACallback
from gba_hvd.elastic import endings
from gba_hvd.errors import LastCheckpointFailed, ShardMemoryError, WorldLost
from gba_hvd.training.job_state import LocalHost


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    """Rank 0 of two on a host; the other process is this one until a test says otherwise."""
    memory = SimpleNamespace(folder=tmp_path, is_closed=False, trouble=lambda: "")
    world = SimpleNamespace(size=2)
    return SimpleNamespace(
        model=SimpleNamespace(tables=SimpleNamespace(memory=memory)), host=LocalHost(neighbours={1: os.getpid()}),
        world=world, progress=SimpleNamespace(step=7), folder=tmp_path,
    )  # fmt: skip


@pytest.fixture
def dead() -> int:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as process:
        process.wait(60)
    return process.pid


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SystemExit(0), "FINISHED"),
        (SystemExit(None), "FINISHED"),
        (SystemExit(3), "FAILED"),
        (SystemExit("no"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (WorldLost("gone"), "FAILED"),
        (WorldLost("gone", "KILLED"), "KILLED"),
        (LastCheckpointFailed("full"), "NOT_SAVED"),
        (RuntimeError(), "FAILED"),
    ],
    ids=repr,
)
def test_status(error: BaseException, status: str) -> None:
    assert endings.status_of(error) == status


def test_sigterm_is_this_workers_own_end_while_its_neighbours_live(engine: Any) -> None:
    error = KeyboardInterrupt(endings.SIGTERM)
    assert endings.explained(engine, error) is error
    assert "a worker of this world of 2 was lost" in str(endings.world_lost(engine))


def test_a_neighbour_that_is_gone_without_a_note_was_killed(engine: Any, dead: int) -> None:
    engine.host.neighbours[1] = dead
    told = endings.explained(engine, KeyboardInterrupt(endings.SIGTERM))
    assert isinstance(told, WorldLost) and endings.status_of(told) == "FAILED"
    assert f"rank 1 (process {dead}) was killed, or died without a word" in str(told)
    ctrl_c = KeyboardInterrupt()
    assert endings.explained(engine, ctrl_c) is ctrl_c


def test_a_neighbour_that_left_a_note_is_the_cause(engine: Any) -> None:
    endings.leave_note(engine, "FAILED", ValueError("bad row"))
    told = endings.explained(engine, KeyboardInterrupt(endings.SIGTERM))
    assert endings.status_of(told) == "FAILED"
    assert "ended first (ValueError: bad row)" in str(told)


def test_workers_that_are_interrupted_together_are_all_interrupted(engine: Any) -> None:
    """Also the one that heard of the other's end before its own signal."""
    endings.leave_note(engine, "KILLED", KeyboardInterrupt(endings.SIGTERM))
    own = KeyboardInterrupt(endings.SIGTERM)
    assert endings.explained(engine, own) is own
    lost = endings.cause_elsewhere(engine)
    assert isinstance(lost, WorldLost)
    assert isinstance(endings.explained(engine, lost), KeyboardInterrupt)


def test_who_failed_counts_more_than_who_was_interrupted(engine: Any, dead: int) -> None:
    endings.leave_note(engine, "KILLED", KeyboardInterrupt())
    engine.host.neighbours[2] = dead
    assert "rank 2" in str(endings.cause_elsewhere(engine))


def test_memory_that_was_taken_away_explains_any_error(engine: Any) -> None:
    engine.model.tables.memory.trouble = lambda: "it was removed"
    told = endings.explained(engine, FileNotFoundError("shards"))
    assert isinstance(told, ShardMemoryError) and str(told) == "it was removed"
    assert endings.explained(engine, told) is told


def test_where_a_launcher_replaces_workers_those_that_go_on_say_what_one_failed_with(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    engine.world.host = "h1"
    endings.leave_note(engine, "FAILED", ValueError("bad row"))
    before, pid = {1: os.getpid(), 2: 1}, os.getpid()
    assert endings.failed_neighbours(engine, before) == [], "it is in the new world"
    engine.host.neighbours = {}
    (told,) = endings.failed_neighbours(engine, before)
    assert (told.kind, told.step, told.level) == ("worker_failed", 7, "warning")
    assert told.data == {"rank": 1, "host": "h1", "pid": pid, "why": "ValueError: bad row"}
    assert f"rank 1 of the world before, on h1 (process {pid}), ended with ValueError: bad row" in told.message
    engine.host.neighbours = {1: pid}
    endings.leave_note(engine, "KILLED", KeyboardInterrupt("SIGTERM"))
    engine.host.neighbours = {}
    assert endings.failed_neighbours(engine, before) == [], "it was told to leave"


@pytest.mark.parametrize(("code", "status"), [(None, None), (0, None), (3, "FAILED"), ("no", "FAILED")])
def test_a_script_that_leaves_by_sys_exit(code: Any, status: str | None) -> None:
    watch, own = endings.ExitWatch(), sys.exit
    watch.enter()
    with pytest.raises(SystemExit):
        sys.exit(code)
    watch.leave()
    assert sys.exit is own
    error = watch.error()
    assert (None if error is None else endings.status_of(error)) == status


def test_a_planned_switch_that_comes_late_is_told_once_and_by_whoever_asks_first() -> None:
    callback = GBACallback(mode="allreduce", switch_at={10: "gba", 60: "allreduce"})
    assert callback.wish(12, "allreduce") and callback.late is None
    assert callback.overdue(61) == [60]
    assert callback.wish(75, "gba") and callback.late == (60, 75)
    assert callback.overdue(80) == []
    successor = GBACallback(mode="allreduce", switch_at={10: "gba"})
    assert successor.wish(75, "gba") is None and successor.late is None
