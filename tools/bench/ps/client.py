"""One run of `bench ps`: starts the servers of one contestant, then asks them for rows and sends them gradients.

Every contestant is a context manager that yields a `ServerAddress`. Row r is on server r mod N. Servers are processes
of their own; all talk through TCP on the loopback interface.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import resource
import select
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import psutil
import torch
import torch.distributed.rpc as rpc
import zmq

import gba_hvd
from gba_hvd import Compression, torch_optimizers
from gba_hvd.compression.row_codec import RowCoder
from gba_hvd.compression.spec import Spec
from gba_hvd.embedding.row_gradients import RowGrad
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.ps import launch as companion
from gba_hvd.ps import messages, transport
from gba_hvd.ps.client import Client
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.tcp_sockets import TcpDealer, TcpRouter
from gba_hvd.ps.worker import push_window
from gba_hvd.ps.worker.lease_prefetch import LeasePrefetcher
from gba_hvd.ps.worker.session import PsSession
from gba_hvd.ps.worker.worker import PsWorker
from gba_hvd.shm.shard_memory import ShardMemory
from recovery import state_codec

from ..harness import torch_rpc_server
from .command import CONTESTANTS, DIM, N_ROWS

N_SAMPLES = 10**9  # of the epoch that the leases are on: it does not end
N_REQUESTS = 16  # different ones, cycled
LEARNING_RATE = 1e-3
LEASE_SECONDS = 5  # times as long as a measurement of rows: a percentile needs many
HERE, ELSEWHERE = 1, 2  # the servers' host, and the host that the clients say they are on


class ServerAddress(Protocol):
    """A client of some servers. `pids`: the server processes."""

    pids: Sequence[int]

    def pull(self, ids: np.ndarray) -> Any:
        """int64 [n], distinct, ascending -> float32 [n, DIM]"""

    def push(self, ids: np.ndarray, grads: np.ndarray) -> None:
        """int64 [n], float32 [n, DIM]; returns with it on the way, or, with one in flight, when every server has it."""

    def flush(self) -> None:
        """Returns when every server has all pushes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestant", choices=list(CONTESTANTS))
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    found = []
    of = {"contestant": args.contestant, "servers": args.servers, "in_flight": args.in_flight}
    with OPEN[args.contestant](args.servers, args.in_flight) as endpoint:
        for n in args.rows:
            rng = np.random.default_rng(n)
            ids = [np.sort(rng.choice(N_ROWS, n, replace=False)) for _ in range(N_REQUESTS)]
            grads = [rng.standard_normal((n, DIM), dtype=np.float32) for _ in range(N_REQUESTS)]

            def pull(i: int, ids: list[np.ndarray] = ids) -> None:
                endpoint.pull(ids[i])

            def push(i: int, ids: list[np.ndarray] = ids, grads: list[np.ndarray] = grads) -> None:
                endpoint.push(ids[i], grads[i])

            def pull_push(i: int, pull: Callable[[int], None] = pull, push: Callable[[int], None] = push) -> None:
                pull(i)
                push(i)

            for what, request in (("pull", pull), ("push", push), ("pull_push", pull_push)):
                figures = timed(request, endpoint.flush, n, args.seconds, endpoint.pids)
                found.append({**of, "rows": n, "what": what, **figures})
        if isinstance(endpoint, Ours):
            times = endpoint.lease_times(args.rows[0], LEASE_SECONDS * args.seconds)
            found.append({**of, "rows": args.rows[0], "what": "lease", **times})
    args.result.write_text(json.dumps(found))


def timed(
    request: Callable[[int], None], flush: Callable[[], None], n: int, seconds: float, servers: Sequence[int]
) -> dict[str, float]:
    """Speed and processor time of requests until all are answered, the first few not counted."""
    for i in range(N_REQUESTS):
        request(i)
    flush()
    cpu, start = _cpu_s(servers), time.perf_counter()
    count = 0
    while time.perf_counter() - start < seconds:
        request(count % N_REQUESTS)
        count += 1
    flush()
    took_s = time.perf_counter() - start
    used = {name: after_s - cpu[name] for name, after_s in _cpu_s(servers).items()}
    per = 1000 / count
    return {
        "rows_per_s": n * count / took_s,
        "ms": took_s * per,
        **{name: seconds * per for name, seconds in used.items()},
    }


