"""Starting the companion server, and finding it again.

A worker that finds no server on its host starts one, outside the launcher's process tree: launchers end what they find
there, and the server must outlive a restart of the workers. Who holds the lock on `ps-N.lock` is the server; the kernel
lets go of it however the process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gba_hvd.comm.own_address import own_address
from gba_hvd.embedding import row_optimizers
from gba_hvd.embedding.row_optimizers import RowOptimizer
from gba_hvd.errors import GbaError
from gba_hvd.ps.messages import Endpoint, Wire
from gba_hvd.shm import job_folder as folders
from gba_hvd.shm.layout import Layout

_TRY_AGAIN_S = 5.0
_FORK_S = 120.0  # until Python has started and forked the server, which a busy machine may take long for

# Pushes and steps take and release the same few MiB again and again. The C library's default gives them back to the
# kernel each time, and every page that comes again is a page fault; so up to 128 MiB at the end of a heap stay.
_KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}

# Forks before anything heavy is imported and takes the lock at once: a second process ends silently. `comm` is the name
# that `top` and `ps -e` show, of at most 15 characters.
_START = """# gba-hvd companion server; after this code: the job's folder, number
import fcntl, os, sys
if os.fork(): os._exit(0)
folder, index = sys.argv[1], int(sys.argv[2])
lock = open(os.path.join(folder, f"ps-{index}.lock"), "a")
try: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError: os._exit(0)
try: open("/proc/self/comm", "w").write("gba-hvd-server")
except OSError: pass
import json
from pathlib import Path
settings = json.loads((Path(folder) / "ps.json").read_text())
sys.path += [path for path in settings.get("sys_path", ()) if path not in sys.path]
from gba_hvd.ps.server.server import main
main(Path(folder), index)
"""


_STORED = {"heartbeat_timeout_s": "alive_s"}  # names in `ps.json` that differ from those of the fields
_PYTHON = {stored: name for name, stored in _STORED.items()}


@dataclass(frozen=True)
class Settings:
    """What a server starts with: `ps.json` in the job's folder, written by the worker that starts it.

    layout: `Layout.describe`. row_optimizer: `describe_optimizer`; own_row_optimizers: of tables with one of their own,
    by number from 1 on. address: the IP address to listen at.

    heartbeat_timeout_s: after so long without a heartbeat a worker's leases go to others; lease_s: its longest use
    buffer_bytes: of pushes that wait for their step, at most; grace_s: what the memory outlives the workers by
    sys_path: where the script finds its modules: the server looks there, too, after its own
    wire: how it listens over TCP
    """

    job: str
    layout: dict[str, Any]
    row_optimizer: dict[str, Any]
    address: str
    heartbeat_timeout_s: float = 2.0
    lease_s: float = 60.0
    buffer_bytes: int = 4 << 30
    grace_s: float = 20.0
    wire: Wire = "curve"
    sys_path: list[str] = field(default_factory=list)
    own_row_optimizers: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Settings:
        stored = json.loads((folder / "ps.json").read_text())
        return cls(**{_PYTHON.get(name, name): value for name, value in stored.items()})

    def write(self, file: Path) -> None:
        values = dataclasses.asdict(self)
        file.write_text(json.dumps({_STORED.get(name, name): value for name, value in values.items()}))


def write_settings(folder: Path, job: str, key: bytes, layout: Layout, optimizer: RowOptimizer, **more: Any) -> None:
    """What servers of this host read at their start. Written once; the same values again change nothing."""
    if (folder / "ps.json").exists():
        return
    paths = [os.path.abspath(path) for path in sys.path]  # "" is the folder that the script was started in
    settings = Settings(job, layout.describe(), describe_optimizer(optimizer), own_address(), sys_path=paths, **more)
    mine = f"new-{os.getpid()}-{threading.get_ident()}"  # several workers may write at once
    fd = os.open(folder / f"key.{mine}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "wb") as file:
        file.write(key)
    (folder / f"key.{mine}").rename(folder / "key")
    fresh = folder / f"ps.json.{mine}"
    settings.write(fresh)
    fresh.rename(folder / "ps.json")  # last: from here on a server can start


def ensure_running(folder: Path, index: int) -> bool:
    """Start the server unless it runs. Returns at once; True if one had to be started.

    One that could not start is tried again only after some seconds. Raises GbaError when no process can be started, or
    the folder cannot be trusted.
    """
    try:
        folders.check(folder)
    except FileNotFoundError:
        return False  # the job's folder is gone
    if not (folder / "ps.json").exists():
        return False
    try:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - (folder / f"ps-{index}.failed").stat().st_mtime < _TRY_AGAIN_S:
                return False
        with open(folder / f"ps-{index}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return False  # the job's folder is gone
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "GBA_HVD_KEY"))}
    try:
        with open(folder / f"ps-{index}.log", "ab") as log:
            (folder / f"ps-{index}.failed").unlink(missing_ok=True)
            subprocess.run(
                [sys.executable, "-c", _START, str(folder), str(index)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, check=True,
                timeout=_FORK_S,
                env=_KEEPS_MEMORY | environ | {"OMP_NUM_THREADS": "1"}, cwd="/",
            )  # fmt: skip
    except FileNotFoundError:
        return False  # the job's folder is gone
    except (OSError, subprocess.SubprocessError) as error:
        raise GbaError(f"no companion server can be started in {folder}: {error}") from error
    return True


def why_not_started(folder: Path, index: int) -> str:
    """Why the newest server could not start; empty if it could, or has not had time to."""
    try:
        return (folder / f"ps-{index}.failed").read_text() or "it wrote no message"
    except FileNotFoundError:
        return ""


def endpoint(folder: Path, index: int, host: int, timeout_s: float) -> Endpoint:
    """Where the server of this host listens; waits until it does. Raises GbaError with the end of its log."""
    deadline = time.monotonic() + timeout_s
    settings = json.loads((folder / "ps.json").read_text())
    while True:
        ensure_running(folder, index)
        if failure := why_not_started(folder, index):
            raise GbaError(f"the companion server cannot start: {failure}")
        try:
            ports = json.loads((folder / f"ps-{index}.address").read_text())
            wire = settings.get("wire", "curve")
            return Endpoint(host, index, settings["address"], ports["control"], ports["pull"], wire)
        except (FileNotFoundError, KeyError, TypeError, ValueError):  # not there yet, or damaged
            if time.monotonic() > deadline:
                raise GbaError(
                    f"the companion server did not start within {timeout_s:.0f} s; its last lines: "
                    f"{last_words(folder, index) or 'nothing'}"
                ) from None
            time.sleep(0.02)


def folder_lost(folder: Path, opened: int) -> str:
    """Why no server can start in the job's folder, which was opened before; empty while it is the same folder."""
    try:
        if os.stat(folder).st_ino == os.fstat(opened).st_ino:
            return ""
        what = "was replaced by another folder of that name"
    except FileNotFoundError:
        what = "was removed"
    return (
        f"the job's folder {folder} {what}, so no companion server can start on this host. If no person did that by "
        "hand, systemd removes what a user has in /dev/shm when the user logs out: `loginctl enable-linger`, or set "
        "GBA_HVD_SHARD_DIR. Workers that run keep their tables; stop the job and start it again"
    )


