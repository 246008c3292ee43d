"""The newest dense values: read from the file of this host's servers, pulled from those of other hosts.

What is pulled comes complete or as a difference, whichever was faster (`compression.bypass`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gba_hvd.comm.collectives import worker_lost
from gba_hvd.compression import dense_push
from gba_hvd.compression.bypass import Bypass, StepTiming
from gba_hvd.compression.dense_exchange import DenseExchange
from gba_hvd.compression.sparse_message import BadMessage
from gba_hvd.gradients.dense_gradients import DenseGradients
from gba_hvd.ps.client import Client
from gba_hvd.ps.dense_file import DenseReader
from gba_hvd.ps.messages import Compressor, Dense, PullDense
from gba_hvd.ps.state_files import path_of
from gba_hvd.ps.worker.replies import request
from gba_hvd.ps.worker.session import DenseParts, PsSession, compressor_of


class DenseValues:
    """One worker's, by server. Belongs to the training thread. `close()` may be called twice.

    Owns the readers of the files; uses, but does not own, the client and the model's dense parameters (`dense`).
    steps: of each server's values as they are here, -1: none yet.
    compression: None where nothing is pulled, too
    """

    def __init__(
        self, session: PsSession, worker: int, parts: DenseParts, dense: DenseGradients, client: Client,
        compression: DenseExchange | None,
    ) -> None:  # fmt: skip
        self._session, self._worker, self._parts, self._dense, self._client = session, worker, parts, dense, client
        self.steps = [-1] * len(parts)
        self._values = [np.empty(sum(parts.sizes[t] for t in part), dtype=np.float32) for part in parts.tensors]
        self._readers: list[DenseReader | None] = [None] * len(parts)
        self._compression = compression
        self._compressor: Compressor | None = None
        self._pulls: list[Bypass] = []  # by server: whether its values come compressed
        self._pulled_s = [time.perf_counter()] * len(parts)
        if compression is not None:
            self._compressor = compressor_of(compression.spec)
            self._pulls = [
                Bypass(["values"], compression.spec.is_forced, f"dense values from server {s}", "a pull takes")
                for s in range(len(parts))
            ]

    def open(self, host: int, folder: Path) -> None:
        """The files of this host's servers, in the job's folder."""
        for s, server in enumerate(self._session.servers):
            if server.host == host:
                self._readers[s] = DenseReader(path_of(folder, server.index, "dense"))

    def close(self) -> None:
        for reader in self._readers:
            if reader is not None:
                reader.close()
        self._readers = [None] * len(self._readers)

    def forget(self) -> None:
        """What is here may be other values than the model's."""
        self.steps = [-1] * len(self._parts)

    def refresh_(self) -> int:
        """Bring the model's dense parameters to the newest values; returns the oldest step among them."""
        for s, part in enumerate(self._parts.tensors):
            if not part:
                self.steps[s] = max(self.steps)
                continue
            reader, before = self._readers[s], self.steps[s]
            if reader is not None:
                self.steps[s] = reader.read(self._values[s], before)
            else:
                self._pull(s)
            if self.steps[s] > before:
                self._dense.set_parameters_(part, torch.from_numpy(self._values[s]))
        return min(self.steps)

    def as_served(self) -> np.ndarray:
        """float32 [n]: what the servers show now. Neither the model nor `steps` changes."""
        for s, part in enumerate(self._parts.tensors):
            if not part:
                continue
            reader = self._readers[s]
            if reader is not None:
                reader.read(self._values[s], -1)
                continue
            reply = request(self._client, s, PullDense(self._session.generation, -1))
            assert isinstance(reply.body, Dense)
            self._values[s] = np.frombuffer(reply.frames[0], dtype=np.float32)
        return self._parts.joined(self._values)

    def _pull(self, server: int) -> None:
        compress = bool(self._pulls) and any(self._pulls[server].tensors_next())
        compressor, asked_s = self._compressor if compress else None, time.perf_counter()
        body = PullDense(self._session.generation, self.steps[server], self._worker, compressor)
        reply = request(self._client, server, body)
        assert isinstance(reply.body, Dense)
        if not reply.frames:
            return
        self._take(server, reply.body, reply.frames[0])
        if self._compression is not None and compress == (reply.body.base != -1):
            now = time.perf_counter()  # a difference that was asked for may come complete: that says nothing
            took, self._pulled_s[server] = StepTiming(now - asked_s, 0.0, now - self._pulled_s[server]), now
            decision = self._pulls[server].saw(compress, [took])
            if decision is not None and decision.changed:
                self._compression.decisions.append(decision)

    def _take(self, server: int, dense: Dense, frame: Any) -> None:
        if dense.base == -1:
            self._values[server] = np.frombuffer(frame, dtype=np.float32).copy()
        elif dense.base == self.steps[server]:
            try:
                dense_push.add_(
                    self._values[server], frame, [self._parts.sizes[t] for t in self._parts.tensors[server]]
                )
            except BadMessage as error:
                raise worker_lost(f"server {server} sent dense values that are none: {error}") from error
        else:
            raise worker_lost(
                f"server {server} sent the difference to step {dense.base}, this worker has {self.steps[server]}"
            )
        self.steps[server] = dense.step
