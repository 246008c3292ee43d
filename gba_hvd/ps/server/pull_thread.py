"""The server's second thread: answers pulls of rows while the main thread is busy.

It owns the socket for pulls and only reads shard memory: a row that is being written may come half old, half new.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq

from gba_hvd.ps import transport
from gba_hvd.ps.messages import ProtocolError, PullRows, Request, Rows
from gba_hvd.ps.partition.compressed_frames import RowPulls, encode_rows
from gba_hvd.ps.request_port import Requester, RequestPort
from gba_hvd.ps.transport import Listener
from gba_hvd.shm.shard_memory import ShardMemory

log = logging.getLogger("gba_hvd.ps")
_TICK_MS = 100


class PullThread:
    """`start()`, `end()`, `join()`. mine: asked for each pull, bool [S]: the shards whose rows are given out here."""

    def __init__(self, listener: Listener, job: str, memory: ShardMemory, mine: Callable[[], np.ndarray]) -> None:
        self._port = RequestPort(listener, job, self._rows)
        self._memory, self._mine, self._pulls = memory, mine, RowPulls()
        self._thread = threading.Thread(target=self._serve, name="pulls", daemon=True)
        self._is_over = False

    @property
    def port(self) -> int:
        return self._port.number

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """From any thread, at once."""
        self._is_over = True

    def join(self) -> None:
        self._thread.join()

    def _serve(self) -> None:
        poller = zmq.Poller()
        sockets = {transport.pollable(socket): socket for socket in self._port.sockets}
        for polled in sockets:
            poller.register(polled, zmq.POLLIN)
        next_tick = 0.0
        while not self._is_over:
            try:
                for polled, _ in poller.poll(_TICK_MS):
                    self._port.serve(sockets[polled])
                if (now := time.monotonic()) >= next_tick:
                    next_tick = now + _TICK_MS / 1000
                    self._port.tick()
            except Exception:
                log.exception("the server continues after an error that belongs to no pull")
                time.sleep(_TICK_MS / 1000)

    def _rows(self, caller: Requester, request: Request, frames: list[Any]) -> tuple[Rows, Sequence[Any]]:
        if not isinstance(request, PullRows):
            raise ProtocolError(f"{type(request).__name__} does not belong to the port for pulls")
        return Rows(), encode_rows(self._memory, self._mine(), request, frames, self._pulls)
