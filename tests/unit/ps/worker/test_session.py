"""How the dense values are spread over the servers."""

from __future__ import annotations

import numpy as np

from gba_hvd.ps.messages import Endpoint
from gba_hvd.ps.worker.session import DenseParts, PsSession


def session(*dense_servers: int) -> PsSession:
    servers = tuple(Endpoint(host, 0, "", 0, 0) for host in (11, 12, 13))
    return PsSession(1, "gba", "job", b"", servers, (0, 1), dense_servers, "global")


def test_what_was_split_is_joined_again() -> None:
    parts = DenseParts(3, (1, 0, 1), [3, 2, 1])
    flat = np.arange(6, dtype=np.float32)
    split = parts.split(flat)
    assert [part.tolist() for part in split] == [[3, 4], [0, 1, 2, 5], []]
    assert parts.tensors == [[1], [0, 2], []] and len(parts) == 3
    flat[:] = -1  # the parts are copies
    assert parts.joined(split).tolist() == [0, 1, 2, 3, 4, 5]


def test_servers_of_other_hosts_are_far() -> None:
    assert session(0).remote_servers(12) == [True, False, True]
