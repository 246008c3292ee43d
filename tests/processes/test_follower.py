"""A real job trains and saves while a model in another process takes over what it learns."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recovery.restore.open_checkpoint import open_checkpoint

from . import prefork
from .cluster import HERE, NAMES, Cluster, cluster, wait_for
from .test_checkpoints import LOCK_STEP, PATIENCE_S, let_go, saving
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
                [*prefork.python(), str(HERE / "follower.py"), str(self._url), str(self.out), dies_at],
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
    return predicted(job.arrays(), **arguments)


def predicted(arrays: dict[str, np.ndarray], **arguments: Any) -> np.ndarray:
    clicks, model = Clicks(300), served_model(**arguments)
    model.load_state_dict({name[6:]: torch.from_numpy(a) for name, a in arrays.items() if name.startswith("dense.")})
    rows = [arrays["user.weights"][clicks.user], arrays["item.weights"][clicks.item], clicks.dense]
    with torch.no_grad():
        found: np.ndarray = model.mlp(torch.cat([torch.from_numpy(one) for one in rows], dim=1)).squeeze(1).numpy()
    return found


@pytest.mark.parametrize("dies_at", ["stage", pytest.param("apply", marks=pytest.mark.variant), "poll"])
@pytest.mark.parametrize("mode", ["allreduce", pytest.param("gba", marks=pytest.mark.variant)])
def test_a_follower_that_was_killed_ends_with_the_predictions_of_the_trained_model(
    tmp_path: Path, mode: str, dies_at: str
) -> None:
    plan = saving(tmp_path, policy="delta") | FEW | ({"gba": LOCK_STEP} if mode == "gba" else {})
    plan |= {"holds": {"1": "servers", "4": "followed", "10": "killed"}, "sleep_s": 0.1, "epochs": 3}
    with (
        cluster(tmp_path / "job", **plan, horovod=False) as job,
        following(tmp_path / "served", tmp_path / "checkpoints", **FEW) as served,
    ):
        job.start_alone()
        let_go(job)
        served.start(dies_at)
        wait_for(lambda: job.ended or served.updates(), "the first update", PATIENCE_S)
        (job.out / "followed").touch()
        served.await_death()
        n_before = len(served.updates())
        served.start()
        wait_for(lambda: job.ended or len(served.updates()) > n_before, "an update after the death", PATIENCE_S)
        (job.out / "killed").touch()
        assert job.wait(PATIENCE_S) == 0, job.log()
        assert np.array_equal(served.predictions(), predictions_of(job, **FEW))
        updates = served.updates()
        assert updates[-1]["step"] == job.result()["step"]
        assert len({update["pid"] for update in updates}) == 2
        assert not all(update["is_full"] for update in updates)


def test_a_job_that_loses_a_worker_and_a_server_is_followed(tmp_path: Path) -> None:
    """The server dies with saves in flight, or between two: what it did not save comes with a later save."""
    faults = [
        fault("after commit", step=8),
        {"point": "before exchange", "step": 16, "rank": 0, "do": "kill the server"},
    ]
    plan = saving(tmp_path, policy="delta") | {"faults": faults, "holds": {"1": "servers", "4": "followed"}}
    with (
        cluster(tmp_path / "job", **plan, sleep_s=0.1, epochs=3) as job,
        following(tmp_path / "served", tmp_path / "checkpoints") as served,
    ):
        job.start_elastic(TWO)
        let_go(job)
        served.start()
        wait_for(lambda: job.ended or served.updates(), "the first update", PATIENCE_S)
        (job.out / "followed").touch()
        assert job.wait(PATIENCE_S) == 0, job.log()
        assert job.fired() == 2
        assert np.array_equal(served.predictions(), predictions_of(job))
        assert served.updates()[-1]["step"] == job.result()["step"]


def test_rows_of_two_hosts_arrive_together(tmp_path: Path) -> None:
    """Each host's server writes its part. What no worker has whole is compared with the last checkpoint."""
    plan = saving(tmp_path, policy="delta") | {"holds": {"1": "servers", "4": "followed"}}
    with (
        cluster(tmp_path / "job", **plan, own_memory_per_name=True, sleep_s=0.1) as job,
        following(tmp_path / "served", tmp_path / "checkpoints") as served,
    ):
        job.start_static(2, TWO)
        let_go(job, n_servers=2)
        served.start()
        wait_for(lambda: job.ended or served.updates(), "the first update", PATIENCE_S)
        (job.out / "followed").touch()
        assert job.wait(PATIENCE_S) == 0, job.log()
        predictions, last = served.predictions(), open_checkpoint(tmp_path / "checkpoints")
        assert last.step == served.updates()[-1]["step"] == job.result()["step"]
        arrays = {f"{name}.weights": last.rows(name) for name in last.tables}
        arrays |= {name: values for name, values in job.arrays().items() if name.startswith("dense.")}
        assert np.array_equal(predictions, predicted(arrays))
