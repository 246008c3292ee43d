"""A companion server of its own to throw bad messages at, and a fuzzer that does so for a given time.

    python -m tests.processes.fuzz_server [--seconds 60] [--seed 1] [--wire tls] [--folder DIR]

The server is a real process with real shard memory. Each round sends it random bytes, corrupted and truncated messages,
messages of other jobs and versions, impossible ids, counts and numbers, through its local socket and over TCP, with and
without the job's key. After each round the process must be the same one, answer, and no byte of any row, dense value or
ledger may have changed. At the end the same server must train a step and get it right.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from gba_hvd.embedding.row_gradients import RowGrad, pack_by_owner, with_contributors
from gba_hvd.embedding.row_optimizers import SGD
from gba_hvd.ps import launch, messages, transport, wire
from gba_hvd.ps.dense_file import DenseReader
from gba_hvd.ps.messages import (
    Answer,
    Apply,
    Blend,
    Discard,
    Endpoint,
    Enter,
    Export,
    HeartbeatMsg,
    JobPosition,
    LeaseGrant,
    LeaseReply,
    LeaseRequest,
    Leave,
    PlannedMember,
    Publish,
    PullDense,
    PullRows,
    Push,
    PushDone,
    Refused,
    ReplicaSubmitted,
    Request,
    Residual,
    ReturnLeases,
    Sources,
    Status,
    SubmitReplica,
    SwitchTo,
)
from gba_hvd.ps.state_files import path_of
from gba_hvd.ps.tcp_sockets import TcpDealer
from gba_hvd.shm.layout import Layout
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.shm.snapshot_file import SnapshotFile
from gba_hvd.torch_optimizers import spec_of
from recovery import state_codec

TABLES = {"user": (40, 4), "item": (10, 4), "wide": (6, 8)}
N_SHARDS, N_SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 3, 64, 16, 8
LR, ROW_LR = 0.5, 0.1
TENSORS: list[tuple[str, list[int], int]] = [("w", [3, 2], 0), ("b", [2], 0)]
N_DENSE = 8
GENERATION = 0x5EED_0000_1234
WORKER = 77
_LAST = 1 << 40  # number of the last message of a round


class Waiting:
    """A socket of wire plain or tls with the calls of ZeroMQ's that wait."""

    def __init__(self, socket: TcpDealer) -> None:
        self._socket, self._came, self._poll = socket, list[list[Any]](), select.poll()
        self._poll.register(socket, select.POLLIN)

    def poll(self, timeout_ms: int) -> bool:
        deadline = time.monotonic() + timeout_ms / 1000
        while not self._came and time.monotonic() < deadline:
            self._socket.tick()
            self._poll.poll(10)
            with contextlib.suppress(zmq.Again):
                self._came.append([bytes(frame) for frame in self._socket.recv_multipart()])
        return bool(self._came)

    def send_multipart(self, frames: Sequence[Any], flags: int = 0) -> None:
        with contextlib.suppress(zmq.Again):  # what was sent before is on its way first
            self._came.append([bytes(frame) for frame in self._socket.recv_multipart()])
        self._socket.send_multipart(frames)

    def recv_multipart(self) -> list[Any]:
        while not self.poll(1000):
            pass
        return self._came.pop(0)

    def close(self, linger: int = 0) -> None:
        self._socket.close()


