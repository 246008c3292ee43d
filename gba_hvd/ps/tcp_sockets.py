"""Sockets over TCP, with TLS or without encryption: `wire="tls"` and `wire="plain"`.

    TcpRouter   of a server: any number of connections
    TcpDealer   of a client: one connection, opened again when it breaks

Both have the part of a ZeroMQ socket's interface that `transport` uses, and `fileno()` for a poller: readable when
there may be something to do. They start no thread: all they do is done in calls of the thread that they belong to.

Nothing is taken from a peer, and nothing sent to it, before both sides have proved on this very connection that they
hold the job's key (`key_proof`, with TLS after its own handshake). Until then a connection holds a few hundred bytes,
with TLS up to 160 KB, for `handshake_s` between one part of the proof and the next, and there are at most
MOST_UNPROVEN; a new one then ends the oldest. Afterwards a message is

    number of frames (u32), size of each (u64), the frames one after the other; little endian

A frame that is longer than the socket takes, as any other message that makes no sense, ends the connection.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from gba_hvd.ps import key_proof
from gba_hvd.ps.key_proof import NotProven

if TYPE_CHECKING:
    from ssl import SSLContext

log = logging.getLogger("gba_hvd.ps")
MOST_UNPROVEN = 256
MOST_FRAMES = 1 << 16  # of one message, in pieces
_ACCEPTS_A_TURN = 32
_REPORT_S = 60.0
_VIEWS_A_CALL = 512  # the kernel takes 1024
_KEEP_BYTES = 1 << 16  # what is shorter is copied when it has to wait, as ZeroMQ does
_RECONNECT_S, _RECONNECT_MOST_S = 0.02, 0.5
_NO_FD = (errno.EMFILE, errno.ENFILE)


class Outgoing:
    """A message on its way. done: the kernel has all of it, or the connection is gone."""

    def __init__(self, frames: Sequence[Any]) -> None:
        views = [memoryview(frame).cast("B") for frame in frames if memoryview(frame).nbytes]
        sizes = [memoryview(frame).nbytes for frame in frames]
        head = np.uint32(len(sizes)).tobytes() + np.array(sizes, "<u8").tobytes()
        self.views: deque[Any] = deque([memoryview(head), *views])
        self.done = False

    def keep(self) -> None:
        """The short frames may change from now on."""
        self.views = deque(view if len(view) >= _KEEP_BYTES else memoryview(bytes(view)) for view in self.views)

    def sent(self, n_bytes: int) -> None:
        while n_bytes:
            first = self.views[0]
            if n_bytes < len(first):
                self.views[0] = first[n_bytes:]
                return
            n_bytes -= len(first)
            self.views.popleft()
        self.done = not self.views


class Connection:
    """One TCP connection, of either side: the proof, then messages. Never waits.

    Raises OSError when the connection is over already.
    """

    def __init__(
        self, tcp: socket.socket, key: bytes, is_server: bool, most_bytes: int, tls: SSLContext | None = None
    ) -> None:
        self.tcp = tcp
        self._recv_into: Callable[[memoryview], int] = tcp.recv_into
        self._send: Callable[[Sequence[Any]], int] = tcp.sendmsg
        self._handshake: Callable[[], bool] | None = None  # until TLS is there; nothing is sent before
        if tls is not None:
            from gba_hvd.ps.tls import TlsLink

            link = TlsLink(tcp, tls, is_server)
            self.tcp, self._handshake = link.socket, link.handshake
            self._recv_into, self._send = link.recv_into, link.send
        self.peer = b""
        self.is_proven = False
        self.outgoing: deque[Outgoing] = deque()
        self._key, self._most_bytes = key, most_bytes
        self._message: list[Any] | None = None
        self._n_filled = 0  # parts of the handshake, the proof and of messages that have come
        self._steps = self._serve() if is_server else self._open()
        self._unfilled = next(self._steps) if self._handshake is None else memoryview(b"")

    # --- in: generators that yield what is to be filled next ---------------------------------------------------------

    def _serve(self) -> Iterator[memoryview]:
        hello, answer = bytearray(key_proof.HELLO_BYTES), bytearray(key_proof.PROOF_BYTES)
        yield from _greeted(hello)
        reply = key_proof.reply(self._key, bytes(hello), os.urandom(key_proof.NONCE_BYTES))
        self._send_whole(reply)
        yield memoryview(answer)
        key_proof.accept(self._key, bytes(hello), reply, bytes(answer))
        self.is_proven = True
        yield from self._messages()

    def _open(self) -> Iterator[memoryview]:
        hello, reply = key_proof.hello(os.urandom(key_proof.NONCE_BYTES)), bytearray(key_proof.REPLY_BYTES)
        self._send_whole(hello)
        yield from _greeted(reply)
        self._send_whole(key_proof.answer(self._key, hello, bytes(reply)))
        self.is_proven = True
        yield from self._messages()

    def _messages(self) -> Iterator[memoryview]:
        while True:
            count = bytearray(4)
            yield memoryview(count)
            n = int.from_bytes(count, "little")
            if not 0 < n <= MOST_FRAMES:
                raise ConnectionError(f"a message of {n:,} frames, {MOST_FRAMES:,} at most")
            sizes = np.empty(n, "<u8")
            yield sizes.view(np.uint8).data
            if (longest := int(sizes.max())) > self._most_bytes:
                raise ConnectionError(f"a frame of {longest:,} bytes, the limit is {self._most_bytes:,}")
            frames = []
            for size in sizes.tolist():
                frames.append(np.empty(size, np.uint8).data)  # one by one: what is not there yet takes no memory
                if size:
                    yield frames[-1]
            self._message = frames

    def receive(self) -> list[Any] | None:
        """The frames of the next message, if all of it is there. Raises OSError when the connection is over."""
        while self._message is None:
            if not self._fill():
                return None
        message, self._message = self._message, None
        return message

    def take_proof(self) -> bool:
        """Take what has come of the proof, and nothing behind it; whether a part of it is complete that was not.

        Raises OSError when the connection is over.
        """
        n_before = self._n_filled
        while not self.is_proven and self._fill():
            pass
        return self._n_filled > n_before

    def _fill(self) -> bool:
        """Read once. False: nothing is there."""
        try:
            is_over = self._handshake is not None and self._handshake()
            n = 0 if self._handshake is not None else self._recv_into(self._unfilled)
        except BlockingIOError:
            return False
        if self._handshake is not None:
            self._n_filled += 1
            if is_over:
                self._handshake, self._unfilled = None, next(self._steps)
            return True
        if not n:
            raise ConnectionResetError("the peer closed the connection")
        if n < len(self._unfilled):
            self._unfilled = self._unfilled[n:]
        else:
            self._n_filled += 1
            self._unfilled = next(self._steps)
        return True

    # --- out ---------------------------------------------------------------------------------------------------------

    def _send_whole(self, data: bytes) -> None:
        """Of the proof: shorter than what the kernel takes on a connection that nothing was sent on."""
        if self._send([memoryview(data)]) != len(data):
            raise ConnectionError("the kernel takes no handshake")

    def send(self, frames: Sequence[Any]) -> Outgoing:
        message = Outgoing(frames)
        self.outgoing.append(message)
        if len(self.outgoing) == 1:
            self.flush()
        if not message.done:
            message.keep()
        return message

    def flush(self) -> None:
        """Give the kernel what it takes. Raises OSError when the connection is over."""
        while self.outgoing:
            message = self.outgoing[0]
            try:
                n = self._send([message.views[i] for i in range(min(len(message.views), _VIEWS_A_CALL))])
            except BlockingIOError:
                return
            message.sent(n)
            if message.done:
                self.outgoing.popleft()

    def close(self) -> None:
        self.tcp.close()
        for message in self.outgoing:
            message.done = True
        self.outgoing.clear()


def _greeted(message: bytearray) -> Iterator[memoryview]:
    """The first message of the peer. Another protocol may begin with less, and wait: the first byte shows it."""
    yield memoryview(message)[:1]
    key_proof.check_first_byte(bytes(message[:1]))
    yield memoryview(message)[1:]


class TcpRouter:
    """A server's socket. `bind` it; then `recv_multipart` and `send_multipart`, of [peer, *frames].

    most_bytes: of a frame that it takes; queued: messages that wait for one peer to read, those beyond are lost
    refused: connections that did not prove that they hold the key
    """

    def __init__(self, key: bytes, most_bytes: int, queued: int, handshake_s: float, with_tls: bool = False) -> None:
        self._key, self._most_bytes, self._queued, self._handshake_s = key, most_bytes, queued, handshake_s
        self._tls = _tls_context(key, True) if with_tls else None
        self._listening: socket.socket | None = None
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}  # by file descriptor
        self._peers: dict[bytes, Connection] = {}
        self._deadlines: dict[int, float] = {}  # of those that have proved nothing yet, the oldest first
        self._ready: deque[int] = deque()
        self._n_accepted = 0
        self.refused, self._reported, self._next_report_s, self._why = 0, 0, 0.0, ""
        self.closed = False

    def fileno(self) -> int:
        return self._epoll.fileno()

    def bind(self, address: str, port: int) -> int:
        """Listen there, at any port if it is 0; the port. Raises OSError."""
        self._listening = socket.create_server((address, port), backlog=128)
        self._listening.setblocking(False)
        self._epoll.register(self._listening, select.EPOLLIN)
        port = int(self._listening.getsockname()[1])
        self._key = key_proof.key_at(self._key, address, port)
        return port

    def recv_multipart(self, flags: int = zmq.DONTWAIT, copy: bool = False) -> list[Any]:
        """A message that waits. Raises zmq.Again when none does."""
        if not self._ready:
            self._ready.extend(fd for fd, _ in self._epoll.poll(0))
        while self._ready:
            fd = self._ready.popleft()
            if self._listening is not None and fd == self._listening.fileno():
                self._accept()
                continue
            connection = self._connections.get(fd)
            if connection is None:
                continue
            try:
                self._flush(connection)
                message = connection.receive()
            except OSError as error:
                self._drop(connection, error)
                continue
            if connection.is_proven:
                self._deadlines.pop(fd, None)
            if message is not None:
                return [connection.peer, *message]
        raise zmq.Again

    def send_multipart(
        self, message: Sequence[Any], flags: int = zmq.DONTWAIT, copy: bool = False, track: bool = False
    ) -> Outgoing:
        """Never waits: to a peer that is gone the message is lost. Raises zmq.Again when the peer does not read."""
        connection = self._peers.get(bytes(message[0]))
        if connection is None:
            raise zmq.Again
        if len(connection.outgoing) >= self._queued:
            raise zmq.Again
        try:
            sent = connection.send(message[1:])
        except OSError as error:
            self._drop(connection, error)
            raise zmq.Again from error
        if not sent.done:
            self._epoll.modify(connection.tcp, select.EPOLLIN | select.EPOLLOUT)
        return sent

    def tick(self) -> None:
        """End connections that took too long to prove that they hold the key. To be called several times a second."""
        now = time.monotonic()
        while self._deadlines:
            fd, deadline_s = next(iter(self._deadlines.items()))
            if deadline_s >= now:
                break
            connection = self._connections[fd]
            try:  # this thread may have been busy since the proof came
                if not connection.take_proof():
                    raise NotProven("it sent no proof in time")
            except OSError as error:
                self._drop(connection, error)
                continue
            del self._deadlines[fd]
            if not connection.is_proven:
                self._deadlines[fd] = now + self._handshake_s
        if self.refused > self._reported and now >= self._next_report_s:
            text = "%d connections to this server were refused since the last report: %s"
            log.warning(text, self.refused - self._reported, self._why)
            self._reported, self._next_report_s = self.refused, now + _REPORT_S

    def close(self, linger: int = 0) -> None:
        if self.closed:
            return
        self.closed = True
        for connection in self._connections.values():
            connection.close()
        if self._listening is not None:
            self._listening.close()
        self._epoll.close()

    def _accept(self) -> None:
        assert self._listening is not None
        for _ in range(_ACCEPTS_A_TURN):
            try:
                tcp, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_FD and self._deadlines:
                    self._drop(self._connections[next(iter(self._deadlines))], NotProven("there are too many"))
                return
            if len(self._deadlines) >= MOST_UNPROVEN:
                self._drop(self._connections[next(iter(self._deadlines))], NotProven("there are too many"))
            _configure(tcp, heartbeat_s=5, lost_after_s=30)
            try:
                connection = Connection(tcp, self._key, True, self._most_bytes, self._tls)
            except OSError:  # it is gone already
                tcp.close()
                continue
            self._n_accepted += 1
            connection.peer, fd = self._n_accepted.to_bytes(8, "little"), connection.tcp.fileno()
            self._connections[fd] = self._peers[connection.peer] = connection
            self._deadlines[fd] = time.monotonic() + self._handshake_s
            self._epoll.register(fd, select.EPOLLIN)

    def _flush(self, connection: Connection) -> None:
        if connection.outgoing:
            connection.flush()
            if not connection.outgoing:
                self._epoll.modify(connection.tcp, select.EPOLLIN)

    def _drop(self, connection: Connection, why: Exception) -> None:
        fd = connection.tcp.fileno()
        del self._connections[fd], self._peers[connection.peer]
        self._deadlines.pop(fd, None)
        if not connection.is_proven:
            self.refused += 1
            self._why = str(why)
        elif type(why) is ConnectionError:
            log.warning("a peer that holds the job's key sent %s: its connection was closed", why)
        connection.close()  # which takes it out of the epoll set


class TcpDealer:
    """A client's socket to one server: connects in the background, and again when the connection breaks.

    What was sent on a connection that broke may be lost, as with any socket: requests are repeated.
    """

    def __init__(
        self,
        address: str,
        port: int,
        key: bytes,
        most_bytes: int,
        queued: int,
        handshake_s: float,
        with_tls: bool = False,
    ) -> None:
        self._place, self._key, self._most_bytes = (address, port), key_proof.key_at(key, address, port), most_bytes
        self._tls = _tls_context(key, False) if with_tls else None
        self._queued, self._handshake_s = queued, handshake_s
        self._epoll = select.epoll()
        self._connection: Connection | None = None
        self._tcp: socket.socket | None = None
        self._watched = 0  # what the epoll set waits for, once the connection is there
        self._waiting: deque[list[Any]] = deque()  # messages, until the connection is there
        self._deadline_s, self._retry_s, self._pause_s = 0.0, 0.0, _RECONNECT_S
        self.why_not = ""  # what kept the newest connection from being made
        self.closed = False
        self._begin()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def send_multipart(self, message: Sequence[Any], flags: int = zmq.DONTWAIT, copy: bool = False) -> None:
        """Never waits. Raises zmq.Again when too many messages wait already."""
        connection = self._connection
        if connection is None or not connection.is_proven:
            if len(self._waiting) >= self._queued:
                raise zmq.Again
            self._waiting.append(list(message))
            self.tick()
            return
        if len(connection.outgoing) >= self._queued:
            raise zmq.Again
        try:
            connection.send(message)
        except OSError as error:
            self._lost(error)
            return
        self._watch()

    def recv_multipart(self, flags: int = zmq.DONTWAIT, copy: bool = False) -> list[Any]:
        """A message that waits. Raises zmq.Again when none does."""
        try:
            if self._connection is None:
                self._connected()
            if (connection := self._connection) is not None:
                was_proven = connection.is_proven
                connection.flush()
                message = connection.receive()
                if connection.is_proven and not was_proven:
                    self.why_not, self._pause_s = "", _RECONNECT_S
                    while self._waiting:
                        connection.send(self._waiting.popleft())
                self._watch()
                if message is not None:
                    return message
        except OSError as error:
            self._lost(error)
        raise zmq.Again

    def tick(self) -> None:
        """Connect again, or give up a connection that is not made in time. To be called several times a second."""
        now = time.monotonic()
        if self._tcp is None:
            if now >= self._retry_s:
                self._begin()
        elif now > self._deadline_s and (self._connection is None or not self._connection.is_proven):
            self._lost(NotProven("it sent no proof in time"))

    def close(self, linger: int = 0) -> None:
        if not self.closed:
            self.closed = True
            self._end()
            self._epoll.close()

    def _begin(self) -> None:
        self._tcp = tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._deadline_s = time.monotonic() + self._handshake_s
        _configure(tcp, heartbeat_s=1, lost_after_s=10)
        self._epoll.register(tcp, select.EPOLLOUT)
        failed = tcp.connect_ex(self._place)
        if failed not in (0, errno.EINPROGRESS):
            self._lost(OSError(failed, os.strerror(failed)))

    def _connected(self) -> None:
        """Begin the proof once the connection is there. Raises OSError when it cannot be made."""
        if self._tcp is None or not self._epoll.poll(0):
            return
        if failed := self._tcp.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(failed, os.strerror(failed))
        tcp, self._tcp = self._tcp, None
        self._epoll.unregister(tcp)  # TLS puts another socket in its place
        try:
            self._connection = Connection(tcp, self._key, False, self._most_bytes, self._tls)
        except OSError:
            tcp.close()
            raise
        self._tcp = self._connection.tcp
        self._watched = select.EPOLLIN
        self._epoll.register(self._tcp, self._watched)

    def _watch(self) -> None:
        assert self._connection is not None
        wanted = select.EPOLLIN | (select.EPOLLOUT if self._connection.outgoing else 0)
        if wanted != self._watched:
            self._epoll.modify(self._connection.tcp, wanted)
            self._watched = wanted

    def _lost(self, why: Exception) -> None:
        if self._connection is None or not self._connection.is_proven:
            self.why_not = str(why)
        elif type(why) is ConnectionError:
            log.warning("a server sent %s: its connection was closed", why)
        self._end()
        self._retry_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RECONNECT_MOST_S)

    def _end(self) -> None:
        if self._tcp is not None:
            self._epoll.unregister(self._tcp)  # `close` does not while a child has it open that was forked meanwhile
            self._tcp.close()
        if self._connection is not None:
            self._connection.close()
        self._connection = self._tcp = None


def _tls_context(key: bytes, is_server: bool) -> SSLContext:
    from gba_hvd.ps import tls  # (OpenSSL and certificates: for this wire only)

    return tls.context(key, is_server)


def _configure(tcp: socket.socket, heartbeat_s: int, lost_after_s: int) -> None:
    """Nothing waits to be sent together; a peer that is silently gone is noticed."""
    tcp.setblocking(False)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, heartbeat_s)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, heartbeat_s)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, lost_after_s // heartbeat_s - 1))
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * lost_after_s)
