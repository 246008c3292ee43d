"""What a host's lead and its companion server tell each other in allreduce mode: where training stands, what is wanted.

So `gba-hvd status` and `gba-hvd switch` find the same server to talk to in every mode.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gba_hvd.ps.client import Client, Reply, ServerLost
from gba_hvd.ps.protocol import Beat, Endpoint, Hold, Position, Refused, Save, Saved

_SAVE_TIMEOUT_S = 60.0  # a server that has just been started takes some seconds


class LocalServer:
    """The lead's line to its host's server. Start with `start()`; `close()` may be called twice.

    look: where training stands, plain values; called on the client's thread
    """

    def __init__(
        self, job: str, key: bytes, folder: Path, host: int, worker: int, rank: int, look: Callable[[], dict[str, Any]]
    ) -> None:
        self._worker, self._rank, self._host, self._look = worker, rank, host, look
        self._client = Client(job, key, [Endpoint(host, 0, "", 0, 0)], host, folder, timeout_s=10.0)
        self._client.beat = self._beat
        self._client.on_position = self._hear
        self._heard: tuple[str, str] = ("", "")
        self._handled: tuple[str, str] = ("", "")
        self.saved: Saved | None = None
        self._accepted: Save | None = None  # which the server has not said the end of

    def start(self) -> None:
        self._client.start()

    def close(self) -> None:
        self._client.beat = None  # no goodbye: the worker stays in the job
        self._client.close()

    def wanted(self) -> tuple[str, str] | None:
        """(mode, reason) that an operator asked for, once."""
        if self._heard == self._handled:
            return None
        self._handled = self._heard
        return self._heard if self._heard[0] else None

    def save(self, request: Save, state: bytes) -> None:
        """Have the server save what it holds; what became of it is in `saved`."""
        future = self._client.send(0, request, [state], timeout_s=_SAVE_TIMEOUT_S)
        future.add_done_callback(lambda f: self._asked_to_save(request, f.result))

    def has_read(self, number: int) -> bool:
        """Whether the server has read the rows that it was told to save, or never will."""
        saved = self.saved
        return saved is not None and saved.number >= number and (saved.state != "running" or "read" in saved.facts)

    def hold(self, request: Hold) -> None:
        """Have the server give the signs of life of a claim."""
        self._client.send(0, request, timeout_s=_SAVE_TIMEOUT_S)

    def _asked_to_save(self, request: Save, result: Callable[[], Reply]) -> None:
        try:
            body = result().body
            why = body.why if isinstance(body, Refused) else ""
        except ServerLost as error:
            why = str(error)
        if why:
            self._save_failed(request, why)
        else:
            self._accepted = request

    def _beat(self) -> Beat:
        return Beat(self._worker, self._rank, self._host, os.getpid(), 0, told=self._look())

    def _hear(self, position: Position) -> None:
        self._heard = (position.wanted, position.reason)
        if position.saved is None:
            return
        if position.saved.number:
            self.saved = position.saved
            if position.saved.state != "running":
                self._accepted = None
        elif not position.saved.state and self._accepted is not None:
            # A server that knows of no save is a successor of the one that began it.
            self._save_failed(self._accepted, "the server that was saving its rows has died")
            self._accepted = None

    def _save_failed(self, request: Save, why: str) -> None:
        self.saved = Saved(request.epoch, request.number, "failed", {"why": why})
