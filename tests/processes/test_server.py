"""A real companion server: what bad messages, full buffers, kills and blocked ports do to it, and what they do not."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from gba_hvd.errors import GbaError
from gba_hvd.ps import launch, messages, transport, wire
from gba_hvd.ps.client import Client, ServerLost
from gba_hvd.ps.messages import (
    Apply,
    HeartbeatMsg,
    LeaseGrant,
    LeaseReply,
    Leave,
    Ok,
    PlannedMember,
    PullDense,
    PullRows,
    Push,
    PushDone,
    Refused,
    Rows,
    Save,
    SaveAbout,
    SaveSettings,
    Status,
    StatusReport,
)
from gba_hvd.shm.layout import Layout
from gba_hvd.shm.process_state import is_alive
from gba_hvd.switching import leave_ps
from recovery.catalog import claims
from recovery.catalog.chains import Chain, chains
from recovery.config import Config
from recovery.restore.inspect import read_state
from recovery.storage.open import open_store
from recovery.storage.store import manifest_names

from . import fuzz_server
from .cluster import wait_for
from .fuzz_server import GENERATION, LR, N_DENSE, N_SHARDS, ROW_LR, TABLES, WORKER, Host, Peer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
PATIENCE_S = 120.0  # a busy machine takes long to import torch
LAYOUT = Layout.of(TABLES, (), N_SHARDS, seed=3, init_std=0.1)
BEGIN = np.arange(N_DENSE, dtype=np.float32)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A server in the midst of an asynchronous mode, with one push in its buffer."""
    served = Host(tmp_path_factory.mktemp("memory"), job="job")
    peer = served.peer()
    peer.ask(*fuzz_server.enter(served.endpoints))
    peer.send(fuzz_server.a_beat())
    given = fuzz_server.lease(peer, 1)
    assert isinstance(fuzz_server.push(peer, given, fuzz_server.gradients(served.layout)[0]), Ok)
    yield served
    served.close()


@pytest.fixture
def unchanged(host: Host) -> Iterator[Host]:
    """Whatever the test does, the server stays up, and no byte of any row, dense value or the ledger changes."""
    before, pid = host.everything(), host.pid()
    yield host
    answer, _ = host.peer().ask(Status())
    assert isinstance(answer, StatusReport)
    assert host.pid() == pid
    assert host.everything() == before
    assert "Traceback" not in host.log()


# --- bad messages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", sorted(fuzz_server.bad_envelopes("job")))
def test_what_is_no_message_of_this_job_is_refused(unchanged: Host, what: str) -> None:
    for pull in (False, True):
        peer = unchanged.peer(pull=pull)
        peer.post(fuzz_server.bad_envelopes("job")[what])
        envelope = wire._envelope.decode(peer.socket.recv_multipart()[0])
        assert isinstance(wire.decode_answer(envelope), Refused)


@pytest.mark.parametrize("what", sorted(fuzz_server.bad_pushes(LAYOUT)))
def test_a_bad_push_is_refused(unchanged: Host, what: str) -> None:
    body = Push(WORKER, GENERATION, 1, 2)
    answer, _ = unchanged.peer().ask(body, fuzz_server.bad_pushes(LAYOUT)[what])
    assert isinstance(answer, Refused)
    assert not answer.retry
    assert answer.kind == ("NotFinite" if what.startswith(("NaN", "inf")) else "ProtocolError"), answer.why


@pytest.mark.parametrize("what", sorted(fuzz_server.bad_requests(LAYOUT, [])))
def test_a_bad_request_is_refused(unchanged: Host, what: str) -> None:
    body, frames = fuzz_server.bad_requests(unchanged.layout, unchanged.endpoints)[what]
    answer, _ = unchanged.peer(local=False).ask(body, frames)
    assert isinstance(answer, Refused)
    assert answer.why


@pytest.mark.parametrize("what", sorted(fuzz_server.bad_pulls(LAYOUT)))
def test_a_bad_pull_is_refused(unchanged: Host, what: str) -> None:
    peer = unchanged.peer(local=False, pull=True)
    answer, _ = peer.ask(PullRows(GENERATION), fuzz_server.bad_pulls(LAYOUT)[what])
    assert isinstance(answer, Refused)


