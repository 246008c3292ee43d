"""The processes that read: a launcher that forks, and the readers that it forks.

    worker --starts--> launcher: imports torch, then one thread waits for requests
                       launcher --forks--> reader: takes in the dataset, then answers with one batch for each request

A process that trains has threads of Horovod, of sockets and of kernels, and must not be forked; the launcher has none.
It costs an import of torch once, and a reader a fork. The script is not run again in any of them.

Each has one socket to the worker. When the worker ends in any way, the launcher's is closed, so the launcher ends, and
with it, by the kernel, every reader.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import pickle
import random
import signal
import socket
import sys
import traceback

import numpy as np
import torch

from gba_hvd.reading import frames
from gba_hvd.reading.datasets import reads
from gba_hvd.reading.slow_reads import logging_slow_reads

_PR_SET_PDEATHSIG = 1
_MESSAGE = 4096  # bytes of a request to the launcher, at most


def main(control_fd: int) -> None:
    """The launcher. Serves until its worker is gone."""
    torch.set_num_threads(1)
    control, readers = socket.socket(fileno=control_fd), set[int]()
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(control, _MESSAGE, 2)
        except OSError:
            message = b""
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "number" in request:
            answer = _fork(control, fds[0], fds[1], request["number"])
            readers.add(answer)
        elif request["pid"] in readers:  # and not waited for: the number is still that process's
            readers.remove(request["pid"])
            answer = _end(request["pid"], request["kill"])
        else:
            answer = None
        control.send(json.dumps(answer).encode())


def _end(pid: int, kill: bool) -> int:
    """What a reader ended with, as `os.waitpid` has it."""
    if kill:
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _fork(control: socket.socket, end_fd: int, dataset_fd: int, number: int) -> int:
    launcher = os.getpid()
    if pid := os.fork():
        os.close(end_fd)
        os.close(dataset_fd)
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == launcher:
            control.close()
            with logging_slow_reads():
                _read(socket.socket(fileno=end_fd), dataset_fd, number)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # as where it was closed when Python started
                stream.flush()
        os._exit(code)


def _read(end: socket.socket, dataset_fd: int, number: int) -> None:
    """A reader. Its first answer says that it has the dataset; then one answer for each "take", in order."""
    try:
        try:
            # Private to this process where it is written; one copy for all readers where it is not.
            memory = mmap.mmap(dataset_fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            os.close(dataset_fd)
            dataset, collate_fn, init = frames.unpacked(memory)
            if init is not None:
                init(number)
            take = reads(dataset, collate_fn)
        except Exception as error:
            _send_error(end, error)
            return
        frames.send(end, (None, None))
        while True:
            what, *facts = frames.receive(end)
            if what == "will read":
                dataset.will_read(*facts)
                continue
            rows, seed = facts
            _seed(seed)
            try:
                answer = take(rows), None
            except Exception as error:
                _send_error(end, error)
                continue
            try:
                frames.send(end, answer)
            except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
                _send_error(end, error)
    except frames.Closed:
        pass


def _send_error(end: socket.socket, error: Exception) -> None:
    """The error with where it came from, as text too: not every error can be pickled and made again."""
    lines = "".join(traceback.format_exception(error))
    sent: Exception | None = error
    try:
        frames.unpacked(frames.joined(frames.packed(error)))
    except Exception:
        sent = None
    frames.send(end, (sent, lines))


def _seed(seed: int) -> None:
    """Before each batch: what a dataset draws does not depend on the process, nor on what it has read before."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
