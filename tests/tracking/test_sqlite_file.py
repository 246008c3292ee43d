"""The SQLite file of MLflow: a killed maker leaves none, a reader changes none, and one that is broken is said so."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools import cli

from gba_hvd.errors import BadInput
from gba_hvd.serving.logged_model import version_of_alias
from gba_hvd.tracking import sqlite_file
from gba_hvd.tracking.find_run import read
from gba_hvd.tracking.mlflow_run import RunNotThere, open_run, resolved_uri
from gba_hvd.tracking.sender import Sender
from gba_hvd.tracking.spool import SpoolWriter, waiting

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's use of SQLAlchemy

JOB = {"kind": "job", "job_id": "ks", "rank": 0, "size": 1, "host": "h", "chief": True, "leads_host": True}
JOB |= {"stamp": "1:h:1", "ms": 1, "experiment": "e", "run_name": "ctr", "run_id": None, "user": "u", "source": "s"}


class Killed(Exception):
    pass


def fill(uri: str) -> None:
    Path(uri.removeprefix("sqlite:///")).write_text("all tables")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Not there yet, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mlflow.db"


def execute(file: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        for statement in statements:
            db.execute(statement)


def uri(file: Path) -> str:
    return f"sqlite:///{file}"


def a_spool(file: Path, **changes: Any) -> Path:
    spool = file.parent / "gba-hvd-spool" / "ks.jsonl"
    writer = SpoolWriter(spool)
    writer.append({**JOB, "tracking_uri": uri(file), **changes})
    writer.close()
    return spool


def left_half_made(file: Path) -> None:
    """As a kill leaves it: a table is there, and the version does not say so."""
    execute(file, "CREATE TABLE latest_metrics (key TEXT)")
    os.utime(file, (1, 1))


def test_a_maker_that_dies_leaves_no_database_and_the_next_one_begins_anew(file: Path):
    def die(uri: str) -> None:
        half = Path(uri.removeprefix("sqlite:///"))
        assert half.parent == file.parent and not list(file.parent.iterdir())
        half.write_text("half")
        half.with_name(f"{half.name}-journal").write_text("of that half")
        raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            sqlite_file.make(file, die)
        assert not file.exists()
    file.with_name("mlflow.db-journal").write_text("of a database that was removed")
    sqlite_file.make(file, fill)
    assert [one.name for one in file.parent.iterdir()] == ["mlflow.db"]
    assert file.read_text() == "all tables"


def test_a_maker_that_fails_leaves_nothing_and_an_empty_file_is_replaced(file: Path):
    def fail(uri: str) -> None:
        fill(uri)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        sqlite_file.make(file, fail)
    assert not list(file.parent.iterdir())
    file.touch()
    assert sqlite_file.is_missing(file)
    sqlite_file.make(file, fill)
    assert file.read_text() == "all tables" and not sqlite_file.is_missing(file)


def test_a_database_that_appears_meanwhile_stays(file: Path):
    def late(uri: str) -> None:
        fill(uri)
        file.write_text("of another")

    sqlite_file.make(file, late)
    assert [one.name for one in file.parent.iterdir()] == ["mlflow.db"]
    assert file.read_text() == "of another"


@pytest.mark.slow
@pytest.mark.timeout(1200)  # as those of test_mlflow
def test_the_first_run_makes_the_database_whole(file: Path):
    made = open_run(uri(file), JOB, lambda: True)
    assert open_run(uri(file), JOB, lambda: False).run_id == made.run_id
    assert [one.name for one in file.parent.iterdir()] == ["mlflow.db"]
    assert read("ks", uri(file)).job_id == "ks"


@pytest.mark.slow
def test_who_may_make_no_database_does_not_fill_an_empty_file_either(file: Path):
    file.touch()
    with pytest.raises(RunNotThere, match=r"mlflow\.db is not there"):
        open_run(uri(file), JOB, lambda: False)
    assert file.read_bytes() == b""


def test_a_half_made_database_stops_the_sender_with_what_to_do(file: Path):
    left_half_made(file)
    sender = Sender(a_spool(file))
    sender.turn(0.0)
    assert sender.status.stopped
    problem = sender.status.problem or ""
    assert "table latest_metrics already exists" in problem
    assert "and holds no runs: move it away, unless another process (mlflow ui) is making it now" in problem


@pytest.mark.slow
def test_one_that_changed_just_now_may_be_in_the_making_so_the_sender_tries_again(file: Path):
    left_half_made(file)
    os.utime(file)
    sender = Sender(a_spool(file))
    sender.turn(0.0)
    assert not sender.status.stopped and "left half made" in (sender.status.problem or "")


@pytest.mark.slow
def test_reading_neither_upgrades_a_half_made_database_nor_fails_without_the_spool(
    file: Path, capsys: pytest.CaptureFixture[str]
):
    left_half_made(file)
    before = file.read_bytes()
    spool = a_spool(file)
    for command in (["report", "ks"], ["report"], ["advise", "ks"]):
        assert cli.main([*command, "--tracking-uri", uri(file)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"gba-hvd: {file} was left half made" in line and "holds no runs: move it away" in line
        assert f"`gba-hvd report {spool.relative_to(file.parent)}` reads them there" in line
    assert file.read_bytes() == before


def test_a_database_with_runs_is_not_to_be_moved_away(file: Path):
    execute(file, "CREATE TABLE runs (run_uuid TEXT)", "INSERT INTO runs VALUES ('a')")

    def fail(text: str) -> None:
        raise RuntimeError(text)

    with pytest.raises(BadInput, match=r"trace_info already exists\)\. It holds 1 runs: keep a copy") as refused:
        sqlite_file.opened(file, lambda: fail("table trace_info already exists\n[SQL: ..."))
    assert "move it away" not in str(refused.value)
    with pytest.raises(RuntimeError, match="locked"):
        sqlite_file.opened(file, lambda: fail("database is locked"))


def test_an_empty_file_has_no_runs_and_stays_empty(file: Path):
    file.touch()
    with pytest.raises(BadInput, match="it holds no runs"):
        read("ks", uri(file))
    assert file.read_bytes() == b""


def test_a_model_of_a_database_that_is_not_there_makes_none(file: Path):
    with pytest.raises(BadInput, match="has no runs and no models"):
        version_of_alias("models:/ctr@champion", uri(file))
    assert list(file.parent.iterdir()) == []


def test_a_locked_database_is_said_soon_and_where_records_wait(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sqlite_file, "BUSY_S", 0.01)
    execute(file, "CREATE TABLE runs (run_uuid TEXT)")
    a_spool(file)
    with contextlib.closing(sqlite3.connect(file)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(BadInput, match=r"was locked by another process for .* gba-hvd-spool/ks\.jsonl"):
            read("ks", uri(file))


def test_what_is_no_database_is_one_line(file: Path):
    file.write_text("notes " * 1000)
    with pytest.raises(BadInput, match="cannot be read as a SQLite database"):
        read("ks", uri(file))


def test_a_run_that_is_not_there_yet_is_named_with_its_spool(file: Path):
    spool = a_spool(file).relative_to(file.parent)
    for name in ("ks", "ctr"):
        with pytest.raises(
            BadInput, match=f"called '{name}'.* are in {spool}: .*mlflow send gba-hvd-spool` sends them"
        ):
            read(name, uri(file))
    with pytest.raises(BadInput) as refused:
        read("another", uri(file))
    assert "spool" not in str(refused.value)
    assert waiting(spool.parent, None) == [spool] and waiting(file.parent / "nowhere", None) == []


def test_options_of_a_uri_are_no_part_of_the_files_name(file: Path):
    assert sqlite_file.file_of("sqlite:///mlflow.db?timeout=3") == Path("mlflow.db")
    assert resolved_uri("sqlite:///mlflow.db?timeout=3") == f"{uri(file)}?timeout=3"
