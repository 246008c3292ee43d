"""A worker's side of its reader processes: starting them, asking them for batches, saying what one died of.

See `reader_main` for what the processes are.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from gba_hvd.errors import BadInput, GbaError
from gba_hvd.reading import frames
from gba_hvd.reading.datasets import Block
from gba_hvd.reading.settings import Collate

_START = """
import sys
sys.path += [path for path in sys.argv[2:] if path not in sys.path]
from gba_hvd.reading.reader_main import main
main(int(sys.argv[1]))
"""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


class ReaderDied(GbaError):
    """A reader process of this worker has ended, and what it was reading is not there."""


class ReaderProcesses:
    """The reader processes of one dataset, for as long as the `with` block lasts.

        with ReaderProcesses(dataset, collate_fn, n=4, init=None) as readers:
            batch = readers.take(0, rows, seed=17)

    n: how many. init: called in each with its number, before it reads.
    Entering raises BadInput where the dataset cannot be sent to another process, and what `init` raises. Each process
    may be asked from a thread of its own.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None, n: int, init: Callable[[int], None] | None) -> None:
        self._sent, self._n = (dataset, collate_fn, init), n
        self._ends: list[socket.socket] = []
        self._sending = [threading.Lock() for _ in range(n)]
        self._pids: list[int] = []

    def __enter__(self) -> ReaderProcesses:
        memory = _in_memory(*self._sent)
        try:
            for number in range(self._n):
                mine, theirs = socket.socketpair()
                self._ends.append(mine)
                with theirs:
                    self._pids.append(_LAUNCHER.fork(theirs, memory, number))
            for number in range(self._n):
                self._answer(number, "takes in the dataset")
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, number: int, rows: np.ndarray, seed: int) -> Any:
        """The batch of the samples `rows`, int64 [n], read by that process; waits for it.

        seed: of what the dataset draws at random for this batch. Raises what reading raised there, with the traceback
        as a note; ReaderDied when the process is gone.
        """
        doing = f"reads {len(rows)} samples, the first is {rows[0] if len(rows) else None}"
        self._send(number, ("take", rows, seed))
        return self._answer(number, doing)

    def will_read(self, number: int, now: Block, after: Block | None) -> None:
        """From any thread: that process will be asked for samples of these. See `LanedDataset`."""
        self._send(number, ("will read", now, after))

    def close(self) -> None:
        """Ends the processes, also those that read. May be called twice."""
        ends, pids, self._pids = self._ends, self._pids, []
        for pid in pids:
            _LAUNCHER.kill(pid)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
            end.close()

    def _send(self, number: int, message: Any) -> None:
        with self._sending[number], contextlib.suppress(frames.Closed):  # then there is no answer either
            frames.send(self._ends[number], message)

    def _answer(self, number: int, doing: str) -> Any:
        try:
            answer, text = frames.receive(self._ends[number])
        except frames.Closed as error:
            if not (pids := self._pids):
                raise ReaderDied("the reader processes were closed, since their epoch is over") from error
            raise ReaderDied(self._obituary(pids, number, doing)) from error
        if text is None:
            return answer
        if answer is None:
            raise GbaError(f"reader process {number} of {self._n} raised, while it {doing}:\n{text}")
        answer.add_note(f"In reader process {number} of {self._n} of this worker:\n{text}")
        raise answer

    def _obituary(self, pids: list[int], number: int, doing: str) -> str:
        pid = pids[number]
        status = _LAUNCHER.status_of(pid)
        if status is None:
            how = "has ended, and so has the process that started it"
        elif os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            how = f"was ended by {name}" + (": out of memory?" if name == "SIGKILL" else "")
        else:
            how = f"ended with exit code {os.waitstatus_to_exitcode(status)}; its output says why"
        return (
            f"reader process {number} of {self._n} (pid {pid}) {how}; what it did last: it {doing}. Fewer "
            "num_workers need less memory; with num_workers=0 the worker itself reads, where a debugger sees it"
        )


def _in_memory(dataset: Any, collate_fn: Any, init: Any) -> int:
    """A file in memory, without a name, with what readers need. All readers map it: arrays are there once."""
    try:
        data = frames.joined(frames.packed((dataset, collate_fn, init)))
    except Exception as error:
        raise BadInput(
            f"the dataset ({type(dataset).__name__}), collate_fn and worker_init_fn must be copied to "
            f"reader processes, and cannot be: {type(error).__name__}: {error}. Open files, connections and locks when "
            "they are first used, not in __init__; or set num_workers=0 and prefetch=2, which reads ahead in a thread"
        ) from error
    fd = os.memfd_create("gba-hvd-dataset", os.MFD_CLOEXEC)
    with contextlib.ExitStack() as on_error:
        on_error.callback(os.close, fd)
        os.ftruncate(fd, len(data))
        with mmap.mmap(fd, len(data)) as memory:
            memory[:] = data
        on_error.pop_all()
    return fd


class _Launcher:
    """The process that readers are forked from: started by the first of them, ended with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, end: socket.socket, memory: int, number: int) -> int:
        """The pid of a new reader."""
        with self._lock:
            for _ in range(2):
                if self._process is None:
                    self._start()
                pid = self._ask({"number": number}, [end.fileno(), memory])
                if pid is not None:
                    return pid
                self._end()  # it was ended from outside: start another one
        raise GbaError("no reader process can be started: the process that forks them ends at once; see its output")

    def status_of(self, pid: int) -> int | None:
        """What a reader ended with, as `os.waitpid` has it; None when that is not known any more."""
        with self._lock:
            return self._ask({"pid": pid, "kill": False}, [])

    def kill(self, pid: int) -> None:
        with self._lock:
            self._ask({"pid": pid, "kill": True}, [])

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ask(self, request: dict[str, int | bool], fds: list[int]) -> int | None:
        if self._control is None:
            return None
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], fds)
            answer = self._control.recv(4096)
        except OSError:
            return None
        return json.loads(answer) if answer else None

    def _start(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [os.path.abspath(path) for path in sys.path]  # "" is the folder that the script was started in
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(theirs.fileno()), *paths], stdin=subprocess.DEVNULL,
                start_new_session=True, pass_fds=[theirs.fileno()], env=os.environ | dict.fromkeys(_THREADS, "1"),
            )  # fmt: skip
        self._control = mine
        atexit.register(self.close)

    def _end(self) -> None:
        process, control, self._process, self._control = self._process, self._control, None, None
        if control is not None:
            control.close()
        if process is not None:
            process.wait()
            atexit.unregister(self.close)


_LAUNCHER = _Launcher()
