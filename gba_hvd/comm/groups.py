"""Operations of some of the workers, one of each host, say, or of all, over Gloo connections of their own.

An operation of Horovod's waits for a round of the background threads of all workers, and rounds take processor time
also while there is nothing to do. Its own way for some of the workers is a process set, whose operations wait for
rounds of *all* as well, and in Horovod 0.28.1 a set that lost a worker ends its other processes when they leave the
world. So these workers are connected directly, by the Gloo that torch has, and an operation begins when it is called.

Gloo has one time limit for an operation, and what it interrupts cannot be continued; a worker may be late for any time,
so no limit is set. A worker whose operation fails, since a peer died or closed the group, closes its own connections,
so that all of the group learn of it. One that was cut off closes none: TCP's keep-alive probes find that it does not
answer, as Horovod's background thread does. Processes that a worker forked hold its connections open, too, until they
end.

What a failure leaves: an operation that Gloo still waits in, which cannot be cancelled. Its thread, its buffers and its
connections stay until it ends or this process does; should its peers come after all, they have its result. Its buffers
are memory of torch's, which Gloo's thread can free without Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, AllToAllOptions, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from gba_hvd.comm.collectives import World, worker_lost
from gba_hvd.comm.own_address import own_address
from gba_hvd.errors import GbaError

_TO_CONNECT = datetime.timedelta(seconds=30)
_UNLIMITED = datetime.timedelta(days=1000)
# s without a word from the peer, s between probes, probes without an answer; a firewall forgets idle connections later
_PROBES = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


class NotConnected(GbaError):
    """There is no group; training continues without it."""


class Group:
    """One worker's part. All workers of the group call the same methods in the same order. A new one for every world.

    Where a worker of the world is lost, they raise what Horovod raises; the group is closed then.
    """

    def __init__(self, name: str, world: World, ranks: Sequence[int], connections: Any) -> None:
        """name: of its sums, for what is logged of a long wait; connections: a ProcessGroupGloo of these ranks"""
        self._name, self._world, self._ranks, self._connections = name, world, ranks, connections
        self._buffer = torch.empty(0)
        self._sent = torch.empty(0)

    def sum_(self, values: Tensor) -> None:
        """Sum over the ranks of the group, in place. values: [n], n > 0, on the CPU."""
        if self._buffer.shape != values.shape or self._buffer.dtype != values.dtype:
            self._buffer = torch.empty_like(values)
        self._buffer.copy_(values)  # a sum that failed may still be written to
        options = AllreduceOptions()
        options.timeout = _UNLIMITED
        self._wait(self._name, lambda connections: connections.allreduce([self._buffer], options))
        values.copy_(self._buffer)

    def alltoall(
        self, name: str, words: np.ndarray, splits: np.ndarray, expected: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `World.alltoall`; ranks are those within the group. Without `expected` the counts go ahead."""
        options = AllToAllOptions()
        options.timeout = _UNLIMITED
        if expected is None:
            ours, theirs = torch.tensor(splits, dtype=torch.int64), torch.empty(len(splits), dtype=torch.int64)
            self._wait(name, lambda connections: connections.alltoall_base(theirs, ours, [], [], options))
            expected = theirs.numpy()
        if len(self._sent) < len(words):
            self._sent = torch.empty(len(words))
        sent, received = self._sent[: len(words)], torch.empty(int(expected.sum()))
        np.copyto(sent.numpy(), words)
        n_sent, n_received = splits.tolist(), expected.tolist()
        self._wait(name, lambda connections: connections.alltoall_base(received, sent, n_received, n_sent, options))
        return received.numpy(), expected

    def close(self) -> None:
        """Close the connections. May be called twice, not while an operation is waited for."""
        self._connections = None

    def _wait(self, name: str, begin: Callable[[Any], Any]) -> None:
        """begin: begins the operation with the connections it is called with; it keeps none"""
        if self._connections is None:
            raise worker_lost("this worker has left the group")
        work = None
        try:
            work = begin(self._connections)
            self._world.wait_until(name, work.is_completed, partial(_doze, work), self._ranks)
        except BaseException:
            if work is None or not work.is_completed():  # to free the connections would wait for it
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connections))
            work = None  # the traceback would keep the connections open
            self.close()
            raise
        try:
            work.wait()
        except RuntimeError as error:
            work = None
            self.close()
            raise worker_lost(f"a worker is gone: {_first_sentence(error)}") from None


def _doze(work: Any, most_s: float) -> None:
    """Sleep until the operation ends, or for so long. What it ends with is not looked at."""
    with contextlib.suppress(RuntimeError):  # also that of the time-out, which ends nothing else
        work.wait(datetime.timedelta(seconds=max(most_s, 1e-3)))  # whole ms, and 0 is for ever


def form_group(name: str, world: World, ranks: Sequence[int]) -> Group | None:
    """Connect the workers of these ranks, two or more, in ascending order; None for all others.

    A collective of all workers. Raises NotConnected on all, where one could not be connected.
    """
    mine, failure, store, connections = "", "", None, None
    try:
        if world.rank in ranks:
            mine = own_address()
        if world.rank == ranks[0]:
            store = _store_at(mine)
    except (RuntimeError, OSError, GbaError) as error:
        failure = str(error) or type(error).__name__
    _refuse_failed(world, "group", failure)
    place = b"" if store is None else f"{mine}:{store.port}".encode()
    host, _, port = world.broadcast("group.place", place, ranks[0]).decode().rpartition(":")
    try:
        if world.rank in ranks:
            store = store or TCPStore(host, int(port), is_master=False, timeout=_TO_CONNECT)
            before = _descriptors()
            connections = ProcessGroupGloo(store, ranks.index(world.rank), len(ranks), _options(mine))
            _keep_alive(_descriptors() - before)
    except (RuntimeError, OSError) as error:
        failure = str(error) or type(error).__name__
    _refuse_failed(world, "group connected", failure)
    return None if connections is None else Group(name, world, ranks, connections)


def _store_at(address: str) -> TCPStore:
    """Where the others leave their addresses; at this address of this host only."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, timeout=_TO_CONNECT, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _descriptors() -> set[int]:
    return set(map(int, os.listdir("/proc/self/fd")))


def _keep_alive(descriptors: Iterable[int]) -> None:
    """Gloo has no option for it; a socket that another thread opened meanwhile comes to no harm."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # another thread has closed it
            copy = os.dup(descriptor)
            try:
                one = socket.socket(fileno=copy)
            except OSError:  # a file
                os.close(copy)
                continue
            with one:
                if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in _PROBES.items():
                        one.setsockopt(socket.IPPROTO_TCP, option, value)


def _refuse_failed(world: World, name: str, failure: str) -> None:
    for rank, text in enumerate(world.gather_bytes(name, failure.encode())):
        if len(text):
            raise NotConnected(f"rank {rank} could not be connected: {bytes(text).decode()}")


def _first_sentence(error: Exception) -> str:
    """Gloo's errors begin with the place in its source, in brackets, and end with guesses."""
    text = str(error)
    return (text.partition("] ")[2] if text.startswith("[") else text).partition(". ")[0]


def _options(address: str) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._threads, options._timeout = 1, _TO_CONNECT
    return options
