"""Sockets and the client on them: no request stays without an end, whatever answers or does not."""

from __future__ import annotations

import os
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from gba_hvd.comm.traffic import Traffic
from gba_hvd.errors import GbaError
from gba_hvd.ps import client as client_module
from gba_hvd.ps import transport, wire
from gba_hvd.ps.client import Client, ServerLost
from gba_hvd.ps.messages import (
    WIRES,
    Answer,
    Compressor,
    Endpoint,
    HeartbeatMsg,
    Ok,
    Push,
    Refused,
    Request,
    Status,
    StatusReport,
    SwitchTo,
    Wire,
)

KEY = b"k" * 32
WAYS: list[tuple[bool, Wire]] = [(True, "curve"), (False, "curve"), (False, "plain"), (False, "tls")]
Reaction = Callable[[int, Request], list[bytes] | Answer | None]


class Stub:
    """A server of one thread: answers each request as it is configured to."""

    def __init__(self, folder: Path, react: Reaction, wire: Wire) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate = transport.Gate(self._context, KEY)
        self.listener = transport.Listener(self._context, folder, "ps-0.control", "127.0.0.1", 0, KEY, wire=wire)
        self.wire = wire
        self.seen: list[tuple[int, Request]] = []
        self._react, self._ended = react, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller, sockets = zmq.Poller(), (self._gate.socket, self.listener.local, self.listener.tcp)
        by_name = {transport.pollable(each): each for each in sockets}
        for name in by_name:
            poller.register(name, zmq.POLLIN)
        while not self._ended:
            self.listener.tick()
            for name, _ in poller.poll(20):
                each = by_name[name]
                if each is self._gate.socket:
                    self._gate.serve()
                    continue
                try:
                    peer, frames = transport.receive(each, wait=False)
                except zmq.Again:
                    continue
                envelope = wire.open_envelope(frames[0], "job")
                request = wire.decode_request(envelope)
                self.seen.append((envelope.number, request))
                answer = self._react(envelope.number, request)
                if isinstance(answer, list):
                    each.send_multipart([peer, *answer])
                elif answer is not None:
                    transport.send(each, peer, wire.encode("job", envelope.number, answer))

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self._gate.close()
        self.listener.close()
        self._context.term()


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Callable[[Reaction], Stub]]:
    made: list[Stub] = []

    def make(react: Reaction, wire: Wire = "curve") -> Stub:
        made.append(Stub(tmp_path, react, wire))
        return made[-1]

    yield make
    for each in made:
        each.close()


def a_client(folder: Path, stub: Stub | None = None, local: bool = True, timeout_s: float = 60.0) -> Client:
    wire = stub.wire if stub else "curve"
    endpoint = Endpoint(0, 0, "127.0.0.1", stub.listener.port if stub else 1, 1, wire)
    return Client("job", KEY, [endpoint], 0 if local else 1, folder, timeout_s)


@pytest.mark.parametrize(("local", "wire"), WAYS)
def test_a_request_is_answered(tmp_path: Path, stub: Callable[..., Stub], local: bool, wire: Wire) -> None:
    client = a_client(tmp_path, stub(lambda number, request: StatusReport({"n": number}), wire), local)
    client.start()
    assert client.call(0, Status()).body == StatusReport({"n": 1})
    client.close()
    client.close()


@pytest.mark.parametrize("local", [True, False])
def test_what_a_server_of_this_host_is_asked_is_no_traffic(
    tmp_path: Path, stub: Callable[[Reaction], Stub], local: bool
) -> None:
    client = a_client(tmp_path, stub(lambda number, request: Ok()), local)
    client.traffic = Traffic()
    client.start()
    client.call(0, Push(1, 7, 0, 0), [np.zeros(3, np.float32), np.zeros(2, np.float32)])
    client.close()
    counted = {key[::2]: n for key, n in client.traffic.so_far().items()}
    n_bytes = [counted.get(("sent", kind), 0) for kind in ("dense", "rows")]
    assert n_bytes == ([0, 0] if local else [12, 8])
    assert (("sent", "header") in counted) is (("received", "header") in counted) is not local


