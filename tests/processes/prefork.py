"""Starts workers and servers by `fork` from a process that has imported torch, Horovod and the kernels already.

A worker of a test trains for a second and took five to start: 1.3 s for torch, 1.3 s for what `torch.optim` imports of
`torch._dynamo`, 0.9 s for numba and the compiled kernels, the rest for this package and what it needs. Here one process
per test runner imports all that once.

    horovodrun ... python prefork_client.py SOCKET worker.py     in place of     horovodrun ... python worker.py

The client passes its arguments, environment, folder and standard streams on, and waits for the worker: it forwards
signals to it, and ends as the worker ended. If the client is killed, or the process that forks, so is the worker. The
worker is a process of its own session with its own pid; `/proc` shows the command line and the environment that it was
started with. It ends without taking the interpreter apart, see `_run`.

A worker's `sys.executable` is a script that starts a companion server in the same way, benchmarks' modules (`-m`) and
`train_ctr.py` too, and everything else by the real interpreter. What sends to MLflow is forked from a second process,
which has imported MLflow (1.8 s) and its SQLite store (1.5 s), and which workers have not.

Of this package one module reads the environment when it is imported, `gba_hvd.trace`: a worker that is to write a trace
imports the package again.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import os
import random
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

CLIENT = Path(__file__).with_name("prefork_client.py")
_ROOM = 64 * 1024  # bytes for the command line and the environment of a worker, each
_MESSAGE = 256 * 1024  # bytes of the largest request
_START_S = 300.0  # on a busy machine imports take long
_PR_SET_PDEATHSIG = 1
_INTERPRETER = """#!/bin/sh
case "$1 $2 $3 $4" in
    "-c "*"from gba_hvd.ps.server"*) exec {client} "$@" ;;
    "-m gba_hvd_tools.bench."* | "-W ignore -m gba_hvd_tools.bench."*) exec {client} "$@" ;;
    */train_ctr.py" "*) exec {client} "$@" ;;
    "-P -c "*"from gba_hvd.tracking.sender_process"*) exec {sender} "$@" ;;
    *) exec {python} "$@" ;;
esac
"""


@functools.cache
def python() -> list[str]:
    """What stands in place of the Python interpreter in a command; starts the process to fork from at its first call.

    That process ends with this one.
    """
    folder = Path(tempfile.mkdtemp(prefix="prefork-"))
    worker, sender = [[sys.executable, "-I", "-S", str(CLIENT), str(folder / name)] for name in ("socket", "senders")]
    interpreter = Path(_interpreter(worker[-1]))
    interpreter.write_text(_INTERPRETER.format(
        client=shlex.join(worker), sender=shlex.join(sender), python=shlex.quote(sys.executable)
    ))  # fmt: skip
    interpreter.chmod(0o700)
    for command in ("horovodrun", "gba-hvd"):  # looked for beside the interpreter
        interpreter.with_name(command).symlink_to(Path(sys.executable).with_name(command))
    for client, what in ((worker, "workers"), (sender, "senders")):
        _start(client[-1], what)
    return worker


def _start(path: str, what: str) -> None:
    """The process to fork "workers" or "senders" from. It ends with this one.

    Ready before it imports: if an import fails, who asks first is not answered, and the error is on standard error.
    """
    ready, ready_there = os.pipe()
    alive_there, alive = os.pipe()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD", "GBA_HVD", "TEST_PLAN"))}
    environ |= {"OMP_NUM_THREADS": "1", "PREFORK_ROOM": " " * _ROOM}
    server = subprocess.Popen(
        [sys.executable, __file__, path, what, str(ready_there), str(alive_there), " " * _ROOM],
        env=environ, stdin=subprocess.DEVNULL, pass_fds=[ready_there, alive_there], start_new_session=True,
    )  # fmt: skip
    os.close(ready_there)
    os.close(alive_there)
    with selectors.DefaultSelector() as selector:
        selector.register(ready, selectors.EVENT_READ)
        assert selector.select(_START_S) and os.read(ready, 1), f"the process to fork {what} from did not start"
    os.close(ready)
    atexit.register(lambda: (os.close(alive), server.wait(_START_S)))  # if this process is killed, `alive` closes, too


def interpreter() -> str:
    """In place of `sys.executable`: it starts companion servers and benchmarks' workers by a fork, all else as ever."""
    return _interpreter(python()[-1])


def _interpreter(socket_path: str) -> str:
    return str(Path(socket_path).with_name("python"))


def _import_for_senders() -> None:
    import gba_hvd.tracking.sender_process

    gba_hvd.tracking.sender_process.prepare_process()  # MLflow reads some settings when it is imported
    for name in ("tracking.rest_store", "tracking.sqlalchemy_store", "artifact.artifact_repository_registry"):
        importlib.import_module(f"mlflow.store.{name}")


def _import_for_workers() -> None:
    """And for servers."""
    import gba_hvd_tools.chaos.data  # noqa: F401
    import horovod.torch  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch

    import gba_hvd
    import gba_hvd.ps.server.server
    import recovery.callback  # noqa: F401
    from gba_hvd import kernels
    from gba_hvd.compression import kernels as compression_kernels

    for name in gba_hvd.__all__:
        getattr(gba_hvd, name)  # imports the module that has it
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports torch._dynamo
    kernels.load()
    compression_kernels.load()


