"""What a worker makes of a server's answer: the reply, or the error that decides how training continues."""

from __future__ import annotations

from concurrent.futures import Future

from gba_hvd.comm.collectives import worker_lost
from gba_hvd.errors import GbaError, StateMismatch
from gba_hvd.ps.client import Client, Reply, ServerLost, ServerRefused
from gba_hvd.ps.messages import RefusalKind, Refused, Request


class Disagreement(StateMismatch):
    """This worker and others disagree about what they train."""


def refusal(text: str, kind: RefusalKind) -> GbaError:
    """The error of a refused request. A kind other than "" concerns this request alone, as in a mode that is over."""
    return GbaError(text) if kind else ServerRefused(text)


def wait_reply(future: Future[Reply]) -> Reply:
    """Wait for it. Raises StateMismatch for what cannot be mended, else the error that forms the world again."""
    try:
        reply = future.result()
    except ServerLost as error:
        raise worker_lost(str(error)) from error
    if isinstance(reply.body, Refused):
        if reply.body.kind == "mismatch":  # forming the world again would not mend it
            raise Disagreement(reply.body.why)
        if reply.body.kind == "failed":  # nor this
            raise StateMismatch(reply.body.why)
        refused = refusal(f"a server refused: {reply.body.why}", reply.body.kind)
        raise worker_lost(str(refused)) from refused
    return reply


def request(client: Client, server: int, body: Request) -> Reply:
    """Send a request without frames and wait for the answer. Raises as `wait_reply`."""
    return wait_reply(client.send(server, body))
