"""One chaos job under real `horovodrun`: its folders, its launcher, its processes, and what its workers wrote."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recovery.storage.rename import replace_file

from ..process_list import others
from .data import ChaosClicks, files_of
from .plan import CHECKPOINT_S, EPOCHS, GLOBAL_BATCH, MICRO_BATCH, SAMPLES, TRACKING, FaultPlan

NAMES = ("localhost", "127.0.0.1", socket.gethostname())  # Horovod counts these as different hosts
GRACE_S = 2.0
APART_GRACE_S = 60.0  # where each worker has a host of its own: it keeps its rows until the worker is replaced
VARIABLE = "GBA_HVD_CHAOS"
KILL_S = 60.0  # a process that waits for a disk or a mount ends when that answers
# The tool's store is found by fsspec as any other: by an entry point of a distribution on the path.
_ENTRY_POINTS = "[fsspec.specs]\nchaos = gba_hvd_tools.chaos.store:ChaosFileSystem\n"
_METADATA = "Metadata-Version: 2.1\nName: gba-hvd-chaos-store\nVersion: 0\n"


class ChaosJob:
    """Folders under `folder`, which the caller owns; the shard memory in a short-named one, for its sockets.

    shard_dir, disk: of shard memory and of checkpoints
    """

    def __init__(self, plan: FaultPlan, folder: Path, tracking_uri: str = "") -> None:
        self.plan, self.folder = plan, folder
        self.out, self.disk, self.trace = folder / "out", folder / "disk", folder / "trace"
        for path in (self.out, self.disk):
            path.mkdir(parents=True)
        self.shard_dir = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.plan_file, self.hosts_file, self.log_file = folder / "plan.json", folder / "hosts", folder / "log"
        self.store_control, self.tracking_uri = folder / "store-fault.json", tracking_uri
        self.proxy: dict[str, list[int]] = {}  # ports before the servers of each host
        self.launcher: subprocess.Popen[bytes] | None = None
        self.started_s = 0.0
        self._read: dict[Path, int] = {}
        self._notes: list[dict[str, Any]] = []

    # --- start and end ---

    def start(self, alone: bool = False) -> None:
        """alone: one worker, without a launcher."""
        url = {"folder": str(self.disk / "saved"), "store": f"chaos://{self.disk}/saved"}.get(
            self.plan.checkpoints or ""
        )
        facts = {
            **asdict(self.plan), "out": str(self.out), "shard_dir": str(self.shard_dir), "samples": SAMPLES,
            "epochs": EPOCHS, "global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, "checkpoint_url": url,
            "checkpoint_s": CHECKPOINT_S, "tracking_uri": self.tracking_uri, "proxy": self.proxy,
        }  # fmt: skip
        self.plan_file.write_text(json.dumps(facts))
        if self.plan.data == "parquet":
            files_of(ChaosClicks(SAMPLES, self.plan.features, self.plan.hashed), self.folder / "clicks")
        self.set_hosts(NAMES[: self.plan.workers])
        script = self.folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {self.hosts_file}\n")
        script.chmod(0o755)
        plugin = self.folder / "plugin" / "gba_hvd_chaos_store-0.dist-info"
        plugin.mkdir(parents=True)
        (plugin / "METADATA").write_text(_METADATA)
        (plugin / "entry_points.txt").write_text(_ENTRY_POINTS)
        n = self.plan.workers
        command = [
            str(Path(sys.executable).parent / "horovodrun"), "-np", str(n), "--min-np", "1", "--max-np", str(max(2, n)),
            "--host-discovery-script", str(script), "--blacklist-cooldown-range", "1", "2", "--network-interface", "lo",
            sys.executable, "-m", "gba_hvd_tools.chaos.workload",
        ]  # fmt: skip
        self.started_s = time.time()
        with open(self.log_file, "wb") as log:
            self.launcher = subprocess.Popen(
                command[-3:] if alone else command, env=self._environ(plugin.parent),
                stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, cwd=self.folder,
            )  # fmt: skip

    def _environ(self, plugin: Path) -> dict[str, str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD", "GBA_HVD", "MLFLOW"))}
        environ |= {
            VARIABLE: str(self.plan_file), "GBA_HVD_SHARD_DIR": str(self.shard_dir), "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1", "GBA_HVD_LEASE_S": "3", "GBA_HVD_SERVER_S": "60", "GBA_HVD_ALIVE_S": "30",
            "GBA_HVD_GRACE_S": str(APART_GRACE_S if self.plan.apart else GRACE_S),
            "GBA_HVD_CHAOS_STORE": str(self.store_control),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(plugin), os.environ.get("PYTHONPATH", "")))),
        }  # fmt: skip
        if self.plan.tracking in TRACKING:
            environ |= {"MLFLOW_HTTP_REQUEST_TIMEOUT": "3", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
        if self.plan.replay:
            environ["GBA_HVD_TRACE"] = str(self.trace)
        return environ

    def set_hosts(self, names: tuple[str, ...]) -> None:
        replace_file(self.hosts_file, "".join(f"{name}:1\n" for name in names))

    @property
    def exit_code(self) -> int | None:
        assert self.launcher is not None
        return self.launcher.poll()

    def kill(self) -> None:
        """All processes of this job that still live: the launcher first, since it replaces workers that die."""
        if self.launcher is not None:
            self.launcher.kill()
        until = time.monotonic() + KILL_S
        while (alive := self.processes()) and time.monotonic() < until:  # one of them may have started another
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if self.launcher is not None:
            self.launcher.wait(KILL_S)

    def remove(self) -> None:
        """All folders."""
        shutil.rmtree(self.shard_dir, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- what is there ---

    def processes(self) -> list[int]:
        """Live processes of this job: by the plan in their environment, or the folder in their command line."""
        marker, folder = f"{VARIABLE}={self.plan_file}".encode(), str(self.shard_dir).encode()
        return [pid for pid, command, environ in others() if folder in command or marker in environ]

    def describe(self, pid: int) -> str:
        with contextlib.suppress(OSError):
            return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()[:150]}"
        return str(pid)

    def left_files(self) -> list[str]:
        """Shard memory, sockets and folders of jobs that are still there."""
        return [
            str(path.relative_to(self.shard_dir))
            for path in self.shard_dir.glob("**/*")
            if (not path.is_dir() or path.name.startswith("gba-hvd-")) and path.name != "ballast"
        ]

    def job_folders(self) -> list[Path]:
        """The job's folder on each host."""
        return sorted(path for path in self.shard_dir.glob("**/gba-hvd-*") if path.is_dir())

    # --- what the workers wrote ---

    def notes(self) -> list[dict[str, Any]]:
        """All notes so far, in the order they were found; reads only what is new."""
        for path in self.out.glob("*.jsonl"):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")  # a killed worker may leave half a line
            if newline:
                self._read[path] = self._read.get(path, 0) + len(whole) + 1
                self._notes += [{"pid": path.stem, **json.loads(line)} for line in whole.splitlines()]
        return self._notes

    def last_step(self) -> int:
        return max((int(note["step"]) for note in self.notes() if "step" in note), default=0)

    def last_workers(self) -> int:
        """That took part in the newest step."""
        steps = [(int(note["step"]), int(note["workers"])) for note in self.notes() if "step" in note]
        return max(steps, default=(0, 0))[1]

    def result(self) -> dict[str, Any] | None:
        try:
            loaded: dict[str, Any] = json.loads((self.out / "result.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return loaded

    def fired_inside(self) -> list[dict[str, Any]]:
        """Faults of the schedule in the workers that happened: kind, step, time."""
        found = []
        for path in sorted((self.out / "inside").glob("fault-*.json")):
            with contextlib.suppress(json.JSONDecodeError):  # the process that fired it died while writing
                line = json.loads(path.read_text())
                found.append({"kind": line["fault"]["kind"], "step": line["step"], "time": line["unix_s"]})
                continue
            found.append({"kind": path.stem.split("-", 2)[2], "step": None, "time": None})
        return found
