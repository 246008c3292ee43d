"""What a job's folder says of its servers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gba_hvd.ps import launch
from gba_hvd.ps.state_files import StateFiles


@pytest.mark.parametrize("text", ['{"address": "/tmp/x', "", "[1, 2]", '{"pid": null}', "{}"])
def test_a_damaged_address_names_no_process(tmp_path: Path, text: str) -> None:
    (tmp_path / "ps-0.address").write_text(text)
    assert launch.pid_of(tmp_path, 0) is None
    launch.kill(tmp_path, 0)


def test_an_address_names_its_process(tmp_path: Path) -> None:
    assert launch.pid_of(tmp_path, 0) is None
    (tmp_path / "ps-0.address").write_text('{"pid": 12}')
    assert launch.pid_of(tmp_path, 0) == 12
    assert launch.process_of(tmp_path, 0) == launch.ServerProcess(12), "of the version before"


def test_each_server_that_takes_the_place_of_another_one_counts(tmp_path: Path) -> None:
    before = time.time()
    for n_restarts in range(3):
        StateFiles(tmp_path, 0).save_address(1, 2)
        found = launch.process_of(tmp_path, 0)
        assert found is not None and (found.pid, found.n_restarts) == (os.getpid(), n_restarts)
        assert before <= found.started_unix_s <= time.time()
        assert StateFiles(tmp_path, 0).ports() == (1, 2)


def test_a_server_keeps_the_memory_that_it_takes_again_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr("subprocess.run", lambda *args, env, **rest: started.append(env))
    (tmp_path / "ps.json").write_text("{}")
    tmp_path.chmod(0o700)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4096")
    assert launch.ensure_running(tmp_path, 0)
    assert started[0]["MALLOC_TRIM_THRESHOLD_"] == "4096"
    assert int(started[0]["MALLOC_MMAP_THRESHOLD_"]) == 32 << 20