def _cpu_s(servers: Sequence[int]) -> dict[str, float]:
    """Processor time so far of this process, and of the servers together; of each, what was spent in the kernel."""
    own, theirs = resource.getrusage(resource.RUSAGE_SELF), [psutil.Process(pid).cpu_times() for pid in servers]
    return {
        "cpu_ms_client": own.ru_utime + own.ru_stime,
        "kernel_ms_client": own.ru_stime,
        "cpu_ms_servers": sum(one.user + one.system for one in theirs),
        "kernel_ms_servers": sum(one.system for one in theirs),
    }


# --- ours ------------------------------------------------------------------------------------------------------------


class Ours:
    """A worker of gba mode, as if on another host. A push is acknowledged, reported and, every eighth, applied."""

    def __init__(
        self, base: str, session: PsSession, worker: int, pids: Sequence[int], rows: Spec, in_flight: int
    ) -> None:
        self._base, self._session, self.pids, self._rows, self._in_flight = base, session, pids, rows, in_flight
        push_window.MAX_IN_FLIGHT = in_flight  # of this process
        tables = tables_in(base)
        parameter = torch.zeros(1, requires_grad=True)
        self._mode = PsWorker(
            session, worker, worker - 1, ELSEWHERE, os.getpid(), tables, DenseGradients([parameter], 1), 60.0,
            row_coder=None if rows.is_none else RowCoder(rows, [DIM]),
        )  # fmt: skip
        self._mode.start()
        self._leases = LeasePrefetcher(self._ask)

    def _ask(self) -> messages.LeaseReply:
        return self._mode.ask(0, 0, 0, N_SAMPLES, [0.0, LEARNING_RATE], 0, lambda: True)

    def pull(self, ids: np.ndarray) -> Any:
        return self._mode.fetch_rows([ids])[0]

    def push(self, ids: np.ndarray, grads: np.ndarray) -> None:
        self._push(self._leases.next(), ids, grads)

    def _push(self, reply: messages.LeaseReply, ids: np.ndarray, grads: np.ndarray) -> None:
        assert reply.lease is not None
        self._mode.push(reply.lease, [[RowGrad(ids, grads)]], None, 0.0, "")
        if self._in_flight == 1:
            self.flush()

    def flush(self) -> None:
        self._mode.flush()

    def lease_times(self, n: int, seconds: float) -> dict[str, float]:
        """Time of a lease while another process pulls and pushes n rows."""
        spawn = mp.get_context("spawn")
        here, there = spawn.Pipe()
        args = (self._base, self._session, n, there, self._rows, self._in_flight)
        loads = spawn.Process(target=load, args=args, daemon=True)
        loads.start()
        here.recv()
        few, zeros = np.arange(16), np.zeros((16, DIM), np.float32)
        times: list[float] = []
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            start = time.perf_counter()
            reply = self._ask()
            times.append(time.perf_counter() - start)
            self._push(reply, few, zeros)
        here.send(None)
        loads.join(60)
        half, most = np.percentile(times, [50, 99])
        return {"n": len(times), "p50_ms": 1000 * half, "p99_ms": 1000 * most, "p99_over_p50": most / half}

    def close(self) -> None:
        self._leases.close()
        self._mode.close()


def load(base: str, session: PsSession, n: int, asked: Connection, rows: Spec, in_flight: int) -> None:
    """A process that pulls and pushes until a message ends it."""
    endpoint, rng = Ours(base, session, 2, (), rows, in_flight), np.random.default_rng(n)
    ids, grads = np.sort(rng.choice(N_ROWS, n, replace=False)), rng.standard_normal((n, DIM), dtype=np.float32)
    asked.send(None)
    while not asked.poll():
        endpoint.pull(ids)
        endpoint.push(ids, grads)
    endpoint.flush()
    endpoint.close()


