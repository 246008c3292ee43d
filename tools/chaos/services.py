"""What stands beside a chaos job: a useless tracking server, a proxy between hosts, noisy neighbours, small disks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_CHUNK = 1 << 16


class BadTracking:
    """An HTTP server that answers 500, or accepts and never answers. `contacts` counts connections."""

    def __init__(self, hangs: bool) -> None:
        self._hangs, self._server = hangs, socket.create_server(("127.0.0.1", 0))
        self.uri, self.contacts = f"http://127.0.0.1:{self._server.getsockname()[1]}", 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._server.accept()
                self.contacts += 1
                self._open.append(connection)
                if not self._hangs:
                    threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while connection.recv(_CHUNK):
                connection.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")

    def close(self) -> None:
        _shut(self._server, *self._open)


class Proxy:
    """Stands before one host's server: two fixed ports (control, pull) that lead to where the server listens now.

    The target is read from the server's own file at each connection, so a server that was started again is found.
    `fault(kind, seconds)` spoils what passes, `met` says whether anything passed meanwhile.
    """

    def __init__(self, shard_dir: Path, seed: int) -> None:
        self._dir, self._rng, self._lock = shard_dir, random.Random(seed), threading.Lock()
        self._servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.ports = [server.getsockname()[1] for server in self._servers]
        self._open: list[socket.socket] = []
        self._kind, self._until, self.met = "", 0.0, False
        for server, which in zip(self._servers, ("control", "pull"), strict=True):
            threading.Thread(target=self._accept, args=(server, which), daemon=True).start()

    def fault(self, kind: str, seconds: float) -> None:
        self._kind, self._until = kind, time.monotonic() + seconds
        if kind == "network_reset":
            with self._lock:
                self.met = self.met or bool(self._open)
                _shut(*self._open)
                self._open.clear()

    def close(self) -> None:
        _shut(*self._servers, *self._open)

    def _accept(self, server: socket.socket, which: str) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=self._connect, args=(connection, which), daemon=True).start()

    def _connect(self, connection: socket.socket, which: str) -> None:
        try:
            (path,) = self._dir.glob("gba-hvd-*/ps-0.address")
            target = socket.create_connection(("127.0.0.1", int(json.loads(path.read_text())[which])), timeout=5)
            target.settimeout(None)
        except (OSError, ValueError):  # there is no server just now: the requester tries again
            connection.close()
            return
        with self._lock:
            self._open += [connection, target]
        for ends in ((connection, target), (target, connection)):
            threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_CHUNK):
                self._wait()
                sink.sendall(piece)
        _shut(source, sink)

    def _wait(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            return
        if self._kind != "network_reset":
            self.met = True
        if self._kind == "network_delay":
            time.sleep(0.02)
        elif self._kind == "network_loss":
            if self._rng.random() < 0.1:
                time.sleep(0.2)
        elif self._kind == "network_cut":
            time.sleep(left)


def _shut(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


# Burns in bursts until its time is over or the process that started it is gone.
_BURN = """
import os, sys, time
parent, end = os.getppid(), time.monotonic() + float(sys.argv[1])
while time.monotonic() < end and os.getppid() == parent:
    burst = time.monotonic() + 1.5
    while time.monotonic() < burst: pass
    time.sleep(0.5)
"""


def start_neighbours(n_processes: int, seconds: float) -> list[subprocess.Popen[bytes]]:
    """So many that each of the job's n processes is left a tenth of a core; they end by themselves, within 20 s."""
    n = max(1, 10 * len(os.sched_getaffinity(0)) - n_processes)
    return [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", _BURN, str(min(20.0, seconds))]) for _ in range(min(n, 64))
    ]


@contextlib.contextmanager
def small_file_system(folder: Path, megabytes: int) -> Iterator[None]:
    """A tmpfs at `folder`. Raises OSError where mounting is not possible."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        raise OSError(f"no small file system can be mounted ({made.stderr.strip()}): run as root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def can_mount() -> str:
    """Why small file systems cannot be mounted here; empty if they can."""
    if os.geteuid() != 0:
        return "small file systems can be mounted by root only"
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError), small_file_system(Path(folder), 1):
        return ""
    return "small file systems cannot be mounted, though this is root: CAP_SYS_ADMIN is missing"


def fill(folder: Path) -> Path:
    """Write until the file system is full. Returns what has to be deleted to end it."""
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for piece in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(piece))
    return ballast
