"""Sockets with TLS and without: what gets in, what is lost, and what a peer without the key can make them hold."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket as sockets
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from gba_hvd.ps import key_proof, tcp_sockets, tls
from gba_hvd.ps.tcp_sockets import TcpDealer, TcpRouter

KEY, OTHER = b"k" * 32, b"o" * 32
LIMIT = 1 << 20
A_MESSAGE = (1).to_bytes(4, "little") + (3).to_bytes(8, "little") + b"abc"
Ends = tuple[TcpRouter, TcpDealer]


def a_router(port: int = 0, handshake_s: float = 60.0, with_tls: bool = False) -> tuple[TcpRouter, int]:
    router = TcpRouter(KEY, LIMIT, 64, handshake_s, with_tls)
    return router, router.bind("127.0.0.1", port)


def a_dealer(port: int, key: bytes = KEY, queued: int = 64, with_tls: bool = False) -> TcpDealer:
    return TcpDealer("127.0.0.1", port, key, LIMIT, queued, 60.0, with_tls)


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def with_tls(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def ends(with_tls: bool) -> Iterator[Ends]:
    router, port = a_router(with_tls=with_tls)
    dealer = a_dealer(port, with_tls=with_tls)
    yield router, dealer
    dealer.close()
    dealer.close()
    router.close()
    router.close()


def key_at(port: int, key: bytes = KEY) -> bytes:
    return key_proof.key_at(key, "127.0.0.1", port)


def turn(each: TcpRouter | TcpDealer) -> list[Any] | None:
    each.tick()
    try:
        return each.recv_multipart()
    except zmq.Again:
        return None


def until(what: Callable[[], Any], *others: TcpRouter | TcpDealer) -> Any:
    """Poll all sockets until this gives something; what others receive is thrown away."""
    deadline = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < deadline, "nothing came"
        for other in others:
            turn(other)
        is_readable(*others, timeout_ms=1)
    return found


def is_readable(*each: TcpRouter | TcpDealer | sockets.socket, timeout_ms: int | None) -> bool:
    """Whether one of them is, in time. None: waits until one is."""
    poll = select.poll()  # not `select`, which takes no file descriptor beyond 1023
    for one in each:
        poll.register(one, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def at_router(router: TcpRouter, *others: TcpDealer) -> tuple[bytes, list[bytes]]:
    peer, *frames = until(lambda: turn(router), *others)
    return peer, [bytes(frame) for frame in frames]


@pytest.mark.slow
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


def test_a_poller_sees_all_that_came(ends: Ends) -> None:
    """Nothing stays behind in the TLS layer that makes no socket readable."""
    router, dealer = ends
    messages = [[b"a" * size, b"b" * (3 * size)] for size in (1, 0, 4096, 5461, 16384, 100_000)] * 5
    for message in messages:
        dealer.send_multipart(message)
    found: list[list[bytes]] = []
    deadline = time.monotonic() + 60
    while len(found) < len(messages):
        assert time.monotonic() < deadline, f"{len(found)} of {len(messages)} came"
        if is_readable(dealer, timeout_ms=0):
            turn(dealer)
        if is_readable(router, timeout_ms=1) and (message := turn(router)):
            found.append([bytes(frame) for frame in message[1:]])
    assert found == messages


def test_a_message_to_a_peer_that_does_not_read_waits_and_others_are_served(ends: Ends, with_tls: bool) -> None:
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
    other = a_dealer(router._listening.getsockname()[1], with_tls=with_tls)  # type: ignore[union-attr]
    other.send_multipart([b"hello"])
    peer, _ = at_router(router, other)
    router.send_multipart([peer, b"world"])
    assert until(lambda: turn(other), router) == [b"world"]
    other.close()
    until(lambda: turn(dealer), router)
    dealer.close()
    until(lambda: sent.done, router)


def test_what_tls_holds_back_to_fill_a_packet_goes_out_with_the_message() -> None:
    router, port = a_router(with_tls=True)
    dealer = a_dealer(port, with_tls=True)
    dealer.send_multipart([b"hello"])
    peer, _ = at_router(router, dealer)
    tcp = router._peers[peer].tcp

    def is_corked() -> bool:
        return bool(tcp.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_CORK))

    router.send_multipart([peer, bytes(LIMIT)])
    assert not is_corked(), "it was sent"
    while not router._peers[peer].outgoing:
        router.send_multipart([peer, bytes(LIMIT)])
    assert not is_corked(), "the kernel took no more"
    assert len(until(lambda: turn(dealer), router)[0]) == LIMIT
    dealer.close()
    router.close()


def test_a_message_to_a_peer_that_is_gone_is_lost(ends: Ends) -> None:
    router, dealer = ends
    dealer.send_multipart([b"hello"])
    peer, _ = at_router(router, dealer)
    dealer.close()
    until(lambda: not router._connections, router)
    with pytest.raises(zmq.Again):
        router.send_multipart([peer, b"late"])


# --- who gets in -----------------------------------------------------------------------------------------------------


def test_without_the_key_nothing_is_exchanged(with_tls: bool) -> None:
    router, port = a_router(with_tls=with_tls)
    stranger = a_dealer(port, OTHER, with_tls=with_tls)
    stranger.send_multipart([b"let me in"])
    until(lambda: router.refused, router, stranger)
    assert not router._connections or not any(one.is_proven for one in router._connections.values())
    who = "the peer" if with_tls else "the server"
    assert f"{who} does not hold the job's key" in until(lambda: stranger.why_not, router, stranger)
    assert turn(router) is None and len(stranger._waiting) == 1, "it was not sent"
    stranger.close()
    router.close()


class Raw:
    """A client by hand, on a router that is served meanwhile."""

    def __init__(self, router: TcpRouter, port: int) -> None:
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
            except ssl.SSLWantReadError:
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


def test_who_says_nothing_is_cut_off_in_time_and_reported(with_tls: bool, caplog: pytest.LogCaptureFixture) -> None:
    router, port = a_router(handshake_s=0.0, with_tls=with_tls)
    raw = Raw(router, port)
    assert raw.is_over()
    until(lambda: router.refused == router._reported == 1, router)
    assert "1 connections to this server were refused since the last report: it sent no proof in time" in caplog.text
    raw.socket.close()
    router.close()


def test_connections_without_a_proof_are_few(with_tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_sockets, "MOST_UNPROVEN", 3)
    router, port = a_router(with_tls=with_tls)
    silent = [Raw(router, port) for _ in range(5)]
    assert silent[0].is_over() and silent[1].is_over(), "the oldest ones"
    assert len(router._deadlines) == 3
    dealer = a_dealer(port, with_tls=with_tls)
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


def test_a_client_connects_again_to_the_successor_of_its_server(with_tls: bool) -> None:
    router, port = a_router(with_tls=with_tls)
    dealer = a_dealer(port, with_tls=with_tls)
    for _ in range(2):
        dealer.send_multipart([b"hello"])
        peer, found = at_router(router, dealer)
        router.send_multipart([peer, b"world"])
        assert (found, until(lambda: turn(dealer), router)) == ([b"hello"], [b"world"])
        router.close()
        until(lambda: dealer._connection is None, dealer)
        router, _ = a_router(port, with_tls=with_tls)
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


def test_a_connection_that_breaks_before_its_proof_leaves_nothing_open(
    with_tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, port = a_router(with_tls=with_tls)
    gc.collect()  # what tests before have left is not closed meanwhile
    n_open, failed = len(os.listdir("/proc/self/fd")), list[sockets.socket]()

    def breaks(tcp: sockets.socket, *_: Any) -> None:
        failed.append(tcp)
        raise ConnectionResetError("planned")

    with monkeypatch.context() as patched:
        patched.setattr(tcp_sockets, "Connection", breaks)
        dealer = a_dealer(port, with_tls=with_tls)
        until(lambda: failed, dealer)
        assert dealer.why_not == "planned" and failed[0].fileno() == -1
        dealer.close()
    assert len(os.listdir("/proc/self/fd")) == n_open
    router.close()


def test_what_is_sent_before_there_is_a_server_waits_up_to_a_limit(with_tls: bool) -> None:
    with sockets.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dealer = a_dealer(port, queued=2, with_tls=with_tls)
    for number in (b"1", b"2"):
        dealer.send_multipart([number])
    with pytest.raises(zmq.Again):
        dealer.send_multipart([b"3"])
    router, _ = a_router(port, with_tls=with_tls)
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


# --- TLS -------------------------------------------------------------------------------------------------------------


def over_tls(raw: Raw, router: TcpRouter, key: bytes = KEY) -> ssl.SSLSocket:
    """A client by hand, whose handshake the router takes part in."""
    raw.socket.settimeout(0.0)
    found = tls.context(key, False).wrap_socket(raw.socket, do_handshake_on_connect=False)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        turn(router)
        try:
            found.do_handshake()
        except ssl.SSLWantReadError:
            is_readable(found, timeout_ms=1)
            continue
        found.settimeout(0.001)
        raw.socket = found
        return found
    raise AssertionError("no handshake")


@pytest.mark.slow
def test_within_tls_the_proof_is_asked_for_as_well() -> None:
    router, port = a_router(with_tls=True)
    for given, is_taken in ((KEY, True), (OTHER, False)):
        raw = Raw(router, port)
        assert over_tls(raw, router).version() == "TLSv1.3"
        hello = key_proof.hello(os.urandom(32))
        raw.socket.sendall(hello)
        reply = raw.read(key_proof.REPLY_BYTES)
        answer = key_proof.proof(key_at(port, given), "client", hello[16:], reply[16:48])
        raw.socket.sendall(answer + A_MESSAGE)
        if is_taken:
            assert at_router(router)[1] == [b"abc"]
        else:
            assert raw.is_over() and router.refused == 1
        raw.socket.close()
    router.close()


def test_what_is_sent_with_tls_cannot_be_read_or_altered_on_the_way(caplog: pytest.LogCaptureFixture) -> None:
    router, port = a_router(with_tls=True)
    with sockets.create_server(("127.0.0.1", 0)) as listening:
        dealer = a_dealer(listening.getsockname()[1], with_tls=True)
        # Both sides bind their proof to the server's own address, so the client has to take the proxy for it.
        dealer._key = key_at(port)
        dealer.send_multipart([b"a secret of these rows"])
        here, _ = listening.accept()
    there = sockets.create_connection(("127.0.0.1", port))
    seen, found = bytearray(), None
    for one in (here, there):
        one.setblocking(False)
    deadline = time.monotonic() + 60
    while found is None and time.monotonic() < deadline:
        turn(dealer)
        found = turn(router)
        seen += pass_on(here, there)
        pass_on(there, here)
    assert found is not None and bytes(found[1]) == b"a secret of these rows"
    assert len(seen) > 500 and b"secret" not in seen
    dealer.send_multipart([b"x" * 1000])
    altered = bytearray()
    while len(altered) < 1000:
        assert time.monotonic() < deadline, f"{len(altered)} bytes came"
        turn(dealer)
        with contextlib.suppress(BlockingIOError):
            altered += here.recv(1 << 16)
    altered[500] ^= 1
    there.sendall(altered)
    until(lambda: not router._connections, router)
    assert turn(router) is None
    assert "sent what TLS does not take" in caplog.text and "altered on its way" in caplog.text
    for each in (here, there, dealer, router):
        each.close()


def pass_on(source: sockets.socket, target: sockets.socket) -> bytes:
    try:
        found = source.recv(1 << 16)
    except BlockingIOError:
        return b""
    target.sendall(found)
    return found


@pytest.mark.parametrize("of_server", [False, True])
def test_tls_and_plain_do_not_understand_each_other_and_say_so(of_server: bool) -> None:
    router, port = a_router(with_tls=of_server)
    dealer = a_dealer(port, with_tls=not of_server)
    dealer.send_multipart([b"hello"])
    until(lambda: router.refused and dealer.why_not, router, dealer)
    of_tls, of_plain = (router._why, dealer.why_not) if of_server else (dealer.why_not, router._why)
    assert "started with another wire than wire='tls'" in of_tls
    assert of_server or "speaks TLS, as wire='tls' does" in of_plain
    dealer.close()
    router.close()


def test_a_key_that_encrypted_enough_is_replaced_by_that_of_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_MOST_RECORDS", 6)
    router, port = a_router(with_tls=True)
    dealer = a_dealer(port, with_tls=True)
    peers: set[bytes] = set()
    deadline = time.monotonic() + 60
    while len(peers) < 3:
        assert time.monotonic() < deadline, f"{len(peers)} connections"
        with contextlib.suppress(zmq.Again):  # what is lost with its connection is asked for again
            dealer.send_multipart([b"again"])
        turn(dealer)
        if is_readable(router, timeout_ms=10) and (message := turn(router)):
            peers.add(bytes(message[0]))
    dealer.close()
    router.close()


def test_a_handshake_byte_by_byte_gets_no_time_for_each() -> None:
    router, port = a_router(handshake_s=0.0, with_tls=True)
    raw = Raw(router, port)
    begins = ssl.MemoryBIO()
    client = tls.context(KEY, False).wrap_bio(ssl.MemoryBIO(), begins)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    n_sent = 0
    with contextlib.suppress(OSError):
        for byte in begins.read():
            raw.socket.sendall(bytes([byte]))
            n_sent += 1
            turn(router)
            if not router._connections and router.refused:
                break
    assert raw.is_over() and router.refused == 1 and n_sent < 50
    raw.socket.close()
    router.close()
