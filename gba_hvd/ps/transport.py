"""Sockets between workers and servers: over TCP, and over a local socket on a host.

Over TCP both sides prove that they hold the job's key; a process without it gets nothing. With wire "curve" that is
ZeroMQ's CURVE, which encrypts; with "tls" and "plain" it is `tcp_sockets`, with TLS or without encryption. On a host
the socket lies in the job's own folder, which only the job's user can enter, who can map the tables too.

A server's TCP sockets take frames of a few MiB only, since a frame is held in memory before its sender has proved
anything. Larger ones travel in pieces, so the size of a request has no limit of its own: a leading frame, which cannot
be a header, says how long the frames are, and `receive` puts them together. Before the proof a connection may hold one
frame, for HANDSHAKE_S. CURVE has a ZeroMQ thread of its own: what it is flooded with does not hold up local workers.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from zmq.utils import z85

from gba_hvd.errors import GbaError
from gba_hvd.ps.messages import Wire
from gba_hvd.ps.tcp_sockets import TcpDealer, TcpRouter

MAX_FRAME_BYTES = 1 << 31
PIECE_BYTES = 1 << 30  # of a frame to a local peer, or from a server
TCP_PIECE_BYTES = 4 << 20  # of a frame to a server over TCP
HANDSHAKE_S = 2.0  # a server's patience with a peer that has proved nothing
CONNECT_S = 10.0  # a client's patience with a server, which may be busy, before it connects again
IO_THREADS = 2
_LOCAL_THREAD, _TCP_THREAD = 1, 2  # bits of a ZeroMQ affinity
_ENCRYPTION_BYTES = 1024  # more than CURVE adds to a frame
_IN_PIECES = b"\xc1"  # msgpack begins nothing so
MAX_FRAMES = 1024  # of one message
QUEUED_MESSAGES = 64  # per peer and direction; a peer that does not read loses what comes after
READ_AHEAD_MESSAGES = 8  # that a server takes in from one peer before it gets to them
UNREAD_BYTES = 4 << 30  # of large answers that peers have not read yet; then there are no more for now
LARGE_BYTES = 1 << 16
KEY_BYTES = 32
_DOMAIN = b"gba-hvd"
_BIND_TRIES_S = 5.0  # a successor waits so long for its predecessor's port


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def key_pair(key: bytes, role: str) -> tuple[bytes, bytes]:
    """(public, secret) of a role, from the job's key: all processes of a job know both pairs, others none."""
    secret = z85.encode(hashlib.blake2b(key, digest_size=32, person=role.encode()).digest())
    return zmq.curve_public(secret), secret


def local_address(folder_fd: int, name: str) -> str:
    """Address of a local socket in an open folder: short, however long the folder's path (the limit is 107 bytes)."""
    return f"ipc:///proc/self/fd/{folder_fd}/{name}"


class Gate:
    """Admits TCP peers that hold the job's key (ZeroMQ's authentication protocol, RFC 27). `serve()` answers one."""

    def __init__(self, context: zmq.Context[Any], key: bytes) -> None:
        self._admitted = z85.decode(key_pair(key, "client")[0])
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def serve(self) -> None:
        """Answer one request; the socket must have one."""
        version, request, domain, _, _, mechanism, *credentials = self.socket.recv_multipart()
        admitted = (domain, mechanism, credentials) == (_DOMAIN, b"CURVE", [self._admitted])
        status, text = (b"200", b"OK") if admitted else (b"400", b"this process does not hold the job's key")
        self.socket.send_multipart([version, request, status, text, b"", b""])

    def close(self) -> None:
        self.socket.close()


