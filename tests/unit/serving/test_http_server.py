"""Requests that MLflow's scoring server would not read, and options of a store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from gba_hvd import BadInput
from gba_hvd.serving.http_server import _with_type
from gba_hvd_tools.checkpoint.store_argument import options_of


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


def test_the_patience_of_a_store_is_numbers() -> None:
    assert options_of(["tries=2", "timeout_s=3", "key=7"]) == {"tries": 2, "timeout_s": 3.0, "key": "7"}
    with pytest.raises(BadInput, match="--option tries=two: expected a whole number"):
        options_of(["tries=two"])
