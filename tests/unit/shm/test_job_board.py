"""What `gba-hvd status` finds on a job's board is of the mode and the workers that the job has now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gba_hvd.shm import job_board
from gba_hvd.shm.job_board import Board

TIMES = {"workers": 2, "step_s": 0.3, "unix_s": 1000.0}


def board(folder: Path, workers: int) -> Board:
    return Board(
        folder, "allreduce", 0, name="ctr", job="j", workers=workers, hosts=1, switchable=True, checkpoints=""
    )  # fmt: skip


def shown(folder: Path) -> dict[str, Any]:
    report = job_board.read(folder)
    assert report is not None
    return report


def test_times_of_steps_are_those_of_the_mode_and_the_workers_that_the_job_has(tmp_path: Path) -> None:
    both = board(tmp_path, 2)
    both.show(7, 0, 7, 9, 70, None, "allreduce")
    both.show_times(TIMES)
    assert shown(tmp_path)["step_times"] == TIMES
    both.show(8, 0, 8, 9, 80, None, "gba")
    assert "step_times" not in shown(tmp_path)
    both.show(9, 0, 9, 9, 90, None, "allreduce")
    assert "step_times" in shown(tmp_path)
    alone = board(tmp_path, 1)
    assert "step_times" not in shown(tmp_path)
    alone.show_times(TIMES)
    assert "step_times" not in shown(tmp_path), "of a leader that has not learned of the new world"


def test_a_pause_is_shown_until_the_next_world_has_formed(tmp_path: Path) -> None:
    first = board(tmp_path, 2)
    first.show_times(TIMES)
    first.show_pause("a worker is gone")
    assert shown(tmp_path)["stands_still"] == "a worker is gone" and "step_times" not in shown(tmp_path)
    board(tmp_path, 2)
    assert "stands_still" not in shown(tmp_path) and "step_times" not in shown(tmp_path)
