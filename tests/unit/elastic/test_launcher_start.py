"""When a job's launcher was started."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gba_hvd.elastic import launcher_start


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        (["/opt/venv/bin/python", "/opt/venv/bin/horovodrun", "-np", "2"], True),
        (["horovodrun", "-np", "2"], True),
        (["/bin/sh", "-c", "horovodrun -np 2 python train.py"], False),
        (["python", "train.py", "horovodrun"], False),
        ([], False),
    ],
)
def test_a_launcher_is_known_by_its_program(command: list[str], is_one: bool) -> None:
    assert launcher_start.is_launcher(command) == is_one


def process(started_s: float, *command: str, parents: Sequence[Any] = ()) -> Any:
    return SimpleNamespace(create_time=lambda: started_s, cmdline=lambda: list(command), parents=lambda: list(parents))


def test_a_worker_under_a_launcher_has_its_start_and_another_one_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    above = [process(30.0, "sh", "-c", "python train.py"), process(20.0, "python", "/bin/horovodrun", "-np", "2")]
    above.append(process(10.0, "sh", "sweep.sh"))
    for parents, expected in ((above, 20.0), (above[::2], 40.0), ([], 40.0)):
        worker = process(40.0, "python", "train.py", parents=parents)
        monkeypatch.setattr(launcher_start.psutil, "Process", lambda worker=worker: worker)
        assert launcher_start.launcher_started_s() == expected


def test_a_launcher_that_cannot_be_looked_at_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[str]:
        raise psutil.AccessDenied(1)

    parent = SimpleNamespace(cmdline=refuse)
    worker = process(40.0, "python", "train.py", parents=[parent])
    monkeypatch.setattr(launcher_start.psutil, "Process", lambda: worker)
    assert launcher_start.launcher_started_s() == 40.0
