"""The proof of the job's key on a connection that is not encrypted: who gets in, and what others learn."""

from __future__ import annotations

import pytest

from gba_hvd.ps import key_proof
from gba_hvd.ps.key_proof import NotProven

KEY, OTHER = b"k" * 32, b"o" * 32
NONCE, NEXT = b"n" * 32, b"m" * 32
HELLO = key_proof.hello(NONCE)
REPLY = key_proof.reply(KEY, HELLO, NEXT)
ANSWER = key_proof.answer(KEY, HELLO, REPLY)


def test_two_sides_with_the_same_key_accept_each_other() -> None:
    key_proof.accept(KEY, HELLO, REPLY, ANSWER)
    lengths = key_proof.HELLO_BYTES, key_proof.REPLY_BYTES, key_proof.PROOF_BYTES
    assert tuple(map(len, (HELLO, REPLY, ANSWER))) == lengths
    assert not any(KEY in message for message in (HELLO, REPLY, ANSWER))


def test_a_server_without_the_key_gets_no_proof_from_a_client() -> None:
    with pytest.raises(NotProven, match="the server does not hold the job's key"):
        key_proof.answer(KEY, HELLO, key_proof.reply(OTHER, HELLO, NEXT))


def test_a_client_without_the_key_is_not_accepted() -> None:
    proof = key_proof.proof(OTHER, "client", NONCE, NEXT)
    for answer in (proof, bytes(key_proof.PROOF_BYTES), b"", ANSWER[:-1]):
        with pytest.raises(NotProven, match="the client does not hold the job's key"):
            key_proof.accept(KEY, HELLO, REPLY, answer)


def test_a_proof_is_of_its_role() -> None:
    """Sent back to the side that gave it, it proves nothing."""
    with pytest.raises(NotProven, match="the client does not"):
        key_proof.accept(KEY, HELLO, REPLY, REPLY[key_proof.HELLO_BYTES :])
    with pytest.raises(NotProven, match="the server does not"):
        key_proof.answer(KEY, HELLO, REPLY[: key_proof.HELLO_BYTES] + ANSWER)


def test_a_proof_is_of_its_server() -> None:
    """A process that listens where a server of the job died can have another one's proof, and not use it."""
    here, there = (key_proof.key_at(KEY, "10.0.0.1", port) for port in (4000, 4001))
    assert here == key_proof.key_at(KEY, "10.0.0.1", 4000) != key_proof.key_at(KEY, "10.0.0.2", 4000)
    with pytest.raises(NotProven, match=r"the server does not .* or a proxy is between"):
        key_proof.answer(here, HELLO, key_proof.reply(there, HELLO, NEXT))


def test_a_proof_is_of_its_connection() -> None:
    """Who has listened to another one can use nothing of it: each side draws a nonce for each connection."""
    with pytest.raises(NotProven):
        key_proof.accept(KEY, HELLO, key_proof.reply(KEY, HELLO, b"x" * 32), ANSWER)
    with pytest.raises(NotProven):
        key_proof.answer(KEY, key_proof.hello(b"x" * 32), REPLY)


@pytest.mark.parametrize(
    ("greeted", "named"),
    [
        (b"\xff" + bytes(8) + b"\x7f" + bytes(38), "speaks ZeroMQ, as wire='curve' does"),
        (b"GET / HTTP/1.1\r\n" + bytes(32), "begins with b'G'"),
        (b"gba-hvd plain 9\n" + bytes(32), "begins with b'gba-hvd plain 9"),
    ],
)
def test_another_protocol_is_named(greeted: bytes, named: str) -> None:
    with pytest.raises(NotProven, match=named):
        key_proof.reply(KEY, greeted, NEXT)
    with pytest.raises(NotProven, match=named):
        key_proof.answer(KEY, HELLO, greeted + bytes(32))
