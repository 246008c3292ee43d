"""However a job ends, it says why and nothing of it remains."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools import cli

from .cluster import NAMES, cluster, wait_for

pytestmark = [pytest.mark.processes]


@pytest.mark.parametrize(
    ("number", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)]
)
def test_nothing_is_left_when_the_launcher_is_ended(tmp_path: Path, number: signal.Signals, to_group: bool) -> None:
    with cluster(tmp_path, epochs=1000, sleep_s=0.01) as job:
        job.start_static(2)
        assert job.launcher is not None
        wait_for(lambda: job.last_step() > 3, "training")
        if to_group:
            os.killpg(job.launcher.pid, number)  # what Ctrl-C in a terminal does
        else:
            job.launcher.send_signal(number)
        job.wait()  # what horovodrun returns then is its own affair
        assert "FINISHED" not in [end["end"] for end in job.notes("end")]
        job.assert_nothing_left()


def test_a_plain_job_is_listed_and_leaves_nothing_when_all_its_processes_get_sigterm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As systemd and batch systems end a job: its keeper gets the signal, too."""
    with cluster(tmp_path, {"GBA_HVD_JOB_NAME": "clicks"}, epochs=1000, sleep_s=0.01) as job:
        job.start_static(2)
        wait_for(lambda: job.last_step() > 3, "training")
        assert cli.main(["ps", "--json", "--dir", str(job.shard_dir)]) == 0
        (listed,) = json.loads(capsys.readouterr().out)
        assert (listed["name"], listed["mode"], listed["workers"], listed["hosts"]) == ("clicks", "allreduce", 2, 1)
        assert listed["step"] > 0 and listed["steps_of_epoch"] == 11
        keepers = [pid for pid in job.processes() if b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(keepers) == 1
        for pid in job.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        job.wait()
        job.assert_nothing_left()


@pytest.mark.parametrize("at", ["report", "exit"])
def test_a_worker_that_gets_sigterm_when_it_has_finished_has_succeeded(tmp_path: Path, at: str) -> None:
    with cluster(tmp_path, epochs=1, sigterm_at=at) as job:
        job.run(lambda: job.start_static(2))
        assert [note["sigterm_at"] for note in job.notes("sigterm_at")] == [at, at]
        assert [end["end"] for end in job.notes("end")] == ["FINISHED", "FINISHED"]
        job.assert_every_sample_once(epochs=1)


def test_nothing_is_left_when_a_worker_fails_and_its_error_is_shown(tmp_path: Path) -> None:
    with cluster(tmp_path, faults=[{"point": "before exchange", "do": "raise", "step": 5, "rank": 1}]) as job:
        job.start_static(2)
        assert job.wait() != 0
        assert job.fired() == 1
        assert "planned failure" in job.said()
        (failed,) = (note for note in job.notes("event") if note["event"] == "failed" and "goes_on" in note)
        assert failed["goes_on"] == (
            "when all workers have ended, the same command starts at step 0 again, since it has no CheckpointCallback"
        )
        assert "Start the job again: it begins at step 0, since it has no CheckpointCallback" in job.said()
        job.assert_nothing_left()


@pytest.mark.parametrize(("mode", "last"), [("gba", 1), ("shadow", 0)])
def test_a_host_that_is_done_serves_the_others_until_they_are(tmp_path: Path, mode: str, last: int) -> None:
    """In shadow the worker that submits first learns a moment later than the last that all have."""
    plan = {"own_memory_per_name": True, "gba": {"mode": mode}, "epochs": 2, "last_to_end": last}
    with cluster(tmp_path, **plan) as job:
        job.run(lambda: job.start_elastic(NAMES[:2]))
        assert (job.out / "another-ends").exists(), "one was to end before the other"
        assert [end["end"] for end in job.notes("end")] == ["FINISHED", "FINISHED"]
        assert not [e["event"] for e in job.notes("event") if e["event"] == "dense_state_old"]
        result = job.result()
        assert result["applied"] + result["dropped"] == result["total"] == 2000


def test_a_loss_that_is_not_a_number_stops_all_workers_at_the_same_step(tmp_path: Path) -> None:
    with cluster(tmp_path, nan_at_step=7, nan_rank=1, ends_last=0) as job:
        job.start_static(2)
        assert job.wait() != 0
        ends = job.notes("end")
        assert [end["end"] for end in ends] == ["FAILED", "FAILED"]
        assert all(re.search(r"step 7 .*micro-batch \d+.*as after step 6", end["error"]) for end in ends), ends
        job.assert_nothing_left()


def test_workers_that_define_different_tables_refuse_each_other(tmp_path: Path) -> None:
    assert_refused(tmp_path, "tables['user'] [300, 8], here [301, 8]", rank_one_differs=1)


def test_workers_with_different_wires_refuse_each_other(tmp_path: Path) -> None:
    differs = "GBACallback['wire'] curve, here plain"
    assert_refused(tmp_path, differs, gba={"mode": "gba"}, gba_of_rank_one={"wire": "plain"})


def assert_refused(tmp_path: Path, differs: str, **settings: Any) -> None:
    """Two workers with these settings refuse each other. differs: the setting as the error has it, with both values"""
    with cluster(tmp_path, ends_last=0, **settings) as job:
        job.start_static(2)
        assert job.wait() != 0
        assert f"have another model or other settings than rank 0: rank 0 has {differs}" in job.said()
        job.assert_nothing_left()


def test_all_workers_of_a_host_map_one_copy(tmp_path: Path) -> None:
    """The proportional set sizes of the table pages add up to the file, but for pages that nobody has read."""
    with cluster(tmp_path, wait_at_step=3, samples=2000) as job:
        job.start_static(2)
        wait_for(lambda: len(list(job.out.glob("waiting-*"))) == 2, "both workers at step 3")
        (file,) = job.shard_dir.glob("*/shards")
        mapped = sum(pss_bytes(pid, str(file)) for pid in job.processes(only_workers=True))
        size = file.stat().st_blocks * 512
        assert 0.9 * size < mapped < 1.02 * size
        (job.out / "go").touch()
        assert job.wait() == 0, job.log()
        job.assert_nothing_left()


def pss_bytes(pid: int, file: str) -> int:
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith(file)
        elif counts and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total