def tables_in(base: str) -> gba_hvd.EmbeddingTables:
    tables = gba_hvd.EmbeddingTables({"t": (N_ROWS, DIM)}, gba_hvd.SGD(lr=LEARNING_RATE), shard_dir=base)
    tables.memory = ShardMemory.create_or_open(Path(base), "bench", tables.layout, grace_s=1.0)
    return tables


@contextmanager
def ours(
    servers: int, in_flight: int, wire: messages.Wire = "curve", rows: Spec = Compression.none
) -> Iterator[ServerAddress]:
    key = transport.new_key()
    # Not gba-hvd-...: other jobs of this machine would take the folder for memory of a dead job, and remove it.
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as base:
        tables = tables_in(base)
        layout, memory = tables.layout, tables.memory
        assert memory is not None
        for shard in range(layout.n_shards):
            memory.init_shard(shard, 0)
        companion.write_settings(memory.folder, "bench", key, layout, tables.optimizer, wire=wire)
        endpoints = [companion.endpoint(memory.folder, i, HERE, 60.0) for i in range(servers)]
        shard_servers = tuple(shard % servers for shard in range(layout.n_shards))
        session = PsSession(1, "gba", "bench", key, tuple(endpoints), shard_servers, (0,), "global")
        parameter = torch.zeros(1, requires_grad=True)
        spec = torch_optimizers.spec_of(torch.optim.SGD([parameter], lr=0.0))
        client = Client("bench", key, endpoints, ELSEWHERE, memory.folder, 60.0)
        client.start()
        for me in range(servers):
            tensors: list[tuple[str, list[int], int]] = [("p", [1], 0)] if me == 0 else []
            enter = messages.Enter(
                1, endpoints, me, list(shard_servers), messages.JobPosition(), N_SAMPLES, 8, 1,
                vars(Discipline()).copy(), "global", LEARNING_RATE, [0.0], tensors, spec,
            )  # fmt: skip
            values = np.zeros(len(tensors), np.float32)
            client.call(me, enter, [values, state_codec.encode([{}] * len(tensors))])
        client.close()
        pids = [companion.pid_of(memory.folder, i) for i in range(servers)]
        endpoint = Ours(base, session, 1, [pid for pid in pids if pid is not None], rows, in_flight)
        try:
            yield endpoint
        finally:
            endpoint.close()
            memory.close()


class Window:
    """A peer's pushes on the way, as `push_window` has them: at most so many; one is waited for at once."""

    def __init__(self, in_flight: int) -> None:
        self._most, self._waits = in_flight, deque[Callable[[], Any]]()

    def enter(self) -> None:
        while len(self._waits) >= self._most:
            self._waits.popleft()()

    def sent(self, wait: Callable[[], Any]) -> None:
        self._waits.append(wait)
        if self._most == 1:
            self.flush()

    def flush(self) -> None:
        while self._waits:
            self._waits.popleft()()


# --- raw ZeroMQ ------------------------------------------------------------------------------------------------------


class Echo:
    """Sends as many bytes as a pull or push has, receives as many as its answer; half of them with each of two."""

    def __init__(self, sockets: Sequence[Any], pids: Sequence[int], in_flight: int) -> None:
        self._sockets, self.pids, self._window = sockets, pids, Window(in_flight)
        self.flush = self._window.flush

    def pull(self, ids: np.ndarray) -> Any:
        n = len(self._sockets)
        parts = np.array_split(ids, n)
        for s, part in zip(self._sockets, parts, strict=True):
            s.send_multipart([str(len(part) * DIM * 4).encode(), part], copy=False)
        self.flush()  # answers come in the order of requests
        return [np.frombuffer(s.recv_multipart(copy=False)[0].buffer, dtype=np.float32) for s in self._sockets]

    def push(self, ids: np.ndarray, grads: np.ndarray) -> None:
        n = len(self._sockets)
        self._window.enter()
        for s, some, values in zip(self._sockets, np.array_split(ids, n), np.array_split(grads, n), strict=True):
            s.send_multipart([b"8", some, values], copy=False)
        self._window.sent(lambda: [s.recv_multipart(copy=False) for s in self._sockets])