def test_a_non_finite_gradient_is_named(unchanged: Host) -> None:
    frames = fuzz_server.bad_pushes(LAYOUT)
    dense, _ = unchanged.peer().ask(Push(WORKER, GENERATION, 1, 2), frames["infinity in a dense tensor"])
    row, _ = unchanged.peer().ask(Push(WORKER, GENERATION, 1, 2), frames["NaN in a row"])
    assert isinstance(dense, Refused)
    assert "gradient of w " in dense.why
    assert isinstance(row, Refused)
    assert "row 0 of table 'user'" in row.why


@pytest.mark.parametrize("wire", messages.WIRES)
def test_random_messages_for_some_seconds(tmp_path: Path, wire: str) -> None:
    counts = fuzz_server.fuzz(tmp_path, seconds=2, seed=11, wire=wire)
    assert counts["rounds"] >= 1
    assert counts["answers"] > 50


# --- who gets in -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["NULL", "PLAIN", "another key", "the server's key, another client's"])
def test_a_process_without_the_key_gets_nothing_over_tcp(unchanged: Host, mechanism: str) -> None:
    context: zmq.Context[Any] = zmq.Context()
    if mechanism == "another key":
        endpoint = unchanged.endpoints[0]
        stranger = transport.connect(context, transport.new_key(), address=endpoint.address, port=endpoint.control)
    else:
        stranger = context.socket(zmq.DEALER)
        if mechanism == "PLAIN":
            stranger.plain_username, stranger.plain_password = b"operator", b"password"
        elif mechanism != "NULL":
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.curve_serverkey = transport.key_pair(unchanged.key, "server")[0]
        stranger.connect(f"tcp://{unchanged.endpoints[0].address}:{unchanged.endpoints[0].control}")
    try:
        stranger.send(wire.encode("job", 1, Status()))
        answer, _ = unchanged.peer(local=False).ask(Status())  # with the key: at once
        assert isinstance(answer, StatusReport)
        assert not stranger.poll(1500)
    finally:
        stranger.close(linger=0)
        context.term()


@pytest.mark.parametrize("of_server", ["plain", "tls"])
def test_a_process_without_the_key_gets_nothing_and_is_reported(tmp_path: Path, of_server: messages.Wire) -> None:
    host = Host(tmp_path, job="plain", wire=of_server)
    stranger = host.peer(local=False, key=transport.new_key())
    context: zmq.Context[Any] = zmq.Context()
    other_wire = transport.connect(context, host.key, address=host.endpoints[0].address, port=host.endpoints[0].control)
    try:
        for pull in (False, True):
            answer, _ = host.peer(local=False, pull=pull).ask(Status())  # with the key: at once
            assert isinstance(answer, Refused if pull else StatusReport)
        stranger.send(Status())
        other_wire.send(wire.encode("plain", 1, Status()))
        assert not stranger.socket.poll(1500) and not other_wire.poll(0)
        wait_for(lambda: "connections to this server were refused" in host.log(), "the server's report", PATIENCE_S)
        assert isinstance(host.peer(local=False).ask(Status())[0], StatusReport)
    finally:
        other_wire.close(linger=0)
        context.term()
        host.close()


# --- limits ----------------------------------------------------------------------------------------------------------


def test_limits_hold_and_others_are_served_meanwhile(tmp_path: Path) -> None:
    limit = 600_000
    host = Host(tmp_path, job="limits", buffer_bytes=limit)
    silent: list[socket.socket] = []
    try:
        peer = host.peer()
        body, frames = fuzz_server.enter(host.endpoints)
        assert peer.ask(body, frames)[0] == Ok()
        for _ in range(50):  # connected, and not a word
            silent.append(socket.create_connection((host.endpoints[0].address, host.endpoints[0].control)))
        memory_before = psutil.Process(host.pid()).memory_info().rss

        giant = host.peer(local=False)
        giant.post(
            wire.encode("limits", 1, Push(WORKER, GENERATION, 0, 1)), bytes(transport.TCP_PIECE_BYTES + 2048), b""
        )
        assert not giant.socket.poll(500), "an oversized frame is not answered: the connection is cut"

        rows = np.zeros(2 * 50_000, dtype=np.float32)  # large, and no row message
        refused = [peer.ask(Push(WORKER, GENERATION, 0, 1), [bytes(4 * N_DENSE), rows])[0] for _ in range(5)]
        assert {answer.kind for answer in refused if isinstance(answer, Refused)} == {"ProtocolError"}

        deaf = host.peer(pull=True)
        keys = [np.zeros(9000, np.int64), np.zeros(9000, np.int64)]  # answered with 432,000 bytes
        for _ in range(200):
            try:
                deaf.send(PullRows(GENERATION), keys)
            except zmq.Again:  # the server takes no more from a peer that takes nothing itself
                break
        assert isinstance(host.peer(pull=True).ask(PullRows(GENERATION), [k[:3] for k in keys])[0], Rows)
        assert isinstance(peer.ask(Status())[0], StatusReport)
        grown = psutil.Process(host.pid()).memory_info().rss - memory_before
        assert grown < 150e6, f"{grown:,} bytes"
    finally:
        for each in silent:
            each.close()
        host.close()