@pytest.mark.slow
def test_a_request_that_is_put_off_is_sent_again_and_the_reason_is_kept(
    tmp_path: Path, stub: Callable[[Reaction], Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
    monkeypatch.setattr(client_module, "time", clock)

    def react(number: int, request: Request) -> Answer:
        nonlocal ahead_s
        if len(server.seen) > 2:
            ahead_s = 1000.0  # it has been sent again: time is up
        return Refused("4 bytes of gradients wait already", retry=True)

    server = stub(react)
    client = a_client(tmp_path, server)
    client.start()
    with pytest.raises(ServerLost, match="did not take Status: 4 bytes of gradients wait already"):
        client.call(0, Status())
    assert len(server.seen) > 2
    client.close()


@pytest.mark.slow
def test_a_server_with_the_other_wire_is_named_when_a_request_fails(tmp_path: Path, stub: Callable[..., Stub]) -> None:
    server = stub(lambda number, request: Ok())
    endpoint = Endpoint(2, 0, "127.0.0.1", server.listener.port, 0, "plain")
    client = Client("job", KEY, [endpoint], 1, tmp_path, timeout_s=1.0)
    client.start()
    why, deadline = "", time.monotonic() + 60
    while "speaks ZeroMQ, as wire='curve' does" not in why:  # a busy machine may not have connected in time
        assert time.monotonic() < deadline, why
        with pytest.raises(ServerLost, match=r"it should listen at 127\.0\.0\.1:") as failed:
            client.call(0, Status())
        why = str(failed.value)
    client.close()


def test_an_answer_of_another_version_ends_the_wait_and_not_the_thread(
    tmp_path: Path, stub: Callable[[Reaction], Stub]
) -> None:
    answers: dict[int, Any] = {1: [b"\xff\x00garbage"], 2: [b"\x94\x00\xa3\x80ob"], 3: Ok()}
    # Once each: nobody can know which request such an answer is to, so a second one would end the next wait.
    client = a_client(tmp_path, stub(lambda number, request: answers.pop(number, None)))
    client.start()
    for _ in range(2):
        with pytest.raises(ServerLost, match="not a message of this protocol"):
            client.call(0, Status())
    assert client.call(0, Status()).body == Ok()
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "newer"),
    [(SwitchTo("gba", "why", pin=True), "world"), (Compressor("dct", 0.01, 100, 2.0, "float32"), "per_table")],
)
def test_a_field_that_a_running_job_of_a_version_before_refuses_is_sent_only_where_it_says_something(
    sent: Any, newer: str
) -> None:
    encoded = msgspec.msgpack.decode(msgspec.msgpack.encode(sent))
    assert newer not in encoded and msgspec.convert(encoded, type(sent)) == sent
    assert newer in msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(sent, **{newer: 1})))


def test_requests_that_wait_when_the_client_closes_fail(tmp_path: Path) -> None:
    client = a_client(tmp_path)
    client.start()
    waiting = [client.send(0, Status()) for _ in range(3)]
    client.close()
    for future in [*waiting, client.send(0, Status())]:
        with pytest.raises(ServerLost, match="closed"):
            future.result(60)


def test_a_client_that_was_never_started_can_be_closed(tmp_path: Path) -> None:
    client = a_client(tmp_path)
    future = client.send(0, Status())
    client.close()
    with pytest.raises(ServerLost):
        future.result(60)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_kills_the_thread_is_reported_to_all_requests(tmp_path: Path) -> None:
    client = a_client(tmp_path)

    def broken() -> HeartbeatMsg:
        raise RuntimeError("no heart")

    client.beat = broken
    client.start()
    with pytest.raises(ServerLost, match=r"no heart|closed"):
        client.send(0, Status()).result(60)
    client._thread.join(60)
    with pytest.raises(ServerLost, match="the client's thread died of RuntimeError: no heart"):
        client.send(0, Status()).result(60)
    client.close()


@pytest.mark.slow
def test_what_is_asked_when_a_request_fails_fails_too(tmp_path: Path) -> None:
    """A callback that sends the next request, while the thread ends."""
    client = a_client(tmp_path)
    client.start()
    after: list[Any] = []
    client.send(0, Status()).add_done_callback(lambda _: after.append(client.send(0, Status())))
    client.close()
    with pytest.raises(ServerLost):
        after[0].result(60)


def test_repeats_grow_rarer(tmp_path: Path) -> None:
    request = client_module._Pending(0, False, [], [], "Status", client_module.Future(), deadline_s=0.0)
    client = a_client(tmp_path)

    class Nowhere:
        def send_multipart(self, *args: Any, **kwargs: Any) -> None:
            raise zmq.Again

    pauses = []
    for _ in range(6):
        pauses.append(request.pause_s)
        client._post({(0, False): Nowhere()}, request)
    assert pauses == [1, 2, 4, 8, 8, 8]
    client.close()


@pytest.mark.parametrize("wire", WIRES)
def test_a_taken_port_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wire: Wire) -> None:
    monkeypatch.setattr(transport, "_BIND_TRIES_S", 0.0)
    context: zmq.Context[Any] = zmq.Context()
    with sockets.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(GbaError, match=f"cannot listen at 127.0.0.1:{port}.*another process took the port"):
            transport.Listener(context, tmp_path, "ps-0.control", "127.0.0.1", port, KEY, wire=wire)
    context.destroy(linger=0)