class _Server:
    """Forks on request. One thread, so that a fork is a complete copy."""

    def __init__(self, path: str, alive: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(alive, selectors.EVENT_READ, functools.partial(self._end, path))
        self._workers: dict[int, tuple[socket.socket, int]] = {}  # by pid: the client, and the file that shows the end

    def requests(self) -> dict[str, Any]:
        """Serves until it is a new worker: then what that one is to do."""
        while True:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is not key:
                    continue  # of a worker that one before it in this list was the end of
                request = key.data()
                if request is not None:
                    return request

    def _accept(self) -> dict[str, Any] | None:
        client, _ = self._listener.accept()
        message, streams, _, _ = socket.recv_fds(client, _MESSAGE, 3)
        if not message:  # the client was killed before it asked
            client.close()
            return None
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            _end_with(server)
            self._close()
            client.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            request: dict[str, Any] = json.loads(message)
            return request
        for stream in streams:
            os.close(stream)
        with contextlib.suppress(OSError):  # it was killed meanwhile: `_client_gone` is next
            client.send(str(pid).encode())
        end = os.pidfd_open(pid)
        self._workers[pid] = client, end
        self._selector.register(client, selectors.EVENT_READ, functools.partial(self._client_gone, pid))
        self._selector.register(end, selectors.EVENT_READ, functools.partial(self._ended, pid))
        return None

    def _client_gone(self, pid: int) -> None:
        """Whoever killed the client wanted the worker's end."""
        client, end = self._workers[pid]
        self._selector.unregister(client)
        signal.pidfd_send_signal(end, signal.SIGKILL)

    def _ended(self, pid: int) -> None:
        client, end = self._workers.pop(pid)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(end)
        os.close(end)
        if client in self._selector.get_map():
            self._selector.unregister(client)
        with contextlib.suppress(OSError):  # it is gone
            client.send(str(status).encode())
        client.close()

    def _end(self, path: str) -> None:
        """The tests are over."""
        for _, end in self._workers.values():
            signal.pidfd_send_signal(end, signal.SIGKILL)
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)  # both servers do it
        os._exit(0)

    def _close(self) -> None:
        """Of the server in a worker."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.detach()
        self._selector.close()


def _end_with(parent: int) -> None:
    """This process is killed when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # already
        os._exit(1)


def _become(request: dict[str, Any], interpreter: str) -> types.CodeType:
    """This process is now as if it had been started with the request's command, of which the code is returned."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    command = [sys.executable, *request["arguments"]]
    _show(b"".join(os.fsencode(a) + b"\0" for a in command), _place(48))
    _show(b"".join(os.fsencode(f"{k}={v}") + b"\0" for k, v in request["environ"].items()), _place(50))
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        setattr(sys, name, open(number, mode, buffering=1, closefd=False))  # noqa: SIM115
    sys.executable = interpreter
    if "GBA_HVD_TRACE" in os.environ:
        for module in [one for one in sys.modules if one.partition(".")[0] in ("gba_hvd", "gba_hvd_tools", "recovery")]:
            del sys.modules[module]
    main, code = _main_module(request["arguments"])
    random.seed()
    for name, seed in (("numpy.random", "seed"), ("torch", "seed")):
        if name in sys.modules:
            getattr(sys.modules[name], seed)()
    sys.modules["__main__"] = main
    return code


def _main_module(arguments: list[str]) -> tuple[types.ModuleType, types.CodeType]:
    """`__main__` and its code, of `-c TEXT`, `-m MODULE` or a file, and more; sets `sys.argv` and `sys.path`."""
    if arguments[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        del arguments[:2]
    is_safe = arguments[0] == "-P"  # the script's folder is not on `sys.path`
    kind, *more = arguments[is_safe:]
    folder = [] if is_safe else [""] if kind in ("-c", "-m") else [str(Path(kind).parent)]
    sys.path[:1] = [*folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    main = types.ModuleType("__main__")
    code: types.CodeType | None
    if kind == "-c":
        text, *more = more
        main.__file__, sys.argv = "<string>", [kind, *more]
        code = compile(text, main.__file__, "exec")
    elif kind == "-m":
        module, *more = more
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None, module
        loader = SourceFileLoader(module, spec.origin)
        main.__spec__, main.__package__, main.__file__, sys.argv = spec, spec.parent, spec.origin, [spec.origin, *more]
        code = loader.get_code(module)
    else:
        main.__file__, sys.argv = kind, arguments
        code = SourceFileLoader("__main__", kind).get_code("__main__")
    assert code is not None
    return main, code


def _place(first: int) -> tuple[int, int]:
    """Where in this process the kernel reads its command line (48 and 49 in `stat`) or environment (50, 51)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from the third field on
    return int(fields[first - 3]), int(fields[first - 2])


def _show(text: bytes, place: tuple[int, int]) -> None:
    start, end = place
    assert len(text) < end - start, f"{len(text)} bytes of arguments or environment, room for {end - start}"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _main() -> types.CodeType:
    path, what, ready, alive, _ = sys.argv[1:]
    server = _Server(path, int(alive))
    os.write(int(ready), b"1")
    os.close(int(ready))
    _import_for_senders() if what == "senders" else _import_for_workers()
    gc.collect()
    gc.freeze()  # what was imported stays shared
    return _become(server.requests(), _interpreter(path))


def _run(code: types.CodeType) -> NoReturn:
    """Runs a program and ends the process as the interpreter does, but that modules and objects are not freed.

    Freeing writes to all of the memory that was shared since the fork: 0.4 s of processor time. So files that are still
    open are not flushed, but for the standard streams.
    """
    interrupted = False
    try:
        exec(code, sys.modules["__main__"].__dict__)
        status = 0
    except SystemExit as end:
        status = _status(end.code)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        status, interrupted = 1, type(error) is KeyboardInterrupt
    try:
        threading._shutdown()  # waits for threads
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except OSError:
                status = 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _status(code: object) -> int:
    """What a process ends with after `sys.exit(code)`."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    _run(_main())
