"""Stands for a worker that `prefork.py` forks: passes on its start, signals and how the worker ended."""

import json
import os
import signal
import socket
import sys

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    path, *arguments = sys.argv[1:]
    request = {"arguments": arguments, "environ": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until somebody is there to take them
        server.connect(path)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        pid = int(server.recv(64))
        for number in _FORWARDED:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        status = int(server.recv(64))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
