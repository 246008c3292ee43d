"""What rank 0 reports of workers that live and do nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd.callbacks import Event
from gba_hvd.modes.parameter_server import ParameterServerMode
from gba_hvd.ps.messages import JobPosition

BOTH = [(0, 0.1), (1, 0.1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_is_reported_once_for_each_time_and_when_it_works_again(rank: int) -> None:
    reported: list[Event] = []
    engine: Any = SimpleNamespace(
        emit=reported.append, progress=SimpleNamespace(step=7), world=SimpleNamespace(rank=rank)
    )
    servers: Any = SimpleNamespace(name="gba")
    mode = ParameterServerMode(engine, servers)

    def kinds_after(hanging: list[tuple[int, int, float]], rates: list[tuple[int, float]]) -> list[str]:
        reported.clear()
        servers.position = JobPosition(hanging=hanging, rates=rates)
        mode._report_hanging()
        return [event.kind for event in reported]

    assert kinds_after([], BOTH) == []
    assert kinds_after([(1, 41, 62.0)], BOTH) == (["worker_hangs"] if rank == 0 else [])
    if reported:
        assert reported[0].level == "warning" and reported[0].data == {"rank": 1, "pid": 41, "seconds": 62.0}
        assert "rank 1 (process 41) lives, and has done nothing for 62 s" in reported[0].message
    assert kinds_after([(1, 41, 63.0)], BOTH) == []
    assert kinds_after([], BOTH) == (["worker_works"] if rank == 0 else [])
    assert kinds_after([(1, 41, 70.0)], BOTH) == (["worker_hangs"] if rank == 0 else [])
    assert kinds_after([], BOTH[:1]) == [], "it was killed, which another event reports"
