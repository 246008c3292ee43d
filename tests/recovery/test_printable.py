"""Names from elsewhere write no lines of their own, and move no cursor."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from gba_hvd_tools.checkpoint import terminal_report
from gba_hvd_tools.cli import main
from gba_hvd_tools.commands.data_output import print_summary

from gba_hvd.callbacks import Event
from gba_hvd.elastic.log_lines import FORMAT, _Line
from gba_hvd.tracking.report.page import page
from gba_hvd.tracking.run_history import RunHistory
from recovery.printable import one_line, printable


def test_control_characters_are_shown() -> None:
    assert printable("a\x1b]0;x\x07\x9b2J\x7f\u202eb\tc") == "a\\x1b]0;x\\x07\\x9b2J\\x7f\\u202eb\tc"
    assert printable("two\nlines") == "two\n  lines"
    assert one_line("two\nlines é") == "two\\nlines é"


def test_a_log_line_cannot_be_forged() -> None:
    record = logging.LogRecord("gba_hvd", logging.INFO, "x", 1, "table %r %s", ("t", "a\n2026 ERROR b\x1b[2J"), None)
    line = _Line(FORMAT).format(record)
    assert line.endswith("a\n  2026 ERROR b\\x1b[2J")


def test_an_event_has_neither_secrets_nor_control_characters() -> None:
    assert Event("started", 0, "password=abc \x1b[2J").message == "password=*** \\x1b[2J"


def test_a_foreign_checkpoint_is_shown_on_lines_of_its_own(capsys: object) -> None:
    about = {"job": "x\x1b[2J\n  mode forged"}
    shown = dict.fromkeys(("step", "samples", "n_bytes", "chain_bytes", "state_bytes", "n_shards", "age_s"), 0)
    terminal_report.print_one(
        {
            **shown,
            "name": "n",
            "kind": "full",
            "blobs": "-",
            "chain": [],
            "about": about,
            "position": None,
            "tables": [],
        }
    )
    out = capsys.readouterr().out  # type: ignore[attr-defined]
    assert "\x1b" not in out and "  job       x\\x1b[2J\\n  mode forged\n" in out


def test_commands_show_control_characters_of_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "x\x1b[2J"
    (tmp_path / f"gba-hvd-{evil}" / "file").mkdir(parents=True)
    assert main(["clean", "--dir", str(tmp_path / f"gba-hvd-{evil}")]) == 0
    (tmp_path / evil).mkdir()
    assert main(["checkpoint", "ls", str(tmp_path / evil)]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / evil)]) == 0
    assert main(["checkpoint", "ls", str(tmp_path / f"{evil}-gone")]) == 1
    field = {"name": evil, "encoding": {"kind": evil}, "rows": 1, "id_0": {}, "values": {}, "multi_valued": False}
    bad = {"count": 1, "rows_read": 1, "first": [evil]}
    print_summary(tmp_path, {"splits": {}, "fields": [field], "numeric": [], "input": {"bad_rows": bad}})
    deleted = {"name": evil, "step": 1}
    terminal_report.print_rollback({"deleted": [deleted], "newest": None, "to": evil, "step": 1})
    terminal_report.print_list(evil, [])
    terminal_report.print_list("u", [{"name": "n", "ok": False, "why": evil}])
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert said.err.startswith("gba-hvd: there is no folder") and said.out.count("x\\x1b[2J") >= 8


def test_the_report_has_no_control_characters() -> None:
    text = page(RunHistory("t", "here", "j", "FAILED", "a\x1b[2J<b>", 0, None))
    assert "a\\x1b[2J&lt;b&gt;" in text and "\x1b" not in text and "default-src 'none'" in text
