"""Files that an earlier version left are read by this one: a job that it began and that was killed is finished.

`make.py` made the archives with the last version before the modules of the package were moved and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gba_hvd.shm.host_identity import Host
from tests.processes import prefork

from .job import N_EPOCHS, N_SAMPLES
from .make import HERE, HOLD_AT, placed

pytestmark = [pytest.mark.processes]
MODES = ("gba", "allreduce")


def finish(folder: Path, mode: str) -> dict[str, Any]:
    """The job's own account of its end."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD", "GBA_HVD"))}
    environ |= {"GBA_HVD_SHARD_DIR": str(folder / "memory"), "GBA_HVD_JOB_ID": "formats", "GBA_HVD_GRACE_S": "2"}
    shutil.copy(HERE / "job.py", folder)
    command = [*prefork.python(), "job.py", mode]
    with placed(folder):
        ended = subprocess.run(
            command, check=False, env=environ, cwd=folder, capture_output=True, text=True, timeout=300
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def resumed(result: dict[str, Any]) -> dict[str, Any]:
    (event,) = (event for event in result["events"] if event["kind"] == "resumed")
    return event


def assert_finished(result: dict[str, Any]) -> None:
    assert (result["step"], result["losses"]) == (N_EPOCHS * N_SAMPLES // 64, N_EPOCHS)
    samples = result["samples"]
    assert samples["total"] == samples["applied"] + samples["dropped"] + samples["lost"] == N_EPOCHS * N_SAMPLES
    assert result["n_steps"] > N_EPOCHS * N_SAMPLES // 64 - HOLD_AT, "the callback's own state came back"
    assert np.isfinite(result["users"]).all()


def unpack(mode: str, folder: Path) -> None:
    with tarfile.open(HERE / f"{mode}.tar.gz") as archive:
        archive.extractall(folder, filter="data")


@pytest.mark.parametrize("mode", MODES)
def test_a_job_is_resumed_from_the_checkpoint_of_an_earlier_version(tmp_path: Path, mode: str) -> None:
    unpack(mode, tmp_path)
    (tmp_path / "memory").rename(tmp_path / "lost")
    (tmp_path / "memory").mkdir()
    result = finish(tmp_path, mode)
    assert not resumed(result).get("from_memory") and resumed(result)["step"] > N_SAMPLES // 64
    assert_finished(result)


@pytest.mark.parametrize("mode", MODES)
def test_a_job_is_resumed_from_the_memory_of_an_earlier_version(tmp_path: Path, mode: str) -> None:
    """Training state, session, ledger and dense part of the servers, rows; in memory as if it had run on this host."""
    unpack(mode, tmp_path)
    memory = tmp_path / "memory" / "gba-hvd-formats"
    memory.chmod(0o700)
    facts = json.loads((memory / "memory.json").read_text())
    facts["host"] = vars(Host.here(tmp_path / "memory"))
    (memory / "memory.json").write_text(json.dumps(facts))
    result = finish(tmp_path, mode)
    assert resumed(result)["from_memory"] and resumed(result)["step"] >= HOLD_AT - 1
    assert_finished(result)
