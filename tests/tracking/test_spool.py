"""A spool whose disk is full, that cannot be written, or that is removed: nothing is lost without a word."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gba_hvd.callbacks import Event
from gba_hvd.errors import BadInput
from gba_hvd.tracking import MLflowCallback, spool
from gba_hvd.tracking.records import LogBatch
from gba_hvd.tracking.sender import LOST_EVENT, Sender
from gba_hvd.tracking.spool import (
    SpoolStatus,
    SpoolWriter,
    all_records,
    read_status,
    remove,
    room_path,
    status_path,
    unsent,
    write_status,
)
from gba_hvd.tracking.spool_delivery import SpoolDelivery
from tests.tracking.conftest import job, step

JOB = {"kind": "job", "chief": True}
END = {"kind": "end", "status": "FINISHED", "reason": "", "ms": 5}


class Disk:
    """Has `room` for so many bytes, of which the files of the folder take theirs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.room = folder, 1 << 30
        self._write = os.write
        monkeypatch.setattr(spool.os, "write", self.write)

    def write(self, fd: int, data: bytes) -> int:
        left = self.room - sum(file.stat().st_size for file in self.folder.iterdir())
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(fd, data[:left])

    def fill(self, but: int = 0) -> None:
        self.room = sum(file.stat().st_size for file in self.folder.iterdir()) + but


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "job.jsonl"


@pytest.fixture
def disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    path.parent.mkdir()
    return Disk(path.parent, monkeypatch)


def point(k: int) -> dict[str, Any]:
    return {"kind": "metrics", "step": k, "ms": k, "values": {"train/loss": 0.5}}


def steps(path: Path) -> list[int]:
    return [record["step"] for record in all_records(path) if record["kind"] == "metrics"]


@pytest.mark.parametrize("torn", [0, 1, 30])
def test_what_a_full_disk_does_not_take_is_written_once_there_is_room(path: Path, disk: Disk, torn: int):
    writer = SpoolWriter(path)
    writer.append(point(1))
    for k in (2, 3):
        disk.fill(but=torn if k == 2 else 1)
        writer.append(point(k))
        assert (writer.lost, writer.obstacle) == (0, "[Errno 28] No space left on device")
    disk.room = 1 << 30
    writer.append(point(4))
    writer.close()
    assert (steps(path), writer.lost, writer.obstacle) == ([1, 2, 3, 4], 0, None)
    assert not [record for record in all_records(path) if record["kind"] == "broken"]


def test_the_end_of_a_job_has_room_on_a_disk_that_stays_full(path: Path, disk: Disk):
    writer = SpoolWriter(path, reserves=True)
    writer.append(JOB)
    disk.fill()
    for k in range(1, 31):
        writer.append(point(k))
    assert steps(path) == [] and writer.obstacle
    writer.append(END)
    writer.close()
    assert (steps(path), writer.lost) == (list(range(1, 31)), 0)
    assert list(all_records(path))[-1] == END and not room_path(path).exists()


def test_where_too_much_waits_the_oldest_points_are_lost_and_the_end_has_their_number(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(spool, "_WAITING_BYTES", 1000)
    writer = SpoolWriter(path, reserves=True)
    writer.append(JOB)
    disk.fill()
    writer.append({"kind": "event", "event": "switch"})
    for k in range(1, 51):
        writer.append(point(k))
    lost = writer.lost
    writer.append(END)
    writer.close()
    assert 0 < lost == 50 - len(steps(path)) and steps(path)[-1] == 50
    event, end = (next(one for one in all_records(path) if one["kind"] == kind) for kind in ("event", "end"))
    assert event["event"] == "switch"
    assert (end["lost"], end["why_lost"]) == (lost, "[Errno 28] No space left on device")


def test_what_the_room_of_the_end_is_too_small_for_is_lost_and_counted(path: Path, disk: Disk):
    writer = SpoolWriter(path, reserves=True)
    writer.append(JOB)
    disk.fill(but=100)
    writer.append({"kind": "event", "message": "x" * 40_000})
    writer.append(END)
    writer.close()
    assert [record["kind"] for record in all_records(path)] == ["job", "blank", "end"]
    assert list(all_records(path))[-1]["lost"] == writer.lost == 1


def test_a_status_takes_the_place_of_the_one_before_on_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch):
    SpoolWriter(path, reserves=True).close()
    assert status_path(path).exists()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spool.os, "replace", refuse)
    for status in (SpoolStatus(problem="x" * 400, sent=7), SpoolStatus(offset=9, done=True)):
        write_status(path, status)
        assert read_status(path) == status
    assert not [file for file in path.parent.iterdir() if file.suffix == ".new"]
    remove(path)
    assert not path.parent.exists()


def test_a_removed_spool_is_written_again_with_all_of_its_records(path: Path):
    writer = SpoolWriter(path, reserves=True)
    for record in (JOB, point(1)):
        writer.append(record)
    assert not writer.put_back()
    shutil.rmtree(path.parent)
    writer.append(point(2))
    assert writer.put_back() and not writer.put_back()
    writer.append(END)
    writer.close()
    assert list(all_records(path)) == [JOB, point(1), point(2), END]


def test_a_spool_that_cannot_be_made_again_is_one_later(path: Path):
    writer = SpoolWriter(path)
    writer.append(JOB)
    shutil.rmtree(path.parent)
    path.parent.touch()
    assert not writer.put_back() and writer.obstacle
    writer.append(point(1))
    path.parent.unlink()
    assert writer.put_back()
    assert list(all_records(path)) == [JOB, point(1)]