@pytest.mark.parametrize("local", [True, False])
def test_a_training_state_larger_than_a_frame_may_be_is_saved_and_comes_back(tmp_path: Path, local: bool) -> None:
    host = Host(tmp_path, job="states", buffer_bytes=600_000)
    here = host.host if local else host.host + 1  # as from another host: over TCP
    client = Client(host.job, host.key, host.endpoints, here, host.folder, timeout_s=PATIENCE_S)
    store, state = open_store(tmp_path / "saved"), np.random.default_rng(1).bytes(3 * transport.TCP_PIECE_BYTES)
    claim = claims.claim(store, "states.1")
    request = Save(
        epoch=claim.epoch, number=1, part=0, n_parts=1, kind="full", parent=None, step=1, samples=1, about=SaveAbout(),
        settings=SaveSettings(str(tmp_path / "saved"), {}, Config(policy="full")),
        claim=claim, first_epoch=claim.epoch,
    )  # fmt: skip
    try:
        client.start()
        assert client.call(0, request, [state]).body == Ok()
        wait_for(lambda: manifest_names(store), "the checkpoint")
        chain = next(iter(chains(store)))
        assert isinstance(chain, Chain) and read_state(store, chain.newest) == state
    finally:
        client.close()
        host.close()


def test_a_full_buffer_refuses_for_now_and_says_what_is_full(tmp_path: Path) -> None:
    push_bytes = sum(frame.nbytes for frame in fuzz_server.gradients(LAYOUT)[0])
    host = Host(tmp_path, job="full", buffer_bytes=push_bytes + 2000)
    try:
        peer = host.peer()
        peer.ask(*fuzz_server.enter(host.endpoints))
        peer.send(fuzz_server.a_beat())
        leases = [fuzz_server.lease(peer, request) for request in (1, 2)]
        padded = [fuzz_server.gradients(host.layout)[0] for _ in leases]
        keep = [np.concatenate([frames[1]]) for frames in padded]
        assert fuzz_server.push(peer, leases[0], [padded[0][0], keep[0]]) == Ok()
        for extra in range(1, 12):  # the same micro-batch under other serials: nobody will ask for them
            answer = fuzz_server.push(peer, LeaseGrant(0, 1000 + extra, 0, 8), [padded[0][0], keep[0]])
            if isinstance(answer, Refused):
                break
        assert isinstance(answer, Refused)
        assert answer.retry
        assert "buffer_bytes" in answer.why
    finally:
        host.close()


# --- kills -----------------------------------------------------------------------------------------------------------

# Serves like `gba_hvd.ps.server.server.main`, but dies at one exact place of the real code, the first time it comes
# there: at once, or when another process has died.
_DIES = """
import fcntl, os, signal, sys, time
from pathlib import Path
folder, index, point, after = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
lock = open(folder / f"ps-{index}.lock", "a")
fcntl.flock(lock, fcntl.LOCK_EX)
from gba_hvd.ps.server import server
from gba_hvd.ps.coordinator.coordinator import Coordinator
from gba_hvd.ps.partition.dense_part import DensePart
from gba_hvd.ps.partition.partition import Partition
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.shm.process_state import is_alive
from gba_hvd.ps.coordinator.ledger import Ledger
owner, name, before = {
    "before it is measured": (Partition, "measure", True),
    "measured": (Coordinator, "measured", False),
    "before the step": (Partition, "_apply", True),
    "rows begun": (ShardMemory, "begin", False),
    "rows done": (ShardMemory, "finish", False),
    "dense done": (DensePart, "step_", False),
    "before it counts": (Coordinator, "applied", True),
    "push stored": (Partition, "push", False),
    "entered": (Partition, "begin", False),
    "before others discard": (Ledger, "lost_pushes", False),
}[point]
method = getattr(owner, name)
def die():
    while after and is_alive(after): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
def dying(*args, **kwargs):
    if before: die()
    method(*args, **kwargs)
    die()
setattr(owner, name, dying)
server.main(folder, index)
"""


