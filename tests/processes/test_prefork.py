"""A forked worker looks like one that was started, and ends with its client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import prefork
from .cluster import PATIENCE_S, wait_for

pytestmark = pytest.mark.processes

_SHOW = """
import os, sys
from pathlib import Path
print(sys.argv[1:], os.getcwd(), os.environ["COLOUR"], __name__, "torch" in sys.modules, flush=True)
print(Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").split(b"\\0")[1:], flush=True)
print(b"COLOUR=blue" in Path("/proc/self/environ").read_bytes().split(b"\\0"), flush=True)
sys.exit(7)
"""
_START = """
import subprocess, sys
for first_line in ("from gba_hvd.ps.server.server import main", "pass"):
    code = f"import sys\\nif 0:\\n    {first_line}\\nprint(sys.argv, 'torch' in sys.modules, flush=True)"
    subprocess.run([sys.executable, "-c", code, "0"], check=True)
"""
_MODULE = """
import sys, warnings
from . import sibling
warnings.warn("a warning")
print(sys.argv, sys.path[0] in ("", sibling.FOLDER), __name__, __package__, __spec__.name, __file__)
"""
_ENDS_WITH_ITS_SERVER = """
import ctypes
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
print(number.value, flush=True)
"""
_WAIT = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
Path(sys.argv[1]).write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
"""

_ENDS = """
import atexit, sys, threading, time
def slow(): time.sleep(0.3); print("thread")
print("first")
threading.Thread(target=slow).start()
atexit.register(print, "atexit")
"""


def start(folder: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    file = folder / "script.py"
    file.write_text(script)
    return subprocess.Popen(
        [*prefork.python(), str(file), *arguments],
        cwd=folder, env={**os.environ, "COLOUR": "blue"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def pid_in(file: Path) -> int:
    return int(wait_for(lambda: file.exists() and file.read_text(), "the worker"))


def test_a_worker_has_the_arguments_environment_and_folder_of_its_client(tmp_path: Path) -> None:
    with start(tmp_path, _SHOW, "1", "two") as client:
        said, _ = client.communicate(timeout=PATIENCE_S)
    script = tmp_path / "script.py"
    assert said.splitlines() == [
        f"['1', 'two'] {tmp_path} blue __main__ True", f"{[os.fsencode(script), b'1', b'two']}", "True",
    ]  # fmt: skip
    assert client.returncode == 7


def test_a_worker_starts_servers_by_a_fork_and_everything_else_by_the_interpreter(tmp_path: Path) -> None:
    with start(tmp_path, _START) as client:
        said, _ = client.communicate(timeout=PATIENCE_S)
    assert said.splitlines() == ["['-c', '0'] True", "['-c', '0'] False"]
    assert client.returncode == 0


def test_what_sends_to_mlflow_is_forked_from_a_process_that_has_imported_it_and_not_torch(tmp_path: Path) -> None:
    code = """if 0:
    from gba_hvd.tracking.sender_process import main
import sys; print(sys.argv, sys.path[0] == "", [name in sys.modules for name in ("mlflow", "torch")])"""
    command = [prefork.interpreter(), "-P", "-c", code, "1"]
    forked = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    assert forked.stdout == "['-c', '1'] False [True, False]\n"


@pytest.mark.parametrize("how", [(), ("-W", "ignore")])
def test_a_module_runs_as_with_the_interpreter(tmp_path: Path, how: tuple[str, ...]) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "module.py").write_text(_MODULE)
    (tmp_path / "job" / "sibling.py").write_text(f"FOLDER = {str(tmp_path)!r}\n")
    forked, started = (
        subprocess.run(
            [*command, *how, "-m", "job.module", "1"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        for command in (prefork.python(), [sys.executable])
    )
    said = f"['{tmp_path}/job/module.py', '1'] True __main__ job job.module {tmp_path}/job/module.py\n"
    assert forked.stdout == started.stdout == said
    assert ("a warning" in forked.stderr) == ("a warning" in started.stderr) == (not how)


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit()",
        "sys.exit(7)",
        "sys.exit('why')",
        "raise ValueError('why')",
        "raise KeyboardInterrupt",
        "sys.stdout.flush(); sys.stdout.close()",
        "sys.stdout.flush(); sys.stdout = open('/dev/full', 'w')",
    ],
)
def test_a_worker_ends_as_with_the_interpreter(tmp_path: Path, end: str) -> None:
    file = tmp_path / "script.py"
    file.write_text(_ENDS + end)
    forked, started = (
        subprocess.run([*command, str(file)], check=False, capture_output=True, text=True, timeout=PATIENCE_S)
        for command in (prefork.python(), [sys.executable])
    )
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert started.stdout == ("first\n" if "stdout" in end else "first\nthread\natexit\n")
    if "full" not in end:
        assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_a_signal_to_the_client_reaches_the_worker(tmp_path: Path) -> None:
    with start(tmp_path, _WAIT, str(tmp_path / "pid")) as client:
        pid_in(tmp_path / "pid")
        client.send_signal(signal.SIGTERM)
        assert client.wait(PATIENCE_S) == 3


def test_the_client_of_a_killed_worker_ends_likewise(tmp_path: Path) -> None:
    with start(tmp_path, _WAIT, str(tmp_path / "pid")) as client:
        os.kill(pid_in(tmp_path / "pid"), signal.SIGKILL)
        assert client.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_worker_does_not_outlive_its_client(tmp_path: Path) -> None:
    with start(tmp_path, _WAIT, str(tmp_path / "pid")) as client:
        pid = pid_in(tmp_path / "pid")
        client.kill()
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the worker's end")


def test_a_worker_is_killed_when_the_process_that_forked_it_ends(tmp_path: Path) -> None:
    with start(tmp_path, _ENDS_WITH_ITS_SERVER) as client:
        said, _ = client.communicate(timeout=PATIENCE_S)
    assert int(said) == signal.SIGKILL


def server_of(worker: int) -> int:
    return int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Meanwhile a process notices nothing, and afterwards everything at once."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "the stop")
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def is_over(pid: int) -> bool:
    """Its server may be stopped, so that nobody waits for it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("first", ["worker", "client"])
def test_a_worker_and_its_client_that_end_together_end_nobody_else(tmp_path: Path, first: str) -> None:
    with start(tmp_path, _WAIT, str(tmp_path / "pid")) as client, start(tmp_path, _WAIT, str(tmp_path / "2")) as other:
        worker, another = pid_in(tmp_path / "pid"), pid_in(tmp_path / "2")
        server = server_of(worker)
        with stopped(server):
            for pid in (worker, client.pid) if first == "worker" else (client.pid, worker):
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda pid=pid: is_over(pid), "the end")
        wait_for(lambda: not Path(f"/proc/{worker}").exists(), "the worker's end")
        assert server_of(another) == server
        other.send_signal(signal.SIGTERM)
        assert other.wait(PATIENCE_S) == 3


def test_a_client_that_is_killed_before_its_worker_is_there_ends_nobody_else(tmp_path: Path) -> None:
    """It has asked for the worker, and does not hear that it is there."""
    with start(tmp_path, _WAIT, str(tmp_path / "pid")) as other:
        worker = pid_in(tmp_path / "pid")
        server = server_of(worker)
        script = str(tmp_path / "script.py")
        request = {"arguments": [script, str(tmp_path / "2")], "environ": dict(os.environ), "folder": str(tmp_path)}
        with stopped(server), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(prefork.python()[-1])
            socket.send_fds(client, [json.dumps(request).encode()], [0, 1, 2])
        wait_for(lambda: children(server) == [worker], "the end of the worker that nobody waits for")
        other.send_signal(signal.SIGTERM)
        assert other.wait(PATIENCE_S) == 3


def children(server: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
