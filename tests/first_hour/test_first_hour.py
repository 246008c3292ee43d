"""The first hour of a new user, replayed: ratings as MovieLens has them, prepared, tried, trained, interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from .clicks import ratings
from .commands import TRAIN, command, environment, typed, wait_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # MLflow's use of SQLAlchemy
]

JOB = """
name: movies
model: {kind: deepfm, hidden: [16, 8]}
embedding: {dim: 4, optimizer: row_adagrad, lr: 0.05}
train: {global_batch: 512, micro_batch: 128, epochs: 100000, early_stop: 0}
"""


def test_prepare_try_train_interrupt_and_look(tmp_path: Path) -> None:
    file = ratings(tmp_path / "ratings.dat")
    columns = ["--columns", "user,movie,like,time", "--label", "like", "--timestamp", "time", "--categorical", "rest"]
    reported = typed(tmp_path, "gba-hvd", "data", "prepare", file, "--out", "store", *columns)
    assert reported.returncode == 0, reported.stderr

    (tmp_path / "job.yaml").write_text(JOB)
    words: list[str | Path] = [TRAIN, "--config", "job.yaml", "--data", "store"]
    plan = typed(tmp_path, "python", *words, "--dry-run")
    assert plan.returncode == 0, plan.stderr
    assert "batch     128 samples, forward and backward in" in plan.stdout

    printed = interrupted(tmp_path, command("python")[0], *words)
    summary = json.loads((tmp_path / "runs" / "movies" / "summary.json").read_text())
    assert summary["status"] == "KILLED"
    assert summary["error"].startswith("KeyboardInterrupt")
    assert (summary["name"], summary["workers"]) == ("movies", 2)
    assert summary["by_epoch"] and summary["best_epoch"] is not None

    # The launcher kills what is left of the job seconds after the interrupt; all is sent nevertheless, or said.
    assert "gba-hvd mlflow send" in printed
    run = wait_until_ended(tmp_path)
    wait_until(lambda: not (tmp_path / "gba-hvd-spool").exists(), "the sender cleaned up")
    assert (run.info.run_name, run.info.status) == ("movies", "KILLED")
    assert run.data.params["model.kind"] == "deepfm"
    assert run.data.params["model.hidden"] == "[16, 8]"
    assert (run.data.params["dense.lr"], run.data.params["seed"]) == ("0.001", "2021")
    assert run.data.params["data.dir"] == "store"

    report = typed(tmp_path, "gba-hvd", "report", "movies", "--out", "page.html")
    assert report.returncode == 0, report.stderr
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", (tmp_path / "page.html").read_text()))
    assert (facts["name"], facts["model"], facts["data"]) == ("movies", "deepfm", "store")
    assert re.fullmatch(r"epoch \d+, by valid_auc", facts["best epoch"])
    assert {"test_auc", "test_logloss", "time per epoch, median", "warnings"} <= facts.keys()


def interrupted(folder: Path, *words: str | Path) -> str:
    """Train on two workers until an epoch is over and MLflow has the run, then press Ctrl-C; what was printed."""
    launcher = command("horovodrun", "-np", "2", "--network-interface", "lo", *words)
    log = folder / "job.log"
    with log.open("wb") as output:
        job = subprocess.Popen(launcher, cwd=folder, env=environment(folder), stdout=output, stderr=output)
    summary = folder / "runs" / "movies" / "summary.json"
    try:
        wait_until(
            lambda: job.poll() is not None or (epochs_of(summary) > 0 and delivered(folder)), "an epoch, and MLflow"
        )
        assert job.poll() is None, log.read_text()
        job.send_signal(signal.SIGINT)
        job.wait(300)
    finally:
        if job.poll() is None:
            job.kill()
    wait_until(lambda: not os.listdir(folder / "shards"), "the memory is gone")
    return log.read_text()


def epochs_of(summary: Path) -> int:
    return int(json.loads(summary.read_text()).get("epochs", 0)) if summary.exists() else 0


def delivered(folder: Path) -> bool:
    """Whether the sender has begun to deliver: the run is there."""
    reported = [json.loads(file.read_text()) for file in (folder / "gba-hvd-spool").glob("*.status.json")]
    return any(one["run_id"] for one in reported)


def wait_until_ended(folder: Path) -> Any:
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    (experiment,) = (one for one in client.search_experiments() if one.name == "ctr examples")

    def ended() -> Any:
        (run,) = client.search_runs([experiment.experiment_id])
        return run if run.info.status != "RUNNING" else None

    wait_until(ended, "the run has ended")
    return ended()
