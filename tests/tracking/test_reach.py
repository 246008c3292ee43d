"""When a job knows that MLflow takes no records, what it prints then, and how its end mentions it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from gba_hvd.tracking import MLflowCallback, spool_delivery
from gba_hvd.tracking.reach import Outage, Reach
from gba_hvd.tracking.spool import SpoolStatus
from tests.tracking.conftest import job, step

SILENT = "MLflow has taken nothing for 20 s"


def test_what_is_not_taken_for_long_is_an_outage_since_it_waits() -> None:
    reach = Reach()
    looks = [(0.0, 50, 50), (10.0, 50, 90), (20.0, 50, 120), (30.0, 50, 150), (40.0, 50, 170), (50.0, 170, 170)]
    found = [reach.look(None, offset, n_bytes, True, now_s) for now_s, offset, n_bytes in looks]
    assert found == [None, None, None, SILENT, SILENT, None]
    assert reach.over == [Outage(10.0, 50.0)] and reach.since_unix_s is None


def test_a_failed_request_is_an_outage_at_once_and_keeps_its_beginning() -> None:
    reach = Reach()
    assert reach.look(None, 50, 90, True, 10.0) is None
    assert reach.look("refused", 50, 90, True, 20.0) == "refused"
    assert reach.look("refused", 50, 120, True, 60.0) == "refused"
    assert reach.look(None, 50, 150, True, 70.0) == SILENT, "that nothing is taken lasts longer than a problem is known"
    assert reach.since_unix_s == 20.0


@pytest.mark.parametrize(
    ("looks", "has_run"),
    [
        ([(0.0, 0, 9), (30.0, 0, 99), (60.0, 0, 200)], False),  # the sender starts, which takes long
        ([(0.0, 9, 9), (60.0, 9, 20), (70.0, 20, 20)], True),  # training stood still between two looks
        ([(0.0, 5, 9), (60.0, 9, 30), (120.0, 30, 60)], True),  # slow, and it comes on
    ],
)
def test_what_is_no_outage(looks: list[tuple[float, int, int]], has_run: bool) -> None:
    reach = Reach()
    assert [reach.look(None, offset, n, has_run, now_s) for now_s, offset, n in looks] == [None] * 3
    assert reach.over == [] and reach.since_unix_s is None


class NoSender:
    """The process is at work, as far as the callback sees."""

    def __init__(self, spool: Path) -> None:
        self.spool = spool

    def alive(self) -> bool:
        return True

    def wait(self, until: object, timeout_s: float) -> bool:
        return True


def test_an_outage_is_reported_with_its_time_and_mentioned_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = SpoolStatus(run_id="r1", experiment_id="1", tracking_uri="http://tracker")
    monkeypatch.setattr(spool_delivery, "SenderProcess", NoSender)
    monkeypatch.setattr(spool_delivery, "read_status", lambda spool: status)
    monkeypatch.setattr(spool_delivery, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    callback = MLflowCallback(spool_dir=tmp_path, log_every_steps=1, system_metrics=False)
    callback.on_job(job("j"))
    assert callback.problem == "" and "MLflow" not in capsys.readouterr().err
    status = replace(status, problem="connection refused")
    callback.on_step(step(1))
    at = time.strftime("%H:%M:%S", time.localtime(1000.0))
    assert callback.problem == (f"MLflow since {at}: records wait, nothing is lost so far: connection refused")
    (line,) = capsys.readouterr().err.splitlines()
    assert line[8:].startswith(f" MLflow: records wait in {callback.spool}: connection refused") and line[2] == ":"
    monkeypatch.setattr(time, "time", lambda: 1100.0)
    status = replace(status, problem=None, offset=10**9)
    callback.on_step(step(2))
    assert callback.problem == ""
    assert capsys.readouterr().err[8:] == " MLflow: records are being sent again\n"
    status = replace(status, recorded=True, done=True)
    callback.on_end("FINISHED", None)
    until = time.strftime("%H:%M:%S", time.localtime(1100.0))
    assert f"It was out of reach from {at} to {until}; what waited was sent. Open " in capsys.readouterr().out
