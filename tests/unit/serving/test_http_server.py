"""Requests that MLflow's scoring server would not read, and options of a store."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from gba_hvd_tools.checkpoint.store_argument import options_of
from starlette.requests import ClientDisconnect, Request

from gba_hvd import BadInput
from gba_hvd.serving import http_server
from gba_hvd.serving.http_server import _with_type


def status_of(headers: list[tuple[bytes, bytes]], app: Any) -> list[int]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/invocations", "headers": headers}
    asyncio.run(_with_type(app)(scope, None, send))
    return [one["status"] for one in sent if "status" in one]


def test_content_types_and_clients_that_leave() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["headers"])[b"content-type"])
        raise ClientDisconnect

    assert status_of([], app) == [415] and not seen
    assert status_of([(b"content-type", b"Application/JSON")], app) == []
    assert seen == [b"application/json"]


def answered(
    app: Any,
    pieces: Iterable[bytes],
    *headers: tuple[bytes, bytes],
    method: str = "POST",
    path: str = "/invocations",
) -> tuple[int, str, int]:
    """Status and text of the one answer, and how many pieces of the body were taken."""
    sent: list[Any] = []
    taken = 0
    left = iter(pieces)

    async def receive() -> Any:
        nonlocal taken
        taken += 1
        body = next(left, None)
        return {"type": "http.request", "body": body or b"", "more_body": body is not None}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"",
             "headers": [(b"content-type", b"application/json"), *headers]}  # fmt: skip
    asyncio.run(_with_type(app)(scope, receive, send))
    (status,) = [one["status"] for one in sent if "status" in one]
    return status, b"".join(one.get("body", b"") for one in sent).decode(), taken


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(http_server, "check_hashed", lambda *about: None)
    monkeypatch.setattr(http_server, "id_columns", lambda about: ())
    return http_server.app_of(
        cast(Any, SimpleNamespace(manifest=SimpleNamespace(input=(), takes_raw=False), encoder=None))
    )


def test_a_body_over_the_limit_is_refused_before_all_of_it_has_come(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MOST_BYTES", 10)
    status, text, taken = answered(app, [b"x"], (b"content-length", b"100000000000"))
    assert (status, taken) == (413, 0) and "may have 10 bytes, got 100,000,000,000: send fewer" in text
    status, text, taken = answered(app, [b"1234"] * 1000)
    assert (status, taken) == (413, 3) and "may have 10 bytes, got more" in text
    assert answered(app, [b"12345", b"67890"])[0] == 400


def test_json_that_is_nested_too_deep_is_refused_in_a_line(app: Any) -> None:
    status, text, _ = answered(app, [b'{"dataframe_records": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
    assert status == 400 and text.startswith("the JSON of the request is nested too deep") and "\n" not in text


def test_health_shows_a_problem_and_fails_once_updates_have_ended(app: Any) -> None:
    def health(has_ended: bool, problem: str) -> tuple[int, str]:
        followed = http_server.healthy_unless(app, lambda: has_ended, lambda: problem)
        return answered(followed, [], method="GET", path="/health")[:2]

    assert health(False, "") == (200, "\n")
    assert health(False, "they are gone") == (200, "they are gone")
    assert health(True, "StoreError: it failed") == (503, "StoreError: it failed")


@pytest.mark.slow
def test_a_client_with_half_a_request_does_not_keep_the_server(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_server, "_MOST_WAIT_S", 1)
    listening = http_server.bound("127.0.0.1", 0)
    client = socket.create_connection(listening.getsockname())
    client.sendall(b"POST /invocations HTTP/1.1\r\nHost: a\r\nContent-Type: a\r\nContent-Length: 9\r\n\r\nhalf")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await receive()
            os.kill(os.getpid(), signal.SIGTERM)
            await Request(scope, receive).body()

    before = signal.signal(signal.SIGTERM, lambda *about: None)
    try:
        http_server.serve(app, listening)
    finally:
        signal.signal(signal.SIGTERM, before)
        client.close()
    said = capfd.readouterr().err
    assert "requests that have begun are waited for (1), for 1 s at most" in said and "Traceback" not in said


def test_the_patience_of_a_store_is_numbers() -> None:
    assert options_of(["tries=2", "timeout_s=3", "key=7"]) == {"tries": 2, "timeout_s": 3.0, "key": "7"}
    with pytest.raises(BadInput, match="--option tries=two: expected a whole number"):
        options_of(["tries=two"])