def last_words(folder: Path, index: int) -> str:
    """The end of a server's log; empty where it has written nothing."""
    try:
        return (folder / f"ps-{index}.log").read_text(errors="replace")[-2000:].strip()
    except FileNotFoundError:
        return ""


@dataclass(frozen=True)
class ServerProcess:
    """Of a server, as `ps-N.address` names it. n_restarts: how many died in its place. started_unix_s: 0: not known"""

    pid: int
    started_unix_s: float = 0.0
    n_restarts: int = 0


def process_of(folder: Path, index: int) -> ServerProcess | None:
    """The process that serves, if one has started. A file that is damaged names none."""
    try:
        stored = json.loads((folder / f"ps-{index}.address").read_text())
        since = float(stored.get("started_unix_s", 0.0))
        return ServerProcess(int(stored["pid"]), since, int(stored.get("n_restarts", 0)))
    except (AttributeError, FileNotFoundError, KeyError, TypeError, ValueError):
        return None


def processes_of(folder: Path) -> dict[int, ServerProcess]:
    """All servers of this host that have started, by their index."""
    indices = sorted(int(path.stem.removeprefix("ps-")) for path in folder.glob("ps-*.address"))
    return {index: found for index in indices if (found := process_of(folder, index)) is not None}


def pid_of(folder: Path, index: int) -> int | None:
    """The same process, by its number."""
    found = process_of(folder, index)
    return None if found is None else found.pid


def companion_pids(folder: Path, hosts: Sequence[str] = (), host: str = "") -> dict[int, int]:
    """This host's companion server, if one has started, by the number of this host among those of the servers."""
    pid, ordered = pid_of(folder, 0), list(dict.fromkeys(hosts))
    return {} if pid is None else {ordered.index(host) if ordered else 0: pid}


def kill(folder: Path, index: int) -> None:
    """End a server that does not answer. One that is gone already, or another process of its number, is left alone."""
    pid = pid_of(folder, index)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if pid is not None and os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def describe_optimizer(optimizer: RowOptimizer) -> dict[str, Any]:
    """A row optimizer as plain values. Another process finds its class as `row_optimizers.build` allows."""
    kind = type(optimizer)
    registered = row_optimizers.REGISTERED.name_of(kind)
    if not dataclasses.is_dataclass(optimizer) or kind.__module__ == "__main__":
        raise GbaError(
            f"the row optimizer {kind.__qualname__} must be a dataclass in a module that other processes can import, "
            f"not in {kind.__module__}"
        )
    module = row_optimizers.PUBLIC_MODULE if kind.__module__ == row_optimizers.__name__ else kind.__module__
    name = registered or f"{module}:{kind.__qualname__}"
    row_optimizers.resolve(name)
    return {"class": name, "fields": dataclasses.asdict(optimizer)}