@dataclass(frozen=True)
class Dying:
    """A server that is to die. client: stands for it, and ends as it ends."""

    client: subprocess.Popen[bytes]
    pid: int

    def wait(self) -> int:
        return self.client.wait(PATIENCE_S)


def replace_by_one_that_dies(host: Host, point: str, index: int = 0, after: int = 0) -> Dying:
    """after: a process that has to be dead first; until then the server stands at that point."""
    old = host.pid(index)
    with open(host.folder / f"ps-{index}.log", "ab") as log:
        client = subprocess.Popen(
            [sys.executable, "-c", _DIES, str(host.folder), str(index), point, str(after)], stdout=log, stderr=log
        )
    os.kill(old, signal.SIGKILL)  # the new one waits for the lock, which the old one's end releases
    wait_for(lambda: launch.pid_of(host.folder, index) not in (None, old), "the server that will die", PATIENCE_S)
    return Dying(client, host.pid(index))


def restarted(host: Host, dead: int, index: int = 0) -> None:
    """A successor serves."""

    def serves() -> bool:
        launch.ensure_running(host.folder, index)
        return launch.pid_of(host.folder, index) not in (None, dead)

    wait_for(serves, f"a successor; the log: {host.log(index)}", PATIENCE_S)


def finish_epoch(peer: Peer, layout: Layout, first_request: int) -> dict[str, Any]:
    """Take and push whatever is left of the epoch, also what had been given when a server died; returns the account."""
    request = first_request
    peer.ask(Leave(WORKER, finished=False))
    peer.send(fuzz_server.a_beat())
    while True:
        answer, _ = peer.ask(fuzz_server.an_ask(request))
        assert isinstance(answer, LeaseReply), answer
        if answer.status == "finished":
            return answer.position.account
        if answer.lease is None:
            continue
        assert fuzz_server.push(peer, answer.lease, fuzz_server.gradients(layout)[0]) == Ok()
        assert isinstance(fuzz_server.done(peer, answer.lease), Ok)
        request += 1


@pytest.mark.parametrize(
    ("point", "steps_of_dense", "missed"),
    [
        ("push stored", 4, 0),
        ("before the step", 4, 0),
        ("rows begun", 3, N_SHARDS + 1),
        ("rows done", 3, 1),
        ("dense done", 4, 0),
        ("before it counts", 4, 0),
    ],
)
def test_a_killed_server_goes_on_where_it_stopped(tmp_path: Path, point: str, steps_of_dense: int, missed: int) -> None:
    host = Host(tmp_path, job="killed")
    try:
        host.peer().ask(*fuzz_server.enter(host.endpoints))
        rows_before = host.memory.flat.copy()
        dying = replace_by_one_that_dies(host, point)
        first = host.peer()
        first.send(fuzz_server.a_beat())
        for request in (1, 2):
            given = fuzz_server.lease(first, request)
            first.send(Push(WORKER, GENERATION, given.micro, given.serial), fuzz_server.gradients(host.layout)[0])
            first.send(PushDone(WORKER, GENERATION, given.micro, given.serial))
            if point == "push stored":
                break
        assert dying.wait() == -signal.SIGKILL
        restarted(host, dying.pid)

        account = finish_epoch(host.peer(), host.layout, first_request=10)
        assert account["total"] == account["applied"] == 64
        assert account["shard_steps_missed"] == missed
        step, values = host.dense()
        assert step == 4
        np.testing.assert_array_equal(values, BEGIN - np.float32(LR * steps_of_dense))
        changed = (host.memory.flat - rows_before)[np.abs(host.memory.flat - rows_before) > 1e-6]
        steps_of_rows = 3 if point == "rows begun" else 4
        marks_and_counters = changed < 0  # rows went down by their gradient; counters and marks went up
        np.testing.assert_allclose(changed[marks_and_counters], -ROW_LR * steps_of_rows, rtol=1e-5)
    finally:
        host.close()


