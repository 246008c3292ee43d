"""`gba-hvd run` says what is waited for where a job takes long to start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from gba_hvd_tools.launch import start_watch
from gba_hvd_tools.launch.start_watch import outcome

from gba_hvd.elastic import launch_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "start"
    found.touch()
    return found


def test_a_start_that_takes_longer_than_the_limit_waits(file: Path) -> None:
    assert outcome(file, os.getpid(), 0.0) == "waits"


def test_a_start_that_cannot_be_reported_leaves_no_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_watch, "FIRST_S", 0.0)
    monkeypatch.setattr(sys, "stderr", stream := Mock(**{"write.side_effect": BrokenPipeError}))
    start_watch._report(file, os.getpid())
    assert stream.write.called and not file.exists()


def test_a_worker_that_has_started_ends_the_wait(file: Path) -> None:
    launch_file.remove({"GBA_HVD_START_FILE": str(file)})
    launch_file.remove({"GBA_HVD_START_FILE": str(file)})
    assert outcome(file, os.getpid(), 100.0) == "begun"


def test_a_worker_that_another_launcher_started_removes_nothing(file: Path) -> None:
    launch_file.remove({})
    assert file.exists()


def test_a_launcher_that_has_ended_ends_the_wait(file: Path) -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as launcher:
        assert outcome(file, launcher.pid, 100.0) == "ended"  # also where nobody has waited for it
    assert outcome(file, launcher.pid, 100.0) == "ended"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("first_s", "ends_when"), [(0.05, "not os.path.exists(name)"), (100.0, "True")])
def test_only_a_slow_start_has_a_line(tmp_path: Path, first_s: float, ends_when: str) -> None:
    (tmp_path / "train.py").write_text(
        f"import os, time\nname = os.environ['GBA_HVD_START_FILE']\nwhile not ({ends_when}):\n    time.sleep(0.02)\n"
    )
    call = (
        "from gba_hvd_tools import cli\n"
        "from gba_hvd_tools.launch import start_watch\n"
        f"start_watch.FIRST_S = {first_s}\n"
        "cli.main(['run', '-np', '1', 'train.py'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", call], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no worker here has come to its training") == (first_s < 1)