def test_a_peer_that_does_not_read_gets_no_more_large_answers(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    listener = transport.Listener(context, tmp_path, "s", "127.0.0.1", 0, KEY, unread_bytes=2 << 20)
    folder_fd = os.open(tmp_path, os.O_RDONLY)
    deaf = transport.connect(context, KEY, folder_fd=folder_fd, name="s")
    deaf.send(b"hello")
    peer, _ = transport.receive(listener.local)
    large = np.zeros(1 << 18, np.uint8)
    # What its socket has taken in counts as read: a queue of them, at most, and what the kernel keeps.
    sent = [listener.answer(listener.local, peer, b"header", [large]) for _ in range(transport.QUEUED_MESSAGES + 40)]
    assert not all(sent), "10 MiB more than its socket takes, for a peer that reads nothing"
    assert listener.answer(listener.local, peer, b"small", [])
    for _ in range(sum(sent)):
        assert len(deaf.recv_multipart()) == 2
    deadline = time.monotonic() + 60
    while not listener.answer(listener.local, peer, b"header", [large]):
        assert time.monotonic() < deadline, "the room is given back a moment after the last byte was read"
    deaf.close(linger=0)
    listener.close()
    os.close(folder_fd)
    context.destroy(linger=0)


# --- large frames ----------------------------------------------------------------------------------------------------

SIZES = [(0,), (5,), (4, 4), (9, 0, 3), (0, 0, 8), (4, 17, 4, 1)]


@pytest.mark.parametrize("sizes", SIZES)
def test_frames_come_back_from_their_pieces(sizes: tuple[int, ...]) -> None:
    frames = [bytes([65 + i]) * size for i, size in enumerate((3, *sizes))]
    sent = transport.in_pieces(frames, 4)
    assert max(map(len, sent[1:])) <= 4 and (max(sizes) > 4 or sent == frames), "what is short travels as it is"
    assert [bytes(frame) for frame in transport.joined([memoryview(frame) for frame in sent])] == frames


@pytest.mark.parametrize(
    "wrong",
    [lambda s: s[:-1], lambda s: [*s, b"x"], lambda s: [b"\xc1" + bytes(7), *s[1:]], lambda s: [s[0], b"", b""]],
)
def test_pieces_of_other_lengths_than_announced_are_no_message(wrong: Any) -> None:
    sent = transport.in_pieces([b"head", b"0123456789"], 4)
    with pytest.raises(ValueError, match=r"announced|next frame|buffer size"):
        transport.joined([memoryview(frame) for frame in wrong(sent)])


def assert_arrives(stub: Callable[..., Stub], tmp_path: Path, n_bytes: int, local: bool, wire: Wire = "curve") -> None:
    """A request and an answer of this size, through a client and sockets as they are."""
    state = np.arange(n_bytes // 8, dtype=np.int64)
    seen: list[tuple[int, int]] = []

    def react(number: int, request: Request) -> Answer:
        return Ok()

    server = stub(react, wire)
    before = transport.receive

    def receive(socket: Any, wait: bool = True) -> Any:
        peer, frames = before(socket, wait)
        if len(frames) > 1:
            seen.append((len(frames[1]), int(np.frombuffer(frames[1], np.int64)[-1])))
        return peer, frames

    transport.receive = receive
    endpoint = Endpoint(1 if local else 2, 0, "127.0.0.1", server.listener.port, 0, wire)
    client = Client("job", KEY, [endpoint], 1, tmp_path, timeout_s=300.0)
    try:
        client.start()
        assert client.call(0, Push(0, 0, 0, 0), [state]).body == Ok()
    finally:
        transport.receive = before
        client.close()
    assert seen[0] == (n_bytes, n_bytes // 8 - 1)


@pytest.mark.parametrize(("local", "wire"), WAYS)
def test_a_frame_larger_than_a_socket_takes_travels_in_pieces(
    stub: Callable[..., Stub], tmp_path: Path, local: bool, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 1 << 20)
    monkeypatch.setattr(transport, "PIECE_BYTES", 1 << 18)
    monkeypatch.setattr(transport, "TCP_PIECE_BYTES", 1 << 16)
    assert_arrives(stub, tmp_path, 3 << 20, local, wire)


@pytest.mark.variant
def test_a_training_state_of_more_than_two_gibibytes_arrives(stub: Callable[[Reaction], Stub], tmp_path: Path) -> None:
    assert_arrives(stub, tmp_path, (2 << 30) + (64 << 20), local=True)


@pytest.mark.slow
def test_without_the_key_a_connection_holds_little_and_not_for_long(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    listener = transport.Listener(context, tmp_path, "s", "127.0.0.1", 0, KEY)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(23, b"\0") + bytes(32)
    long_command = b"\x06" + (transport.TCP_PIECE_BYTES * 2).to_bytes(8, "big")  # a frame that is announced
    try:
        with sockets.create_connection(("127.0.0.1", listener.port)) as loud:
            loud.settimeout(60)
            loud.sendall(greeting + long_command)
            with pytest.raises(ConnectionError):  # the server takes none of it, and cuts the connection
                loud.sendall(bytes(2 * transport.TCP_PIECE_BYTES))
        with sockets.create_connection(("127.0.0.1", listener.port)) as silent:
            silent.settimeout(60)
            assert silent.recv(100) and not silent.recv(100), "its greeting, then the end"
        assert listener.tcp.handshake_ivl <= 2000
    finally:
        listener.close()
        context.destroy(linger=0)
