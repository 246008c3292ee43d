"""How `gba-hvd` ends: in a sentence, in the right exit status, and with nothing of it left behind."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gba_hvd_tools import cli
from gba_hvd_tools.bench.harness.measure import RunFailed, check_writable
from gba_hvd_tools.signals import raise_if_ended

from gba_hvd.errors import BadInput

Command = Callable[[Callable[[], int]], None]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Let `gba-hvd do` run a function."""

    def use(run: Callable[[], int]) -> None:
        parser = argparse.ArgumentParser()
        parser.add_subparsers().add_parser("do").set_defaults(run=lambda args: run())
        monkeypatch.setattr(cli, "build_parser", lambda: parser)

    return use


def test_sigterm_ends_a_command_as_ctrl_c_does(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    cleaned_up = []

    def wait() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            cleaned_up.append(True)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    command(wait)
    assert cli.main(["do"]) == 130
    assert cleaned_up
    assert capsys.readouterr().err == "gba-hvd: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_sigterm_that_c_code_swallows_is_found_by_the_next_look(command: Command) -> None:
    def work() -> int:
        with contextlib.closing(sqlite3.connect(":memory:")) as db:
            db.set_trace_callback(lambda statement: os.kill(os.getpid(), signal.SIGTERM))
            db.execute("SELECT 1")
        went_on.append(True)
        raise_if_ended()
        return 0

    went_on = list[bool]()
    command(work)
    assert (cli.main(["do"]), went_on) == (130, [True])
    command(lambda: raise_if_ended() or 0)
    assert cli.main(["do"]) == 0


def test_what_a_person_can_mend_is_one_line(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise BadInput("no such thing")

    command(refuse)
    assert cli.main(["do"]) == 1
    assert capsys.readouterr().err == "gba-hvd: no such thing\n"


@pytest.mark.processes
def test_a_reader_that_has_had_enough_is_no_error(tmp_path: Path) -> None:
    program = """
import argparse, sys
from gba_hvd_tools import cli
def run(args):
    sys.stdin.readline()  # until the reader is gone
    print("x" * 100_000)
    return 0
parser = argparse.ArgumentParser()
parser.set_defaults(run=run)
cli.build_parser = lambda: parser
sys.exit(cli.main([]))
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.close()
    child.stdout = None
    _, said = child.communicate(b"\n", timeout=60)
    assert (child.returncode, said) == (1, b"")


def test_a_result_that_cannot_be_written_is_reported_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "result.json")
    with pytest.raises(RunFailed, match="is a folder"):
        check_writable(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match="cannot be written here"):
        check_writable(tmp_path / "file" / "result.json")


@pytest.mark.slow
def test_a_standard_stream_that_is_closed_is_as_dev_null_for_the_command_and_its_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nfor fd in (1, 2):\n    os.write(fd, b'x')\nsys.stdout.write('x')\nos._exit(7)\n")
    call = [sys.executable, "-m", "gba_hvd_tools.cli", "run", "-np", "1", str(script)]
    assert subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *call], check=False, timeout=60).returncode == 7
