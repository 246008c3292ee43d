"""Write what a killed job leaves on disk: its memory on the host, and its checkpoints. `test_formats.py` reads them.

    python -m tests.data.formats.make        # with the version whose files are to be read by later ones

Per mode one file: `<mode>.tar.gz`, with `memory/gba-hvd-formats` (rows, the training state kept beside them, and what
the servers wrote: session, ledger, dense part) and `checkpoints`. All processes were killed at once, so the files are
what a crash leaves.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .job import PLACE

HERE = Path(__file__).parent
HOLD_AT = 26  # in the second epoch of 15 steps each
PATIENCE_S = 120.0


@contextlib.contextmanager
def placed(folder: Path) -> Iterator[None]:
    """PLACE is that folder meanwhile, for one process of this machine at a time."""
    with open(PLACE.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        PLACE.unlink(missing_ok=True)
        PLACE.symlink_to(folder)
        try:
            yield
        finally:
            PLACE.unlink()


def make(mode: str) -> None:
    with tempfile.TemporaryDirectory() as name, placed(folder := Path(name)):
        for part in ("memory", "checkpoints"):
            (folder / part).mkdir()
        environ = {**os.environ, "GBA_HVD_SHARD_DIR": str(folder / "memory"), "GBA_HVD_JOB_ID": "formats"}
        environ |= {"GBA_HVD_GRACE_S": "600", "FORMATS_HOLD_AT": str(HOLD_AT)}
        shutil.copy(HERE / "job.py", folder)
        job = subprocess.Popen([sys.executable, "job.py", mode], env=environ, cwd=folder)
        try:
            wait_for(job, "the server", lambda: any(folder.glob("memory/*/ps-0.address")))
            (folder / "server-is-up").touch()
            wait_for(job, "a checkpoint of the second epoch", lambda: newest_step(folder / "checkpoints") > 15)
            wait_for(job, "the worker that stands still", (folder / "holding").exists)
            # The server's thread answers in order, so what the worker sent before is applied and written.
            wait_for(job, f"step {HOLD_AT} on the server", lambda: step_of_server(folder / "memory") >= HOLD_AT - 1)
        finally:
            kill_all_in(folder)
            job.wait()
        forget_the_folders_of_this_machine(folder / "memory" / "gba-hvd-formats" / "ps.json")
        with tarfile.open(HERE / f"{mode}.tar.gz", "w:gz") as archive:
            for part in ("memory", "checkpoints"):
                archive.add(
                    folder / part, part, filter=lambda entry: entry if entry.isfile() or entry.isdir() else None
                )


def forget_the_folders_of_this_machine(settings: Path) -> None:
    """The servers' settings name the folders that the script imports from."""
    facts = json.loads(settings.read_text())
    settings.write_text(json.dumps({**facts, "sys_path": []}))


def wait_for(job: subprocess.Popen[bytes], what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert job.poll() is None and time.monotonic() < deadline, f"the job came to no {what}"
        time.sleep(0.1)


def step_of_server(memory: Path) -> int:
    """As `gba-hvd status` has it; -1: no server answers yet."""
    command = [sys.executable, "-m", "gba_hvd_tools.cli", "status", "formats", "--dir", str(memory), "--json"]
    asked = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    return int(json.loads(asked.stdout).get("step", -1)) if asked.returncode == 0 else -1


def newest_step(checkpoints: Path) -> int:
    def step_of(manifest: dict[str, Any]) -> int:
        return int(manifest["manifest"]["step"])

    return max((step_of(json.loads(path.read_bytes())) for path in checkpoints.glob("manifests/*.json")), default=0)


def kill_all_in(folder: Path) -> None:
    """The worker, its server, and the process that removes the memory: by their command lines and working directory."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_ours = entry.name.isdigit() and (entry / "cwd").resolve() == folder
            if is_ours or str(folder).encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


if __name__ == "__main__":
    for mode in ("gba", "allreduce"):
        make(mode)
