"""Sockets without encryption: what gets in, what is lost, and what a peer without the key can make them hold."""

from __future__ import annotations

import os
import select
import socket as sockets
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from gba_hvd.ps import key_proof, plain_tcp
from gba_hvd.ps.plain_tcp import PlainDealer, PlainRouter

KEY, OTHER = b"k" * 32, b"o" * 32
LIMIT = 1 << 20
A_MESSAGE = (1).to_bytes(4, "little") + (3).to_bytes(8, "little") + b"abc"
Ends = tuple[PlainRouter, PlainDealer]


def a_router(port: int = 0, handshake_s: float = 60.0) -> tuple[PlainRouter, int]:
    router = PlainRouter(KEY, LIMIT, 64, handshake_s)
    return router, router.bind("127.0.0.1", port)


def a_dealer(port: int, key: bytes = KEY, queued: int = 64) -> PlainDealer:
    return PlainDealer("127.0.0.1", port, key, LIMIT, queued, 60.0)


@pytest.fixture
def ends() -> Iterator[Ends]:
    router, port = a_router()
    dealer = a_dealer(port)
    yield router, dealer
    dealer.close()
    dealer.close()
    router.close()
    router.close()


def key_at(port: int, key: bytes = KEY) -> bytes:
    return key_proof.key_at(key, "127.0.0.1", port)


def turn(each: PlainRouter | PlainDealer) -> list[Any] | None:
    each.tick()
    try:
        return each.recv_multipart()
    except zmq.Again:
        return None


def until(what: Callable[[], Any], *others: PlainRouter | PlainDealer) -> Any:
    """Poll all sockets until this gives something; what others receive is thrown away."""
    deadline = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < deadline, "nothing came"
        for other in others:
            turn(other)
        is_readable(*others, timeout_ms=1)
    return found


