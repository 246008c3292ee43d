"""What a worker has done lately."""

from __future__ import annotations

import pytest

from gba_hvd.ps.coordinator.recent_pace import PACE_S, RecentPace


def test_the_pace_is_of_the_last_seconds_pauses_included() -> None:
    pace = RecentPace(100.0)
    for i in range(200):
        pace.add(100.0 + i / 10)
    assert pace.per_s(120.0) == pytest.approx(10.0)
    assert pace.per_s(125.0) == pytest.approx(5.0)
    assert pace.per_s(120.0 + PACE_S) == 0.0
    assert pace.last_s == pytest.approx(119.9)


def test_what_has_just_begun_is_not_measured_over_longer_than_it_is_there() -> None:
    pace = RecentPace(100.5)
    assert pace.per_s(100.5) == 0.0 and pace.last_s is None
    pace.add(101.5, 30)
    pace.add(102.4, 30)
    assert pace.per_s(102.5) == pytest.approx(30.0)
