"""A job driven by hand, a real MLflow server that can be stopped, killed and started again, and a way to ask it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from gba_hvd.callbacks import Event, Job, StepRecord
from tests.processes import prefork

WORKER = Path(__file__).with_name("worker.py")
FLUSH_S = 300.0  # at the end of a job; starting the sender takes tens of seconds on a machine that trains meanwhile


def job(
    job_id: str, rank: int = 0, size: int = 1, host: str = "h1", is_host_leader: bool = True, **settings: Any
) -> Job:
    return Job(job_id, rank, size, 0, host, is_host_leader, settings)


def step(k: int, workers: int = 1, loss: float | None = 0.5) -> StepRecord:
    return StepRecord(k, 0, 64, 64 * k, 0.01, workers, "allreduce", loss)


def event(kind: str, k: int, message: str = "") -> Event:
    return Event(kind, k, message or f"{kind} happened")


def wait_until(what: str, condition: Callable[[], Any], timeout_s: float = 300.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        threading.Event().wait(0.1)
    return value


def client(uri: str) -> MlflowClient:
    return MlflowClient(tracking_uri=uri)


def runs(uri: str, job_id: str) -> list[Run]:
    mlflow = client(uri)
    experiments = [experiment.experiment_id for experiment in mlflow.search_experiments()]
    return list(mlflow.search_runs(experiments, f"tags.`gba_hvd.job_id` = '{job_id}'"))


def only_run(uri: str, job_id: str) -> Run:
    (run,) = runs(uri, job_id)
    return run


def logged_steps(uri: str, run: Run, key: str) -> list[int]:
    return sorted(metric.step for metric in client(uri).get_metric_history(run.info.run_id, key))


def artifact(uri: str, run: Run, path: str, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return Path(client(uri).download_artifacts(run.info.run_id, path, str(folder))).read_text()


def artifact_names(uri: str, run: Run) -> set[str]:
    return {info.path for info in client(uri).list_artifacts(run.info.run_id)}


def port_of_our_own() -> int:
    """Below those that the kernel gives to outgoing connections: nobody gets it while the server is down."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(max(1024, lowest - 10_000), lowest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """A real `mlflow server` on a port of its own; its whole process group is what is stopped and killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = port_of_our_own()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None:
            return
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self._folder}/server.db"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | settings, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            )
        wait_until("mlflow server answers", self._answers)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait(30)
            self._process = None

    def is_there(self) -> bool:
        return self._process is not None and self._answers()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=20) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@pytest.fixture(scope="module", autouse=True)
def _forked_senders(request: pytest.FixtureRequest) -> Iterator[None]:
    """What sends to MLflow is forked from a process that has imported it, see `prefork`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("processes") is not None:
            patch.setattr(sys, "executable", prefork.interpreter())
        yield


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow-server"))
    yield server
    server.kill()


@pytest.fixture
def server(_server: Server) -> Iterator[Server]:
    _server.start()
    yield _server
    if _server._process is not None:
        _server.thaw()


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A SQLite file the tests share: making its tables takes seconds."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    # Makes the tables: two processes that do so at once disturb each other.
    client(uri).search_experiments(max_results=1)
    return uri


class Worker:
    """Callbacks in a process of their own, so that it can be killed."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps({"flush_timeout_s": FLUSH_S, **settings})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            text=True,
        )

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Call a callback method there; returns when it has returned."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._close()
        assert self._process.returncode == -signal.SIGKILL

    def leave(self) -> None:
        """Let it end by itself: its input is over."""
        self._close()

    def _close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(100)
        self._process.stdout.close()