def test_a_server_killed_while_it_takes_over_takes_over_when_asked_again(tmp_path: Path) -> None:
    host = Host(tmp_path, job="entering")
    try:
        dying = replace_by_one_that_dies(host, "entered")
        peer = host.peer()
        body, frames = fuzz_server.enter(host.endpoints)
        peer.send(body, frames)
        assert dying.wait() == -signal.SIGKILL
        restarted(host, dying.pid)
        assert host.peer().ask(body, frames)[0] == Ok()
        assert finish_epoch(host.peer(), host.layout, 1)["applied"] == 64
    finally:
        host.close()


@pytest.mark.variant
def test_a_port_that_was_taken_meanwhile_is_named(tmp_path: Path) -> None:
    host = Host(tmp_path, job="port")
    client = Client(host.job, host.key, host.endpoints, 0, host.folder, timeout_s=PATIENCE_S)
    try:
        os.kill(host.pid(), signal.SIGKILL)
        endpoint = host.endpoints[0]
        with socket.socket() as taken:

            def take() -> bool:
                try:
                    taken.bind((endpoint.address, endpoint.control))
                except OSError:
                    return False
                return True

            wait_for(take, "the port")
            taken.listen()
            client.start()
            with pytest.raises(ServerLost, match=f"cannot listen at {endpoint.address}:{endpoint.control}"):
                client.call(0, Status())
            (host.folder / "ps-0.address").rename(host.folder / "kept")
            with pytest.raises(GbaError, match="another process took the port"):
                launch.endpoint(host.folder, 0, 0, PATIENCE_S)
            (host.folder / "kept").rename(host.folder / "ps-0.address")
        restarted(host, host.pid())  # the port is free again
        assert isinstance(client.call(0, Status()).body, StatusReport)
    finally:
        client.close()
        host.close()


def test_a_step_that_cannot_be_applied_is_over_and_the_workers_learn_it(tmp_path: Path) -> None:
    host = Host(tmp_path, job="overflow")
    try:
        peer = host.peer()
        peer.ask(*fuzz_server.enter(host.endpoints))
        before = host.everything()
        fuzz_server.train_a_step(peer, host.layout, 1, value=3e38)  # finite, but not the sum of two
        answer, _ = peer.ask(fuzz_server.an_ask(3))
        assert isinstance(answer, Refused)
        assert answer.kind == "failed"
        assert "step 1 could not be applied" in answer.why
        step, values = host.dense()
        assert step == 1
        np.testing.assert_array_equal(values, BEGIN)
        weights = np.frombuffer(before[0], np.float32)
        assert np.isfinite(host.memory.flat[1024:]).all()
        assert len(weights) == len(host.memory.flat)
    finally:
        host.close()