def serve_echo(ready: Connection, secret: bytes) -> None:
    """A ZeroMQ server's process: answers n bytes to n, until asked to end."""
    context: zmq.Context[Any] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server, router.curve_secretkey = True, secret
    ready.send(router.bind_to_random_port("tcp://127.0.0.1"))
    answer = memoryview(bytearray(4 * N_ROWS * DIM))
    while True:
        peer, wanted, *_ = router.recv_multipart(copy=False)
        n = int(wanted.bytes)
        if n == 0:
            break
        router.send_multipart([peer, answer[:n]], copy=False)
    context.destroy(linger=0)


@contextmanager
def zmq_curve(servers: int, in_flight: int) -> Iterator[ServerAddress]:
    spawn = mp.get_context("spawn")
    public, secret = zmq.curve_keypair()
    context: zmq.Context[Any] = zmq.Context()
    processes, sockets = [], []
    for _ in range(servers):
        here, there = spawn.Pipe()
        process = spawn.Process(target=serve_echo, args=(there, secret), daemon=True)
        process.start()
        dealer = context.socket(zmq.DEALER)
        dealer.curve_serverkey = public
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.connect(f"tcp://127.0.0.1:{here.recv()}")
        processes.append(process)
        sockets.append(dealer)
    try:
        yield Echo(sockets, [p.pid for p in processes if p.pid is not None], in_flight)
        for dealer in sockets:
            dealer.send_multipart([b"0"])
        for process in processes:
            process.join(10)
    finally:
        context.destroy(linger=0)


# --- our own sockets -------------------------------------------------------------------------------------------------


class _Waiting:
    """Such a socket with calls that wait, as ZeroMQ's do."""

    def __init__(self, socket: TcpDealer) -> None:
        self._socket, self._poll = socket, select.poll()
        self._poll.register(socket.fileno(), select.POLLIN)

    def send_multipart(self, frames: Sequence[Any], copy: bool = False) -> None:
        self._socket.send_multipart(frames)

    def recv_multipart(self, copy: bool = False) -> list[Any]:
        return [SimpleNamespace(buffer=frame) for frame in waited(self._socket, self._poll)]


def waited(socket: TcpDealer | TcpRouter, poll: select.poll) -> list[Any]:
    while True:
        try:
            return socket.recv_multipart()
        except zmq.Again:
            poll.poll(100)
            socket.tick()


def serve_tcp_echo(ready: Connection, key: bytes, with_tls: bool) -> None:
    """The process of a server: answers n bytes to n, until asked to end."""
    router = TcpRouter(key, transport.MAX_FRAME_BYTES, transport.QUEUED_MESSAGES, 10.0, with_tls)
    ready.send(router.bind("127.0.0.1", 0))
    poll = select.poll()
    poll.register(router.fileno(), select.POLLIN)
    answer = memoryview(bytearray(4 * N_ROWS * DIM))
    while True:
        peer, wanted, *_ = waited(router, poll)
        n = int(bytes(wanted))
        if n == 0:
            break
        router.send_multipart([peer, answer[:n]])
    router.close()


