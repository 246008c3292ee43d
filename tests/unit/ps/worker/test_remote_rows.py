"""Rows that a worker pulls from the servers of other hosts: found under their keys, and as many as were asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from gba_hvd import Compression, kernels
from gba_hvd.compression.row_codec import RowCoder, encode_rows, read_keys
from gba_hvd.embedding.passes import PulledRows
from gba_hvd.ps.client import Reply
from gba_hvd.ps.messages import Endpoint, Rows
from gba_hvd.ps.worker.remote_rows import RemoteRows
from gba_hvd.ps.worker.session import PsSession

DIM = 3


def rows_of(keys: np.ndarray) -> np.ndarray:
    """float32 [n, DIM]: what the servers have."""
    return np.arange(DIM, dtype=np.float32) + keys[:, None].astype(np.float32)


class Servers:
    """Take the place of the client: each answers with the rows that it was asked for, `more` of them too many."""

    def __init__(self, spec: Any, more: int = 0) -> None:
        self._spec, self._more = spec, more
        self.asked: list[tuple[int, list[int]]] = []
        self.of_shard: list[int] = []

    def of(self, key: int) -> int:
        return self.of_shard[key % len(self.of_shard)]

    def send(self, server: int, body: Any, frames: Any, **_: Any) -> Future[Reply]:
        keys = np.frombuffer(frames[0], np.int64) if body.compressor is None else read_keys(frames[0], 2**40)
        self.asked.append((server, keys.tolist()))
        rows = np.concatenate([rows_of(keys), np.zeros((self._more, DIM), np.float32)])
        future: Future[Reply] = Future()
        future.set_result(Reply(Rows(), [rows if body.compressor is None else encode_rows(rows, self._spec)]))
        return future


@pytest.fixture
def pull(make_tables: Callable[..., Any]) -> Callable[..., tuple[PulledRows, Servers]]:
    def pulled(keys: list[int], hosts: list[int], spec: Any = None, more: int = 0) -> tuple[PulledRows, Servers]:
        tables, servers = make_tables({"user": (500, DIM)}), Servers(spec, more)
        servers.of_shard = [shard % len(hosts) for shard in range(tables.layout.n_shards)]
        endpoints = tuple(Endpoint(host, i, "", 0, 0) for i, host in enumerate(hosts))
        session = PsSession(1, "gba", "job", b"", endpoints, tuple(servers.of_shard), (0,), "global")
        coder = None if spec is None else RowCoder(spec, [DIM])
        remote = RemoteRows(session, 1, tables, servers, coder)  # type: ignore[arg-type]
        found = remote.fetch([np.array(keys, np.int64)], whole=False)[0]
        assert found is not None
        return found, servers

    return pulled


@pytest.mark.parametrize("spec", [None, Compression.bf16.always()], ids=["whole", "bf16"])
@pytest.mark.parametrize("hosts", [[2], [1, 2], [2, 3, 1, 4]], ids=str)
@pytest.mark.parametrize("keys", [[], [7], [9, 4, 9, 2, 31, 4, 6, 8, 1, 3]], ids=len)
def test_each_row_comes_once_from_its_server(pull: Any, keys: list[int], hosts: list[int], spec: Any) -> None:
    found, servers = pull(keys, hosts, spec)
    remote = [key for key in dict.fromkeys(keys) if hosts[servers.of(key)] != 1]
    assert sorted(found.keys.tolist()) == sorted(remote)
    number = np.empty(len(remote), np.int32)
    assert kernels.find_keys(np.array(remote, np.int64), found.slots, found.keys, number) < 0
    assert np.array_equal(found.values[number], rows_of(np.array(remote, np.int64)))
    for server, asked in servers.asked:
        assert asked == sorted(asked) or spec is None
        assert sorted(asked) == sorted(key for key in remote if servers.of(key) == server)
    assert sum(len(asked) for _, asked in servers.asked) == len(remote)


def test_other_rows_than_were_asked_for_are_refused(pull: Any) -> None:
    with pytest.raises(Exception, match="server 0 sent 4 rows, 2 were asked for"):
        pull([1, 3], [2], more=2)
