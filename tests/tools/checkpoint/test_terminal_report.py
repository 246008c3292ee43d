"""Tables in a narrow terminal."""

from __future__ import annotations

import sys

import pytest
from gba_hvd_tools.checkpoint.terminal_report import print_table


def test_no_word_is_cut_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    job = "49b3f6aa-bbbb-cccc-dddd-123456789abc"
    print_table(["job", "step"], [[job, "1,234"]], left=[0])
    lines = capsys.readouterr().out.splitlines()
    assert "".join(line.replace("1,234", "").strip() for line in lines[3:]) == job
