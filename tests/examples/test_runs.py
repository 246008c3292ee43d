"""The scripts, run as a person runs them. Most start from a process that has imported torch already, see `prefork`.

The demo and the minimal script start as they do for a person.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from gba_hvd.faults import FaultSchedule
from tests.processes import prefork

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = """
mlflow: false
data:
  synthetic: {train: 20000, valid: 4000, test: 4000, tables: {user: 200, item: 50}, n_dense: 2}
model: {kind: dlrm, bottom: [8], hidden: [8]}
embedding: {dim: 4, optimizer: row_adagrad, lr: 0.05}
train: {global_batch: 400, micro_batch: 100, epochs: 3}
"""


def environment(folder: Path) -> dict[str, str]:
    (folder / "shards").mkdir(exist_ok=True)
    own = {"GBA_HVD_SHARD_DIR": str(folder / "shards"), "GBA_HVD_GRACE_S": "1", "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in os.environ.items() if not name.startswith("GBA_HVD_")} | own


def run(folder: Path, *command: str | Path, timeout_s: float = 400) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        check=False,
        cwd=folder,
        env=environment(folder),
        text=True,
        timeout=timeout_s,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_workers(n: int) -> list[str | Path]:
    if n == 1:
        return [*prefork.python()]
    return [Path(sys.executable).with_name("horovodrun"), "-np", str(n), "--network-interface", "lo", *prefork.python()]


def train(folder: Path, workers: int, *settings: str) -> dict[str, Any]:
    (folder / "job.yaml").write_text(SMALL)
    out = folder / f"out-{workers}"
    run(folder, *on_workers(workers), EXAMPLES / "train_ctr.py", "--config", "job.yaml", "--out", out, *settings)
    wait_until_empty(folder / "shards")
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def test_two_workers_reach_what_one_reaches(tmp_path: Path) -> None:
    alone, together = train(tmp_path, 1), train(tmp_path, 2, "data.num_workers=1")
    assert (alone["workers"], together["workers"]) == (1, 2)
    assert together["auc"] == pytest.approx(alone["auc"], abs=1e-4)
    assert together["logloss"] == pytest.approx(alone["logloss"], abs=1e-4)
    assert together["steps"] == alone["steps"] == 50 * alone["epochs"]
    assert together["samples_total"] == together["samples_applied"] == 20_000 * alone["epochs"]
    assert alone["auc"] > 0.7


def test_raw_criteo_files_go_through_prepare_train_and_evaluate_on_two_workers(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    rows = [
        "\t".join(
            [
                str(int(rng.random() < 0.3)),
                *map(str, rng.integers(0, 9, 13)),
                *(f"{v:08x}" for v in rng.integers(0, 5, 26)),
            ]
        )
        for _ in range(2000)
    ]
    (tmp_path / "criteo.txt").write_text("\n".join([*rows, ""]))
    settings = ["data.preset=criteo-kaggle", f"data.cache={tmp_path / 'cache'}", "train.epochs=1"]
    summary = train(tmp_path, 2, "--data", str(tmp_path / "criteo.txt"), *settings)
    assert summary["samples_applied"] == summary["samples_total"] > 1500
    assert 0 < summary["auc"] < 1
    assert len([p for p in (tmp_path / "cache").iterdir() if p.is_dir()]) == 1


def test_the_minimal_script_runs_as_it_stands(tmp_path: Path) -> None:
    assert "epoch 1: step 196, validation AUC 0." in run(tmp_path, sys.executable, EXAMPLES / "minimal.py")


def test_a_run_goes_through_the_modes_it_is_asked_for_and_says_so(tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    FaultSchedule().slow(worker=1, factor=4, from_step=40, to_step=90).dump(faults)
    # In gba nobody waits for the chief: enough epochs, so that it is there to ask for the change back.
    modes = ["switching.switch_at={40: gba, 90: allreduce}", "switching.wait_s=120"]
    modes += ["train.epochs=10", "train.early_stop=0"]
    summary = train(tmp_path, 2, "--faults", str(faults), *modes, "train.row_average=contributors")
    assert [(s["from"], s["to"]) for s in summary["switches"]] == [("allreduce", "gba"), ("gba", "allreduce")]
    assert 40 <= summary["switches"][0]["step"] < 90 <= summary["switches"][1]["step"]
    assert sum(summary["staleness"]["histogram"].values()) > 0
    account = {name: summary[f"samples_{name}"] for name in ("applied", "dropped", "lost")}
    assert sum(account.values()) == summary["samples_total"] == 20_000 * summary["epochs"]
    assert (summary["refused"], summary["samples_lost"]) == (0, 0)
    assert summary["auc"] > 0.7


@pytest.mark.variant
def test_threads_of_a_worker_share_a_replica_that_sgd_steps(tmp_path: Path) -> None:
    settings = ["switching.mode=shadow", "switching.wait_s=120", "train.threads=2"]
    summary = train(tmp_path, 1, *settings, "dense.optimizer=sgd", "dense.momentum=0.9", "dense.lr=0.05")
    assert [(s["from"], s["to"]) for s in summary["switches"]] == [("allreduce", "shadow")]
    assert summary["samples_applied"] == summary["samples_total"] == 20_000 * summary["epochs"]
    assert summary["auc"] > 0.7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_learns_what_a_cpu_learns(tmp_path: Path) -> None:
    of_cpu, of_gpu = train(tmp_path, 1), train(tmp_path, 1, "train.device=cuda")
    assert of_gpu["auc"] == pytest.approx(of_cpu["auc"], abs=1e-3)
    assert of_gpu["samples_applied"] == of_cpu["samples_applied"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["din", "dien", "youtube_dnn"])
def test_a_gpu_trains_models_of_sequences(tmp_path: Path, name: str) -> None:
    settings = ["mlflow=false", "train.device=cuda", "train.epochs=1", "data.behaviour.train=4000"]
    config = EXAMPLES / "configs" / f"{name}.yaml"
    run(tmp_path, *on_workers(1), EXAMPLES / "train_ctr.py", "--config", config, "--out", tmp_path, *settings)
    assert json.loads((tmp_path / "summary.json").read_text())["samples_applied"] == 4000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SMALL)
    command = [*on_workers(1), EXAMPLES / "train_ctr.py", "--config", "job.yaml", "train.device=cuda:1"]
    done = subprocess.run(command, check=False, cwd=tmp_path, env=environment(tmp_path), text=True, capture_output=True)
    assert done.returncode == 1
    assert "train.device=cuda:1: torch finds 0 GPUs here" in done.stderr


@pytest.mark.parametrize(
    ("name", "mode"), [("din", "allreduce"), ("dien", "gba"), ("youtube_dnn", "allreduce"), ("youtube_dnn", "gba")]
)
def test_models_of_sequences_learn_from_the_history(tmp_path: Path, name: str, mode: str) -> None:
    sizes = {
        "train": 12_000,
        "valid": 1000,
        "test": 2000,
        "users": 200,
        "items": 200,
        "categories": 10,
        "max_length": 8,
    }
    config, out = EXAMPLES / "configs" / f"{name}.yaml", tmp_path / "out"
    settings = [f"data.behaviour.{key}={value}" for key, value in sizes.items()]
    settings += ["train.global_batch=256", "train.micro_batch=64", "train.epochs=2", "mlflow=false"]
    settings += ["embedding.lr=1e-2", "dense.lr=5e-3"]  # for so few steps
    settings += [f"switching.mode={mode}", "switching.wait_s=120"]
    said = run(tmp_path, *on_workers(2), EXAMPLES / "train_ctr.py", "--config", config, "--out", out, *settings)
    wait_until_empty(tmp_path / "shards")
    summary = json.loads((out / "summary.json").read_text())
    assert [switch["to"] for switch in summary["switches"]] == ([] if mode == "allreduce" else [mode])
    account = [summary[f"samples_{kind}"] for kind in ("applied", "dropped", "lost")]
    assert sum(account) == summary["samples_total"] == 2 * 12_000
    if name == "youtube_dnn":
        # The 50 most popular of 200 items are found by no history at all.
        assert summary["recall_at_50_bayes"] > summary["recall_at_50"] > 0.6
        assert summary["recall_at_50_last"] is not None and 0 < summary["ndcg_at_50"] < summary["recall_at_50"]
        assert "auc" not in summary and "test recall@50 0." in said
        assert all(0 < epoch["test_recall_at_50"] < 1 for epoch in summary["by_epoch"] if "test_recall_at_50" in epoch)
    else:
        assert 0.7 < summary["auc"] < summary["auc_bayes"] + 0.01


def test_a_job_goes_by_one_name(tmp_path: Path) -> None:
    """What the settings say comes before the environment: in the summary, in what people read, in `gba-hvd ps`.

    And it says that it stopped before its last epoch.
    """
    (tmp_path / "job.yaml").write_text(SMALL)
    settings = [
        "name=nightly",
        "data.synthetic.train=2000",
        "train.epochs=200",
        "train.early_stop=1",
        "embedding.lr=0.5",
    ]
    command = [*on_workers(1), EXAMPLES / "train_ctr.py", "--config", "job.yaml", "--out", "out", *settings]
    said = run(tmp_path, "env", "GBA_HVD_JOB_NAME=of-the-environment", *command)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert f"nightly: finished: {summary['steps']:,} steps" in said
    assert summary["name"] == "nightly" and summary["seconds_in_all"] >= summary["seconds"]
    early = f"stopped early: no gain in valid AUC for 1 epoch (train.early_stop=1), after {summary['epochs']} of 200"
    assert summary["stopped_early"].startswith(early)
    assert [line for line in said.splitlines() if line.startswith(early)]
    assert "of-the-environment" not in said


def test_the_same_command_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    saving = [f"checkpoint.url={tmp_path / 'checkpoints'}", "checkpoint.every_steps=20"]
    first = train(tmp_path, 1, *saving, "train.epochs=1")
    assert first["recoveries"] == []
    assert first["checkpoints"]["last"]["saved_step"] == first["steps"] == 50
    second = train(tmp_path, 1, *saving)
    (resumed,) = second["recoveries"]
    assert (resumed["kind"], resumed["step"], resumed["rows_restored"]) == ("resumed", 50, 250)
    assert second["checkpoints"]["count"] > first["checkpoints"]["count"]
    assert second["steps"] == 50 * second["epochs"] > 50
    assert second["samples_total"] == second["samples_applied"] == 20_000 * second["epochs"]


def demo_command(folder: Path, *settings: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(folder / "demo"), "mlflow=false", *settings]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_demo_reports_its_story_and_ends_well(tmp_path: Path) -> None:
    # Five epochs: on a busy machine the job would be over before all replacements have started.
    shown = run(tmp_path, *demo_command(tmp_path, "--timeout-s", "1000", "train.epochs=5"), timeout_s=1100)
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert shown.count("killed with SIGKILL") == shown.count("a replacement has joined") == 3
    assert "killed with SIGKILL, in gba" in shown
    assert "killed with SIGKILL, in allreduce" in shown
    assert [s["to"] for s in summary["switches"][:2]] == ["gba", "allreduce"]
    assert summary["restarts"] >= 3
    assert "that host is lost" in shown
    assert "rows are back from the checkpoint" in shown
    assert summary["checkpoints"]["count"] >= 1
    assert [one["rows_lost"] for one in summary["recoveries"]] == [0]
    assert 0 < summary["recoveries"][0]["pls"] < 0.1
    wait_until_empty(tmp_path / "shards")
    account = [summary[f"samples_{name}"] for name in ("applied", "dropped", "lost")]
    assert sum(account) == summary["samples_total"] == 5 * 320_000
    assert summary["auc"] > summary["auc_bayes"] - 0.01


@pytest.mark.parametrize(
    "interrupt",
    [pytest.param(signal.SIGINT, id="Ctrl-C"), pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.variant)],
)
def test_an_interrupted_demo_leaves_no_process_and_no_memory(tmp_path: Path, interrupt: signal.Signals) -> None:
    command = demo_command(tmp_path, "--undisturbed", "train.epochs=1000")
    demo = subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    family: list[psutil.Process] = []
    try:
        wait_for(tmp_path / "demo" / "pulse" / "step.json", demo)
        family = psutil.Process(demo.pid).children(recursive=True)
        assert len(family) >= 4  # the launcher and three workers
        demo.send_signal(interrupt)
        _, errors = demo.communicate(timeout=200)
        assert demo.returncode == 130
        assert b"everything the demo started has been ended" in errors
        _, left = psutil.wait_procs(family, timeout=60)
        assert not left
        wait_until_empty(tmp_path / "shards")
    finally:
        for process in [psutil.Process(demo.pid)] if demo.poll() is None else []:
            family += process.children(recursive=True)
            process.kill()
        for process in family:
            if process.is_running():
                process.kill()


def wait_for(path: Path, process: subprocess.Popen[bytes], timeout_s: float = 200.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def wait_until_empty(folder: Path, timeout_s: float = 90.0) -> None:
    """Workers that are killed leave their memory to its keeper, which waits out the grace period."""
    deadline = time.monotonic() + timeout_s
    while list(folder.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