class Listener:
    """A server's pair of sockets for one purpose: local and TCP. Not thread-safe; call `tick()` often.

    What peers can make it hold is bounded: a frame over TCP by TCP_PIECE_BYTES, what waits from
    one peer by `READ_AHEAD_MESSAGES`, large answers that peers do not read by `unread_bytes`. A peer that is connected
    and silent, or not a ZeroMQ peer, is cut off.

    Raises GbaError when the port is taken, saying what to do.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        folder: Path,
        name: str,
        address: str,
        port: int,
        key: bytes,
        unread_bytes: int = UNREAD_BYTES,
        wire: Wire = "curve",
    ) -> None:
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.local = _router(context, MAX_FRAME_BYTES, _LOCAL_THREAD)
        self.tcp: Any
        if wire == "curve":
            self.tcp = _curve_router(context, key)
        else:
            self.tcp = TcpRouter(key, TCP_PIECE_BYTES, QUEUED_MESSAGES, HANDSHAKE_S, with_tls=wire == "tls")
        self._unread: deque[tuple[Any, int]] = deque()
        self._unread_bytes, self._unread_limit = 0, unread_bytes
        self.port: int = port
        try:
            self.local.bind(local_address(self._folder_fd, name))
            self.port = _bind_to(self.tcp, address, port)
        except BaseException:
            self.close()
            raise

    def answer(self, socket: Any, peer: bytes, header: bytes, frames: Sequence[Any] = ()) -> bool:
        """As `send`; False, and nothing is sent, while peers leave too many large answers unread."""
        n_bytes = sum(memoryview(frame).nbytes for frame in frames)
        if n_bytes < LARGE_BYTES:
            send(socket, peer, header, frames)
            return True
        while self._unread and self._unread[0][0].done:
            self._unread_bytes -= self._unread.popleft()[1]
        if self._unread_bytes + n_bytes > self._unread_limit:  # perhaps the first is for a peer that does not read
            self._unread = deque(waiting for waiting in self._unread if not waiting[0].done)
            self._unread_bytes = sum(size for _, size in self._unread)
        if self._unread and self._unread_bytes + n_bytes > self._unread_limit:
            return False
        try:
            message = [peer, *in_pieces([header, *frames], PIECE_BYTES)]
            tracker = socket.send_multipart(message, flags=zmq.DONTWAIT, copy=False, track=True)
        except zmq.Again:
            return True
        self._unread.append((tracker, n_bytes))
        self._unread_bytes += n_bytes
        return True

    def tick(self) -> None:
        tick(self.tcp)

    def close(self) -> None:
        self.local.close()
        self.tcp.close()
        os.close(self._folder_fd)


def _router(context: zmq.Context[Any], most_bytes: int, thread: int) -> Any:
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.sndhwm, socket.rcvhwm = QUEUED_MESSAGES, READ_AHEAD_MESSAGES
    socket.handshake_ivl = int(1000 * HANDSHAKE_S)
    socket.maxmsgsize = most_bytes
    if context.get(zmq.IO_THREADS) >= IO_THREADS:
        socket.affinity = thread
    return socket


def _curve_router(context: zmq.Context[Any], key: bytes) -> Any:
    socket = _router(context, TCP_PIECE_BYTES + _ENCRYPTION_BYTES, _TCP_THREAD)
    socket.heartbeat_ivl, socket.heartbeat_timeout = 5000, 30000
    socket.curve_server = True
    socket.zap_domain = _DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no peer gets in while there is no gate
    socket.curve_publickey, socket.curve_secretkey = key_pair(key, "server")
    return socket


def _bind_to(socket: Any, address: str, port: int) -> int:
    """Listen at this port, where workers of other hosts expect this server; at any if it is 0. Returns the port."""
    deadline = time.monotonic() + _BIND_TRIES_S
    while True:
        try:
            if isinstance(socket, TcpRouter):
                return socket.bind(address, port)
            if not port:
                return int(socket.bind_to_random_port(f"tcp://{address}"))
            socket.bind(f"tcp://{address}:{port}")
        except (OSError, zmq.ZMQError) as error:
            if time.monotonic() < deadline and error.errno == errno.EADDRINUSE:
                time.sleep(0.1)
                continue
            raise GbaError(
                f"the companion server cannot listen at {address}:{port}, where its predecessor did: {error.strerror}; "
                f"another process took the port (ss -ltnp 'sport = :{port}' names it): end that, or restart the job"
            ) from error
        return port


def pollable(socket: Any) -> Any:
    """What a ZeroMQ poller takes, and by which it names the sockets that are ready."""
    return socket if isinstance(socket, zmq.Socket) else socket.fileno()


def tick(socket: Any) -> None:
    """What is due in a socket that has no thread of its own. To be called several times a second."""
    if isinstance(socket, TcpRouter | TcpDealer):
        socket.tick()


def why_not_connected(socket: Any) -> str:
    """What keeps a client's socket from its server; empty while nothing does, or nothing is known."""
    return socket.why_not if isinstance(socket, TcpDealer) else ""


