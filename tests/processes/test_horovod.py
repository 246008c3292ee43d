"""What Horovod, as we build it, does that the published one does not (`tools.build_horovod` says why)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from .cluster import wait_for

pytestmark = pytest.mark.processes
PATIENCE_S = 60.0
JOINS = "import horovod.torch as hvd; hvd.init()"
TRIES_TWICE = """
import os
import horovod.torch as hvd
try:
    hvd.init()
except ValueError as error:
    print(error)
hvd.shutdown()
os.environ.update({name: "1" for name in ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE")})
hvd.init()
print("a world of", hvd.size())
"""


@pytest.fixture
def rendezvous() -> Iterator[tuple[int, Any]]:
    """Where workers find each other, as the launcher has it: its port, and what they have put there, by scope."""
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer(0)
    port = server.start()
    server.init([])
    yield port, server._httpd.cache
    server.stop()
    server._httpd.server_close()


def worker(script: str, rank: int, port: int) -> subprocess.Popen[str]:
    """One of two, on one host."""
    world = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    place = {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": "lo"}
    place["GLOO_TIMEOUT_SECONDS"] = 1  # five times that, if it is the dead one that would have connected
    how = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "HOSTNAME": "localhost"}
    environ = {f"HOROVOD_{name}": str(value) for name, value in (world | place | how).items()}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | environ, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_worker_that_dies_while_the_world_forms_does_not_take_the_others_along(rendezvous: tuple[int, Any]) -> None:
    port, told = rendezvous
    with worker(JOINS, 1, port) as dies:
        try:
            wait_for(lambda: told.get("global"), "the address of rank 1", PATIENCE_S)
        finally:
            os.kill(dies.pid, signal.SIGKILL)
        dies.communicate(timeout=PATIENCE_S)
    with worker(TRIES_TWICE, 0, port) as survivor:
        said, errors = survivor.communicate(timeout=PATIENCE_S)
    assert survivor.returncode == 0, errors
    assert "initialization failed" in said
    assert said.endswith("a world of 1\n")
