"""What a whole run took, as one number each."""

from __future__ import annotations

from typing import Any

import pytest

from gba_hvd.mode_names import MODES
from gba_hvd.tracking.records import Point
from gba_hvd.tracking.run_history import RunHistory
from gba_hvd.tracking.run_summary import summary_of

GBA = float(MODES.index("gba"))


def event(kind: str, second: float, step: int = 0, **data: Any) -> dict[str, Any]:
    return {"event": kind, "step": step, "message": kind, "unix_s": second, "data": data}


def story(points: dict[str, list[tuple[int, float, float]]], *events: dict[str, Any]) -> RunHistory:
    """points: (step, second, value) by metric. From second 10 to 110"""
    history = {
        name: [Point(name, value, int(1000 * s), step) for step, s, value in some] for name, some in points.items()
    }
    return RunHistory("t", "s", "j", "FINISHED", "", 10_000, 110_000, history=history, events=events)


def test_the_time_is_that_of_launches_and_of_modes_and_the_rate_that_of_all_steps():
    found = summary_of(
        story(
            {"mode": [(10, 30, 0.0), (30, 80, GBA)], "train/samples_per_s": [(10, 30, 100.0), (30, 80, 50.0)]},
            event("started", 10, launcher_unix_s=3.0),
            event("switch", 50, 20, **{"from": "allreduce", "to": "gba"}),
            event("finished", 100, 30),
        )
    )
    # 10 steps at 100 samples/s and 20 at 50: 30 in the time of 50 at 100.
    assert found == {
        "seconds_of_training": 90.0, "seconds_of_launches": 97.0, "samples_per_s_mean": pytest.approx(60.0),
        "seconds_in_allreduce": 40.0, "seconds_in_gba": 50.0,
    }  # fmt: skip


def test_time_between_launches_counts_for_none_and_each_begins_in_a_mode_of_its_own():
    found = summary_of(
        story(
            {"mode": [(10, 20, GBA), (20, 70, 0.0)]},
            event("started", 10, launcher_unix_s=4.0),
            event("failed", 30, 12),
            event("started", 60, 10, launcher_unix_s=55.0),
            event("finished", 100, 20),
        )
    )
    assert found == {
        "seconds_of_training": 60.0, "seconds_of_launches": 71.0, "seconds_in_gba": 20.0, "seconds_in_allreduce": 40.0
    }  # fmt: skip


def test_a_launcher_that_starts_all_workers_again_counts_its_time_once():
    found = summary_of(
        story(
            {"mode": [(10, 20, 0.0)]},
            event("started", 10, launcher_unix_s=0.0),
            event("failed", 30, 12),
            event("started", 60, 10, launcher_unix_s=0.0),
            event("finished", 100, 20),
        )
    )
    assert found["seconds_of_launches"] == 100.0


def test_a_switch_that_was_not_reported_is_seen_by_the_points():
    found = summary_of(story({"mode": [(10, 30, 0.0), (20, 50, GBA)]}, event("started", 10)))
    assert (found["seconds_in_allreduce"], found["seconds_in_gba"]) == (20.0, 80.0)
    assert found["seconds_of_launches"] == found["seconds_of_training"] == 100.0, "of older versions"


def test_a_launch_that_made_no_step_has_its_time_only():
    assert summary_of(story({}, event("started", 10))) == {"seconds_of_training": 100.0, "seconds_of_launches": 100.0}