class Peer:
    """A bare client: sends what it is given, waits for one answer."""

    def __init__(self, job: str, key: bytes, endpoint: Endpoint, folder: Path | None, *, pull: bool = False) -> None:
        self.job, self._context, self._number = job, zmq.Context(), 0
        self._fd = -1
        if folder is None:
            port = endpoint.pull if pull else endpoint.control
            self.socket = transport.connect(self._context, key, address=endpoint.address, port=port, wire=endpoint.wire)
            if isinstance(self.socket, TcpDealer):
                self.socket = Waiting(self.socket)
        else:
            self._fd = os.open(folder, os.O_RDONLY)
            name = f"ps-{endpoint.index}.{'pull' if pull else 'control'}"
            self.socket = transport.connect(self._context, key, folder_fd=self._fd, name=name)

    def post(self, *frames: Any) -> None:
        """Send frames as they are."""
        self.socket.send_multipart(list(frames), flags=zmq.DONTWAIT)

    def send(self, body: Request, frames: Sequence[Any] = ()) -> int:
        self._number += 1
        self.post(wire.encode(self.job, self._number, body), *frames)
        return self._number

    def receive(self, number: int, timeout_s: float = 60.0) -> tuple[Answer, list[bytes]] | None:
        """The answer of this number, or None if none comes in time; others are thrown away."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not self.socket.poll(int(1000 * left) + 1):
                continue
            header, *frames = self.socket.recv_multipart()
            envelope = wire.open_envelope(header, self.job)
            if envelope.number == number:
                return wire.decode_answer(envelope), frames
        return None

    def ask(self, body: Request, frames: Sequence[Any] = (), timeout_s: float = 180.0) -> tuple[Answer, list[bytes]]:
        answer = self.receive(self.send(body, frames), timeout_s)
        if answer is None:
            raise AssertionError(f"no answer to {type(body).__name__} in {timeout_s:.0f} s")
        return answer

    def close(self) -> None:
        self.socket.close(linger=0)
        self._context.term()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Host:
    """One memory and its servers. The reaper removes it all when this process is gone.

    settings: as of `ps.settings`. Leases do not expire unless they are set to: peers send no heartbeats.
    """

    def __init__(self, base: Path, job: str = "fuzz", host: int = 0, n_servers: int = 1, **settings: Any) -> None:
        self.job, self.host, self.n_servers = job, host, n_servers
        self.optimizer = SGD(lr=ROW_LR)
        self.layout = Layout.of(TABLES, self.optimizer.slots, N_SHARDS, seed=3, init_std=0.1)
        self.memory = ShardMemory.create_or_open(base, job, self.layout, grace_s=1.0)
        self.memory.reserve(list(range(N_SHARDS)))
        for shard in range(N_SHARDS):
            self.memory.init_shard(shard, 0)
        self.folder = self.memory.folder
        self.key = settings.pop("key", transport.new_key())
        settings = {"heartbeat_timeout_s": 1000.0, "lease_s": 1000.0, **settings}
        launch.write_settings(self.folder, job, self.key, self.layout, self.optimizer, **settings)
        self.endpoints = [launch.endpoint(self.folder, i, host, 120.0) for i in range(n_servers)]
        self._peers: list[Peer] = []

    def peer(self, index: int = 0, *, local: bool = True, pull: bool = False, **other: Any) -> Peer:
        job, key = other.get("job", self.job), other.get("key", self.key)
        peer = Peer(job, key, self.endpoints[index], self.folder if local else None, pull=pull)
        self._peers.append(peer)
        return peer

    def pid(self, index: int = 0) -> int:
        pid = launch.pid_of(self.folder, index)
        assert pid is not None
        return pid

    def log(self, index: int = 0) -> str:
        return launch.last_words(self.folder, index)

    def ledger(self) -> dict[str, Any] | None:
        """What the coordinator last saved."""
        path = self.folder / "ps-0.ledger"
        saved = SnapshotFile(path).read() if path.exists() else None
        return None if saved is None else msgspec.msgpack.decode(saved, strict=False)

    def dense(self, index: int = 0) -> tuple[int, np.ndarray]:
        reader = DenseReader(path_of(self.folder, index, "dense"))
        out = np.empty(reader.n, np.float32)
        step = reader.read(out, -2)
        reader.close()
        return step, out

    def everything(self) -> tuple[bytes, list[tuple[int, bytes]], Any]:
        """Every byte that a bad message must not change: rows with their marks, dense values, ledger."""
        dense = [(step, values.tobytes()) for step, values in map(self.dense, range(self.n_servers))]
        ledger = self.ledger()
        return self.memory.flat.tobytes(), dense, None if ledger is None else ledger["ledger"]

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        pids = [launch.pid_of(self.folder, i) for i in range(self.n_servers)]
        self.memory.close()
        deadline = time.monotonic() + 60
        while any(pid is not None and Path(f"/proc/{pid}").exists() for pid in pids):
            if time.monotonic() > deadline:
                raise AssertionError(f"the servers {pids} outlive their memory")
            time.sleep(0.02)


def enter(
    endpoints: Sequence[Endpoint], me: int = 0, shard_servers: Sequence[int] | None = None, **changes: Any
) -> tuple[Enter, list[Any]]:
    """A valid `Enter` for one of these servers; server 0 has all dense tensors."""
    tensors = TENSORS if me == 0 else []
    spec = spec_of(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR))
    fields: dict[str, Any] = {
        "generation": GENERATION, "servers": list(endpoints), "me": me,
        "shard_servers": list(shard_servers or [0] * N_SHARDS), "position": JobPosition(account={}),
        "n_samples": N_SAMPLES, "global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH,
        "discipline": {"name": "gba", "lookahead": 0}, "row_average": "global", "row_lr": ROW_LR, "lrs": [LR],
        "tensors": tensors, "optimizer": spec, **changes,
    }  # fmt: skip
    values = np.arange(N_DENSE if me == 0 else 0, dtype=np.float32)
    return Enter(**fields), [values, state_codec.encode([{} for _ in tensors])]


def gradients(
    layout: Layout, owner: Sequence[int] | None = None, value: float = 1.0, contributors: bool = False
) -> list[list[np.ndarray]]:
    """For each server the frames of a push: every dense number and three rows of each group get this gradient."""
    rows = []
    for group in layout.groups:
        grad = RowGrad(np.arange(3, dtype=np.int64), np.full((3, group.dim), value, np.float32))
        rows.append(with_contributors(grad) if contributors else grad)
    owners = np.array(owner or [0] * N_SHARDS, dtype=np.int32)
    n = int(owners.max()) + 1
    message, words = pack_by_owner(rows, owners, n)
    messages = np.split(message, np.cumsum(words)[:-1])
    return [[np.full(N_DENSE if s == 0 else 0, value, np.float32), m] for s, m in enumerate(messages)]


def an_ask(request: int, **changes: Any) -> LeaseRequest:
    fields: dict[str, Any] = {
        "worker": WORKER, "generation": GENERATION, "request": request, "epoch": 0, "n_samples": N_SAMPLES,
        "lrs": [LR, ROW_LR], "lrs_step": 0, **changes,
    }  # fmt: skip
    return LeaseRequest(**fields)


def a_beat(generation: int = GENERATION, **changes: Any) -> HeartbeatMsg:
    fields = {"worker": WORKER, "rank": 0, "host": 0, "pid": os.getpid(), "generation": generation, **changes}
    return HeartbeatMsg(**fields)


def lease(peer: Peer, request: int, **changes: Any) -> LeaseGrant:
    """A lease; asks again while the answer is to wait."""
    while True:
        answer, _ = peer.ask(an_ask(request, **changes))
        assert isinstance(answer, LeaseReply), answer
        if answer.lease is not None:
            return answer.lease
        assert answer.status == "wait", answer


def train_a_step(peer: Peer, layout: Layout, first_request: int, **of_gradients: Any) -> None:
    """Two leases, two pushes, one step, at a host with one server."""
    peer.send(a_beat())
    leases = [lease(peer, first_request + i) for i in range(GLOBAL_BATCH // MICRO_BATCH)]
    for given in leases:
        push(peer, given, gradients(layout, **of_gradients)[0])
        done(peer, given)


def push(peer: Peer, given: LeaseGrant, frames: Sequence[Any]) -> Answer:
    return peer.ask(Push(WORKER, GENERATION, given.micro, given.serial), frames)[0]


def done(peer: Peer, given: LeaseGrant, **more: Any) -> Answer:
    return peer.ask(PushDone(WORKER, GENERATION, given.micro, given.serial, **more))[0]


# --- bad messages ----------------------------------------------------------------------------------------------------


def words(*numbers: int) -> np.ndarray:
    """int64 numbers as the float32 words of a row message."""
    return np.array(numbers, dtype=np.int64).view(np.float32)


def bad_pushes(layout: Layout) -> dict[str, list[Any]]:
    """Frames of pushes that must be refused."""
    dense, rows = gradients(layout)[0]
    nan, inf = rows.copy(), dense.copy()
    nan[2 + 6] = np.nan  # behind the count and three keys of the first group
    inf[5] = -np.inf
    none = words(0)
    key = 4 * 3  # words of a group's message: 2 of the count, 6 of the keys, then the rows

    def rows_with(*front: int) -> np.ndarray:
        return np.concatenate([words(*front), np.zeros(4 * max(0, len(front) - 1), np.float32), none])

    return {
        "no frames": [],
        "one frame": [dense],
        "four frames": [dense, rows, rows, rows],
        "dense of float64": [dense.astype(np.float64), rows],
        "dense of float16": [dense.astype(np.float16), rows],
        "dense too short": [dense[:-1], rows],
        "bytes of no whole number": [dense.tobytes()[:-1], rows],
        "rows truncated": [dense, rows[:-1]],
        "rows with words left": [dense, np.append(rows, np.float32(0))],
        "rows truncated by a byte": [dense, rows.tobytes()[:-3]],
        "no rows at all": [dense, b""],
        "a row beyond its table": [dense, rows_with(1, 50 * N_SHARDS)],
        "a row of the padding": [dense, rows_with(1, 41)],
        "a negative row": [dense, rows_with(1, -1)],
        "a huge row": [dense, rows_with(1, 2**63 - 1)],
        "a negative count": [dense, rows_with(-1)],
        "a huge count": [dense, rows_with(2**62)],
        "a count that overflows": [dense, rows_with(2**63 - 1)],
        "NaN in a row": [dense, nan],
        "infinity in a dense tensor": [inf, rows],
        "random": [dense, np.random.default_rng(key).integers(0, 2**32, 40, dtype=np.uint32)],
    }


def bad_requests(layout: Layout, endpoints: Sequence[Endpoint]) -> dict[str, tuple[Request, list[Any]]]:
    """Well-formed messages that must be refused, and change nothing."""
    good, frames = enter(endpoints, generation=99)
    dense, rows = gradients(layout)[0]

    def entering(**changes: Any) -> tuple[Request, list[Any]]:
        return enter(endpoints, generation=99, **changes)[0], frames

    def applying(step: int = 1, weight: float = 1.0, scale: float = 0.5, lrs: Sequence[float] = (LR,)) -> Request:
        return Apply(GENERATION, step, [PlannedMember(0, 1, weight)], scale, ROW_LR, list(lrs), 0)

    return {
        "ask of another generation": (an_ask(1, generation=1), []),
        "ask with NaN as learning rate": (an_ask(1, lrs=[float("nan"), 0.1]), []),
        "ask with too few learning rates": (an_ask(1, lrs=[0.1]), []),
        "ask without learning rates": (an_ask(1, lrs=[]), []),
        "ask with other samples": (an_ask(1, n_samples=65), []),
        "push of another generation": (Push(WORKER, 1, 0, 1), [dense, rows]),
        "push with a residual that is odd": (Push(WORKER, GENERATION, 0, 1), [dense, rows, b"123"]),
        "push with a residual that is not finite": (
            Push(WORKER, GENERATION, 0, 1), [dense, rows, np.array([np.nan], np.float32)]
        ),
        "residual of another generation": (Residual(WORKER, 1), [b""]),
        "residual without a frame": (Residual(WORKER, GENERATION), []),
        "residual that is odd": (Residual(WORKER, GENERATION), [b"123"]),
        "sources of another generation": (Sources(WORKER, 1), [b""]),
        "sources without a frame": (Sources(WORKER, GENERATION), []),
        "done of another generation": (PushDone(WORKER, 1, 0, 1), []),
        "pull of another generation": (PullDense(1, -1), []),
        "export of another generation": (Export(1, True), []),
        "export of a mean where there are no replicas": (Export(GENERATION, True, 3), []),
        "blend where there are no replicas": (Blend(WORKER, GENERATION, 1, 0, 0.5), [dense]),
        "publish where there are no replicas": (Publish(GENERATION, 0), [dense, b""]),
        "submit where there are no replicas": (SubmitReplica(WORKER, GENERATION, 1), [dense, b""]),
        "all submitted where there are no replicas": (ReplicaSubmitted(WORKER, GENERATION, 1), []),
        "leases returned to another generation": (ReturnLeases(WORKER, 1), []),
        "discard of another generation": (Discard(1, 1 << 40), []),
        "rows at the wrong port": (PullRows(GENERATION), [b"", b""]),
        "apply of another generation": (Apply(1, 1, [], 1.0, 0.1, [0.1], 0), []),
        "apply of a later step": (applying(step=5), []),
        "apply with NaN as scale": (applying(scale=float("nan")), []),
        "apply with an infinite weight": (applying(weight=float("inf")), []),
        "apply with no learning rate": (applying(lrs=[]), []),
        "apply with NaN as learning rate": (applying(lrs=[float("nan")]), []),
        "switch to nowhere": (SwitchTo("gab", "no such mode"), []),
        "enter without frames": (good, []),
        "enter with one frame": (good, frames[:1]),
        "enter with values too short": (good, [frames[0][:-1], frames[1]]),
        "enter with an odd byte": (good, [frames[0].tobytes()[:-1], frames[1]]),
        "enter with random state": (good, [frames[0], os.urandom(100)]),
        "enter with empty state": (good, [frames[0], b""]),
        "enter with state for one tensor": (good, [frames[0], state_codec.encode([{}])]),
        "enter with state that is a number": (good, [frames[0], state_codec.encode(5)]),
        "enter as nobody": entering(me=1) if len(endpoints) == 1 else entering(me=9),
        "enter as a negative": entering(me=-1),
        "enter with a shard too many": entering(shard_servers=[0] * (N_SHARDS + 1)),
        "enter with shards at nobody": entering(shard_servers=[0, 0, 9]),
        "enter with a negative shape": entering(tensors=[("w", [-2, -4], 0)]),
        "enter with a shape that overflows": entering(tensors=[("w", [2**62, 4], 0), ("b", [8], 0)]),
        "enter with a group too far": entering(tensors=[("w", [8], 7)]),
        "enter with an unknown discipline": entering(discipline={"name": "bga"}),
        "enter with an unknown setting": entering(discipline={"name": "gba", "tolerence": 1}),
        "enter with an odd batch": entering(micro_batch=7),
        "enter with no sample": entering(n_samples=0),
        "enter with an unknown optimizer": entering(optimizer={"class": "torch.optim:Adma", "groups": [{}]}),
        "enter with an optimizer from nowhere": entering(optimizer={"class": "no.such:Thing", "groups": [{}]}),
        "enter with no optimizer": entering(optimizer={}),
        "enter with NaN as learning rate": entering(row_lr=float("nan")),
        "enter with an odd account": entering(position=JobPosition(account={"gone": 3})),
        "enter with an unknown average": entering(row_average="median"),
    }  # fmt: skip


def bad_pulls(layout: Layout) -> dict[str, list[Any]]:
    """Frames of pulls of rows that must be refused."""
    keys = np.arange(3, dtype=np.int64)
    return {
        "no frames": [],
        "a frame too many": [keys] * (len(layout.groups) + 1),
        "keys of int32": [keys.astype(np.int32)] * len(layout.groups),
        "a negative key": [keys - 1, keys],
        "a huge key": [keys + 2**62, keys],
        "a row of the padding": [np.array([41]), keys],
    }


def bad_envelopes(job: str) -> dict[str, bytes]:
    """First frames that are no messages of this job."""
    good = wire.encode(job, 1, Status())
    return {
        "nothing": b"",
        "zeros": bytes(100),
        "text": b"GET / HTTP/1.1\r\n\r\n",
        "a truncated message": good[:-1],
        "a message and more": good + b"\0",
        "an old version": msgspec.msgpack.encode([0, job, 1, {"type": "Status"}]),
        "another job": wire.encode(f"{job}-2", 1, Leave(WORKER)),
        "an unknown request": msgspec.msgpack.encode([messages.VERSION, job, 1, {"type": "Format"}]),
        "an answer": wire.encode(job, 1, Refused("no")),
        "an unknown field": msgspec.msgpack.encode([messages.VERSION, job, 1, {"type": "Bye", "worker": 1, "x": 1}]),
        "a wrong type": msgspec.msgpack.encode([messages.VERSION, job, 1, {"type": "Bye", "worker": "me"}]),
        "a fraction": msgspec.msgpack.encode([messages.VERSION, job, 1, {"type": "Bye", "worker": 1.5}]),
        "deep nesting": b"\x91" * 5000 + b"\xc0",
        "a huge array": b"\xdd\xff\xff\xff\xff",
        "a huge string": b"\x94\x01\xdb\xff\xff\xff\xff",
    }


# --- the fuzzer ------------------------------------------------------------------------------------------------------


def corrupted(rng: random.Random, data: bytes) -> bytes:
    """Some bytes changed, cut out, doubled, or the end missing."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(4):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1:
                out[at : at + rng.randint(1, 8)] = b""
            case 2:
                out[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                del out[at:]
    return bytes(out)


def a_round(rng: random.Random, host: Host, done: Counter[str]) -> None:
    """One of everything, in random order, through a fresh connection."""
    pull = rng.random() < 0.3
    peer = host.peer(local=rng.random() < 0.5, pull=pull)
    other = 1 + rng.randrange(1 << 40)  # a generation, not this job's, even in a corrupted message
    dense, rows = gradients(host.layout)[0]
    bodies: list[tuple[Request, list[Any]]] = [
        (an_ask(1, generation=other), []),
        (Push(WORKER, other, 0, 1), [dense, rows]),
        (PushDone(WORKER, other, 0, 1, 0.5, 0.1, ""), []),
        (PullDense(other, -1), []),
        (PullRows(other), [np.arange(3, dtype=np.int64)] * 2),
        (Export(other, False), []),
        (Blend(WORKER, other, 1, 0, 0.5), [dense]),
        (SubmitReplica(WORKER, other, 1), [dense, state_codec.encode([{}, {}])]),
        (Apply(other, 1, [PlannedMember(0, 1, 1.0)], 0.5, ROW_LR, [LR], 0), []),
    ]
    acts: list[Callable[[], None]] = []

    def act(kind: str, *frames: Any) -> None:
        def run() -> None:
            peer.post(*frames)
            done[kind] += 1

        acts.append(run)

    for _ in range(20):
        act("random bytes", *(rng.randbytes(rng.randrange(60)) for _ in range(rng.randint(1, 4))))
    for body, frames in bodies:
        header = wire.encode(host.job, 1, body)
        act("corrupted header", corrupted(rng, header), *frames)
        act("corrupted frames", header, *(corrupted(rng, bytes(memoryview(f).cast("B"))) for f in frames))
    for data in bad_envelopes(host.job).values():
        act("no message of this job", data)
    for body, frames in bad_requests(host.layout, host.endpoints).values():
        act("impossible request", wire.encode(host.job, 1, body), *frames)
    for frames in bad_pushes(host.layout).values():
        act("impossible push", wire.encode(host.job, 1, Push(WORKER, GENERATION, 0, 1)), *frames)
    for frames in bad_pulls(host.layout).values():
        act("impossible pull", wire.encode(host.job, 1, PullRows(GENERATION)), *frames)
    rng.shuffle(acts)
    acts.append(lambda: peer.post(wire.encode(host.job, _LAST, Status())))
    for each in acts:
        while True:
            try:
                each()
                break
            except zmq.Again:  # the server is behind; let it catch up
                time.sleep(0.01)
    while peer.socket.poll(5000):  # the answer to the last one is lost if they were too many to be kept
        header = peer.socket.recv_multipart()[0]
        done["answers"] += 1
        if wire.open_envelope(header, host.job).number == _LAST:
            break
    peer.close()


def fuzz(base: Path, seconds: float, seed: int, wire: str = "curve") -> Counter[str]:
    """Returns what was sent and what came back. Raises AssertionError, naming the seed, when the server gave way."""
    rng, counts = random.Random(seed), Counter[str]()
    host = Host(base, job=f"fuzz-{os.getpid()}", wire=wire)
    try:
        peer = host.peer()
        peer.ask(*enter(host.endpoints))
        before, pid = host.everything(), host.pid()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or not counts["rounds"]:
            a_round(rng, host, counts)
            counts["rounds"] += 1
            answer, _ = peer.ask(Status())
            where = f"seed {seed}, round {counts['rounds']}"
            if host.pid() != pid or not Path(f"/proc/{pid}").exists():
                raise AssertionError(f"{where}: the server ended: {host.log()}")
            if host.everything() != before:
                raise AssertionError(f"{where}: rows, dense values or the ledger changed; {answer}")
        if "Traceback" in host.log():
            raise AssertionError(f"seed {seed}: a request failed in a way that nobody planned: {host.log()}")
        train_a_step(peer, host.layout, 1)
        step, values = host.dense()
        expected = np.arange(N_DENSE, dtype=np.float32) - np.float32(LR)
        if step != 1 or not np.array_equal(values, expected):
            raise AssertionError(f"seed {seed}: the step after all this is wrong: {values}, expected {expected}")
    finally:
        host.close()
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long; until Ctrl-C by default")
    parser.add_argument("--seed", type=int, default=1, help="of the first minute; the next one has the next seed")
    parser.add_argument("--wire", choices=messages.WIRES, default="curve", help="of connections over TCP")
    parser.add_argument("--folder", type=Path, default=None, help="where the shard memory goes")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    deadline, seed, total = time.monotonic() + chosen.seconds, chosen.seed, Counter[str]()
    try:
        while (left := deadline - time.monotonic()) > 0:
            with tempfile.TemporaryDirectory(dir=chosen.folder) as base:
                total += fuzz(Path(base), min(60.0, left), seed, chosen.wire)
            print(f"seed {seed}: ok; so far {dict(total)}", flush=True)
            seed += 1
    except KeyboardInterrupt:
        pass
    print(f"the server stood: {dict(total)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
