"""The first hour with the launcher, as a person has it: the documented commands, a kill, Ctrl-C, two jobs at once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools.process_list import others

pytestmark = [pytest.mark.processes]
BIN = Path(sys.executable).parent
PATIENCE_S = 180.0
SCRIPT = """
import os
import pathlib
import time

import horovod.torch as hvd
import torch

import gba_hvd
from gba_hvd.data import SyntheticClickLog
from gba_hvd.tracking import ProgressLine

hvd.init()
OUT = pathlib.Path(os.environ["OUT"])
rows = {"user": 500, "item": 100}
dataset = SyntheticClickLog(4_000, rows, seed=1)
tables = gba_hvd.EmbeddingTables({name: (n, 4) for name, n in rows.items()}, optimizer=gba_hvd.RowAdagrad(lr=0.05))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tables, self.top = tables, torch.nn.Linear(8, 1)

    def forward(self, batch):
        return self.top(torch.cat(list(self.tables(batch.ids).values()), 1)).squeeze(1)


model = Model()
optimizer = gba_hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), tables, global_batch=200, micro_batch=50
)
state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
state.register_callbacks([ProgressLine(every_s=1000.0)])
EPOCHS, HOLD_AT = int(os.environ.get("EPOCHS", 2)), int(os.environ.get("HOLD_AT", 0))


@gba_hvd.elastic.run
def train(state):
    (OUT / f"pid-{os.getpid()}").touch()
    for state.epoch in range(state.epoch, EPOCHS):
        for batch in gba_hvd.batches(dataset, state):
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
            optimizer.step()
            if HOLD_AT and state.step == HOLD_AT:  # here the test does what it came for
                (OUT / f"held-{os.getpid()}").touch()
                while not (OUT / "go").exists():
                    time.sleep(0.02)
            time.sleep(float(os.environ.get("STEP_S", 0)))
            (OUT / "workers-at" / str(state.step)).write_text(str(hvd.size()))
    samples = state.samples
    (OUT / f"end-{hvd.rank()}").write_text(
        f"{samples.total} {samples.applied} {samples.dropped} {samples.lost} workers {hvd.size()}"
    )


train(state)
"""


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s in vain for {what}"
        time.sleep(0.1)
    return value


class Run:
    """A command of a person's, in a folder of its own."""

    def __init__(self, folder: Path, *command: str | Path, **environ: str) -> None:
        self.out, self.log = folder / "out", folder / "log"
        (self.out / "workers-at").mkdir(parents=True)
        (folder / "shards").mkdir()
        (folder / "train.py").write_text(SCRIPT)
        mine = {"OUT": str(self.out), "GBA_HVD_SHARD_DIR": str(folder / "shards"), "GBA_HVD_GRACE_S": "1"}
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("GBA_HVD", "HOROVOD", "OMP_"))}
        mine["PATH"] = f"{BIN}:/usr/bin:/bin"
        mine["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "120"  # on a busy machine a new worker takes long to start
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command], cwd=folder, env=clean | mine | environ,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._marker = f"OUT={self.out}".encode()

    def workers_seen(self) -> list[int]:
        """Processes that came to the training function."""
        return [int(path.name[4:]) for path in self.out.glob("pid-*")]

    def held(self) -> list[int]:
        return [int(path.name[5:]) for path in self.out.glob("held-*")]

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {PATIENCE_S:g} s:\n{self.said()}") from None

    def processes(self) -> list[int]:
        return [pid for pid, _, environ in others() if self._marker in environ]

    def assert_nothing_left(self) -> None:
        wait_for(lambda: not self.processes(), "the end of all processes")
        assert not list((self.out.parent / "shards").iterdir())


@contextlib.contextmanager
def run(folder: Path, *command: str | Path, **environ: str) -> Iterator[Run]:
    job = Run(folder, *command, **environ)
    try:
        yield job
    finally:
        for pid in job.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.process.wait(PATIENCE_S)


