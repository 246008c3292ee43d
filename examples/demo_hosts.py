"""The job of the demonstration and its hosts, all of them this machine: how it starts, what is where, how it ends."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from demo_watch import DemoFailed
from gba_hvd.config import Config

EXAMPLES = Path(__file__).resolve().parent
WORKERS = 3
SAVE_EVERY_STEPS = 40


class Hosts:
    """Three names of this machine, each a host for Horovod. For the job a host is what shares a memory.

    All share one until `separate`: from then on the next worker of that name is on a host of its own.
    """

    def __init__(self, scratch: Path, memory: Path) -> None:
        self.first, self.second = memory / "first", memory / "second"
        self._names = scratch / "separate"
        self._names.touch()
        self.discovery = _script(scratch / "hosts.sh", *(f"echo {name}:1" for name in host_names()))
        self.worker = _script(
            scratch / "worker.sh",
            f"GBA_HVD_SHARD_DIR={shlex.quote(str(self.first))}",
            f'if grep -qxF "$HOROVOD_HOSTNAME" {shlex.quote(str(self._names))}; then',
            f"    GBA_HVD_SHARD_DIR={shlex.quote(str(self.second))}",
            "fi",
            'export GBA_HVD_SHARD_DIR; exec "$@"',
        )

    def separate(self, name: str) -> None:
        self._names.write_text(f"{name}\n")

    def processes_of_separate(self) -> set[int]:
        """Companion server and keeper: they have their folder in their command line."""
        start = f"{self.second}/"
        lines = {process.pid: process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])}
        return {pid for pid, line in lines.items() if any(word.startswith(start) for word in line)}


@contextmanager
def folder_of_memory() -> Iterator[Path]:
    """For the memory of the hosts. Servers and keepers end when theirs is gone."""
    memory = Path(tempfile.mkdtemp(prefix="demo-of-gba-hvd-", dir=Config.from_env().shard_dir))
    try:
        yield memory
    finally:
        shutil.rmtree(memory, ignore_errors=True)


@contextmanager
def launched(out: Path, hosts: Hosts, overrides: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """`horovodrun` on three "hosts" that are all this machine; on the way out every process it started is gone."""
    command = [
        str(Path(sys.executable).with_name("horovodrun")),
        *("-np", str(WORKERS), "--min-np", "1", "--max-np", str(WORKERS)),
        *("--host-discovery-script", str(hosts.discovery)),
        *("--blacklist-cooldown-range", "1", "2", "--network-interface", "lo"),
        *(str(hosts.worker), sys.executable, "-u", str(EXAMPLES / "train_ctr.py"), "--out", str(out)),
        *("--config", str(EXAMPLES / "configs" / "demo.yaml"), "--faults", str(out / "faults.json")),
        *(
            f"checkpoint.url={out.absolute() / 'checkpoints'}",
            f"checkpoint.every_steps={SAVE_EVERY_STEPS}",
            "checkpoint.policy=mfu",
            "checkpoint.recovery=partial",
            *overrides,
        ),
    ]
    with open(out / "output.log", "wb") as log:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )  # fmt: skip
        try:
            yield job
        finally:
            for impatient in (signal.SIGINT, signal.SIGTERM):
                signal.signal(impatient, signal.SIG_IGN)  # what follows ends by itself, and must not be cut short
            if job.poll() is None:
                print("Ending the job ...", file=sys.stderr, flush=True)
            _end(job)


def host_names() -> list[str]:
    """Three names of this machine. Horovod excludes whole hosts after a failure, so each worker gets one of its own."""
    addresses = [a.address for of in psutil.net_if_addrs().values() for a in of if a.family == socket.AF_INET]
    resolves = []
    try:
        if socket.gethostbyname(socket.gethostname()) in addresses:
            resolves = [socket.gethostname()]
    except OSError:
        pass  # the name is not in /etc/hosts
    names = list(dict.fromkeys(["localhost", "127.0.0.1", *resolves, *addresses]))
    if len(names) < WORKERS:
        raise DemoFailed(f"this machine has only the names {names}: put its host name into /etc/hosts")
    return names[:WORKERS]


def _script(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o700)
    return file


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its workers; kill what is left of either."""
    if job.poll() is not None:
        return
    family = psutil.Process(job.pid).children(recursive=True)
    job.terminate()
    try:
        job.wait(timeout=15)
    except subprocess.TimeoutExpired:
        family += psutil.Process(job.pid).children(recursive=True)
        job.kill()
        job.wait()
    # The senders of MLflow records outlive the workers by a few seconds, to deliver the last ones.
    _, left = psutil.wait_procs(family, timeout=20)
    for process in left:  # psutil compares start times, so a process number in use again is not touched
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=5)