def test_a_server_whose_workers_fell_out_of_the_mode_applies_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator may have been cut off, and come back."""
    monkeypatch.setattr(leave_ps, "_LEAVE_TIMEOUT_S", PATIENCE_S)  # it is to be asked, not killed for being slow
    host = Host(tmp_path, job="retired")
    try:
        peer = host.peer()
        peer.ask(*fuzz_server.enter(host.endpoints))
        leave_ps.retire_servers(host.job, host.key, host.folder, host.host)
        before = host.everything()
        answer, _ = peer.ask(Apply(GENERATION, 1, [], 0.5, ROW_LR, [LR], 0))
        assert isinstance(answer, Refused) and "comes too late" in answer.why
        assert host.everything() == before
        assert not (host.folder / "ps-0.session").exists()
        server = host.pid()
        host.memory.end_old_writers(members={os.getpid()})
        assert is_alive(server) and host.pid() == server, "it writes nothing, and may be saving"
    finally:
        host.close()


def test_a_server_whose_workers_continued_without_it_is_no_writer(tmp_path: Path) -> None:
    """The membership may change before they make a step, and its answer to `Enter` came too late."""
    host = Host(tmp_path, job="late")
    try:
        peer = host.peer()
        body, frames = fuzz_server.enter(host.endpoints)
        peer.ask(body, frames)
        host.memory.claim(taken := np.array([0]))
        peer.ask(HeartbeatMsg(1, 0, 1, os.getpid(), 0, abandoned=GENERATION))
        server, before = host.pid(), host.everything()
        host.memory.end_old_writers(members={os.getpid()})
        assert is_alive(server) and host.pid() == server
        peer.ask(body, frames)
        answer, _ = peer.ask(Apply(GENERATION, 1, [], 0.5, ROW_LR, [LR], 0))
        assert isinstance(answer, Refused) and "comes too late" in answer.why
        assert host.everything() == before
        assert host.memory._writer[taken] == os.getpid()
    finally:
        host.close()


def test_a_server_in_a_mode_that_nobody_ended_is_killed_before_workers_write(tmp_path: Path) -> None:
    """A host leader that died when it had removed the session, and had not asked the server."""
    host = Host(tmp_path, job="unasked")
    try:
        host.peer().ask(*fuzz_server.enter(host.endpoints))
        unasked = host.pid()
        (host.folder / "ps-0.session").unlink()
        leave_ps.retire_servers(host.job, host.key, host.folder, host.host)
        assert is_alive(unasked)
        host.memory.end_old_writers(members={os.getpid()})
        assert not is_alive(unasked)
    finally:
        host.close()


def test_a_server_that_does_not_learn_that_the_mode_is_over_is_killed(tmp_path: Path) -> None:
    host = Host(tmp_path, job="deaf")
    try:
        host.peer().ask(*fuzz_server.enter(host.endpoints))
        deaf = host.pid()
        os.kill(deaf, signal.SIGSTOP)
        leave_ps.retire_servers(host.job, host.key, host.folder, host.host)
        wait_for(lambda: not is_alive(deaf), "its end")
        restarted(host, deaf)
        answer, _ = host.peer().ask(PullDense(GENERATION, -1))
        assert isinstance(answer, Refused) and "is not served here" in answer.why
    finally:
        host.close()


# --- several servers -------------------------------------------------------------------------------------------------


def train_with(peers: list[Peer], layout: Layout, owner: list[int], first_request: int, steps: int) -> dict[str, Any]:
    """Whole steps at several servers; returns the account after the last."""
    answer: Any = None
    peers[0].send(fuzz_server.a_beat())
    for request in range(first_request, first_request + 2 * steps):
        given = fuzz_server.lease(peers[0], request)
        for peer, frames in zip(peers, fuzz_server.gradients(layout, owner), strict=True):
            assert fuzz_server.push(peer, given, frames) == Ok()
        answer = fuzz_server.done(peers[0], given)
        assert isinstance(answer, Ok)
    return answer.position.account if answer.position is not None else {}


def test_two_servers_of_one_memory_apply_every_step_and_outlive_a_kill(tmp_path: Path) -> None:
    owner = [0, 1, 0]
    host = Host(tmp_path, job="two", n_servers=2)
    try:
        peers = [host.peer(i) for i in (0, 1)]
        for me, peer in enumerate(peers):
            assert peer.ask(*fuzz_server.enter(host.endpoints, me, owner))[0] == Ok()
        train_with(peers, host.layout, owner, 1, steps=1)
        wait_for(lambda: host.memory.marks().finished.min() == 1, "step 1 at both servers")

        for index in (0, 1):  # the coordinator, then the other one
            dead = host.pid(index)
            os.kill(dead, signal.SIGKILL)
            restarted(host, dead, index)
            peers = [host.peer(i) for i in (0, 1)]
            train_with(peers, host.layout, owner, 10 * (index + 1), steps=1)
            step = index + 2
            wait_for(lambda step=step: host.memory.marks().finished.min() == step, f"step {step}")

        account = finish_with(peers, host.layout, owner, 30)
        assert account["total"] == account["applied"] == 64
        assert (host.memory.marks().finished == 4).all()
        np.testing.assert_array_equal(host.dense(0)[1], BEGIN - np.float32(4 * LR))
    finally:
        host.close()


@pytest.mark.parametrize(
    ("point", "lost", "missed"),
    [("before the step", 16, 0), ("rows begun", 0, 1), ("rows done", 0, 0), ("dense done", 0, 0)],
)
def test_a_server_that_dies_in_a_step_beside_the_coordinator_costs_what_it_had_not_applied(
    tmp_path: Path, point: str, lost: int, missed: int
) -> None:
    """Samples are lost where nothing of their step was begun, else the shards that missed it."""
    owner = [0, 1, 0]
    host = Host(tmp_path, job="beside", n_servers=2)
    try:
        dying = replace_by_one_that_dies(host, point, index=1)
        peers = [host.peer(i) for i in (0, 1)]
        for me, peer in enumerate(peers):
            assert peer.ask(*fuzz_server.enter(host.endpoints, me, owner))[0] == Ok()
        train_with(peers, host.layout, owner, 1, steps=1)
        assert dying.wait() == -signal.SIGKILL
        restarted(host, dying.pid, index=1)
        account = finish_with([host.peer(i) for i in (0, 1)], host.layout, owner, 10)
        assert (account["total"], account["applied"], account["lost"]) == (64, 64 - lost, lost)
        assert account["shard_steps_missed"] == missed
    finally:
        host.close()


@pytest.mark.parametrize(
    ("first", "point_of_0", "point_of_1", "lost", "missed", "steps_of_dense"),
    [
        (1, "before the step", "rows done", 0, 3, 3),
        (1, "rows done", "before the step", 16, 1, 3),
        (1, "dense done", "rows begun", 0, 1, 4),
        (1, "before others discard", "before the step", 16, 0, 4),
        (0, "before the step", "before the step", 16, 3, 3),
        (0, "rows begun", "dense done", 0, 3, 3),
    ],
)
def test_a_coordinator_and_another_server_that_die_one_right_after_the_other_cost_a_step_at_most(
    tmp_path: Path, first: int, point_of_0: str, point_of_1: str, lost: int, missed: int, steps_of_dense: int
) -> None:
    """first: who of them dies first. A push that both had taken, of a lease that is still out, is computed again."""
    owner = [0, 1, 0]
    host = Host(tmp_path, job="both", n_servers=2)
    try:
        point_of = point_of_0, point_of_1
        one = replace_by_one_that_dies(host, point_of[first], first)
        other = replace_by_one_that_dies(host, point_of[1 - first], 1 - first, after=one.pid)
        peers = [host.peer(i) for i in (0, 1)]
        ahead = {"discipline": {"name": "gba", "lookahead": 1}}
        for me, peer in enumerate(peers):
            assert peer.ask(*fuzz_server.enter(host.endpoints, me, owner, **ahead))[0] == Ok()
        peers[0].send(fuzz_server.a_beat())
        leases = [fuzz_server.lease(peers[0], request) for request in (1, 2, 3)]
        for given in leases:
            for peer, frames in zip(peers, fuzz_server.gradients(host.layout, owner), strict=True):
                assert fuzz_server.push(peer, given, frames) == Ok()
        for given in leases[:2]:
            peers[0].send(PushDone(WORKER, GENERATION, given.micro, given.serial))
        for index, dying in ((first, one), (1 - first, other)):
            assert dying.wait() == -signal.SIGKILL
            restarted(host, dying.pid, index)
        peers = [host.peer(i) for i in (0, 1)]
        for given in leases[1:]:
            assert isinstance(fuzz_server.done(peers[0], given), Ok)
        account = finish_with(peers, host.layout, owner, 10)
        assert (account["total"], account["applied"], account["lost"]) == (64, 64 - lost, lost)
        assert account["shard_steps_missed"] == missed
        assert (host.memory.marks().finished == 4).all()
        np.testing.assert_array_equal(host.dense(0)[1], BEGIN - np.float32(LR * steps_of_dense))
    finally:
        host.close()


def finish_with(peers: list[Peer], layout: Layout, owner: list[int], first_request: int) -> dict[str, Any]:
    peers[0].send(fuzz_server.a_beat())
    request = first_request
    while True:
        answer, _ = peers[0].ask(fuzz_server.an_ask(request))
        assert isinstance(answer, LeaseReply), answer
        if answer.status == "finished":
            return answer.position.account
        if answer.lease is None:
            continue
        for peer, frames in zip(peers, fuzz_server.gradients(layout, owner), strict=True):
            assert fuzz_server.push(peer, answer.lease, frames) == Ok()
        assert isinstance(fuzz_server.done(peers[0], answer.lease), Ok)
        request += 1


def test_a_server_of_another_host_that_lost_a_push_costs_those_samples_and_no_more(tmp_path: Path) -> None:
    owner = [0, 1, 0]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    key = transport.new_key()
    hosts = [Host(tmp_path / name, "hosts", number, key=key) for number, name in enumerate("ab")]
    try:
        endpoints = [host.endpoints[0] for host in hosts]
        peers = [host.peer(local=False) for host in hosts]
        for me, peer in enumerate(peers):
            assert peer.ask(*fuzz_server.enter(endpoints, me, owner))[0] == Ok()
        peers[0].send(fuzz_server.a_beat())
        leases = [fuzz_server.lease(peers[0], request) for request in (1, 2)]
        for given in leases:
            for peer, frames in zip(peers, fuzz_server.gradients(LAYOUT, owner), strict=True):
                assert fuzz_server.push(peer, given, frames) == Ok()
        assert isinstance(fuzz_server.done(peers[0], leases[0]), Ok)
        dead = hosts[1].pid()
        os.kill(dead, signal.SIGKILL)  # with both pushes
        restarted(hosts[1], dead)
        assert isinstance(fuzz_server.done(peers[0], leases[1]), Ok)
        peers = [host.peer(local=False) for host in hosts]
        account = finish_with(peers, LAYOUT, owner, 10)
        assert account["total"] == 64
        assert account["lost"] == 16
        assert account["applied"] == 48
        np.testing.assert_array_equal(hosts[0].dense()[1], BEGIN - np.float32(4 * LR))
    finally:
        for host in hosts:
            host.close()


# --- repeats ---------------------------------------------------------------------------------------------------------


def test_what_is_sent_twice_counts_once(tmp_path: Path) -> None:
    host = Host(tmp_path, job="twice")
    try:
        peer = host.peer()
        body, frames = fuzz_server.enter(host.endpoints)
        assert peer.ask(body, frames)[0] == peer.ask(body, frames)[0] == Ok()
        peer.send(fuzz_server.a_beat())
        leases = [fuzz_server.lease(peer, request) for request in (1, 1, 2, 2)]
        assert leases[0] == leases[1]
        assert leases[2] == leases[3]
        for given in leases:
            assert fuzz_server.push(peer, given, fuzz_server.gradients(host.layout)[0]) == Ok()
        for given in leases:
            assert isinstance(fuzz_server.done(peer, given), Ok)
        late = fuzz_server.push(peer, leases[0], fuzz_server.gradients(host.layout, value=100.0)[0])
        assert late == Ok()
        again = Apply(GENERATION, 1, [PlannedMember(0, 1, 1.0)], 0.5, ROW_LR, [LR], 0)
        assert peer.ask(again)[0] == messages.Applied(1)
        assert finish_epoch(peer, host.layout, 3)["total"] == 64
        answer, frames = peer.ask(PullDense(GENERATION, -1))
        assert answer == messages.Dense(4)
        np.testing.assert_array_equal(np.frombuffer(frames[0], np.float32), BEGIN - np.float32(4 * LR))
        assert peer.ask(PullDense(GENERATION, 4))[1] == []
    finally:
        host.close()


# --- containers ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_of_a_user_without_a_home_trains_from_a_package_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    for name in ("gba_hvd", "recovery"):
        shutil.copytree(Path(launch.__file__).parents[2] / name, package / name, ignore=lambda *_: ["__pycache__"])
        for folder in {path.parent for path in (package / name).rglob("*.py")}:
            (folder / "__pycache__").touch()  # a file: also root makes no folder there
    for name in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/no")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setattr(sys, "executable", str(Path(sys.prefix, "bin", "python")))  # a process that has no kernels yet
    host = Host(tmp_path, job="container")
    try:
        peer = host.peer()
        peer.ask(*fuzz_server.enter(host.endpoints))
        fuzz_server.train_a_step(peer, host.layout, 1)
        step, values = host.dense()
        assert step == 1
        assert np.array_equal(values, BEGIN - np.float32(LR))
        assert list((tmp_path / f"gba-hvd-kernels-{os.geteuid()}").glob("*/*.nbi")), host.log()
    finally:
        host.close()