def discovery(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "discover.sh"
    script.write_text(f"#!/bin/sh\necho {text}\n")
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("slot", [0, pytest.param(1, marks=pytest.mark.variant)])
def test_a_killed_worker_of_three_on_one_host_costs_no_sample_and_is_replaced(tmp_path: Path, slot: int) -> None:
    """The documented command, word for word; no --network-interface either."""
    script = discovery(tmp_path, "localhost:3")
    elastic = ["-np", "3", "--min-np", "2", "--max-np", "3", "--host-discovery-script", script]
    with run(
        tmp_path / "job", "horovodrun", *elastic, sys.executable, "train.py", HOLD_AT="5", EPOCHS="5", STEP_S="0.1"
    ) as job:
        wait_for(lambda: len(job.held()) == 3 or job.process.poll() is not None, "three workers at step 5")
        by_slot = {environ_of(pid)["HOROVOD_SLOT"]: pid for pid in job.held()}
        os.kill(by_slot[str(slot)], signal.SIGKILL)
        (job.out / "go").touch()
        assert job.wait() == 0, job.said()
        said = job.said()
        assert f"worker localhost[{slot}] failed (failure 1 of 5); it is started again in" in said
        assert "exit with status code 137" in said, "the kill was to happen"
        ends = [path.read_text().split() for path in job.out.glob("end-*")]
        assert [end[:4] for end in ends] == 3 * [["20000", "20000", "0", "0"]], ends
        assert len(job.workers_seen()) > 3, "the worker that was killed was to be replaced"
        assert (job.out / "workers-at" / "6").read_text() == "2", "the survivors were to go on at once"
        job.assert_nothing_left()


def environ_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.partition("=")[::2] for word in words)


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """Static, elastic, `gba-hvd run`, and a script alone: the whole terminal's group gets SIGINT, as by a person."""
    python = sys.executable
    script = discovery(tmp_path, "localhost:2")
    elastic = ["-np", "2", "--min-np", "1", "--max-np", "2", "--host-discovery-script", script]
    commands: dict[str, list[str | Path]] = {
        "static": ["horovodrun", "-np", "2", python, "train.py"],
        "elastic": ["horovodrun", *elastic, python, "train.py"],
        "run": ["gba-hvd", "run", "-np", "2:2", "train.py"],
        "alone": [python, "train.py"],
        "run-alone": ["gba-hvd", "run", "-np", "1", "train.py"],
    }
    for name, command in commands.items():
        with run(tmp_path / name, *command, HOLD_AT="5", OMP_NUM_THREADS="1") as job:
            n_workers = 1 if "alone" in name else 2
            wait_for(lambda: len(job.held()) == n_workers or job.process.poll() is not None, "step 5")  # noqa: B023
            os.killpg(job.process.pid, signal.SIGINT)
            status = job.wait()
            said = job.said()
            assert status == (-signal.SIGINT if "alone" in name else 128 + signal.SIGINT), (name, said)
            assert "Traceback" not in said and "KeyboardInterrupt" not in said, (name, said)
            assert "[failed]" not in said and "Error" not in said, (name, said)
            lines = [line for line in said.splitlines() if "interrupted" in line]
            by = "Ctrl-C" if "alone" in name else "Ctrl-C or SIGTERM"
            assert [line for line in lines if f"interrupted by {by}: 5 steps" in line], (name, said)
            assert len(lines) == (1 if "alone" in name else 2), (name, said)  # rank 0's summary; the launcher's own
            job.assert_nothing_left()


def test_a_job_of_another_launcher_is_refused_and_not_trained_twice(tmp_path: Path) -> None:
    with run(tmp_path / "job", sys.executable, "train.py", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0") as job:
        assert job.wait() == 1
        assert "mpirun (Open MPI) started 2 processes (OMPI_COMM_WORLD_SIZE), but Horovod's world has 1" in job.said()
        job.assert_nothing_left()


def test_two_jobs_at_once_on_one_machine_finish(tmp_path: Path) -> None:
    with (
        run(tmp_path / "a", "gba-hvd", "run", "-np", "2", "train.py", HOLD_AT="3") as a,
        run(tmp_path / "b", "gba-hvd", "run", "-np", "1:2", "train.py", HOLD_AT="3") as b,
    ):
        for job in (a, b):
            wait_for(lambda: len(job.held()) == 2 or job.process.poll() is not None, "both jobs training")  # noqa: B023
        for job in (a, b):
            (job.out / "go").touch()
        assert [a.wait(), b.wait()] == [0, 0], a.said() + b.said()
        for job in (a, b):
            (end, _) = sorted(path.read_text() for path in job.out.glob("end-*"))
            assert end == "8000 8000 0 0 workers 2"
            assert re.search(r"OMP_NUM_THREADS=\d+ .*horovodrun -np 2 ", job.said()), "the call is printed"
            job.assert_nothing_left()