class Run:
    """Stands for `JobRun`."""

    run_id, experiment_id, named, continues = "r", "1", "job", None

    def __init__(self) -> None:
        self.events: list[Any] = []

    def send(self, batch: LogBatch) -> list[str]:
        return []

    def claim(self, stamp: str) -> None: ...

    def may_report(self) -> bool:
        return False

    def put_events(self, events: list[Any]) -> list[Any]:
        self.events = events
        return events


@pytest.mark.parametrize("chief", [True, False])
def test_what_was_lost_is_in_the_status_and_in_the_run(path: Path, chief: bool, monkeypatch: pytest.MonkeyPatch):
    writer = SpoolWriter(path)
    about = {"job_id": "j", "rank": 0, "size": 1, "host": "h", "leads_host": True, "stamp": "1:h:1", "ms": 1}
    writer.append({"kind": "job", "chief": chief, "tracking_uri": None, **about})
    writer.append(END | {"lost": 3, "why_lost": "the disk is full"})
    writer.close()
    sender, run = Sender(path), Run()
    monkeypatch.setattr(sender, "_run_now", lambda: run)
    sender.turn(0.0)
    status = read_status(path)
    assert (status.done, status.lost) == (True, 3)
    assert [(one["event"], one["level"], one["data"]["lost"]) for one in run.events] == chief * [
        (LOST_EVENT, "warning", 3)
    ]
    assert all("3 records were lost" in one["message"] for one in run.events)


@pytest.fixture
def callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MLflowCallback]:
    """Without a sender."""
    monkeypatch.setattr(SpoolDelivery, "_start_sender", lambda self: None)
    monkeypatch.setattr(SpoolDelivery, "wait", lambda self, has_finished, is_chief: None)

    def make(spool_dir: Path | str = tmp_path / "spool", **settings: Any) -> MLflowCallback:
        return MLflowCallback(spool_dir=spool_dir, log_every_steps=1, **settings)

    return make


@pytest.mark.parametrize("at", [(True, True), (False, True)])
def test_a_folder_that_cannot_be_written_is_refused_with_its_name_and_the_remedy(callback: Any, at: tuple[bool, bool]):
    with pytest.raises(BadInput) as refused:
        callback("/proc/nowhere").on_start(*at)
    assert str(refused.value).startswith("MLflowCallback cannot write its records to /proc/nowhere: No such file")
    assert "GBA_HVD_SPOOL_DIR, or MLflowCallback(spool_dir=)" in str(refused.value)


@pytest.mark.parametrize(("settings", "leads"), [({}, False), ({"system_metrics": False}, True)])
def test_a_worker_without_records_of_its_own_needs_no_folder(
    callback: Any, settings: Mapping[str, Any], leads: bool
) -> None:
    callback("/proc/nowhere", **settings).on_start(False, leads)


def test_a_folder_that_can_be_written_has_nothing_after_the_look(callback: Any, tmp_path: Path):
    callback().on_start(True, True)
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_new_chief_without_a_folder_trains_and_says_what_is_lost(callback: Any, capsys: pytest.CaptureFixture[str]):
    """Where the world forms again, no worker is refused."""
    one = callback("/proc/nowhere")
    one.on_job(job("no-folder"))
    one.on_step(step(1))
    one._delivery.look(is_chief=True)
    assert "records wait in memory: [Errno 2] No such file or directory: '/proc/nowhere'" in capsys.readouterr().err
    assert "nothing is lost so far" in one.problem
    one.on_end("FINISHED", None)
    reported = capsys.readouterr().err
    assert "records are lost: [Errno 2]" in reported and "kept" not in reported
    assert "what MLflow did not get is lost: /proc/nowhere/" in reported


def test_a_full_disk_is_reported_as_what_it_is(
    callback: Any, disk: Disk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(spool, "_WAITING_BYTES", 2000)
    one = callback()
    one.on_job(job("full"))
    disk.fill()
    one.on_step(step(1))
    one._delivery.look(is_chief=True)
    assert "records wait in memory: [Errno 28] No space left on device" in capsys.readouterr().err
    for k in range(2, 40):
        one.on_step(step(k))
    one._delivery.look(is_chief=True)
    assert "records are lost: [Errno 28] No space left on device" in capsys.readouterr().err
    one.on_end("FINISHED", None)
    assert "records are lost: [Errno 28]" in capsys.readouterr().err
    assert [record["kind"] for record in all_records(one.spool)][-1] == "end"


def test_a_spool_removed_under_the_job_is_complete_at_its_end(callback: Any, capsys: pytest.CaptureFixture[str]):
    one = callback()
    one.on_job(job("removed"))
    one.on_step(step(1))
    shutil.rmtree(one.spool.parent)
    one.on_step(step(2))
    one.on_event(Event("finished", 2, "finished"))
    one.on_end("FINISHED", None)
    reported = capsys.readouterr().err
    assert f"{one.spool} was removed: it is written again, with all of its records" in reported
    assert f"they are kept in {one.spool}" in reported and unsent(one.spool)
    assert (steps(one.spool)[0], list(all_records(one.spool))[-1]["kind"]) == (1, "end")


def test_a_spool_removed_at_the_very_end_is_not_said_to_be_kept(
    callback: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    one = callback()
    one.on_job(job("removed-late"))
    monkeypatch.setattr(one._delivery, "wait", lambda has_finished, is_chief: shutil.rmtree(one.spool.parent))
    one.on_end("FINISHED", None)
    reported = capsys.readouterr().err
    assert f"what MLflow did not get is lost: {one.spool} is not there: it was removed" in reported
    assert "kept" not in reported
