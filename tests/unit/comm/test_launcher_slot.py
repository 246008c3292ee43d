"""May a worker come back after its world broke? With a store that forgets as the launcher's does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd.comm.launcher_slot import LauncherSlot, may_continue
from gba_hvd.comm.world_formation import Forming
from gba_hvd.elastic.world_rejoin import WorldRejoin
from gba_hvd.errors import LauncherUnreachable, WorkerEvicted


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._log(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        self.server.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._log(200)

    def _log(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Launcher(ThreadingHTTPServer):
    """The key-value store of an elastic launcher."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.values: dict[str, bytes] = {}

    def slot(self, host: str = "h1", elastic: str = "1") -> LauncherSlot:
        """Of a worker process of this host."""
        where = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.server_port)}
        return LauncherSlot({**where, "HOROVOD_ELASTIC": elastic, "HOROVOD_HOSTNAME": host, "HOROVOD_LOCAL_RANK": "0"})

    def form_a_world(self) -> None:
        """All workers of the last one have asked, or were given up."""
        self.values.clear()


PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _a_launcher_may_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gba_hvd.comm.launcher_slot._REQUEST_S", PATIENCE_S)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    with Launcher() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_worker_that_stood_still_while_it_was_replaced_does_not_take_the_other_ones_seat(launcher: Launcher) -> None:
    late, new = launcher.slot(), launcher.slot()
    new.register()
    with pytest.raises(WorkerEvicted, match="another worker"):
        late.register()
    new.verify(PATIENCE_S)


@pytest.mark.parametrize(
    ("found", "allowed", "words"),
    [("me", True, "no world since"), (None, False, "without it"), ("you", False, "another worker")],
)
def test_only_a_mark_of_its_own_lets_a_worker_go_on(found: str | None, allowed: bool, words: str) -> None:
    decision, why = may_continue("me", found)
    assert decision is allowed
    assert words in why


def test_a_survivor_goes_on_through_worlds_it_takes_part_in(launcher: Launcher) -> None:
    slot = launcher.slot()
    for _ in range(3):
        slot.register()
        slot.verify(PATIENCE_S)
        launcher.form_a_world()


def test_a_worker_that_the_others_went_on_without_is_given_up(launcher: Launcher) -> None:
    here, away = launcher.slot("h1"), launcher.slot("h2")
    here.register()
    away.register()
    here.verify(PATIENCE_S)
    launcher.form_a_world()
    here.register()
    with pytest.raises(WorkerEvicted, match="without it"):
        away.verify(PATIENCE_S)
    here.verify(PATIENCE_S)


def test_a_worker_whose_place_was_given_to_another_is_given_up(launcher: Launcher) -> None:
    old, new = launcher.slot("h2"), launcher.slot("h2")
    old.register()
    launcher.form_a_world()
    new.register()
    with pytest.raises(WorkerEvicted, match="another worker"):
        old.verify(PATIENCE_S)
    new.verify(PATIENCE_S)


def test_a_world_that_could_not_be_formed_may_be_asked_for_again(launcher: Launcher) -> None:
    slot = launcher.slot()
    slot.register()
    slot.verify(PATIENCE_S)
    launcher.form_a_world()
    slot.verify(PATIENCE_S)  # it was let in, and the others died before it had left its mark


@pytest.mark.slow
def test_a_launcher_that_is_gone_is_waited_for_so_long_and_no_longer() -> None:
    with Launcher() as server:
        slot = server.slot()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        slot.register()
        server.shutdown()
        thread.join()
    with pytest.raises(LauncherUnreachable, match=r"was not reached for 0.3 s .* This worker ends"):
        slot.verify(0.3)
    with pytest.raises(OSError, match="refused"):
        slot.register()


def test_without_an_elastic_launcher_nothing_is_asked(launcher: Launcher) -> None:
    for slot in (launcher.slot(elastic="0"), LauncherSlot({})):
        slot.register()
        slot.verify(0.1)
    assert not launcher.values


@pytest.mark.slow
@pytest.mark.parametrize("error", [WorkerEvicted("it was away"), LauncherUnreachable("it is cut off")])
def test_a_worker_that_may_not_come_back_stops_in_the_background_too(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(timeout_s: float) -> None:
        raise error

    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    reported: Queue[str] = Queue()
    mode: Any = SimpleNamespace(
        position=SimpleNamespace(membership_epoch=1), contact=SimpleNamespace(), abandon=reported.put
    )
    slot: Any = SimpleNamespace(verify=refuse)
    world_rejoin = WorldRejoin(mode, 0, lambda world: 1, slot, PATIENCE_S, Forming())
    world_rejoin.start()
    assert reported.get(timeout=PATIENCE_S) == str(error)
    world_rejoin.stop(PATIENCE_S)
    assert not world_rejoin._thread.is_alive() and reported.empty()
