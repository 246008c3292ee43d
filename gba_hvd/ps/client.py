"""A worker's side of the conversation with the servers: requests, answers, repeats, heartbeats.

One thread per worker owns the sockets. Requests may come from any thread; every one is answered, refused, or fails with
a message, also when the thread ends for any reason. A request without an answer is sent again, less and less often:
servers recognise what they have had. When a server of this host is gone, the thread starts it again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import zmq

from gba_hvd.comm.traffic import Traffic
from gba_hvd.errors import GbaError
from gba_hvd.ps import launch, transport, wire
from gba_hvd.ps.messages import Answer, Endpoint, HeartbeatMsg, JobPosition, Leave, Ok, ProtocolError, Refused, Request

log = logging.getLogger("gba_hvd")
_RESEND_S = 1.0
_RESEND_MOST_S = 8.0
_TRY_AGAIN_S = 0.2  # after a server asked to try again
_BEAT_S = 0.3
_POLL_S = 0.1
# What the frames behind a header are, by `traffic`'s kinds; the last kind counts for all that follow.
_KINDS = {
    ("sent", "Push"): ("dense", "rows"),
    ("received", "PullDense"): ("dense",),
    ("sent", "PullRows"): ("header",),
    ("received", "PullRows"): ("rows",),
    ("received", "Export"): ("dense",),
    ("sent", "Blend"): ("dense",),
    ("received", "Blend"): ("dense",),
    ("sent", "Publish"): ("dense",),
    ("sent", "SubmitReplica"): ("dense",),
}


class ServerLost(GbaError):
    """A server did not answer in time."""


class ServerRefused(GbaError):
    """A server cannot do what the mode needs, as without room in memory: it would refuse again."""


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
    pieces: list[Any]  # the same, in pieces that the server takes
    what: str
    future: Future[Reply]
    deadline_s: float
    resend_s: float = 0.0
    pause_s: float = _RESEND_S
    why_not: str = ""  # the server's reason for putting this request off

    def answer(self, reply: Reply) -> None:
        if not self.future.done():
            self.future.set_result(reply)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Client:
    """Requests to all servers of a job. Start with `start()`, or enter; `close()` may be called twice.

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
        self._over = ""  # why no request can be answered any more
        self._gone: dict[int, str] = {}  # servers that will never answer, and why
        self._door = threading.Lock()  # between requests that come and the end of the thread
        self.beat: Callable[[], HeartbeatMsg] | None = None
        self.finished = True  # what the goodbye says: training is over, or this worker alone leaves
        self.on_position: Callable[[JobPosition], None] = lambda position: None
        self.traffic: Traffic | None = None
        self.folder_lost = ""  # why no server of this host can start any more

    def start(self) -> None:
        self._thread.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with self._door:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join(10)
        self._end({}, "the client is closed")
        if not self._thread.is_alive():
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
        on_reply: Callable[[Future[Reply]], None] | None = None,
    ) -> Future[Reply]:
        """Send a request; the future holds its reply, or ServerLost. Frames must not change until then.

        on_reply: called with the future when it is done, on the client's thread; also where an exception such as Ctrl-C
        ends this call after the request was queued.
        """
        number = next(self._numbers)
        message = [wire.encode(self._job, number, body), *frames]
        deadline = time.monotonic() + (timeout_s or self._timeout_s)
        what = type(body).__name__
        is_local = self.servers[server].host == self._here
        pieces = transport.in_pieces(message, transport.PIECE_BYTES if is_local else transport.TCP_PIECE_BYTES)
        pending = _Pending(server, pull, message, pieces, what, Future(), deadline)
        if on_reply is not None:
            pending.future.add_done_callback(on_reply)
        with self._door:
            over = self._over or ("the client is closed" if self._closing else "")
            if not over:
                self._new.put((number, pending))
                os.eventfd_write(self._wake, 1)
        if over:
            pending.fail(ServerLost(f"{what}: {over}"))
        return pending.future

    def abandon_host(self, host: int, why: str) -> None:
        """No server of this host will answer any more: requests to them fail from now on, and need not wait."""
        self._gone = self._gone | {s: why for s, endpoint in enumerate(self.servers) if endpoint.host == host}

    def call(self, server: int, body: Request, frames: Sequence[Any] = ()) -> Reply:
        """Send a request and wait for its reply. Raises ServerLost after the time-out, GbaError when it is refused."""
        reply = self.send(server, body, frames).result()
        if isinstance(reply.body, Refused):
            raise GbaError(f"server {server} refused {type(body).__name__}: {reply.body.why}")
        return reply

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        sockets: dict[tuple[int, bool], Any] = {}
        pending: dict[int, _Pending] = {}
        next_beat = next_look = 0.0
        over = "the client was closed before the answer came"
        try:
            poller = zmq.Poller()
            poller.register(self._wake, zmq.POLLIN)
            for key in [(s, pull) for s in range(len(self.servers)) for pull in (False, True)]:
                sockets[key] = self._connect(context, *key)
                poller.register(transport.pollable(sockets[key]), zmq.POLLIN)
            while not self._closing:
                ready = dict(poller.poll(int(1000 * _POLL_S)))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                while not self._new.empty():
                    number, request = self._new.get()
                    pending[number] = request
                    self._post(sockets, request)
                for (server, _), socket in sockets.items():
                    while transport.pollable(socket) in ready:
                        try:
                            frames = transport.receive_answer(socket)
                        except zmq.Again:
                            break
                        self._take(pending, server, frames)
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + _BEAT_S
                    self._send_beat(sockets)
                if now >= next_look:
                    next_look = now + _POLL_S
                    self._look_after(sockets, pending, now)
                    for socket in sockets.values():
                        transport.tick(socket)
            if self.beat is not None:
                self._send_unanswered(sockets, Leave(self.beat().worker, self.finished))
        except BaseException as error:
            over = f"the client's thread died of {type(error).__name__}: {error}"
            log.exception("the thread that talks to the servers died")
            raise
        finally:
            self._end(pending, over)
            for socket in sockets.values():
                socket.close(linger=200)
            context.term()

    def _connect(self, context: zmq.Context[Any], server: int, pull: bool) -> Any:
        endpoint = self.servers[server]
        if endpoint.host == self._here:
            name = f"ps-{endpoint.index}.{'pull' if pull else 'control'}"
            return transport.connect(context, self._key, folder_fd=self._folder_fd, name=name)
        port = endpoint.pull if pull else endpoint.control
        return transport.connect(context, self._key, address=endpoint.address, port=port, wire=endpoint.wire)

    def _end(self, pending: dict[int, _Pending], why: str) -> None:
        """From here on every request fails, those that came meanwhile too."""
        with self._door:
            self._over = self._over or why
            while not self._new.empty():
                number, request = self._new.get()
                pending[number] = request
        for request in pending.values():
            request.fail(ServerLost(f"{request.what}: {why}"))

    def _post(self, sockets: dict[tuple[int, bool], Any], request: _Pending) -> None:
        request.resend_s = time.monotonic() + request.pause_s
        request.pause_s = min(2 * request.pause_s, _RESEND_MOST_S)
        try:
            sockets[request.server, request.pull].send_multipart(request.pieces, flags=zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return  # the queue is full: sent again later
        self._count("sent", request.server, request.what, request.message)

    def _take(self, pending: dict[int, _Pending], server: int, frames: list[Any]) -> None:
        try:
            envelope = wire.open_envelope(frames[0], self._job)
            body = wire.decode_answer(envelope)
        except ProtocolError as error:  # it will answer nothing else
            for number, request in list(pending.items()):
                if request.server == server:
                    del pending[number]
                    request.fail(ServerLost(f"server {server} answered {request.what} with {error}"))
            return
        if isinstance(body, Ok) and envelope.number == 0 and body.position is not None:
            self.on_position(body.position)
            return
        asked = pending.get(envelope.number)
        if asked is None:
            return  # the second answer to a request that was sent twice
        if isinstance(body, Refused) and body.retry:
            asked.why_not, asked.pause_s = body.why, _RESEND_S
            asked.resend_s = time.monotonic() + _TRY_AGAIN_S  # `_look_after` sends it
            return
        del pending[envelope.number]
        self._count("received", server, asked.what, frames)
        asked.answer(Reply(body, frames[1:]))

    def _count(self, direction: str, server: int, request: str, frames: Sequence[Any]) -> None:
        if self.traffic is None or self.servers[server].host == self._here:  # through memory
            return
        kinds = _KINDS.get((direction, request), ())
        for i, frame in enumerate(frames):
            kind = kinds[min(i, len(kinds)) - 1] if i and kinds else "header"
            self.traffic.count(direction, kind, memoryview(frame).nbytes)

    def _look_after(self, sockets: dict[tuple[int, bool], Any], pending: dict[int, _Pending], now: float) -> None:
        gone = dict(self._gone)
        for server, endpoint in enumerate(self.servers):
            if endpoint.host == self._here:
                try:
                    launch.ensure_running(self._folder, endpoint.index)
                    failure = launch.why_not_started(self._folder, endpoint.index)
                except GbaError as error:
                    failure = str(error)
                if failure:
                    gone[server] = f"a new one cannot start: {failure}"
        for number, request in list(pending.items()):
            if why := gone.get(request.server):
                del pending[number]
                request.fail(ServerLost(f"server {request.server} is gone, and {why}"))
            elif now > request.deadline_s:
                del pending[number]
                request.fail(ServerLost(self._fail_pending(request, sockets[request.server, request.pull])))
            elif now > request.resend_s:
                self._post(sockets, request)

    def _fail_pending(self, request: _Pending, socket: Any) -> str:
        endpoint = self.servers[request.server]
        text = f"server {request.server} did not answer {request.what}"
        if request.why_not:
            return f"server {request.server} did not take {request.what}: {request.why_not}"
        if endpoint.host == self._here:
            return f"{text}; its log: {launch.last_words(self._folder, endpoint.index) or 'nothing'}"
        where = f"{endpoint.address}:{endpoint.pull if request.pull else endpoint.control}"
        why_not = transport.why_not_connected(socket)
        return f"{text}; it should listen at {where}{f' ({why_not})' if why_not else ''}"

    def _send_beat(self, sockets: dict[tuple[int, bool], Any]) -> None:
        if not self.folder_lost:
            self.folder_lost = launch.folder_lost(self._folder, self._folder_fd)
        if self.beat is not None:
            self._send_unanswered(sockets, self.beat())

    def _send_unanswered(self, sockets: dict[tuple[int, bool], Any], body: Request) -> None:
        """To the first server, without waiting."""
        with contextlib.suppress(zmq.Again):
            sockets[0, False].send_multipart([wire.encode(self._job, 0, body)], flags=zmq.DONTWAIT)
