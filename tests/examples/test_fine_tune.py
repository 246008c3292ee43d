"""The script of docs/RECOVERY.md for fine-tuning is run as it stands there; a copied folder is resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

PAGE = Path(__file__).parents[2] / "docs" / "RECOVERY.md"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # MLflow's use of SQLAlchemy
]


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., str]:
    """Runs the page's script as the job that comes first; returns all that it prints."""
    found = re.search(r"`python finetune.py base`.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "finetune.py").write_text(found[1])
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("GBA_HVD", "HOROVOD", "MLFLOW"))}
    environ |= {"OMP_NUM_THREADS": "1", "GBA_HVD_SHARD_DIR": str(tmp_path / "shm"), "GBA_HVD_GRACE_S": "2"}
    (tmp_path / "shm").mkdir()

    def run(job: str, *arguments: str, job_id: str = "") -> str:
        done = subprocess.run(
            [sys.executable, "finetune.py", job, *arguments], cwd=tmp_path,
            env=environ | ({"GBA_HVD_JOB_ID": job_id} if job_id else {}),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


def run_of(folder: Path, job_id: str) -> Run:
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiments = [one.experiment_id for one in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"tags.`gba_hvd.job_id` = '{job_id}'")
    return run


def events_of(folder: Path, run: Run) -> list[dict[str, Any]]:
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    path = client.download_artifacts(run.info.run_id, "events.jsonl", str(folder))
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_job_starts_from_the_weights_of_another_with_rates_and_a_run_of_its_own(
    launch: Callable[..., str], tmp_path: Path
) -> None:
    launch("base", job_id="base")
    said = launch(
        "tuned", "--start-from", "checkpoints/base", "--lr", "0.0005", "--row-lr", "0.005", job_id="tuned"
    )  # fmt: skip
    assert "[started] step 0" in said and "[resumed]" not in said
    assert "rows that the script assigned, of user, item, are where training begins: weights alone" in said
    assert "learning rates" not in said
    base, tuned = run_of(tmp_path, "base"), run_of(tmp_path, "tuned")
    assert tuned.data.params["dense_lr"] == "0.0005" and "lr=0.005," in tuned.data.params["row_optimizer"]
    assert "gba_hvd.continues_run" not in tuned.data.tags
    best = base.data.metrics["valid_auc"]
    assert tuned.data.metrics["before_auc"] == pytest.approx(best, abs=1e-6), "it is the model, not a new one"
    assert abs(base.data.metrics["before_auc"] - best) > 0.02, "which would show"
    again = launch("tuned", "--start-from", "checkpoints/base", "--epochs", "3", job_id="tuned")
    assert "[resumed] step 40" in again and "are not used: the job resumes" in again


def test_a_copied_folder_is_resumed_as_another_job_with_the_saved_rates(
    launch: Callable[..., str], tmp_path: Path
) -> None:
    launch("base", job_id="base")
    before = run_of(tmp_path, "base")
    shutil.copytree(tmp_path / "checkpoints" / "base", tmp_path / "checkpoints" / "copied")
    said = launch("copied", "--lr", "0.0005", "--row-lr", "0.005", "--epochs", "3", job_id="copied")
    assert said.count("dense 0.005 (script: 0.0005), rows 0.05 (script: 0.005)") >= 1, said
    assert "the checkpoint is of job base, this one is job copied: it has a run of its own" in said
    assert "restored, too: dense values, the state of the optimizers, learning rates (dense 0.005, rows 0.05)" in said
    copied, after = run_of(tmp_path, "copied"), run_of(tmp_path, "base")
    assert after.data.to_dictionary() == before.data.to_dictionary() and after.info.status == "FINISHED"
    assert copied.data.tags["gba_hvd.continues_run"] == after.info.run_id
    assert copied.data.params["dense_lr"] == "0.005" and "lr=0.05," in copied.data.params["row_optimizer"]
    (kept,) = [event for event in events_of(tmp_path, copied) if event["event"] == "learning_rates_kept"]
    assert kept["level"] == "warning" and kept["step"] == 40
    launch("base", "--lr", "0.001", "--epochs", "3", job_id="base")
    continued = run_of(tmp_path, "base")
    assert continued.info.run_id == before.info.run_id and continued.data.metrics["epoch"] == 2
