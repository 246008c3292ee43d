"""What `train_ctr.py` says and leaves behind when a new user first tries it."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .clicks import tagged
from .commands import TRAIN, command, environment, typed, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

SMALL = """
mlflow: false
model: {kind: deepfm, hidden: [8]}
embedding: {dim: 4, optimizer: row_adagrad, lr: 0.05}
train: {global_batch: 400, micro_batch: 100, epochs: 2}
"""
SYNTHETIC = (
    SMALL
    + """
data: {synthetic: {train: 20000, valid: 4000, test: 4000, tables: {user: 200, item: 50}, n_dense: 2}}
"""
)


FAST = ["train.epochs=4", "embedding.optimizer=adam", "embedding.lr=0.02", "dense.lr=0.01", "embedding.init_std=0.1"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A prepared store with a multi-valued field."""
    csv = tagged(tmp_path / "clicks.csv")
    columns = ["--categorical", "user", "--multi", "tags=|", "--numeric", "price"]
    done = typed(tmp_path, "gba-hvd", "data", "prepare", csv, "--out", tmp_path / "store", *columns)
    assert done.returncode == 0, done.stderr
    return tmp_path / "store"


def summary_of(out: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return values


def test_the_data_that_was_named_is_trained_on_or_refused(tmp_path: Path, store: Path) -> None:
    (tmp_path / "job.yaml").write_text(SMALL)
    (tmp_path / "made_up.yaml").write_text(SYNTHETIC)
    (tmp_path / "misspelt.yaml").write_text(SMALL + "data: {preset: criteo-kagle}\n")
    for config, names in (
        ("made_up.yaml", ("data.synthetic has settings", f"data.dir (--data) is {store}")),
        ("misspelt.yaml", ("got 'criteo-kagle'", f"data.dir is {store}", "a prepared store needs no preset")),
    ):
        done = typed(tmp_path, "python", TRAIN, "--config", config, "--data", store, "--dry-run")
        assert done.returncode == 1, done.stdout
        assert all(name in done.stderr for name in names), done.stderr
    raw = typed(tmp_path, "python", TRAIN, "--config", "job.yaml", "--data", tmp_path)
    assert raw.returncode == 1 and "no prepared store (it has no dataset.json)" in raw.stderr
    reported = summary_of(tmp_path / "runs" / "job")
    assert reported["status"] == "FAILED" and "no prepared store" in reported["error"]
    plan = typed(tmp_path, "python", TRAIN, "--config", "job.yaml", "--data", store, "--dry-run")
    assert plan.returncode == 0, plan.stderr
    assert f"{store}: 2,3" in plan.stdout
    assert "multi-valued, pooled by mean: tags" in plan.stdout
    assert "batch     100 samples, forward and backward in" in plan.stdout


VARIANT = pytest.mark.variant


@pytest.mark.parametrize("settings", [
    pytest.param(["model.kind=dlrm", "embedding.pooling=sum", "switching.mode=gba"], id="dlrm-sum-gba"),
    pytest.param(["model.kind=deepfm"], id="deepfm", marks=VARIANT),
    pytest.param(["model.kind=dcn"], id="dcn", marks=VARIANT),
])  # fmt: skip
def test_every_model_trains_a_store_with_a_multi_valued_field(tmp_path: Path, store: Path, settings: list[str]) -> None:
    (tmp_path / "job.yaml").write_text(SMALL)
    done = typed(
        tmp_path, "horovodrun", "-np", "2", "--network-interface", "lo", command("python")[0], TRAIN,
        "--config", "job.yaml", "--data", store, "--out", tmp_path / "out", *FAST, *settings,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    reported = summary_of(tmp_path / "out")
    assert (reported["status"], reported["error"], reported["workers"]) == ("FINISHED", None, 2)
    assert reported["auc"] > 0.7  # only the tags carry the label; without them it is about 0.5


def test_the_metrics_of_an_epoch_stand_together_and_validation_chooses_the_best(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SYNTHETIC)
    # A learning rate that overfits soon, so that the best epoch is not the last.
    settings = ["embedding.lr=0.5", "train.epochs=6", "train.early_stop=0", "train.plateau_factor=0.9"]
    done = typed(tmp_path, "python", TRAIN, "--config", "job.yaml", "--out", "out", *settings)
    assert done.returncode == 0, done.stderr
    reported = summary_of(tmp_path / "out")
    rows = reported["by_epoch"]
    assert [row["epoch"] for row in rows] == list(range(6))
    best = max(rows, key=lambda row: row["valid_auc"])
    assert best["epoch"] < 5, "the job did not overfit: this test needs one that does"
    assert reported["best_epoch"] == best["epoch"]
    assert (reported["auc"], reported["valid_auc"]) == (best["test_auc"], best["valid_auc"])
    assert all(row["seconds"] > 0 for row in rows)
    lines = done.stdout.splitlines()
    (last,) = (line for line in lines if line.startswith("last: "))
    (chosen,) = (line for line in lines if line.startswith("best: "))
    assert last.startswith(f"last: epoch 5: valid_auc {rows[5]['valid_auc']:.4f}")
    assert f"test_auc {rows[5]['test_auc']:.4f}" in last
    assert chosen.startswith(f"best: epoch {best['epoch']}, by valid_auc: valid_auc {best['valid_auc']:.4f}")
    assert f"test_auc {best['test_auc']:.4f}" in chosen
    assert lines[-1].startswith(f"job: best epoch {best['epoch']} (of 0 to 5, by validation): valid AUC")


@pytest.mark.parametrize(
    ("ending", "status"),
    [(signal.SIGINT, "KILLED"), (signal.SIGTERM, "KILLED"), (signal.SIGKILL, "RUNNING")],
    ids=["Ctrl-C", "SIGTERM", "SIGKILL"],
)
def test_an_interrupted_or_killed_job_leaves_a_summary(tmp_path: Path, ending: signal.Signals, status: str) -> None:
    (tmp_path / "job.yaml").write_text(SYNTHETIC)
    words = ["--config", "job.yaml", "--out", "out", "train.epochs=5000", "train.early_stop=0"]
    job = subprocess.Popen(
        command("python", TRAIN, *words), cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL
    )
    try:
        file = tmp_path / "out" / "summary.json"
        wait_until(lambda: job.poll() is not None or (file.exists() and summary_of(tmp_path / "out").get("epochs")), "")
        assert job.poll() is None
        job.send_signal(ending)
        job.wait(200)
    finally:
        job.kill()
    reported = summary_of(tmp_path / "out")
    assert reported["status"] == status
    assert (reported["error"] or "").startswith("" if status == "RUNNING" else "KeyboardInterrupt")
    assert reported["epochs"] == len(reported["by_epoch"]) > 0
    assert 0 < reported["samples_applied"] <= reported["samples_total"]
    assert [path.name for path in file.parent.glob(".*")] == []
