"""A worker's side of the conversation with the servers: requests, answers, repeats, heartbeats.

One thread per worker owns the sockets. Requests may come from any thread; every one is answered, refused, or times out
with a message. A request without an answer is sent again: servers recognise what they have had. When a server of this
host is gone, the thread starts it again.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from gba_hvd.errors import GbaError
from gba_hvd.ps import process, protocol, transport
from gba_hvd.ps.protocol import Answer, Beat, Bye, Endpoint, Ok, Position, Refused, Request

_RESEND_S = 1.0
_BEAT_S = 0.3
_POLL_S = 0.1


class ServerLost(GbaError):
    """A server did not answer in time."""


@dataclass(frozen=True)
class Reply:
    """An answer and its frames."""

    body: Answer
    frames: list[Any]


@dataclass
class _Pending:
    server: int
    pull: bool
    message: list[Any]
    what: str
    future: Future[Reply]
    deadline_s: float
    resend_s: float


class Client:
    """Requests to all servers of a job. Start with `start()`; `close()` may be called twice.

    servers: where they listen; here: the number of this host's memory; folder: this host's job folder.
    """

    def __init__(
        self, job: str, key: bytes, servers: Sequence[Endpoint], here: int, folder: Path, timeout_s: float
    ) -> None:
        self.servers = list(servers)
        self._job, self._key, self._here, self._folder, self._timeout_s = job, key, here, folder, timeout_s
        self._numbers = itertools.count(1)
        self._new: queue.SimpleQueue[tuple[int, _Pending]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="gba-hvd client", daemon=True)
        self._closing = False
        self.beat: Callable[[], Beat] | None = None
        self.on_position: Callable[[Position], None] = lambda position: None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(10)
        os.close(self._folder_fd)
        os.close(self._wake)

    # --- from any thread ---------------------------------------------------------------------------------------------

    def send(
        self,
        server: int,
        body: Request,
        frames: Sequence[Any] = (),
        *,
        pull: bool = False,
        timeout_s: float | None = None,
    ) -> Future[Reply]:
        """Send a request; the future holds its reply, or ServerLost. Frames must not change until then."""
        number = next(self._numbers)
        message = [protocol.encode(self._job, number, body), *frames]
        deadline = time.monotonic() + (timeout_s or self._timeout_s)
        what = type(body).__name__
        pending = _Pending(server, pull, message, what, Future(), deadline, 0.0)
        if self._closing:
            pending.future.set_exception(ServerLost("the client is closed"))
            return pending.future
        self._new.put((number, pending))
        os.eventfd_write(self._wake, 1)
        return pending.future

    def call(
        self,
        server: int,
        body: Request,
        frames: Sequence[Any] = (),
        *,
        pull: bool = False,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send a request and wait for its reply. Raises ServerLost after the time-out, GbaError when it is refused."""
        reply = self.send(server, body, frames, pull=pull, timeout_s=timeout_s).result()
        if isinstance(reply.body, Refused):
            raise GbaError(f"server {server} refused {type(body).__name__}: {reply.body.why}")
        return reply

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        sockets = {
            (s, pull): self._connect(context, s, pull) for s in range(len(self.servers)) for pull in (False, True)
        }
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for socket in sockets.values():
            poller.register(socket, zmq.POLLIN)
        pending: dict[int, _Pending] = {}
        next_beat = next_look = 0.0
        try:
            while not self._closing:
                ready = dict(poller.poll(int(1000 * _POLL_S)))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                while not self._new.empty():
                    number, request = self._new.get()
                    pending[number] = request
                    self._post(sockets, request)
                for socket in sockets.values():
                    while socket in ready:
                        try:
                            frames = socket.recv_multipart(flags=zmq.DONTWAIT, copy=False)
                        except zmq.Again:
                            break
                        self._take(pending, [frame.buffer for frame in frames])
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + _BEAT_S
                    self._send_beat(sockets)
                if now >= next_look:
                    next_look = now + _POLL_S
                    self._look_after(sockets, pending, now)
            self._say_goodbye(sockets)
        finally:
            for request in pending.values():
                request.future.set_exception(
                    ServerLost(f"{request.what}: the client was closed before the answer came")
                )
            for socket in sockets.values():
                socket.close(linger=200)
            context.term()

    def _connect(self, context: zmq.Context[Any], server: int, pull: bool) -> Any:
        endpoint = self.servers[server]
        if endpoint.host == self._here:
            name = f"ps-{endpoint.index}.{'pull' if pull else 'control'}"
            return transport.connect(context, self._key, folder_fd=self._folder_fd, name=name)
        port = endpoint.pull if pull else endpoint.control
        return transport.connect(context, self._key, address=endpoint.address, port=port)

    def _post(self, sockets: dict[tuple[int, bool], Any], request: _Pending) -> None:
        request.resend_s = time.monotonic() + _RESEND_S
        try:
            sockets[request.server, request.pull].send_multipart(request.message, flags=zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return  # the queue is full: sent again later

    def _take(self, pending: dict[int, _Pending], frames: list[Any]) -> None:
        envelope = protocol.open_envelope(frames[0], self._job)
        body = protocol.decode_answer(envelope)
        if isinstance(body, Ok) and envelope.number == 0 and body.position is not None:
            self.on_position(body.position)
            return
        request = pending.get(envelope.number)
        if request is None:
            return  # the second answer to a request that was sent twice
        if isinstance(body, Refused) and body.again:
            return  # `_look_after` sends it again
        del pending[envelope.number]
        request.future.set_result(Reply(body, frames[1:]))

    def _look_after(self, sockets: dict[tuple[int, bool], Any], pending: dict[int, _Pending], now: float) -> None:
        for number, request in list(pending.items()):
            if now > request.deadline_s:
                del pending[number]
                endpoint = self.servers[request.server]
                words = process.last_words(self._folder, endpoint.index) if endpoint.host == self._here else "not here"
                request.future.set_exception(
                    ServerLost(f"server {request.server} did not answer {request.what}; its log: {words}")
                )
            elif now > request.resend_s:
                self._post(sockets, request)
        for endpoint in self.servers:
            if endpoint.host == self._here:
                process.ensure_running(self._folder, endpoint.index)

    def _send_beat(self, sockets: dict[tuple[int, bool], Any]) -> None:
        if self.beat is None:
            return
        message = protocol.encode(self._job, 0, self.beat())
        try:
            sockets[0, False].send(message, flags=zmq.DONTWAIT)
        except zmq.Again:
            return

    def _say_goodbye(self, sockets: dict[tuple[int, bool], Any]) -> None:
        if self.beat is not None:
            message = protocol.encode(self._job, 0, Bye(self.beat().worker))
            try:
                sockets[0, False].send(message, flags=zmq.DONTWAIT)
            except zmq.Again:
                return
