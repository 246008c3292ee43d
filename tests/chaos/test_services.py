"""The proxy, the bad tracking servers, the lying store and the neighbours do what they are planned to do."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gba_hvd_tools.chaos import services
from gba_hvd_tools.chaos.store import ChaosFileSystem


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while piece := self.request.recv(1000):
                self.request.sendall(piece)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[services.Proxy]:
    """Before a server that says everything back."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        folder = tmp_path / "gba-hvd-1"
        folder.mkdir()
        port = server.server_address[1]
        (folder / "ps-0.address").write_text(json.dumps({"control": port, "pull": port, "pid": 1}))
        made = services.Proxy(tmp_path, seed=1)
        yield made
        made.close()
        server.shutdown()


def said_back(connection: socket.socket, piece: bytes = b"hello") -> float:
    """Seconds until it came back."""
    began = time.monotonic()
    connection.sendall(piece)
    got = b""
    while len(got) < len(piece):
        more = connection.recv(1000)
        assert more, "the connection was closed"
        got += more
    assert got == piece
    return time.monotonic() - began


def connected(proxy: services.Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.ports[0]), timeout=30)


@pytest.mark.slow
def test_the_proxy_passes_everything_when_there_is_no_fault(proxy: services.Proxy) -> None:
    with connected(proxy) as connection:
        said_back(connection)
    assert not proxy.met


@pytest.mark.slow
def test_a_cut_holds_everything_until_it_is_over_and_loses_nothing(proxy: services.Proxy) -> None:
    with connected(proxy) as connection:
        said_back(connection)
        proxy.fault("network_cut", 0.5)
        assert said_back(connection) >= 0.4
    assert proxy.met


@pytest.mark.slow
def test_delay_and_loss_are_met_by_what_passes(proxy: services.Proxy) -> None:
    with connected(proxy) as connection:
        proxy.fault("network_delay", 30)
        assert said_back(connection) >= 0.04  # there and back
        proxy.fault("network_loss", 30)
        assert max(said_back(connection) for _ in range(60)) >= 0.2
    assert proxy.met


@pytest.mark.slow
def test_a_reset_breaks_connections_and_new_ones_work(proxy: services.Proxy) -> None:
    with connected(proxy) as connection:
        said_back(connection)
        proxy.fault("network_reset", 0.1)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(10) == b""
    with connected(proxy) as connection:
        said_back(connection)


@pytest.mark.slow
def test_a_tracking_server_answers_500_or_nothing() -> None:
    bad = services.BadTracking(hangs=False)
    asked = http.client.HTTPConnection(bad.uri.removeprefix("http://"), timeout=30)
    asked.request("GET", "/api")
    assert asked.getresponse().status == 500
    asked.close()
    bad.close()
    hanging = services.BadTracking(hangs=True)
    asked = http.client.HTTPConnection(hanging.uri.removeprefix("http://"), timeout=0.3)
    asked.request("GET", "/api")
    with pytest.raises(TimeoutError):
        asked.getresponse()
    asked.close()
    hanging.close()


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "fault.json"
    monkeypatch.setenv("GBA_HVD_CHAOS_STORE", str(path))
    return path


def begin(control: Path, kind: str, seconds: float = 60.0) -> None:
    control.write_text(json.dumps({"kind": kind, "until": time.time() + seconds}))


def test_a_store_fails_loses_and_lists_what_was(control: Path, tmp_path: Path) -> None:
    store, folder = ChaosFileSystem(), f"{tmp_path}/saved"
    store.pipe_file(f"{folder}/one", b"1")
    assert list(store.find(folder)) == [f"{folder}/one"]
    begin(control, "store_stale")
    store.pipe_file(f"{folder}/two", b"2")
    assert list(store.find(folder)) == [f"{folder}/one"]
    assert store.cat_file(f"{folder}/two") == b"2"
    begin(control, "store_loses")
    store.pipe_file(f"{folder}/three", b"3")
    begin(control, "store_503")
    with pytest.raises(OSError, match="503"):
        store.find(folder)
    begin(control, "store_503", seconds=-1.0)
    assert sorted(store.find(folder)) == [f"{folder}/one", f"{folder}/two"]
    assert Path(f"{control}.hits").stat().st_size == 3


def test_a_full_file_system_is_full_and_only_that(tmp_path: Path) -> None:
    mounted = services.small_file_system(tmp_path, 1)
    if services.can_mount():  # says why not
        with pytest.raises(OSError, match="run as root"), mounted:
            pass
        return
    with mounted:
        ballast = services.fill(tmp_path)
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "more").write_bytes(bytes(8192))
        ballast.unlink()
        (tmp_path / "more").write_bytes(bytes(8192))
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_neighbours_end_by_themselves() -> None:
    burning = services.start_neighbours(10 * len(os.sched_getaffinity(0)) - 1, 0.1)
    assert len(burning) == 1
    assert [one.wait(60) for one in burning] == [0]