def is_readable(*each: PlainRouter | PlainDealer | sockets.socket, timeout_ms: int | None) -> bool:
    """Whether one of them is, in time. None: waits until one is."""
    poll = select.poll()  # not `select`, which takes no file descriptor beyond 1023
    for one in each:
        poll.register(one, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def at_router(router: PlainRouter, *others: PlainDealer) -> tuple[bytes, list[bytes]]:
    peer, *frames = until(lambda: turn(router), *others)
    return peer, [bytes(frame) for frame in frames]


@pytest.mark.parametrize(
    "sizes", [(0,), (5,), (0, 7, 0), (100_000, 3), (LIMIT,) * 9, tuple(range(1500))], ids=lambda sizes: str(len(sizes))
)
def test_messages_come_as_they_were_sent(ends: Ends, sizes: tuple[int, ...]) -> None:
    router, dealer = ends
    frames = [np.random.default_rng(i).bytes(size) for i, size in enumerate(sizes)]
    for _ in range(3):
        dealer.send_multipart(frames)
    for _ in range(3):
        peer, found = at_router(router, dealer)
        assert found == frames
    for _ in range(3):
        router.send_multipart([peer, *frames])
    for _ in range(3):
        assert [bytes(frame) for frame in until(lambda: turn(dealer), router)] == frames


def test_short_frames_that_wait_are_kept_as_they_were(ends: Ends) -> None:
    router, dealer = ends
    short, n = np.zeros(1000, np.uint8), 0
    dealer.send_multipart([b"hello"])
    at_router(router, dealer)
    while not dealer._connection or not dealer._connection.outgoing:  # more than the kernel takes
        dealer.send_multipart([bytes(LIMIT), short])
        n += 1
    short[:] = 1
    for _ in range(n):
        assert not any(at_router(router, dealer)[1][1])


def test_a_message_to_a_peer_that_does_not_read_waits_and_others_are_served(ends: Ends) -> None:
    router, dealer = ends
    dealer.send_multipart([b"hello"])
    deaf, _ = at_router(router, dealer)
    while not (connection := router._peers[deaf]).outgoing:
        router.send_multipart([deaf, bytes(LIMIT)])
    waiting = len(connection.outgoing)
    sent = [router.send_multipart([deaf, bytes(LIMIT)]) for _ in range(64 - waiting)][-1]
    with pytest.raises(zmq.Again):
        router.send_multipart([deaf, b"one more"])
    assert not sent.done
    other = a_dealer(router._listening.getsockname()[1])  # type: ignore[union-attr]
    other.send_multipart([b"hello"])
    peer, _ = at_router(router, other)
    router.send_multipart([peer, b"world"])
    assert until(lambda: turn(other), router) == [b"world"]
    other.close()
    until(lambda: turn(dealer), router)
    dealer.close()
    until(lambda: sent.done, router)


def test_a_message_to_a_peer_that_is_gone_is_lost(ends: Ends) -> None:
    router, dealer = ends
    dealer.send_multipart([b"hello"])
    peer, _ = at_router(router, dealer)
    dealer.close()
    until(lambda: not router._connections, router)
    with pytest.raises(zmq.Again):
        router.send_multipart([peer, b"late"])


# --- who gets in -----------------------------------------------------------------------------------------------------


def test_without_the_key_nothing_is_exchanged() -> None:
    router, port = a_router()
    stranger = a_dealer(port, OTHER)
    stranger.send_multipart([b"let me in"])
    until(lambda: router.refused, router, stranger)
    assert not router._connections or not any(one.is_proven for one in router._connections.values())
    assert "the server does not hold the job's key" in until(lambda: stranger.why_not, router, stranger)
    assert turn(router) is None and len(stranger._waiting) == 1, "it was not sent"
    stranger.close()
    router.close()


class Raw:
    """A client by hand, on a router that is served meanwhile."""

    def __init__(self, router: PlainRouter, port: int) -> None:
        self._router, self.socket = router, sockets.create_connection(("127.0.0.1", port))
        self.socket.settimeout(0.001)

    def read(self, n: int) -> bytes:
        """So many bytes, or fewer when the connection ends before."""
        found, deadline = b"", time.monotonic() + 60
        while len(found) < n and time.monotonic() < deadline:
            turn(self._router)
            try:
                more = self.socket.recv(n - len(found))
            except TimeoutError:
                continue
            except ConnectionResetError:
                more = b""
            if not more:
                break
            found += more
        return found

    def is_over(self) -> bool:
        return self.read(1) == b""


@pytest.mark.parametrize("wrong", ["another key", "the server's own proof", "a proof of another connection"])
def test_a_client_that_does_not_prove_is_cut_off_whatever_it_sends_behind(wrong: str) -> None:
    router, port = a_router()
    raw = Raw(router, port)
    hello = key_proof.hello(os.urandom(32))
    raw.socket.sendall(hello)
    reply = raw.read(key_proof.REPLY_BYTES)
    answer = {
        "another key": key_proof.proof(key_at(port, OTHER), "client", hello[16:], reply[16:48]),
        "the server's own proof": reply[48:],
        "a proof of another connection": key_proof.proof(key_at(port), "client", hello[16:], os.urandom(32)),
    }[wrong]
    raw.socket.sendall(answer + A_MESSAGE)
    assert raw.is_over()
    assert router.refused == 1 and not router._connections
    raw.socket.close()
    router.close()


def test_with_the_right_proof_the_same_is_taken() -> None:
    router, port = a_router()
    raw = Raw(router, port)
    hello = key_proof.hello(os.urandom(32))
    raw.socket.sendall(hello)
    raw.socket.sendall(key_proof.answer(key_at(port), hello, raw.read(key_proof.REPLY_BYTES)) + A_MESSAGE)
    assert at_router(router)[1] == [b"abc"]
    assert router.refused == 0
    raw.socket.close()
    router.close()


def test_a_proof_that_came_while_the_server_was_busy_is_in_time() -> None:
    router, port = a_router(handshake_s=0.0)  # each call of `tick` comes too late
    with sockets.create_connection(("127.0.0.1", port)) as client:
        (connection,) = until(lambda: list(router._connections.values()), router)
        hello, arrives = key_proof.hello(os.urandom(32)), connection.tcp
        client.sendall(hello)
        is_readable(arrives, timeout_ms=None)
        turn(router)
        answer = key_proof.answer(key_at(port), hello, client.recv(key_proof.REPLY_BYTES, sockets.MSG_WAITALL))
        client.sendall(answer + A_MESSAGE)
        is_readable(arrives, timeout_ms=None)
        assert at_router(router)[1] == [b"abc"]
        assert router.refused == 0 and not router._deadlines
    router.close()


def test_a_process_that_took_a_dead_servers_port_cannot_pass_on_the_proof_of_another() -> None:
    router, port = a_router()
    with sockets.create_server(("127.0.0.1", 0)) as taken:
        dealer = a_dealer(taken.getsockname()[1])
        between, _ = taken.accept()
    with between:
        until(lambda: is_readable(between, timeout_ms=0), dealer)
        other = Raw(router, port)
        other.socket.sendall(between.recv(key_proof.HELLO_BYTES, sockets.MSG_WAITALL))
        between.sendall(other.read(key_proof.REPLY_BYTES))
        assert "the server does not hold the job's key" in until(lambda: dealer.why_not, dealer)
    other.socket.close()
    dealer.close()
    router.close()


def test_who_says_nothing_is_cut_off_in_time_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    router, port = a_router(handshake_s=0.0)
    raw = Raw(router, port)
    assert raw.is_over()
    until(lambda: router.refused == router._reported == 1, router)
    assert "1 connections to this server were refused since the last report: it sent no proof in time" in caplog.text
    raw.socket.close()
    router.close()


def test_connections_without_a_proof_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_tcp, "MOST_UNPROVEN", 3)
    router, port = a_router()
    silent = [Raw(router, port) for _ in range(5)]
    assert silent[0].is_over() and silent[1].is_over(), "the oldest ones"
    assert len(router._deadlines) == 3
    dealer = a_dealer(port)
    dealer.send_multipart([b"hello"])
    assert at_router(router, dealer)[1] == [b"hello"], "who has the key gets in"
    for each in silent:
        each.socket.close()
    dealer.close()
    router.close()


