"""The demonstration accepts only a run that shows what it promises, and ends what it started."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ctr.pulse import Pulse
from demo import DemoFailed, Watch, checked, outcome
from gba_hvd.callbacks import Job, StepRecord

GOOD = {
    "auc": 0.781, "auc_bayes": 0.785, "logloss": 0.41,
    "samples_total": 2000, "samples_applied": 1990, "samples_dropped": 0, "samples_lost": 10,
    "restarts": 1, "workers": 2, "steps": 40, "seconds": 61.0,
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    (folder / "summary.json").write_text(json.dumps(GOOD | changes))
    return folder / "summary.json"


def test_a_good_summary_is_accepted_and_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_text("[0]<stdout>:MLflow: run 7 is FINISHED. Open it: mlflow ui\n")
    text = outcome(checked(written(tmp_path), killed=True), tmp_path)
    assert "0.7810; the best that any model can reach on this log is 0.7850" in text
    assert "2,000 = 1,990 applied + 0 dropped + 10 lost" in text
    assert "run 7 is FINISHED. Open it: mlflow ui" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_lost": 9}, "does not add up"),
        ({"restarts": 0}, "no restart was counted"),
        ({"auc": 0.774}, r"AUC 0\.774 is not within 0\.01"),
        ({"auc": None}, "AUC None is not within"),
    ],
)
def test_a_run_that_falls_short_fails_the_demo(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DemoFailed, match=message):
        checked(written(tmp_path, **changes), killed=True)


def test_a_job_without_a_summary_fails_the_demo(tmp_path: Path) -> None:
    with pytest.raises(DemoFailed, match=r"without writing .*summary\.json"):
        checked(tmp_path / "summary.json", killed=True)


def test_the_pulse_tells_the_step_and_the_process_of_each_rank(tmp_path: Path) -> None:
    for rank in (1, 0):
        pulse = Pulse(tmp_path, every_steps=2)
        pulse.on_job(Job("job", rank, 2, 0, "here", leads_host=True))
        for step in range(1, 6):
            pulse.on_step(StepRecord(step + rank, 0, 8, 8 * step, 0.1, 2, "allreduce", None))
    assert json.loads((tmp_path / "pulse" / "step.json").read_text())["step"] == 4
    assert psutil.pid_exists(json.loads((tmp_path / "pulse" / "worker-1.json").read_text())["pid"])
    assert sorted(path.name for path in (tmp_path / "pulse").iterdir()) == [
        "step.json",
        "worker-0.json",
        "worker-1.json",
    ]


def test_the_pulse_forgets_ranks_that_the_job_no_longer_has(tmp_path: Path) -> None:
    for rank, size in ((0, 3), (1, 3), (2, 3), (0, 2)):
        Pulse(tmp_path).on_job(Job("job", rank, size, 0, "here", leads_host=rank == 0))
    assert sorted(path.name for path in (tmp_path / "pulse").iterdir()) == ["worker-0.json", "worker-1.json"]


def test_waiting_shows_only_what_the_chief_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "output.log").write_bytes(b"[0]<stdout>:step 5\n[1]<stdout>:noise\nlauncher\n[0]<stderr>:half a li")
    with subprocess.Popen([sys.executable, "-c", ""]) as job:
        Watch(job, tmp_path, time.monotonic() + 30).until(lambda: job.poll() is not None, "the end")
    assert capsys.readouterr().out == "step 5\n"


def test_waiting_for_a_step_ends_when_the_job_does(tmp_path: Path) -> None:
    (tmp_path / "output.log").touch()
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as job:
        watch = Watch(job, tmp_path, time.monotonic() + 30)
        with pytest.raises(DemoFailed, match="ended with status 3 while waiting for step 7"):
            watch.until(lambda: watch.step() >= 7, "step 7")


def test_waiting_ends_when_the_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "output.log").touch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as job:
        with pytest.raises(DemoFailed, match="no time left while waiting for the moon"):
            Watch(job, tmp_path, deadline=time.monotonic()).until(lambda: False, "the moon")
        job.kill()
