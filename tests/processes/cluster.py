"""Launches `worker.py` under real `horovodrun` on this machine and reads what the workers wrote.

Everything has a hard time-out. `Cluster` is a context manager: at its end every process it started is gone, or the
test fails naming what is left.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gba_hvd_tools.process_list import others

from . import prefork

HERE = Path(__file__).parent
HOROVODRUN = Path(sys.executable).parent / "horovodrun"
GRACE_S = 2.0
PATIENCE_S = 180.0  # on a busy machine processes take long to start
END_S = 60.0  # and as long to end
PATIENT = {"GBA_HVD_ALIVE_S": "30"}  # who dies on this machine is seen at once; who is only not scheduled lives
CONTAINER = (
    "unshare",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)  # a namespace of processes, as containers have
NAMES = ("localhost", "127.0.0.1", socket.gethostname())  # Horovod counts these as different hosts


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Poll until the condition gives something true; fail naming what did not come. Leaves the job most of the core."""
    deadline = time.monotonic() + timeout_s
    while True:
        asked = time.monotonic()
        value = condition()
        if value:
            return value
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s in vain for {what}")
        time.sleep(min(0.5, max(0.05, 9 * (now - asked))))


@functools.cache
def _has_containers() -> bool:
    try:
        return subprocess.run([*CONTAINER, "true"], check=False, capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False


def needs_containers() -> pytest.MarkDecorator:
    return pytest.mark.skipif(not _has_containers(), reason=f"{' '.join(CONTAINER)} is not allowed here")


@dataclass
class Cluster:
    """One job. `plan` is what its script reads; `out` where the workers write. script: its name ends in `worker.py`"""

    folder: Path
    plan: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    script: str = "worker.py"

    def __post_init__(self) -> None:
        self.out, self.shard_dir = self.folder / "out", self.folder / "shm"
        self.out.mkdir(parents=True)
        self.plan_file, self.hosts_file, self.log_file = (self.folder / n for n in ("plan.json", "hosts", "log"))
        self.plan = {"out": str(self.out), "shard_dir": str(self.shard_dir), **self.plan}
        self.plan_file.write_text(json.dumps(self.plan))
        self.launcher: subprocess.Popen[bytes] | None = None

    # --- start and end ---

    def start_static(self, workers: int, names: tuple[str, ...] = ()) -> None:
        """names: of hosts, a worker on each; default: all on this one."""
        hosts = ["-H", ",".join(f"{name}:1" for name in names)] if names else []
        self._launch([HOROVODRUN, "-np", workers, *hosts, "--network-interface", "lo"])

    def start_elastic(
        self, names: tuple[str, ...], min_np: int = 1, max_np: int | None = None, cooldown_s: int = 1, slots: int = 1
    ) -> None:
        """cooldown_s: for so long the launcher uses no host again that a worker died on. slots: of each name."""
        self.set_hosts(names, slots)
        script = self.folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {self.hosts_file}\n")
        script.chmod(0o755)
        workers = ["-np", len(names) * slots, "--min-np", min_np, "--max-np", max_np or len(NAMES)]
        hosts = ["--host-discovery-script", script, "--blacklist-cooldown-range", cooldown_s, cooldown_s + 1]
        self._launch([HOROVODRUN, *workers, *hosts, "--network-interface", "lo"])

    def start_alone(self) -> None:
        self._launch([])

    def set_hosts(self, names: tuple[str, ...], slots: int = 1) -> None:
        fresh = self.hosts_file.with_suffix(".new")
        fresh.write_text("".join(f"{name}:{slots}\n" for name in names))
        fresh.rename(self.hosts_file)

    def _launch(self, launcher: list[Any]) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD", "GBA_HVD"))}
        environ |= {
            "TEST_PLAN": str(self.plan_file),
            "OMP_NUM_THREADS": "1",
            "HOROVOD_CYCLE_TIME": os.environ["HOROVOD_CYCLE_TIME"],
            "GBA_HVD_GRACE_S": str(GRACE_S),
            "GBA_HVD_SERVER_S": "60",  # a server that was killed may take long to start on a busy machine
            "PYTHONUNBUFFERED": "1",
        }
        command = [*map(str, launcher), *self.python(), str(HERE / self.script)]
        with open(self.log_file, "wb") as log:
            self.launcher = self.popen(
                command, env=environ | self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, cwd=self.folder,
            )  # fmt: skip

    def python(self) -> list[str]:
        """What runs a worker's script: a process that has imported torch forks it."""
        return prefork.python()

    def popen(self, command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        """Where the launcher runs: here."""
        return subprocess.Popen(command, **settings)

    @property
    def ended(self) -> bool:
        return self.launcher is not None and self.launcher.poll() is not None

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The launcher's exit code."""
        assert self.launcher is not None
        try:
            return self.launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job still runs after {timeout_s:.0f} s:\n{self.log()}") from None

    def run(self, start: Callable[[], None], timeout_s: float = PATIENCE_S) -> Cluster:
        """Start, wait for success, check that nothing is left."""
        start()
        code = self.wait(timeout_s)
        assert code == 0, f"exit code {code}:\n{self.log()}"
        self.assert_nothing_left()
        return self

    def kill(self, pids: Iterable[int]) -> list[int]:
        """SIGKILL to those that are still there, but who cleans up behind the launcher: it ends by itself."""
        killed = []
        for pid in pids:
            with contextlib.suppress(OSError):
                if b"multiprocessing.resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
        return killed

    def kill_all(self) -> None:
        """Nobody gets to say goodbye, nor does who was being started meanwhile."""
        wait_for(lambda: not self.kill(self.processes()), "the end of all that was killed", GRACE_S + END_S)
        self.end()
        self.assert_nothing_left_but_memory()

    def end(self) -> None:
        """Kill whatever of this job still lives."""
        self.kill(self.processes())
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait(END_S)

    # --- what is there ---

    def processes(self, only_workers: bool = False) -> list[int]:
        """Live processes of this job: by the plan in their environment, or the folder in their command line."""
        marker, folder, found = f"TEST_PLAN={self.plan_file}".encode(), str(self.shard_dir).encode(), []
        for pid, command, environ in others():
            if marker in environ or folder in command:
                worker = (
                    b"worker.py" in command
                    and b"horovod" not in command
                    and b"prefork_client.py" not in command
                    and not command.startswith((b"/bin/sh", b"sh\0"))
                )
                if worker or not only_workers:
                    found.append(pid)
        return found

    def processes_of_name(self, name: str) -> list[int]:
        """Worker, server and keeper of one of the names that have a memory each."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                facts = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                is_worker = f"HOROVOD_HOSTNAME={name}".encode() in facts and pid in self.processes(only_workers=True)
                if is_worker or f"{self.shard_dir}/{name}/".encode() in command:
                    found.append(pid)
        return found

    def assert_nothing_left(self) -> None:
        """No process and no shard memory of this job remains, a grace period and what a busy machine needs after it."""
        wait_for(lambda: not self.processes(), f"the end of the job's processes {self.processes()}", GRACE_S + END_S)
        left = [str(p) for p in self.shard_dir.glob("**/*") if not p.is_dir() or p.name.startswith("gba-hvd-")]
        assert not left, f"shard memory or sockets are left: {left}"

    def assert_nothing_left_but_memory(self) -> None:
        """Everything was killed, the keeper of the memory as well."""
        wait_for(lambda: not self.processes(), f"the end of the job's processes {self.processes()}", GRACE_S + END_S)

    def said(self) -> str:
        """All that the job has said."""
        return self.log_file.read_text(errors="replace")

    def log(self) -> str:
        """The end of it, to be shown."""
        return self.said()[-6000:]

    # --- what the workers wrote ---

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """All notes that have the key `kind`, in the order of time."""
        lines = []
        for path in self.out.glob("*.jsonl"):
            whole, _, _ = path.read_text().rpartition("\n")  # a killed worker may leave half a line
            lines += [{"pid": path.stem, **json.loads(line)} for line in whole.splitlines()]
        return sorted((line for line in lines if kind in line), key=lambda line: float(line["time"]))

    def last_step(self) -> int:
        """The newest step that some worker has seen committed."""
        return max((int(line["committed"]) for line in self.notes("committed")), default=0)

    def samples_of_epoch(self, epoch: int) -> list[int]:
        """Every sample of every committed step of an epoch, as often as it took part.

        A step may have been attempted by several worlds; the newest that saw it committed counts. In asynchronous modes
        a micro-batch may have been pushed several times; the newest lease counts. A push before a worker fell out of
        the world may have died with the coordinator: a step of allreduce after that has its samples, then.
        """
        committed = {line["committed"]: line["world"] for line in self.notes("committed") if line["epoch"] == epoch}
        newest: dict[tuple[int, int], dict[str, Any]] = {}
        for line in self.notes("attempt"):
            if committed.get(line["attempt"]) == line["world"]:
                newest[line["attempt"], line["pid"]] = line
        by_lease = sorted(self.pushes(epoch), key=lambda line: int(line["serial"]))
        pushed = {(line["segment"], line["push"]): line for line in by_lease}
        fell_out = max((line["time"] for line in self.notes("restored")), default=0.0)
        again = {row for line in newest.values() if line["time"] > fell_out for row in line["rows"]}
        counted = [line for line in pushed.values() if line["time"] > fell_out or again.isdisjoint(line["rows"])]
        return sorted(row for line in (*newest.values(), *counted) for row in line["rows"])

    def pushes(self, epoch: int | None = None) -> list[dict[str, Any]]:
        """What workers noted just before they pushed a micro-batch in an asynchronous mode."""
        return [line for line in self.notes("push") if epoch is None or line["epoch"] == epoch]

    def assert_every_sample_once(self, epochs: int, samples: int = 1000) -> None:
        """What the workers noted is every sample once an epoch, and the account says the same."""
        for epoch in range(epochs):
            assert self.samples_of_epoch(epoch) == list(range(samples)), f"epoch {epoch}"
        result = self.result()
        assert result["total"] == result["applied"] + result["dropped"] + result["lost"] == epochs * samples
        pushes = [(line["epoch"], line["segment"], line["push"]) for line in self.pushes()]
        again = len(pushes) - len(set(pushes))
        assert again <= result["reissued"], f"{again} micro-batches were pushed again, {result['reissued']} given again"

    def assert_one_fell_out_and_came_back(self) -> None:
        """One worker left the asynchronous mode and trained in it again; the others stayed in it all the time.

        A world that is not formed at once is asked for again: then the same worker restores its state more than once.
        """
        restored = self.notes("restored")
        assert len({line["pid"] for line in restored}) == 1, f"{restored}\n{self.said()}"
        last = restored[-1]
        later = [line for line in self.pushes() if line["pid"] == last["pid"] and line["time"] > last["time"]]
        assert later, f"{last['pid']} did not come back:\n{self.said()}"

    def result(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.out / "result.json").read_text())
        return loaded

    def arrays(self) -> dict[str, np.ndarray]:
        with np.load(self.out / "result.npz") as stored:
            return dict(stored)

    def accesses(self) -> dict[str, np.ndarray]:
        """How often each row was accessed, by table, as the chief's host has them."""
        with np.load(self.out / "accesses.npz") as stored:
            return dict(stored)

    def optimizer_arrays(self) -> dict[str, np.ndarray]:
        """The state of the dense optimizer."""
        with np.load(self.out / "optimizer.npz") as stored:
            return dict(stored)

    def fired(self) -> int:
        return len(list(self.out.glob("fault-*")))

    def schedule_fired(self) -> list[str]:
        """Kinds of the faults of `fault_schedule` that happened, in planned order."""
        paths = sorted((self.out / "schedule").glob("fault-*.json"))
        return [json.loads(path.read_text())["fault"]["kind"] for path in paths]


@contextlib.contextmanager
def cluster(
    folder: Path, environ: dict[str, str] | None = None, script: str = "worker.py", **plan: Any
) -> Iterator[Cluster]:
    job = Cluster(folder, plan, environ or {}, script)
    try:
        yield job
    except BaseException:
        print(job.log())  # shown with the failure
        raise
    finally:
        job.end()


def assert_identical(arrays: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> None:
    """Equal bit for bit."""
    assert set(arrays) == set(reference)
    for name, value in reference.items():
        np.testing.assert_array_equal(arrays[name], value, err_msg=name)


def assert_same_parameters(arrays: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> None:
    """Equal up to the order of float additions."""
    assert set(arrays) == set(reference)
    for name, value in reference.items():
        np.testing.assert_allclose(arrays[name], value, rtol=1e-3, atol=2e-5, err_msg=name)