@contextmanager
def tcp_echo(servers: int, in_flight: int, with_tls: bool = False) -> Iterator[ServerAddress]:
    spawn, key = mp.get_context("spawn"), transport.new_key()
    processes, sockets = [], []
    for _ in range(servers):
        here, there = spawn.Pipe()
        process = spawn.Process(target=serve_tcp_echo, args=(there, key, with_tls), daemon=True)
        process.start()
        sockets.append(TcpDealer("127.0.0.1", here.recv(), key, transport.MAX_FRAME_BYTES, 64, 10.0, with_tls))
        processes.append(process)
    yield Echo([_Waiting(one) for one in sockets], [p.pid for p in processes if p.pid is not None], in_flight)
    for dealer in sockets:
        dealer.send_multipart([b"0"])
    for process in processes:
        process.join(10)
    for dealer in sockets:
        dealer.close()


# --- torch.distributed.rpc -------------------------------------------------------------------------------------------


class Rpc:
    def __init__(self, names: Sequence[str], pids: Sequence[int], in_flight: int) -> None:
        self._names, self.pids, self._window = names, pids, Window(in_flight)
        self.flush = self._window.flush

    def pull(self, ids: np.ndarray) -> Any:
        parts = self._split(ids)
        answers = [
            rpc.rpc_async(name, torch_rpc_server.pull, (torch.from_numpy(ids[part]),))
            for name, part in zip(self._names, parts, strict=True)
        ]
        if len(answers) == 1:
            return answers[0].wait()
        out = torch.empty(len(ids), DIM)
        for part, answer in zip(parts, answers, strict=True):
            out[torch.from_numpy(part)] = answer.wait()
        return out

    def push(self, ids: np.ndarray, grads: np.ndarray) -> None:
        self._window.enter()
        answers = [
            rpc.rpc_async(name, torch_rpc_server.push, (torch.from_numpy(ids[part]), torch.from_numpy(grads[part])))
            for name, part in zip(self._names, self._split(ids), strict=True)
        ]
        self._window.sent(lambda: [answer.wait() for answer in answers])

    def _split(self, ids: np.ndarray) -> list[Any]:
        """Which positions of `ids` each server has; of one server all, which copies nothing."""
        n = len(self._names)
        return [slice(None)] if n == 1 else [np.flatnonzero(ids % n == server) for server in range(n)]


def join_rpc(rank: int, world: int, port: int) -> None:
    # TCP only: between hosts there is neither shared memory nor reading another process's memory ("shm", "cma").
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=4, _transports=["uv"], _channels=["mpt_uv", "basic"]
    )
    rpc.init_rpc("client" if rank == 0 else f"server{rank}", rank=rank, world_size=world, rpc_backend_options=options)


def serve_rpc(rank: int, world: int, port: int) -> None:
    """A table server's process. Keeps all ids, so that no id has to be translated."""
    torch_rpc_server.serve(torch_rpc_server.TableServer(N_ROWS, DIM, LEARNING_RATE))
    join_rpc(rank, world, port)
    rpc.shutdown()


@contextmanager
def torch_rpc(servers: int, in_flight: int) -> Iterator[ServerAddress]:
    torch.set_num_threads(1)
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = mp.get_context("spawn")
    processes = [
        spawn.Process(target=serve_rpc, args=(rank, servers + 1, port), daemon=True) for rank in range(1, servers + 1)
    ]
    for process in processes:
        process.start()
    join_rpc(0, servers + 1, port)
    names = [f"server{rank}" for rank in range(1, servers + 1)]
    yield Rpc(names, [p.pid for p in processes if p.pid is not None], in_flight)
    rpc.shutdown()
    for process in processes:
        process.join(10)


OPEN: dict[str, Callable[[int, int], AbstractContextManager[ServerAddress]]] = {
    "ours": ours,
    "ours_tls": partial(ours, wire="tls"),
    "ours_bf16": partial(ours, rows=Compression.bf16.always()),
    "ours_tls_bf16": partial(ours, wire="tls", rows=Compression.bf16.always()),
    "ours_plain": partial(ours, wire="plain"),
    "rpc": torch_rpc,
    "zmq_curve": zmq_curve,
    "tls_echo": partial(tcp_echo, with_tls=True),
    "plain_echo": tcp_echo,
}

if __name__ == "__main__":
    main()
