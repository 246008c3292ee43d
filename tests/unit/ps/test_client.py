"""A client that cannot make its sockets: no request waits for an answer that will not come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gba_hvd.errors import GbaError
from gba_hvd.ps import transport
from gba_hvd.ps.client import Client
from gba_hvd.ps.messages import Endpoint, Export


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_without_sockets_requests_fail_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(transport, "connect", no_socket)
    client = Client("job", b"k" * 32, [Endpoint(1, 0, "", 0, 0)], 1, tmp_path, 50.0)
    client.start()
    try:
        with pytest.raises(GbaError, match=r"the client's thread died of OSError: .*Too many open files"):
            client.send(0, Export(1, leaving=True)).result(30.0)
    finally:
        client.close()
