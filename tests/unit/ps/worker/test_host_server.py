"""How a host leader handles the reports of its server; above all of one that knows nothing of the save it was given."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd.ps import launch
from gba_hvd.ps.client import Reply, ServerLost
from gba_hvd.ps.messages import (
    DelegateClaim,
    JobPosition,
    Ok,
    Refused,
    Save,
    SaveAbout,
    SaveFacts,
    SaveSettings,
    SaveStatus,
)
from gba_hvd.ps.worker.host_server import HostServer
from recovery.catalog.claims import Claim
from recovery.config import Config

RUNNING, DONE = SaveStatus(1, 4, "running"), SaveStatus(1, 4, "done", SaveFacts(n_bytes=1))


@pytest.fixture
def line(tmp_path: Path) -> HostServer:
    """Not started: reports are passed in by hand."""
    return HostServer("job", b"k" * 32, tmp_path, host=0, worker=0, rank=0, look=dict)


def a_save(number: int) -> Save:
    return Save(
        epoch=1, number=number, part=0, n_parts=1, kind="full", parent=None, step=number, samples=0,
        settings=SaveSettings("/place", {}, Config()), claim=Claim(1, "job", "00000000"), about=SaveAbout(),
        first_epoch=1,
    )  # fmt: skip


def answered(line: HostServer, number: int, body: Any) -> None:
    def result() -> Any:
        if isinstance(body, Exception):
            raise body
        return SimpleNamespace(body=body)

    line._asked_to_save(a_save(number), result)


def received(line: HostServer, *reports: SaveStatus) -> tuple[int, str] | None:
    for report in reports:
        line._on_position(JobPosition(saved=report))
    return None if line.saved is None else (line.saved.number, line.saved.state)


def test_a_save_is_followed_until_its_end(line: HostServer) -> None:
    assert received(line, SaveStatus()) is None
    answered(line, 4, Ok())
    assert received(line, RUNNING) == (4, "running")
    assert received(line, DONE) == (4, "done")


def test_a_successor_that_knows_of_no_save_means_that_it_failed(line: HostServer) -> None:
    answered(line, 4, Ok())
    assert received(line, RUNNING, SaveStatus()) == (4, "failed")
    assert line.saved is not None and "has died" in line.saved.facts.why
    assert received(line, SaveStatus()) == (4, "failed")


def test_a_successor_of_a_server_that_was_saving_in_the_mode_before_means_that_it_failed(line: HostServer) -> None:
    line._on_position(JobPosition(saved=SaveStatus(1, 36, "running")))
    line._on_position(JobPosition(saved=SaveStatus()))
    assert line.saved is not None and (line.saved.number, line.saved.state) == (36, "failed")


def test_a_successor_after_the_end_changes_nothing(line: HostServer) -> None:
    answered(line, 4, Ok())
    assert received(line, RUNNING, DONE, SaveStatus()) == (4, "done")


def test_a_save_that_was_refused_leaves_the_one_before_in_flight(line: HostServer) -> None:
    answered(line, 4, Ok())
    received(line, RUNNING)
    answered(line, 6, Refused(why="checkpoint 4 is still being saved"))
    assert line.saved == SaveStatus(1, 6, "failed", SaveFacts(why="checkpoint 4 is still being saved"))
    assert received(line, SaveStatus()) == (4, "failed")


def test_a_server_that_cannot_be_asked_is_a_failure(line: HostServer) -> None:
    answered(line, 4, ServerLost("server 0 does not answer"))
    assert line.saved == SaveStatus(1, 4, "failed", SaveFacts(why="server 0 does not answer"))


def test_a_save_may_be_of_a_last_checkpoint_and_have_no_number(line: HostServer) -> None:
    answered(line, 4, Ok())
    assert received(line, RUNNING, SaveStatus(1, 0, "running")) == (4, "running")


@pytest.mark.parametrize(
    ("saved", "has_read"),
    [
        (None, False),
        (SaveStatus(1, 3, "done"), False),
        (RUNNING, False),
        (SaveStatus(1, 4, "running", SaveFacts(read=True)), True),
        (SaveStatus(1, 4, "part"), True),
        (DONE, True),
        (SaveStatus(1, 4, "failed", SaveFacts(why="it died")), True),
    ],
)
def test_rows_were_read_or_never_will_be(line: HostServer, saved: SaveStatus | None, has_read: bool) -> None:
    line.saved = saved
    assert line.has_read(4) is has_read


def test_a_save_that_failed_stays_failed_whatever_older_reports_come_after_it(line: HostServer) -> None:
    """The server goes on to report the last save that it knows of, with each heartbeat."""
    line._client.send = lambda *_, **__: Future()  # type: ignore[method-assign]
    received(line, SaveStatus(1, 16, "done", SaveFacts(n_bytes=1)))
    line.save(a_save(26), b"")
    answered(line, 26, Refused("this save is of allreduce mode: the job switched meanwhile"))
    assert received(line, SaveStatus(1, 16, "done", SaveFacts(n_bytes=1))) == (26, "failed")
    assert received(line, SaveStatus(1, 30, "done", SaveFacts(n_bytes=1))) == (30, "done")


def test_a_server_is_ready_when_its_process_lives_and_answered_just_now(
    line: HostServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not line.is_ready() and line.why_not_ready() == "server 0 of this host has not answered yet"
    assert line.why_not_started() == ""
    (tmp_path / "ps-0.failed").write_text("no room")
    assert line.why_not_started() == "no room" and line.why_not_ready().endswith("; its last lines: no room")
    (tmp_path / "ps-0.failed").unlink()
    line._on_position(JobPosition(warming=True))
    assert not line.is_ready(), "no process has said that it serves"
    (tmp_path / "ps-0.address").write_text(json.dumps({"pid": os.getpid(), "control": 1, "pull": 2}))
    assert line.is_ready() and not line.is_ready(to_enter=True)
    assert line.why_not_ready() == "" and "still imports" in line.why_not_ready(to_enter=True)
    line._on_position(JobPosition())
    assert line.is_ready(to_enter=True)
    later_s = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert not line.is_ready() and "has not answered for 60 s" in line.why_not_ready()


class Requests:
    """What a host leader sends, and the answers still to come."""

    def __init__(self, line: HostServer) -> None:
        self.sent: list[Future[Any]] = []
        line._client.send = self.send  # type: ignore[method-assign]

    def send(self, *_: Any, **__: Any) -> Future[Any]:
        self.sent.append(Future())
        return self.sent[-1]


def test_a_server_that_was_started_again_is_given_the_claim_again(line: HostServer) -> None:
    requests = Requests(line)
    line.hold(DelegateClaim(Claim(1, "job", "00000000"), SaveSettings("/place", {}, Config())))
    line._on_position(JobPosition(server=11))
    requests.sent[0].set_result(Reply(Ok(), []))
    line._on_position(JobPosition(server=11))
    line._on_position(JobPosition(server=11))
    assert len(requests.sent) == 1
    line._on_position(JobPosition(server=12))
    line._on_position(JobPosition(server=12))
    assert len(requests.sent) == 2, "it is under way"
    requests.sent[1].set_result(Reply(Ok(), []))
    line._on_position(JobPosition(server=12))
    line._on_position(JobPosition(server=12))
    assert len(requests.sent) == 2


def test_a_server_that_was_too_late_for_the_claim_is_given_it_when_it_answers(line: HostServer) -> None:
    requests = Requests(line)
    line.hold(DelegateClaim(Claim(1, "job", "00000000"), SaveSettings("/place", {}, Config())))
    requests.sent[0].set_exception(ServerLost("server 0 did not answer Hold"))
    line._on_position(JobPosition(server=11))
    assert len(requests.sent) == 2


def test_a_claim_that_a_server_refused_is_not_held_and_is_given_to_it_again_after_a_while(
    line: HostServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests, now_s = Requests(line), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    line.hold(DelegateClaim(Claim(1, "job", "00000000"), SaveSettings("/place", {}, Config())))
    requests.sent[0].set_result(Reply(Refused("no such field"), []))
    for _ in range(3):
        line._on_position(JobPosition(server=11))
    assert len(requests.sent) == 1, "not with each heartbeat"
    now_s += 6.0
    line._on_position(JobPosition(server=11))
    requests.sent[1].set_result(Reply(Refused("no such field"), []))
    line._on_position(JobPosition(server=11))
    assert len(requests.sent) == 2
    now_s += 6.0
    line._on_position(JobPosition(server=11))
    requests.sent[2].set_result(Reply(Ok(), []))
    now_s += 60.0
    for _ in range(2):
        line._on_position(JobPosition(server=11))
    assert len(requests.sent) == 3, "it is held"
    assert [record.message.partition(": ")[2] for record in caplog.records] == ["no such field"], "once"


def test_a_folder_that_was_replaced_is_found_out(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    opened = os.open(folder, os.O_RDONLY)
    try:
        assert launch.folder_lost(folder, opened) == ""
        folder.rename(tmp_path / "elsewhere")
        assert "was removed" in launch.folder_lost(folder, opened)
        folder.mkdir()
        assert "was replaced by another folder" in launch.folder_lost(folder, opened)
    finally:
        os.close(opened)
