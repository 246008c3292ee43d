"""Two hosts must not share a folder for shard memory: the second is refused, and loses nobody a row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools import cli

from .cluster import CONTAINER, Cluster, needs_containers, wait_for

pytestmark = [pytest.mark.processes, needs_containers()]


class Containers(Cluster):
    """Every worker has a namespace of processes of its own, as in a container; files and network are the machine's."""

    def python(self) -> list[str]:
        """A worker that another process forks would be in that one's namespace."""
        return [sys.executable]

    def popen(self, command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        at = len(command) - 2  # the worker's command, behind the launcher's
        return super().popen([*command[:at], *CONTAINER, *command[at:]], **settings)


def test_containers_that_share_a_folder_are_refused_before_any_row_is_touched(tmp_path: Path) -> None:
    job = Containers(tmp_path / "shared", {})
    try:
        job.start_static(2)
        assert job.wait() != 0
        assert "is held by living workers of another host" in job.said()
        assert "cannot see the processes of this one" in job.said()
        assert "GBA_HVD_SHARD_DIR=" in job.said()
        assert not job.notes("committed")
        wait_for(lambda: not job.processes(), "the end of the job's processes")
        # A container that is ended takes its keeper along: what it held is for the next job, or for `clean`.
        assert cli.main(["clean", "--yes", "--dir", str(job.shard_dir)]) == 0
        job.assert_nothing_left()
    finally:
        job.end()


def test_containers_with_folders_of_their_own_train_and_change_hands(tmp_path: Path) -> None:
    """The same two with a folder each, and a change of membership."""
    job = Containers(tmp_path / "apart", {"own_memory_per_name": True, "sleep_s": 0.01})
    try:
        job.start_elastic(("localhost", "127.0.0.1"))
        wait_for(lambda: job.ended or job.last_step() > 2, "training")
        assert not job.ended, job.log()
        job.set_hosts(("localhost",))
        assert job.wait() == 0, job.log()
        assert {note["end"] for note in job.notes("end")} == {"FINISHED"}
        account = job.result()
        assert account["applied"] == account["total"] == 2000
        wait_for(lambda: not job.processes(), "the end of the job's processes")
        for base in job.shard_dir.iterdir():  # a container that ends takes its keeper along
            assert cli.main(["clean", "--yes", "--dir", str(base)]) == 0
        job.assert_nothing_left()
    finally:
        job.end()
