"""Mutual proof of the job's key, over a connection that need not be encrypted: what each side sends, what it accepts.

    client -> server    GREETING, the client's nonce
    server -> client    GREETING, the server's nonce, HMAC-SHA256(key, "server", both nonces)
    client -> server    HMAC-SHA256(key, "client", both nonces)

Each side draws its nonce for this connection alone, so a proof that was captured on another one is of no use; and the
names of the roles differ, so a proof that is sent back to the side that gave it is of no use either. `key` is the job's
for one listening socket (`key_at`), so a process that took a dead server's port cannot pass another server's proofs on.
It is never sent. Pure functions; the connections are `tcp_sockets`'s.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

GREETING = b"gba-hvd plain 1\n"
NONCE_BYTES = PROOF_BYTES = 32
HELLO_BYTES = len(GREETING) + NONCE_BYTES
REPLY_BYTES = HELLO_BYTES + PROOF_BYTES
_OTHERS = {b"\xff": "ZeroMQ, as wire='curve' does", b"\x16": "TLS, as wire='tls' does"}  # by their first byte


class NotProven(ConnectionError):
    """The peer did not prove that it holds the job's key. The message says what came instead."""


def key_at(key: bytes, address: str, port: int) -> bytes:
    """The key of connections to the server that listens there, from the job's key."""
    return hmac.digest(key, f"{address}:{port}".encode(), hashlib.sha256)


def hello(client_nonce: bytes) -> bytes:
    return GREETING + client_nonce


def reply(key: bytes, hello: bytes, server_nonce: bytes) -> bytes:
    """The server's answer to a client's `hello`. Raises NotProven if it is none."""
    return GREETING + server_nonce + proof(key, "server", _nonce(hello), server_nonce)


def answer(key: bytes, hello: bytes, reply: bytes) -> bytes:
    """The client's proof, once the server has given its own. Raises NotProven if it has not."""
    server_nonce = _nonce(reply[:HELLO_BYTES])
    _check(reply[HELLO_BYTES:], proof(key, "server", _nonce(hello), server_nonce), "the server")
    return proof(key, "client", _nonce(hello), server_nonce)


def accept(key: bytes, hello: bytes, reply: bytes, answer: bytes) -> None:
    """Raises NotProven unless the client's answer to this server's reply is right."""
    _check(answer, proof(key, "client", _nonce(hello), _nonce(reply[:HELLO_BYTES])), "the client")


def proof(key: bytes, role: Literal["server", "client"], client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(key, b"%s%s\n%s%s" % (GREETING, role.encode(), client_nonce, server_nonce), hashlib.sha256)


def check_first_byte(byte: bytes) -> None:
    """Of a `hello` or `reply`. Raises NotProven: enough to tell this protocol from those of other wires."""
    if byte != GREETING[:1]:
        what = f"it begins with {byte!r}"
        if byte in _OTHERS:
            what = f"it speaks {_OTHERS[byte]}, and this side was started with wire='plain': give all the same"
        raise NotProven(f"the peer does not speak this protocol: {what}")


def _nonce(greeted: bytes) -> bytes:
    check_first_byte(greeted[:1])
    if greeted[: len(GREETING)] != GREETING:
        raise NotProven(f"the peer does not speak this protocol: it begins with {greeted[: len(GREETING)]!r}")
    return greeted[len(GREETING) :]


def _check(given: bytes, expected: bytes, who: str) -> None:
    if not hmac.compare_digest(given, expected):
        raise NotProven(
            f"{who} does not hold the job's key, or a proxy is between: a server must be reached at the address and "
            "port that it listens at"
        )
