"""What all workers of an asynchronous mode know of it: its servers, and which of them has what of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from gba_hvd.compression.spec import Spec
from gba_hvd.ps.messages import Compressor, Endpoint


class PsSession(msgspec.Struct, frozen=True):
    """What all workers agree on when an asynchronous mode is entered, and what a late joiner receives.

    shard_servers: server of each shard; dense_servers: server of each dense tensor (indices into `servers`)
    accesses: row gradients carry how often each row was looked up
    """

    generation: int
    mode: str
    job: str
    key: bytes
    servers: tuple[Endpoint, ...]
    shard_servers: tuple[int, ...]
    dense_servers: tuple[int, ...]
    row_average: str
    rule: str = "none"
    accesses: bool = False

    def remote_servers(self, host: int) -> list[bool]:
        """Whether each server is on another host."""
        return [server.host != host for server in self.servers]


@dataclass(frozen=True)
class DenseState:
    """One dense tensor as a server has it: values float32 [n], and the optimizer's state of it."""

    values: np.ndarray
    state: dict[str, Any]


class DenseParts:
    """How the dense values, float32 [n] with the tensors one after the other, are spread over the servers.

    dense_servers: server of each tensor. sizes: numbers in each tensor; tensors: of each server, those it has
    """

    def __init__(self, n_servers: int, dense_servers: Sequence[int], sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.tensors = [[t for t, server in enumerate(dense_servers) if server == s] for s in range(n_servers)]
        ends = np.cumsum([0, *sizes])
        self._slices = [[slice(int(ends[t]), int(ends[t + 1])) for t in part] for part in self.tensors]

    def __len__(self) -> int:
        return len(self.tensors)

    def split(self, flat: np.ndarray) -> list[np.ndarray]:
        """For each server what is its of [n], float32 [n of the server]; copies."""
        return [np.concatenate([flat[at] for at in some]) if some else flat[:0].copy() for some in self._slices]

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The inverse of `split`; a copy."""
        flat = np.empty(sum(self.sizes), dtype=np.float32)
        for values, slices in zip(parts, self._slices, strict=True):
            at = 0
            for place in slices:
                n = place.stop - place.start
                flat[place] = values[at : at + n]
                at += n
        return flat


def compressor_of(spec: Spec) -> Compressor:
    """How a worker describes its compressor to a server."""
    return Compressor(spec.selector, spec.keep, spec.refresh_every, spec.drift, spec.values, spec.per_table)


def place_dense(sizes: Sequence[int], n_servers: int) -> list[int]:
    """Server of each dense tensor: the largest first, each to the server that has least."""
    load, server = [0] * n_servers, [0] * len(sizes)
    for tensor in sorted(range(len(sizes)), key=lambda t: -sizes[t]):
        server[tensor] = min(range(n_servers), key=lambda s: (load[s], s))
        load[server[tensor]] += sizes[tensor]
    return server
