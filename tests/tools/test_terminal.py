"""Tables in a narrow terminal; names from elsewhere, which no command carries out."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from gba_hvd_tools.cli import main
from gba_hvd_tools.commands import job, model
from gba_hvd_tools.plan import measured_costs
from gba_hvd_tools.terminal import print_table

from gba_hvd.serving import log_saved, save
from gba_hvd.tracking import sender_process
from recovery.restore import open_checkpoint
from recovery.schedule.adaptive import JobMeasurements


def test_no_word_is_cut_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    job = "49b3f6aa-bbbb-cccc-dddd-123456789abc"
    print_table(["job", "step"], [[job, "1,234"]], left=[0])
    lines = capsys.readouterr().out.splitlines()
    assert "".join(line.replace("1,234", "").strip() for line in lines[3:]) == job


EVIL = "x\x1b[2J"


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    return said.out + said.err


def test_an_exported_model_is_shown_without_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    best = SimpleNamespace(metric=EVIL, value=0.5, step=3, words=f"{EVIL} 0.5", unsaved=None, ahead="")
    opened = SimpleNamespace(name=EVIL, step=3, tables={}, best=best)
    saved = SimpleNamespace(url=EVIL, version=1, n_rows=1, n_bytes=1, new_shards=1, new_bytes=1)
    monkeypatch.setattr(open_checkpoint, "open_checkpoint", lambda *args: opened)
    monkeypatch.setattr(save, "export_model", lambda *args, **settings: saved)
    assert main(["model", "export", str(tmp_path), EVIL, "--build", "a:b"]) == 0
    assert shown(capsys).count("x\\x1b[2J") == 3


def test_a_logged_model_is_shown_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged = SimpleNamespace(run_id=EVIL, version=None, model_uri=EVIL, step=None, alias_move=EVIL)
    monkeypatch.setattr(model, "_opened", lambda *args: (None, SimpleNamespace(version=1, n_bytes=1)))
    monkeypatch.setattr(model, "_mlflow_in_one_line", nullcontext)
    monkeypatch.setattr(log_saved, "log_saved_model", lambda *args, **settings: logged)
    assert main(["model", "log", "u", "--name", "n", "--alias", EVIL]) == 0
    assert shown(capsys).count("x\\x1b[2J") == 4


@pytest.mark.parametrize("words", [["model", "gc"], ["model", "rollback"], ["checkpoint", "rollback"]])
def test_a_location_that_has_nothing_is_named_without_control_characters(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / EVIL
    folder.mkdir()
    assert main([*words, str(folder), *["3"] * (words[1] == "rollback")]) == 1
    assert "x\\x1b[2J" in shown(capsys)


def test_jobs_are_shown_without_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / EVIL
    folder.mkdir()
    assert main(["ps", "--dir", str(folder)]) == 0
    found = {"name": EVIL, "job": EVIL, "mode": EVIL, "dir": EVIL}
    monkeypatch.setattr(job, "running_jobs", lambda bases: [found])
    assert main(["ps"]) == 0
    assert shown(capsys).count("x\\x1b[2J") == 5


def test_the_status_of_a_job_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    table = {"size": 1, "capacity": 1, "evicted": 0, "no_room": 0, "missed_share": 0.0}
    report = {"job": EVIL, "name": f"[red]{EVIL}", "mode": "gba", "command": f"{EVIL}\nmode  auto", "started_unix_s": 0}
    job.print_report({**report, "vocabulary": {EVIL: table}, "last_decision": EVIL, "container": EVIL})
    text = shown(capsys)
    assert text.count("x\\x1b[2J") == 6 and "([red]x" in text and "\nmode  auto" not in text


def test_a_plan_of_a_foreign_checkpoint_has_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured_costs.MeasuredCosts(EVIL, 10**9, 4, {"save_s": 10.0}, {"mtbf_h": 10.0}, JobMeasurements(), {})
    monkeypatch.setattr(measured_costs, "of_arguments", lambda args: found)
    assert main(["plan", "--url", "u"]) == 0
    assert "from x\\x1b[2J: 4 servers" in shown(capsys)


def test_what_was_sent_to_mlflow_is_shown_without_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = SimpleNamespace(done=False, problem=EVIL)
    (tmp_path / "spool.jsonl").touch()
    monkeypatch.setattr(sender_process, "prepare_process", lambda: None)
    monkeypatch.setattr(sender_process, "send_left_behind", lambda *args: sent)
    assert main(["mlflow", "send", str(tmp_path)]) == 1
    assert "not sent, kept: x\\x1b[2J" in shown(capsys)


def test_what_a_job_could_not_write_is_named_where_the_rest_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = SimpleNamespace(done=True, dropped=0, lost=31, run_id="r", tracking_uri="http://m")
    (tmp_path / "spool.jsonl").touch()
    monkeypatch.setattr(sender_process, "prepare_process", lambda: None)
    monkeypatch.setattr(sender_process, "send_left_behind", lambda *args: sent)
    assert main(["mlflow", "send", str(tmp_path)]) == 0
    assert "sent to run r at http://m, 31 lost before: its job could not write them" in shown(capsys)
