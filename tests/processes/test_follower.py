"""A real job trains and saves while a model in another process takes over what it learns."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gba_hvd
from recovery.restore.open_checkpoint import open_checkpoint

from .cluster import HERE, NAMES, Cluster, cluster, wait_for
from .test_checkpoints import LOCK_STEP, PATIENCE_S, events, let_go, saving
from .test_elastic import fault
from .test_hashed_tables import FEW
from .workload import Clicks, served_model

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]
TWO = NAMES[:2]


class Following:
    """A process that follows a job (`follower.py`); one that was killed is started again."""

    def __init__(self, folder: Path, job_url: Path, arguments: dict[str, Any]) -> None:
        self.out, self._url = folder, job_url
        self.out.mkdir()
        (self.out / "arguments.json").write_text(json.dumps(arguments))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, dies_at: str = "") -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("HOROVOD", "GBA_HVD"))}
        with open(self.out / "log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "follower.py"), str(self._url), str(self.out), dies_at],
                env={**environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
            )  # fmt: skip

    def await_death(self) -> None:
        assert self._process is not None
        assert self._process.wait(PATIENCE_S) == -9, self.said()
        assert (self.out / "killed").exists()

    def updates(self) -> list[dict[str, Any]]:
        path = self.out / "updates.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def predictions(self) -> np.ndarray:
        """Of the newest state, when the job has ended."""
        (self.out / "end").touch()
        assert self._process is not None
        assert self._process.wait(PATIENCE_S) == 0, self.said()
        found: np.ndarray = np.load(self.out / "predictions.npy")
        return found

    def said(self) -> str:
        return (self.out / "log").read_text()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def following(folder: Path, job_url: Path, **arguments: Any) -> Iterator[Following]:
    found = Following(folder, job_url, arguments)
    try:
        yield found
    finally:
        found.close()


def predictions_of(job: Cluster, **arguments: Any) -> np.ndarray:
    """What the trained model predicts: with the rows and the dense part that the job ended with."""
    arrays, model = job.arrays(), served_model(**arguments)
    clicks = Clicks(300)
    batch = clicks.take(np.arange(300))
    model.load_state_dict({name[6:]: torch.from_numpy(a) for name, a in arrays.items() if name.startswith("dense.")})
    rows = [
        torch.from_numpy(arrays["user.weights"][clicks.user]),
        torch.from_numpy(arrays["item.weights"][clicks.item]),
    ]
    with torch.no_grad():
        found: np.ndarray = model.mlp(torch.cat([*rows, batch.dense], dim=1)).squeeze(1).numpy()
    return found


def report_lag(updates: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    """On the terminal: `pytest -s`."""
    lags = [update["lag_s"] for update in updates if not update["is_full"]]
    with capsys.disabled():
        print(f"\n{len(lags)} updates, lag in s: median {np.median(lags):.3f}, 95th percentile "
              f"{np.percentile(lags, 95):.3f}; without requests {1e3 * max(u['blocked_s'] for u in updates):.2f} ms")  # fmt: skip


@pytest.mark.parametrize("dies_at", ["stage", pytest.param("apply", marks=pytest.mark.variant), "poll"])
@pytest.mark.parametrize("mode", ["allreduce", pytest.param("gba", marks=pytest.mark.variant)])
def test_a_follower_that_was_killed_ends_with_the_predictions_of_the_trained_model(
    tmp_path: Path, mode: str, dies_at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = saving(tmp_path, policy="delta") | FEW | ({"gba": LOCK_STEP} if mode == "gba" else {})
    with (
        cluster(tmp_path / "job", **plan, holds={"1": "servers", "12": "killed"}, sleep_s=0.1, epochs=3, horovod=False) as job,
        following(tmp_path / "served", tmp_path / "checkpoints", **FEW) as served,
    ):  # fmt: skip
        job.start_alone()
        let_go(job)
        served.start(dies_at)
        served.await_death()
        served.start()
        n_before = len(served.updates())
        wait_for(lambda: job.ended or len(served.updates()) > n_before, "an update after the death", PATIENCE_S)
        (job.out / "killed").touch()
        assert job.wait(PATIENCE_S) == 0, job.log()
        assert np.array_equal(served.predictions(), predictions_of(job, **FEW))
        updates = served.updates()
        assert updates[-1]["step"] == job.result()["step"]
        assert [update["is_full"] for update in updates].count(False) >= 3
        report_lag(updates, capsys)