def _taken(socket: Any, wait: bool) -> list[Any]:
    parts = socket.recv_multipart(flags=0 if wait else zmq.DONTWAIT, copy=False)
    return [part.buffer if isinstance(part, zmq.Frame) else part for part in parts]


def receive(socket: Any, wait: bool = True) -> tuple[bytes, list[Any]]:
    """(peer, frames) of a message that waits at a server; large frames are copied only if they came in pieces. No
    frames: what came makes no sense. Raises zmq.Again when none waits.
    """
    peer, *frames = _taken(socket, wait)
    try:
        return bytes(peer), joined(frames)[:MAX_FRAMES]
    except ValueError:
        return bytes(peer), []


def receive_answer(socket: Any) -> list[Any]:
    """The frames of a message that waits at a client's socket. Raises zmq.Again when none does."""
    return joined(_taken(socket, wait=False))


def in_pieces(frames: Sequence[Any], piece_bytes: int) -> list[Any]:
    """The frames as they are; or, when one is longer than `piece_bytes`, a frame with their lengths, and pieces."""
    views = [memoryview(frame).cast("B") if memoryview(frame).nbytes else b"" for frame in frames]
    sizes = [len(view) for view in views]
    if max(sizes) <= piece_bytes:
        return list(frames)
    pieces = [view[i : i + piece_bytes] for view in views for i in range(0, len(view), piece_bytes)]
    return [_IN_PIECES + np.array(sizes, "<i8").tobytes(), *pieces]


def joined(frames: list[Any]) -> list[Any]:
    """The inverse of `in_pieces`. Raises ValueError when the pieces are not of the lengths that were announced."""
    if not frames or bytes(frames[0][:1]) != _IN_PIECES:
        return frames
    sizes = np.frombuffer(frames[0][1:], "<i8").tolist()
    pieces = deque(frames[1:])
    frames.clear()  # each piece is freed as soon as it was copied
    if min(sizes, default=-1) < 0 or sum(sizes) != sum(len(piece) for piece in pieces):
        raise ValueError("pieces of other lengths than were announced")
    found: list[Any] = []
    for size in sizes:
        whole, at = np.empty(size, np.uint8), 0
        while at < size:
            piece = pieces.popleft()
            if len(piece) > size - at:
                raise ValueError("a piece that reaches into the next frame")
            whole[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        found.append(whole.data)
    return found


def send(socket: Any, peer: bytes, header: bytes, frames: Sequence[Any] = ()) -> None:
    """Send without waiting. A peer that is gone, or does not read, loses the message and asks again."""
    try:
        socket.send_multipart([peer, *in_pieces([header, *frames], PIECE_BYTES)], flags=zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return


def connect(
    context: zmq.Context[Any],
    key: bytes,
    *,
    folder_fd: int | None = None,
    name: str = "",
    address: str = "",
    port: int = 0,
    wire: Wire = "curve",
) -> Any:
    """A worker's socket to a server: through the folder on its own host, by address elsewhere."""
    if folder_fd is None and wire != "curve":
        return TcpDealer(address, port, key, MAX_FRAME_BYTES, QUEUED_MESSAGES, CONNECT_S, with_tls=wire == "tls")
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.set_hwm(QUEUED_MESSAGES)
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.reconnect_ivl, socket.reconnect_ivl_max = 20, 500
    if folder_fd is not None:
        socket.connect(local_address(folder_fd, name))
        return socket
    socket.curve_publickey, socket.curve_secretkey = key_pair(key, "client")
    socket.curve_serverkey = key_pair(key, "server")[0]
    socket.heartbeat_ivl, socket.heartbeat_timeout = 1000, 5000
    socket.connect(f"tcp://{address}:{port}")
    return socket
