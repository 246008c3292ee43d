"""One message in, one answer out: the result of the request, or why it was refused. No message ends a server.

Used by both threads of a server, each for a port of its own. What a request means is not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from gba_hvd.errors import GbaError
from gba_hvd.ps import transport, wire
from gba_hvd.ps.messages import Answer, ProtocolError, RefusalKind, Refused, Request

log = logging.getLogger("gba_hvd.ps")
_DEFECTS_LOGGED = 50
_TOO_MUCH_UNREAD = Refused("too many large answers wait to be read by others", retry=True)


@dataclass(frozen=True)
class Requester:
    """Who asked, and under which number: where the answer goes."""

    job: str
    socket: Any
    peer: bytes
    number: int

    def reply(self, answer: Answer) -> None:
        transport.send(self.socket, self.peer, wire.encode(self.job, self.number, answer))


# Does what a request with these frames wants. Returns the answer and its frames; None: it comes later
# (`Requester.reply`).
Handler = Callable[[Requester, Request, list[Any]], tuple[Answer | None, Sequence[Any]]]


class RequestPort:
    """A listener whose every message is answered. Belongs to the thread that serves it."""

    def __init__(self, listener: transport.Listener, job: str, carry_out: Handler) -> None:
        self.number = listener.port
        self.sockets = listener.local, listener.tcp
        self._listener, self._job, self._carry_out = listener, job, carry_out

    def tick(self) -> None:
        self._listener.tick()

    def serve(self, socket: Any, at_most: int = 1) -> None:
        """Answer so many of the messages that wait at one of the sockets."""
        for _ in range(at_most):
            try:
                peer, frames = transport.receive(socket, wait=False)
            except zmq.Again:
                return
            self._answer(socket, peer, frames)

    def _answer(self, socket: Any, peer: bytes, frames: list[Any]) -> None:
        number = 0
        answer: Answer | None
        out: Sequence[Any]
        try:
            if not frames:
                raise ProtocolError("an empty message")
            envelope = wire.open_envelope(frames[0], self._job)
            number = envelope.number
            request = wire.decode_request(envelope)
            answer, out = self._carry_out(Requester(self._job, socket, peer, number), request, frames[1:])
        except Exception as error:
            answer, out = refused_by(error), ()
            number = number or getattr(error, "number", 0)
        if answer is None:
            return
        if not self._listener.answer(socket, peer, wire.encode(self._job, number, answer), out):
            Requester(self._job, socket, peer, number).reply(_TOO_MUCH_UNREAD)


_logged: list[str] = []  # a peer that goes wrong again and again must not fill the disk


def refused_by(error: Exception) -> Refused:
    """The answer to a request that raised. What is no fault of the request goes to the log as a defect of ours."""
    if not isinstance(error, GbaError | ValueError) and len(_logged) < _DEFECTS_LOGGED:
        _logged.append(error.__class__.__name__)
        log.error("a request failed", exc_info=error)
    kind: RefusalKind = error.kind if isinstance(error, ProtocolError) else ""
    return Refused(str(error)[:2000] or type(error).__name__, kind=kind)
