"""Sockets between workers and servers: ZeroMQ over TCP, encrypted, and over a local socket on a host.

Over TCP both sides prove with CURVE that they hold the job's key; a process without it gets nothing. On a host the
socket lies in the job's own folder, which only the job's user can enter: whoever can enter it can map the tables too.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

MAX_FRAME_BYTES = 1 << 31
QUEUED_MESSAGES = 64  # per peer and direction; a peer that does not read loses what comes after
KEY_BYTES = 32


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
        version, request, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
        admitted = mechanism == b"CURVE" and credentials == [self._admitted]
        status, text = (b"200", b"OK") if admitted else (b"400", b"this process does not hold the job's key")
        self.socket.send_multipart([version, request, status, text, b"", b""])

    def close(self) -> None:
        self.socket.close()


class Listener:
    """A server's pair of sockets for one purpose: local and TCP. Not thread-safe."""

    def __init__(self, context: zmq.Context[Any], folder: Path, name: str, address: str, port: int, key: bytes) -> None:
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.local, self.tcp = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
        for socket in (self.local, self.tcp):
            socket.linger = 0
            socket.set_hwm(QUEUED_MESSAGES)
            socket.maxmsgsize = MAX_FRAME_BYTES
        self.tcp.curve_server = True
        self.tcp.curve_publickey, self.tcp.curve_secretkey = key_pair(key, "server")
        self.local.bind(local_address(self._folder_fd, name))
        self.port: int = port
        if port:
            self.tcp.bind(f"tcp://{address}:{port}")
        else:
            self.port = self.tcp.bind_to_random_port(f"tcp://{address}")

    def close(self) -> None:
        self.local.close()
        self.tcp.close()
        os.close(self._folder_fd)


def receive(socket: zmq.Socket[Any], wait: bool = True) -> tuple[bytes, list[Any]]:
    """(peer, frames) of a waiting message; large frames are not copied. Raises zmq.Again when none waits."""
    peer, *frames = socket.recv_multipart(flags=0 if wait else zmq.DONTWAIT, copy=False)
    return peer.bytes, [frame.buffer for frame in frames]


def send(socket: zmq.Socket[Any], peer: bytes, header: bytes, frames: Sequence[Any] = ()) -> None:
    """Send without waiting. A peer that is gone, or does not read, loses the message and asks again."""
    try:
        socket.send_multipart([peer, header, *frames], flags=zmq.DONTWAIT, copy=False)
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
) -> zmq.Socket[Any]:
    """A worker's socket to a server: through the folder on its own host, by address elsewhere."""
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
