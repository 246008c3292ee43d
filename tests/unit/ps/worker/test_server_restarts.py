"""Servers that were started again, as their files name their processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gba_hvd.ps.worker.server_restarts import Restart, ServerRestarts


@pytest.fixture
def other() -> Iterator[int]:
    """Another process that lives."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def serves(folder: Path, server: int, pid: int) -> None:
    (folder / f"ps-{server}.address").write_text(json.dumps({"pid": pid}))


def test_a_server_that_was_started_again_is_reported_once(tmp_path: Path, other: int) -> None:
    now_s = 0.0
    restarts = ServerRestarts(tmp_path, 2, lambda: now_s)

    def later() -> list[Restart]:
        nonlocal now_s
        now_s += 1.0
        return restarts.since_last()

    assert later() == [], "none has started"
    serves(tmp_path, 0, os.getpid())
    serves(tmp_path, 1, os.getpid())
    assert later() == later() == []
    serves(tmp_path, 1, other)
    assert restarts.since_last() == [], "it has looked just now"
    assert later() == [Restart(1, os.getpid(), other)] and later() == []


def test_a_server_that_died_before_it_was_looked_for_is_no_restart(tmp_path: Path, other: int) -> None:
    (dead := subprocess.Popen([sys.executable, "-c", ""])).wait()
    now_s = 0.0
    restarts = ServerRestarts(tmp_path, 1, lambda: now_s)
    serves(tmp_path, 0, dead.pid)
    assert restarts.since_last() == []
    serves(tmp_path, 0, other)
    now_s = 1.0
    assert restarts.since_last() == []