@pytest.mark.parametrize(
    "head",
    [
        (1).to_bytes(4, "little") + (LIMIT + 1).to_bytes(8, "little"),
        (1 << 20).to_bytes(4, "little"),
        bytes(4),
        (1).to_bytes(4, "little") + b"\xff" * 8,
    ],
)
def test_a_message_that_is_none_ends_the_connection(head: bytes, caplog: pytest.LogCaptureFixture) -> None:
    router, port = a_router()
    raw = Raw(router, port)
    hello = key_proof.hello(os.urandom(32))
    raw.socket.sendall(hello)
    raw.socket.sendall(key_proof.answer(key_at(port), hello, raw.read(key_proof.REPLY_BYTES)) + head)
    assert raw.is_over()
    assert "a peer that holds the job's key sent a" in caplog.text and router.refused == 0
    raw.socket.close()
    router.close()


# --- the client ------------------------------------------------------------------------------------------------------


def test_a_client_connects_again_to_the_successor_of_its_server() -> None:
    router, port = a_router()
    dealer = a_dealer(port)
    for _ in range(2):
        dealer.send_multipart([b"hello"])
        peer, found = at_router(router, dealer)
        router.send_multipart([peer, b"world"])
        assert (found, until(lambda: turn(dealer), router)) == ([b"hello"], [b"world"])
        router.close()
        until(lambda: dealer._connection is None, dealer)
        router, _ = a_router(port)
    dealer.close()
    router.close()


def test_a_connection_that_is_lost_wakes_nobody_although_a_forked_child_has_it_open(ends: Ends) -> None:
    router, dealer = ends
    dealer.send_multipart([b"hello"])
    at_router(router, dealer)
    assert dealer._tcp is not None
    of_child = os.dup(dealer._tcp.fileno())
    router.close()
    until(lambda: dealer._connection is None, dealer)
    assert not is_readable(dealer, timeout_ms=0)
    os.close(of_child)


def test_what_is_sent_before_there_is_a_server_waits_up_to_a_limit() -> None:
    with sockets.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dealer = a_dealer(port, queued=2)
    for number in (b"1", b"2"):
        dealer.send_multipart([number])
    with pytest.raises(zmq.Again):
        dealer.send_multipart([b"3"])
    router, _ = a_router(port)
    assert [at_router(router, dealer)[1] for _ in range(2)] == [[b"1"], [b"2"]]
    dealer.close()
    router.close()


def test_a_server_with_the_other_wire_is_named() -> None:
    context: zmq.Context[Any] = zmq.Context()
    other = context.socket(zmq.ROUTER)
    dealer = a_dealer(other.bind_to_random_port("tcp://127.0.0.1"))
    assert "speaks ZeroMQ, as wire='curve' does" in until(lambda: dealer.why_not, dealer)
    dealer.close()
    context.destroy(linger=0)


def test_a_client_with_the_other_wire_is_named() -> None:
    router, port = a_router()
    context: zmq.Context[Any] = zmq.Context()
    other = context.socket(zmq.DEALER)
    other.connect(f"tcp://127.0.0.1:{port}")
    until(lambda: "speaks ZeroMQ, as wire='curve' does" in router._why, router)
    context.destroy(linger=0)
    router.close()
