"""The demonstration accepts only a run that shows what it promises, and ends what it started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ctr.pulse import ProgressFiles
from ctr.recovery_log import RecoveryLog
from demo import checked, outcome
from demo_hosts import Hosts, host_names
from demo_watch import DemoFailed, Watch, Worker
from gba_hvd.callbacks import Event, Job, StepRecord

TO_GBA = {
    "step": 70,
    "from": "allreduce",
    "to": "gba",
    "reason": "to gba: worker 1 takes 6.0x the median",
    "seconds": 0.2,
}
TO_ALLREDUCE = {"step": 310, "from": "gba", "to": "allreduce", "reason": "gba predicted 1.10x as fast", "seconds": 0.1}
BACK = {"kind": "rows_restored", "step": 370, "rows_restored": 787, "rows_lost": 0, "pls": 0.0125}
GOOD = {
    "auc": 0.781, "auc_bayes": 0.785, "logloss": 0.41,
    "samples_total": 2000, "samples_applied": 1990, "samples_dropped": 0, "samples_lost": 10,
    "restarts": 4, "workers": 3, "steps": 40, "seconds": 61.0, "switches": [TO_GBA, TO_ALLREDUCE],
    "staleness": {"mean": 0.125, "max": 3, "histogram": {"0": 23, "3": 1}},
    "checkpoints": {"count": 9, "failed": 0, "last": {"saved_step": 360}}, "recoveries": [BACK],
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    (folder / "summary.json").write_text(json.dumps(GOOD | changes))
    return folder / "summary.json"


def test_a_good_summary_is_accepted_and_reported_in_words(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_text("[0]<stdout>:MLflow: run 7 is FINISHED. Open it: mlflow ui\n")
    text = outcome(checked(written(tmp_path), disturbed=True), tmp_path)
    assert "0.7810; the best that any model can reach on this log is 0.7850" in text
    assert "2,000 = 1,990 applied + 0 dropped + 10 lost" in text
    assert "to gba at step 70: worker 1 takes 6.0x the median\n" in text
    assert "to allreduce at step 310: gba predicted 1.10x as fast\n" in text
    assert "9, the newest of step 360" in text
    assert "at step 370: 787 rows restored, 0 lost; portion of lost samples 0.01250" in text
    assert "0.12 steps on average, at most 3" in text
    assert "run 7 is FINISHED. Open it: mlflow ui" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_lost": 9}, "does not add up"),
        ({"restarts": 2}, "two workers were killed and a host lost, yet 2 restarts were counted"),
        ({"checkpoints": {"count": 0, "failed": 2, "last": None}}, "the job was to be saved, .*'failed': 2"),
        ({"recoveries": []}, r"rows of the lost host were to come back, its recoveries were \[\]"),
        ({"recoveries": [BACK | {"rows_lost": 1}]}, "rows of the lost host were to come back, .*'rows_lost': 1"),
        ({"switches": [TO_GBA]}, r"its changes were \[\('allreduce', 'gba'\)\]"),
        ({"switches": []}, r"its changes were \[\]"),
        ({"auc": 0.774}, r"AUC 0\.774 is not within 0\.01"),
        ({"auc": None}, "AUC None is not within"),
    ],
)
def test_a_run_that_falls_short_fails_the_demo(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DemoFailed, match=message):
        checked(written(tmp_path, **changes), disturbed=True)


def test_a_job_that_nobody_disturbed_needs_no_switch_and_no_restart(tmp_path: Path) -> None:
    (tmp_path / "output.log").touch()
    quiet = {"switches": [], "restarts": 0, "recoveries": [], "staleness": {"mean": None, "max": None, "histogram": {}}}
    assert "Staleness" not in outcome(checked(written(tmp_path, **quiet), disturbed=False), tmp_path)


def test_a_job_without_a_summary_fails_the_demo(tmp_path: Path) -> None:
    with pytest.raises(DemoFailed, match=r"without writing .*summary\.json"):
        checked(tmp_path / "summary.json", disturbed=True)


def test_the_pulse_reports_the_step_and_the_process_of_each_rank(tmp_path: Path) -> None:
    for rank in (1, 0):
        pulse = ProgressFiles(tmp_path, every_steps=2)
        pulse.on_job(Job("job", rank, 2, 0, "here", is_host_leader=True))
        for step in range(1, 6):
            pulse.on_step(StepRecord(step + rank, 0, 8, 8 * step, 0.1, 2, "allreduce", None))
    reported = json.loads((tmp_path / "pulse" / "step.json").read_text())
    assert reported == {"step": 5, "epoch": 0, "workers": 2, "mode": "allreduce"}
    assert psutil.pid_exists(json.loads((tmp_path / "pulse" / "worker-1.json").read_text())["pid"])
    assert sorted(path.name for path in (tmp_path / "pulse").iterdir()) == [
        "step.json",
        "worker-0.json",
        "worker-1.json",
    ]


def test_the_pulse_reports_a_change_of_mode_at_once_and_needs_no_round_step(tmp_path: Path) -> None:
    pulse, seen = ProgressFiles(tmp_path, every_steps=10), []
    pulse.on_job(Job("job", 0, 2, 0, "here", is_host_leader=True))
    for step, mode in [(1, "allreduce"), (2, "gba"), (9, "gba"), (13, "gba"), (14, "gba")]:
        pulse.on_step(StepRecord(step, 0, 8, 8 * step, 0.1, 2, mode, None))
        seen.append(json.loads((tmp_path / "pulse" / "step.json").read_text())["step"])
    assert seen == [1, 2, 2, 13, 13]


def test_the_pulse_forgets_ranks_that_the_job_no_longer_has(tmp_path: Path) -> None:
    for rank, size in ((0, 3), (1, 3), (2, 3), (0, 2)):
        ProgressFiles(tmp_path).on_job(Job("job", rank, size, 0, "here", is_host_leader=rank == 0))
    assert sorted(path.name for path in (tmp_path / "pulse").iterdir()) == ["worker-0.json", "worker-1.json"]


def test_waiting_shows_only_what_the_chief_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "output.log").write_bytes(b"[0]<stdout>:step 5\n[1]<stdout>:noise\nlauncher\n[0]<stderr>:half a li")
    with subprocess.Popen([sys.executable, "-c", ""]) as job:
        Watch(job, tmp_path, time.monotonic() + 100).until(lambda: job.poll() is not None, "the end")
    assert capsys.readouterr().out == "step 5\n"


def test_waiting_for_a_step_ends_when_the_job_does(tmp_path: Path) -> None:
    (tmp_path / "output.log").touch()
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as job:
        watch = Watch(job, tmp_path, time.monotonic() + 100)
        with pytest.raises(DemoFailed, match="ended with status 3 while waiting for step 7"):
            watch.until(lambda: watch.step() >= 7, "step 7")


def test_waiting_ends_when_the_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "output.log").touch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as job:
        with pytest.raises(DemoFailed, match="no time left while waiting for the moon"):
            Watch(job, tmp_path, deadline=time.monotonic()).until(lambda: False, "the moon")
        job.kill()


def test_the_demo_reads_the_processes_and_the_mode_from_the_pulse(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as job:
        watch = Watch(job, tmp_path, time.monotonic() + 100)
        assert (watch.step(), watch.mode(), watch.workers()) == (-1, "", [])
        for rank in (0, 1):
            pulse = ProgressFiles(tmp_path)
            pulse.on_job(Job("job", rank, 2, 0, "here", is_host_leader=True))
            pulse.on_step(StepRecord(7, 0, 8, 56, 0.1, 2, "gba", None))
        assert (watch.step(), watch.mode(), watch.n_workers()) == (7, "gba", 2)
        assert watch.workers() == [Worker(rank, os.getpid(), "here") for rank in (0, 1)]


def test_the_demo_learns_of_checkpoints_and_rows_that_came_back(tmp_path: Path) -> None:
    log = RecoveryLog(tmp_path)
    log.on_job(Job("job", 0, 1, 0, "here", is_host_leader=True))
    with subprocess.Popen([sys.executable, "-c", ""]) as job:
        watch = Watch(job, tmp_path, time.monotonic() + 100)
        assert watch.recovery("checkpoint") == []
        for kind in ("checkpoint", "rows_restored"):
            log.on_event(Event(kind, 5, "words", {"n": kind}))
        assert watch.recovery("rows_restored") == [{"n": "rows_restored"}]


def test_workers_share_a_memory_until_one_is_given_its_own(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, tmp_path / "memory of all")

    def memory_of(name: str) -> str:
        command = [str(hosts.worker), "sh", "-c", 'echo "$GBA_HVD_SHARD_DIR"']
        environ = {**os.environ, "HOROVOD_HOSTNAME": name}
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.rstrip("\n")

    assert [memory_of(name) for name in host_names()] == [str(hosts.first)] * 3
    hosts.separate("127.0.0.1")
    assert memory_of("127.0.0.1") == str(hosts.second)
    assert memory_of("localhost") == memory_of("127x0.0.1") == str(hosts.first)


def test_what_serves_the_separate_host_is_found_by_its_folder(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, tmp_path)
    wait = "input()"
    with (
        subprocess.Popen([sys.executable, "-c", wait, f"{hosts.second}/job"], stdin=subprocess.PIPE) as of_second,
        subprocess.Popen([sys.executable, "-c", wait, f"{hosts.first}/job"], stdin=subprocess.PIPE) as of_first,
    ):
        assert hosts.processes_of_separate() == {of_second.pid}
        for process in (of_second, of_first):
            process.communicate(b"\n")


def test_every_worker_of_the_demo_has_a_host_name_of_its_own() -> None:
    assert len(set(host_names())) == 3


def test_a_machine_with_too_few_names_gets_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    with pytest.raises(DemoFailed, match="put its host name into /etc/hosts"):
        host_names()
