"""What is reported of workers that live and do nothing, and by which worker."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd.callbacks import Event
from gba_hvd.modes.parameter_server import ParameterServerMode
from gba_hvd.ps.messages import JobPosition

BOTH = [(0, 0.1), (1, 0.1)]


def reports_of(rank: int, reported: list[Event]) -> Callable[..., list[str]]:
    def emit(event: Event, only_here: bool) -> None:
        assert only_here, "no other worker logs it"
        reported.append(event)

    engine: Any = SimpleNamespace(emit=emit, progress=SimpleNamespace(step=7), world=SimpleNamespace(rank=rank))
    servers: Any = SimpleNamespace(name="gba")
    mode = ParameterServerMode(engine, servers)

    def kinds_after(hanging: list[tuple[int, int, float]], rates: list[tuple[int, float]]) -> list[str]:
        reported.clear()
        servers.position = JobPosition(hanging=hanging, rates=rates)
        mode._report_hanging()
        return [event.kind for event in reported]

    return kinds_after


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_is_reported_once_for_each_time_and_when_it_works_again(rank: int) -> None:
    reported: list[Event] = []
    kinds_after = reports_of(rank, reported)

    assert kinds_after([], BOTH) == []
    assert kinds_after([(1, 41, 62.0)], BOTH) == (["worker_hangs"] if rank == 0 else [])
    if reported:
        assert reported[0].level == "warning" and reported[0].data == {"rank": 1, "pid": 41, "seconds": 62.0}
        assert "rank 1 (process 41) lives, and has done nothing for 62 s" in reported[0].message
    assert kinds_after([(1, 41, 63.0)], BOTH) == []
    assert kinds_after([], BOTH) == (["worker_works"] if rank == 0 else [])
    assert kinds_after([(1, 41, 70.0)], BOTH) == (["worker_hangs"] if rank == 0 else [])
    assert kinds_after([], BOTH[:1]) == [], "it was killed, which another event reports"


def test_the_next_worker_reports_rank_0_and_others_while_it_is_stopped() -> None:
    all_three = [(0, 0.1), (1, 0.1), (2, 0.1)]
    reported: list[Event] = []
    one, two = reports_of(1, reported), reports_of(2, [])
    stopped = [(0, 40, 11.0)]
    assert one(stopped, all_three[1:]) == ["worker_hangs"] and two(stopped, all_three[1:]) == []
    assert reported[0].data["rank"] == 0
    both = [*stopped, (2, 42, 11.0)]
    assert one(both, all_three[1:2]) == ["worker_hangs"]
    assert reported[0].data["rank"] == 2
    assert one([], all_three) == ["worker_works"] and reported[0].data == {"pid": 40}, "rank 0 reports rank 2"


def test_a_worker_alone_reports_no_hanging() -> None:
    assert reports_of(0, [])([(0, 40, 62.0)], [(0, 0.1)]) == []
