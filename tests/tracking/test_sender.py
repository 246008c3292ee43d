"""The sender against an MLflow that fails on purpose: nothing is lost, nothing loops, nothing is sent out of order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd.tracking import mlflow_run
from gba_hvd.tracking import sender as sender_module
from gba_hvd.tracking.delivery import first_line
from gba_hvd.tracking.records import LogBatch, metrics_records, pack
from gba_hvd.tracking.run_history import RunHistory
from gba_hvd.tracking.sender import Sender
from gba_hvd.tracking.sender_process import locked, send_left_behind
from gba_hvd.tracking.spool import SpoolWriter, all_records, read_lines, read_status

JOB = {"kind": "job", "job_id": "j", "rank": 0, "size": 1, "host": "h", "chief": True, "leads_host": True}
JOB |= {"stamp": "1:h:1", "ms": 1, "experiment": "e", "tracking_uri": "http://nowhere", "run_name": None}
JOB |= {"run_id": None, "system_every_s": 0, "user": "u", "source": "s"}
END = {"kind": "end", "status": "FINISHED", "reason": ""}


class Refusal(Exception):
    error_code = "INVALID_PARAMETER_VALUE"


class FaultyRun:
    """Stands for `JobRun`: the next calls of `send` raise `faults`, the keys in `refuses` are never taken."""

    def __init__(self) -> None:
        self.run_id, self.experiment_id, self.named, self.continues = "r", "1", "job", None
        self.faults: list[Exception] = []
        self.refuses: set[str] = set()
        self.points: list[tuple[str, int]] = []
        self.calls: list[str] = []
        self.files: dict[str, str] = {}
        self.active: bool | None = True
        self.status: str | None = None
        self.summary: tuple[dict[str, float], int, int] | None = None
        self.unread = 0  # so many times its history cannot be read

    def send(self, batch: LogBatch) -> list[str]:
        self.calls.append("send")
        if self.faults:
            raise self.faults.pop(0)
        if self.refuses & {point.key for point in batch.points}:
            raise Refusal("bad name")
        self.points += [(point.key, point.step) for point in batch.points]
        return []

    def is_active(self) -> bool | None:
        return self.active

    def claim(self, stamp: str) -> None:
        self.calls.append("claim")

    def may_report(self) -> bool:
        return True

    def put_text(self, path: str, text: str) -> None:
        if path == "bad.json":
            raise OSError("no such bucket")
        self.files[path] = text

    def put_events(self, events: list[Any]) -> list[Any]:
        if events:
            self.files["events.jsonl"] = json.dumps(events)
        return events

    def set_tags(self, tags: dict[str, str]) -> None:
        self.calls.append("tags")

    def history(self, wanted: Callable[[str], bool]) -> dict[str, Any]:
        return {}

    def finish(self, status: str, reason: str, job_id: str, ended_ms: int | None = None) -> None:
        self.status = status

    def story(self, wanted: Callable[[str], bool], events: list[Any]) -> RunHistory:
        self.unread -= 1
        if self.unread >= 0:
            raise ValueError("a history that cannot be read")
        return RunHistory("t", "s", "j", str(self.status), "", 1000, 3500, events=events)

    def put_summary(self, values: dict[str, float], step: int, ms: int) -> None:
        self.summary = (values, step, ms)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FaultyRun:
    run = FaultyRun()
    monkeypatch.setattr(mlflow_run, "open_run", lambda uri, job, may_create: run)
    return run


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "job.jsonl"


def write(spool: Path, *records: dict[str, Any]) -> None:
    writer = SpoolWriter(spool)
    for record in records:
        writer.append(record)
    assert writer.lost == 0
    writer.close()


def points(*steps: int, key: str = "loss") -> list[dict[str, Any]]:
    return [record for step in steps for record in metrics_records(step, step, {key: 0.5})]


def test_everything_is_delivered_in_order_and_the_run_is_ended_last(run: FaultyRun, spool: Path):
    write(spool, JOB, *points(1, 2), {"kind": "artifact", "path": "a.json", "text": "{}"}, *points(3), END)
    sender = Sender(spool)
    sender.turn(0.0)
    assert run.points == [("loss", 1), ("loss", 2), ("loss", 3)]
    assert (run.files, run.status) == ({"a.json": "{}"}, "FINISHED")
    assert run.summary == ({"seconds_of_training": 2.5, "seconds_of_launches": 2.5}, 0, 3500)
    assert read_status(spool).done


def test_a_summary_that_cannot_be_made_is_dropped_and_counted_and_the_run_ends(run: FaultyRun, spool: Path):
    run.unread = 3
    write(spool, JOB, *points(1), END)
    sender = Sender(spool)
    for now in (0.0, 100.0):
        sender.turn(now)
        assert not read_status(spool).done and "ValueError" in str(sender.status.problem)
    sender.turn(200.0)
    status = read_status(spool)
    assert (run.status, run.summary, status.done, status.dropped) == ("FINISHED", None, True, 1)


@pytest.mark.parametrize(("where", "n_faults"), [("put_report", 3), ("put_events", 2), ("put_report", 100)])
@pytest.mark.parametrize("orphaned", [False, True])
def test_a_report_is_tried_again_when_a_connection_breaks_and_missed_by_name(
    run: FaultyRun, spool: Path, monkeypatch: pytest.MonkeyPatch, where: str, n_faults: int, orphaned: bool
):
    monkeypatch.setattr(sender_module, "REPORT_PAUSE_S", 0.0)
    written: list[str] = []
    faults: list[Exception] = []

    def broken(call: Callable[..., Any]) -> Callable[..., Any]:
        def breaks(*about: Any) -> Any:
            if faults and run.status is not None and run.summary is not None:
                raise faults.pop()
            return call(*about)

        return breaks

    monkeypatch.setattr(run, "put_report", lambda story, text: written.append(text), raising=False)
    monkeypatch.setattr(run, "put_file", lambda path: None, raising=False)
    monkeypatch.setattr(run, where, broken(getattr(run, where)))
    faults += [ConnectionResetError(104, "reset by peer")] * n_faults
    write(spool, JOB, *points(1), *([] if orphaned else [END]))
    sender = Sender(spool)
    sender.orphaned = orphaned
    sender.turn(0.0)
    assert sender.status.done and run.status == ("FAILED" if orphaned else "FINISHED")
    assert sender.status.model_problem is None
    assert len(written) == (n_faults < 100) == (sender.status.report_problem is None)
    assert n_faults < 100 or "Errno 104" in str(sender.status.report_problem)


def test_of_what_a_database_says_the_line_with_the_reason_is_shown() -> None:
    autoflush = "(raised as a result of Query-invoked autoflush; consider using a session.no_autoflush block)"
    reason = "(sqlite3.OperationalError) attempt to write a readonly database"
    shown = first_line(RuntimeError(f"{autoflush}\n{reason}\n[SQL: INSERT INTO metrics]"))
    assert shown == f"RuntimeError: {reason}"
    assert first_line(RuntimeError(f"{reason}\n[SQL]")) == f"RuntimeError: {reason}"
    assert first_line(RuntimeError("refused\nsee above")) == "RuntimeError: refused"
    assert first_line(OSError()) == "OSError"


def test_a_server_in_trouble_is_left_alone_until_the_back_off_is_over(run: FaultyRun, spool: Path):
    run.faults = [ConnectionError("refused"), TimeoutError("slow")]
    write(spool, JOB, *points(1))
    sender = Sender(spool)
    sender.turn(0.0)
    assert sender.status.problem == "ConnectionError: refused"
    n_calls = len(run.calls)
    sender.turn(0.1)
    assert len(run.calls) == n_calls
    sender.turn(2.0)
    assert sender.status.problem == "TimeoutError: slow"
    sender.turn(10.0)
    assert (run.faults, run.points, sender.status.problem) == ([], [("loss", 1)], None)


def test_at_the_end_of_a_job_a_server_in_trouble_is_asked_more_often(run: FaultyRun, spool: Path):
    run.faults = [ConnectionError("refused")] * 6
    write(spool, JOB, *points(1))
    sender = Sender(spool)
    for turn in range(6):
        sender.turn(100.0 * turn)
    sender.turn(502.0)
    assert (run.faults, run.points) == ([], []), "asked every 30 s"
    write(spool, END)
    sender.look()
    sender.turn(502.0)
    assert (run.points, run.status) == ([("loss", 1)], "FINISHED")


def test_a_folder_that_is_removed_while_a_spool_is_made_there_is_made_again(
    spool: Path, monkeypatch: pytest.MonkeyPatch
):
    mkdir, removed = Path.mkdir, list[Path]()

    def lose_it_once(folder: Path, **more: Any) -> None:
        mkdir(folder, **more)
        if not removed:
            folder.rmdir()
            removed.append(folder)

    monkeypatch.setattr(Path, "mkdir", lose_it_once)
    write(spool, JOB)
    assert removed == [spool.parent] and list(all_records(spool)) == [JOB]


def test_a_refused_value_is_dropped_and_counted_and_its_neighbours_arrive(run: FaultyRun, spool: Path):
    run.refuses = {"bad"}
    write(spool, JOB, *points(1, 2), *points(3, key="bad"), *points(4), END)
    sender = Sender(spool)
    sender.turn(0.0)
    assert run.points == [("loss", 1), ("loss", 2), ("loss", 4)]
    assert (sender.status.dropped, sender.status.done) == (1, True)


def test_a_run_somebody_deleted_stops_the_sender_and_keeps_the_records(run: FaultyRun, spool: Path):
    run.refuses, run.active = {"loss"}, False
    write(spool, JOB, *points(1), END)
    sender = Sender(spool)
    sender.turn(0.0)
    assert sender.status.stopped
    assert "mlflow runs restore" in (sender.status.problem or "")
    assert sender.status.dropped == 0
    assert [record["kind"] for record in all_records(spool)] == ["job", "metrics", "end"]


def test_a_deleted_experiment_stops_the_sender_with_the_remedy(spool: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = SimpleNamespace(
        get_experiment_by_name=lambda name: SimpleNamespace(name=name, experiment_id="7", lifecycle_stage="deleted")
    )
    monkeypatch.setattr(mlflow_run, "MlflowClient", lambda tracking_uri: mlflow)
    write(spool, JOB, *points(1), END)
    sender = Sender(spool)
    sender.turn(0.0)
    assert sender.status.stopped and sender.status.dropped == 0
    assert "the experiment 'e' was deleted" in (sender.status.problem or "")
    assert "mlflow experiments restore --experiment-id 7" in (sender.status.problem or "")
    assert "MLFLOW_EXPERIMENT_NAME" in (sender.status.problem or "")
    assert [record["kind"] for record in all_records(spool)] == ["job", "metrics", "end"]


def test_an_artifact_store_in_trouble_holds_back_nothing_else(run: FaultyRun, spool: Path):
    write(spool, JOB, {"kind": "artifact", "path": "bad.json", "text": "{}"}, *points(1), END)
    sender = Sender(spool)
    for turn in range(5):
        sender.turn(turn * 100.0)
    assert run.points == [("loss", 1)]
    assert (sender.status.dropped, run.status) == (1, "FINISHED")


@pytest.mark.parametrize("dies_before", range(4))
def test_a_sender_that_dies_is_followed_by_one_that_repeats_at_most_a_batch(
    run: FaultyRun, spool: Path, dies_before: int, monkeypatch: pytest.MonkeyPatch
):
    """Dies after MLflow has taken a batch and before that is written down; MLflow keeps equal points once."""

    class Killed(BaseException):
        pass

    monkeypatch.setattr("gba_hvd.tracking.sender.pack", _one_by_one)
    write(spool, JOB, *points(1, 2, 3), END)
    sender = Sender(spool)
    set_status, written = sender._set, 0

    def set_or_die(**changes: Any) -> None:
        nonlocal written
        written += "offset" in changes
        if "offset" in changes and written > dies_before:
            raise Killed
        set_status(**changes)

    monkeypatch.setattr(sender, "_set", set_or_die)
    with pytest.raises(Killed):
        sender.turn(0.0)
    Sender(spool).turn(0.0)
    assert set(run.points) == {("loss", 1), ("loss", 2), ("loss", 3)}
    assert len(run.points) <= 4
    assert run.status == "FINISHED"


def _one_by_one(lines: list[Any]) -> Any:
    for line in lines:
        yield from pack([line])


def test_a_chief_that_vanished_leaves_a_failed_run(run: FaultyRun, spool: Path):
    write(spool, JOB, *points(1))
    sender = Sender(spool)
    sender.turn(0.0)
    assert run.status is None
    sender.orphaned = True
    sender.turn(1.0)
    assert (run.status, sender.status.done) == ("FAILED", True)


def test_a_worker_that_ends_while_it_writes_the_model_leaves_its_own_end(run: FaultyRun, spool: Path):
    write(spool, JOB, *points(1), END | {"model": True})
    sender = Sender(spool)
    sender.turn(0.0)
    assert (run.status, sender.status.done) == ("FINISHED", False)
    sender.orphaned = True
    sender.turn(1.0)
    assert (run.status, sender.status.done) == ("FINISHED", True)
    assert "the worker ended while it wrote it" in run.files["events.jsonl"]


def test_a_line_cut_off_by_a_kill_is_not_read_and_a_damaged_one_is_counted(run: FaultyRun, spool: Path):
    write(spool, JOB, *points(1))
    with spool.open("ab") as file:
        file.write(b'{"kind": "met\xff\n')
    write(spool, *points(2))
    with spool.open("ab") as file:
        file.write(b'{"kind": "metrics", "step": 3')
    sender = Sender(spool)
    sender.turn(0.0)
    assert run.points == [("loss", 1), ("loss", 2)]
    assert sender.status.dropped == 1


def test_a_spool_that_may_not_grow_counts_what_it_turns_away_but_takes_the_end(spool: Path):
    writer = SpoolWriter(spool, limit_bytes=300)
    for record in points(*range(100)):
        writer.append(record)
    writer.append(END)
    writer.close()
    kinds = [record["kind"] for record in all_records(spool)]
    assert kinds.count("metrics") + writer.lost == 100
    assert kinds[-1] == "end"
    assert "limit" in (writer.problem or "")


@pytest.mark.slow
def test_a_spool_larger_than_a_chunk_is_read_piece_by_piece(spool: Path):
    text = "x" * 300_000
    write(spool, {"kind": "artifact", "path": "p", "text": text}, *points(*range(10_000)))
    first = read_lines(spool, 0)
    assert first[0].record["text"] == text
    assert len(first) < 10_001
    assert sum(1 for _ in all_records(spool)) == 10_001


def test_two_senders_never_work_on_one_spool(spool: Path):
    write(spool, JOB)
    with locked(spool) as mine, locked(spool) as second:
        assert (mine, second) == (True, False)


@pytest.mark.parametrize("content", [b'{"event": "x", "step": 1}\n', b"hello\nworld\n", b"", b'{"kind": "job"'])
def test_a_file_that_is_no_spool_is_neither_sent_nor_removed(run: FaultyRun, tmp_path: Path, content: bytes):
    file = tmp_path / "theirs.jsonl"
    file.write_bytes(content)
    status = send_left_behind(file, timeout_s=60.0)
    assert (status.done, status.stopped) == (False, True)
    assert "no spool" in (status.problem or "")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.jsonl"]
    assert file.read_bytes() == content
    assert run.calls == []


def test_a_spool_left_behind_is_sent_and_removed(run: FaultyRun, spool: Path):
    write(spool, JOB, *points(1, 2), END)
    assert send_left_behind(spool, timeout_s=60.0).done
    assert (run.points, run.status) == ([("loss", 1), ("loss", 2)], "FINISHED")
    assert not spool.parent.exists()


def test_sending_what_was_left_behind_can_be_ended_before_any_batch(run: FaultyRun, spool: Path):
    def look() -> None:
        if run.points:
            raise KeyboardInterrupt

    run.points = []
    write(spool, JOB, *points(1), {"kind": "artifact", "path": "a.json", "text": "{}"}, END)
    with pytest.raises(KeyboardInterrupt):
        send_left_behind(spool, timeout_s=60.0, before_each=look)
    assert (run.points, run.files) == ([("loss", 1)], {})
    assert send_left_behind(spool, timeout_s=60.0).done
    assert (run.points, run.status) == ([("loss", 1)], "FINISHED")


def test_a_record_that_is_no_json_is_counted_and_training_goes_on(spool: Path):
    writer = SpoolWriter(spool)
    writer.append({"kind": "event", "data": {("a", "tuple"): 1}})
    writer.append(JOB)
    writer.close()
    assert writer.lost == 1
    assert "keys must be" in (writer.problem or "")
    assert list(all_records(spool)) == [JOB]
