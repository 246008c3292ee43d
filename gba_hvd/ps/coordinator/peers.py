"""The coordinator's way to the other servers: a socket to each, for the mode that is on.

Nothing here waits: the requester sends again what does not go out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import zmq

from gba_hvd.ps import transport, wire
from gba_hvd.ps.messages import Answer, Endpoint, Enter, ProtocolError, Refused, Request


class Peers:
    """By index into `Enter.servers`. Empty where this server is not the coordinator. Belongs to the main thread.

    poller: of the main thread; knows the sockets that are open
    """

    def __init__(self, context: zmq.Context[Any], key: bytes, job: str, poller: zmq.Poller) -> None:
        self._context, self._key, self._job, self._poller = context, key, job, poller
        self._servers: list[Endpoint] = []
        self._sockets: dict[int, Any] = {}

    def connect(self, enter: Enter) -> None:
        """Leave the servers of the mode before, and reach those of this one."""
        for socket in self._sockets.values():
            self._poller.unregister(transport.pollable(socket))
            socket.close()
        self._servers, self._sockets = enter.servers, {}
        if enter.me != 0:
            return
        for index, server in enumerate(enter.servers[1:], start=1):
            socket = transport.connect(
                self._context, self._key, address=server.address, port=server.control, wire=server.wire
            )
            self._sockets[index] = socket
            self._poller.register(transport.pollable(socket), zmq.POLLIN)

    def __len__(self) -> int:
        return len(self._sockets)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sockets)

    def of_host(self, host: int) -> int | None:
        """The first server there; None if it is this one, or there is none."""
        there = [index for index, endpoint in enumerate(self._servers) if endpoint.host == host]
        return there[0] if there and there[0] in self._sockets else None

    def send(self, to: Iterable[int], number: int, request: Request) -> None:
        message = transport.in_pieces([wire.encode(self._job, number, request)], transport.TCP_PIECE_BYTES)
        for index in to:
            with contextlib.suppress(zmq.Again):
                self._sockets[index].send_multipart(message, flags=zmq.DONTWAIT)

    def answers(self, ready: Collection[Any]) -> Iterator[tuple[int, int | None, Answer]]:
        """One from each of these sockets: the server, the number of the request (None: not readable), the answer."""
        for index, socket in list(self._sockets.items()):
            if not socket.closed and transport.pollable(socket) in ready:
                with contextlib.suppress(zmq.Again):
                    frames = transport.receive_answer(socket)
                    yield index, *self._opened(frames)

    def tick(self) -> None:
        for socket in self._sockets.values():
            transport.tick(socket)

    def _opened(self, frames: list[Any]) -> tuple[int | None, Answer]:
        number = None
        try:
            envelope = wire.open_envelope(frames[0], self._job)
            number = envelope.number
            return number, wire.decode_answer(envelope)
        except ProtocolError as error:
            return number, Refused(str(error))
