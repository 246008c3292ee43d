"""What a host's leader and its companion server exchange in allreduce mode: where training stands, what is requested.

So `gba-hvd status` and `gba-hvd switch` find the same server to talk to in every mode. The client behind it starts the
servers of this host and starts them again, beside the training. Whether all of them answer is `is_ready`: a switch or a
checkpoint is agreed on only when all host leaders agree, so that no worker waits for a server that is not up.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from gba_hvd.ps import launch, messages
from gba_hvd.ps.client import Client, Reply, ServerLost
from gba_hvd.shm.process_state import is_alive

log = logging.getLogger("gba_hvd")
_SAVE_TIMEOUT_S = 60.0  # a server that has just been started takes some seconds
_FRESH_S = 3.0  # a server that answered so recently is up; heartbeats go out ten times as often
_HOLD_AGAIN_S = 5.0  # after a server refused to renew the claim


class HostServer:
    """The host leader's connection to its host's server. Start with `start()`; `close()` may be called twice.

    look: where training stands, plain values; called on the client's thread
    n_servers: of this host
    saved: status of the newest save that was asked for; reports of older ones are ignored
    """

    def __init__(
        self,
        job: str,
        key: bytes,
        folder: Path,
        host: int,
        worker: int,
        rank: int,
        look: Callable[[], dict[str, Any]],
        n_servers: int = 1,
    ) -> None:
        self._worker, self._rank, self._host, self._look, self._folder = worker, rank, host, look, folder
        endpoints = [messages.Endpoint(host, i, "", 0, 0) for i in range(n_servers)]
        self._client = Client(job, key, endpoints, host, folder, timeout_s=10.0)
        self._last_reply_s = [-math.inf] * n_servers  # when each server last answered
        self._warming = [False] * n_servers
        self._questions: dict[int, Future[Reply]] = {}  # to all but the first, which gets the heartbeats
        self._held: messages.DelegateClaim | None = None
        self._holding: Future[Reply] = Future()  # of the newest request to hold it
        self._held_by = 0  # the process that has it, as far as is known
        self._refused_s = -math.inf  # when a refusal of it was noted
        self._abandoned = 0
        self._asked = (0, 0)  # (epoch, number) of the newest save
        self._client.beat = self._beat
        self._client.on_position = self._on_position
        self._requested: tuple[str, str] = ("", "")
        self._handled: tuple[str, str] = ("", "")
        self.saved: messages.SaveStatus | None = None
        self._accepted: messages.Save | None = None  # whose end the server has not reported

    def start(self) -> None:
        self._client.start()

    def close(self) -> None:
        self._client.beat = None  # no goodbye: the worker stays in the job
        self._client.close()

    def requested_mode(self) -> tuple[str, str] | None:
        """(mode, reason) that an operator asked for, once."""
        if self._requested == self._handled:
            return None
        self._handled = self._requested
        return self._requested if self._requested[0] else None

    def is_ready(self, to_enter: bool = False) -> bool:
        """Whether every server of this host is up: its process lives, and it answered just now.

        to_enter: and would enter a mode without having to import for it first.
        """
        return all(self._is_up(i, to_enter) for i in range(len(self._last_reply_s)))

    def _is_up(self, server: int, to_enter: bool) -> bool:
        if time.monotonic() - self._last_reply_s[server] > _FRESH_S or (to_enter and self._warming[server]):
            return False
        pid = launch.pid_of(self._folder, server)
        return pid is not None and is_alive(pid)

    def why_not_ready(self, to_enter: bool = False) -> str:
        """What the first server that is not up is missing, with the end of its log; empty when all are up."""
        if self.folder_lost:
            return self.folder_lost
        now = time.monotonic()
        for i, reply_s in enumerate(self._last_reply_s):
            if self._is_up(i, to_enter):
                continue
            if self._warming[i]:
                return f"server {i} of this host still imports what a mode needs"
            silent = "has not answered yet" if math.isinf(reply_s) else f"has not answered for {now - reply_s:.0f} s"
            words = launch.why_not_started(self._folder, i) or launch.last_words(self._folder, i)
            return f"server {i} of this host {silent}" + (f"; its last lines: {words}" if words else "")
        return ""

    def why_not_started(self) -> str:
        """Why some server of this host cannot start; empty while it may only need time."""
        reasons = (launch.why_not_started(self._folder, i) for i in range(len(self._last_reply_s)))
        return self.folder_lost or next(filter(None, reasons), "")

    @property
    def folder_lost(self) -> str:
        """Why no server can start on this host any more: the job's folder was removed, or replaced."""
        return self._client.folder_lost

    def abandon(self, generation: int) -> None:
        """The workers continued in allreduce mode without this mode: servers leave it, or never enter it.

        Each heartbeat reports it, and it is sent at once as well, before any save that comes later.
        """
        self._abandoned = generation
        for i in range(len(self._last_reply_s)):
            self._client.send(i, self._word(), timeout_s=_SAVE_TIMEOUT_S)

    def save(self, request: messages.Save, state: bytes) -> None:
        """Have the server save what it holds; `saved` has the outcome."""
        self._asked = (request.epoch, request.number)
        future = self._client.send(0, request, [state], timeout_s=_SAVE_TIMEOUT_S)
        future.add_done_callback(lambda f: self._asked_to_save(request, f.result))

    def has_read(self, number: int) -> bool:
        """Whether the server has read the rows that it was asked to save, or never will."""
        saved = self.saved
        is_of_it = saved is not None and saved.number >= number and (saved.epoch, saved.number) >= self._asked
        return saved is not None and is_of_it and (saved.state != "running" or saved.facts.read)

    def hold(self, request: messages.DelegateClaim) -> None:
        """Have the server, and its successors, renew a claim."""
        self._refused_s = -math.inf
        self._send_claim(request)

    def _send_claim(self, request: messages.DelegateClaim) -> None:
        self._held, self._held_by = request, 0
        self._holding = self._client.send(0, request, timeout_s=_SAVE_TIMEOUT_S)

    def _asked_to_save(self, request: messages.Save, result: Callable[[], Reply]) -> None:
        try:
            body = result().body
            why = body.why if isinstance(body, messages.Refused) else ""
        except ServerLost as error:
            why = str(error)
        if why:
            self._save_failed(request, why)
        else:
            self._accepted = request

    def _word(self) -> messages.HeartbeatMsg:
        return messages.HeartbeatMsg(
            self._worker, self._rank, self._host, os.getpid(), 0, report=self._look(), abandoned=self._abandoned
        )

    def _beat(self) -> messages.HeartbeatMsg:
        beat = self._word()
        for i in range(1, len(self._last_reply_s)):
            if i not in self._questions or self._questions[i].done():
                self._questions[i] = self._client.send(i, beat, timeout_s=_SAVE_TIMEOUT_S)
                self._questions[i].add_done_callback(lambda future, i=i: self._answered(i, future))  # type: ignore[misc]
        return beat

    def _answered(self, server: int, future: Future[Reply]) -> None:
        if future.exception() is None and isinstance(body := future.result().body, messages.Ok):
            self._last_reply_s[server] = time.monotonic()
            self._warming[server] = body.position is not None and body.position.warming

    def _note_process(self, pid: int) -> None:
        """The first server answers: see that this process of it renews the claim."""
        if self._held is None or pid == self._held_by or not self._holding.done():
            return
        if self._held_by or self._holding.exception() is not None:
            self.hold(self._held)
        elif isinstance(refused := self._holding.result().body, messages.Refused):
            self._claim_was_refused(self._held, refused.why)
        else:
            self._held_by = pid

    def _claim_was_refused(self, request: messages.DelegateClaim, why: str) -> None:
        now = time.monotonic()
        if math.isinf(self._refused_s):
            log.warning("the server of this host does not renew the claim on the checkpoint location: %s", why)
        elif now - self._refused_s > _HOLD_AGAIN_S:
            self._send_claim(request)
        else:
            return
        self._refused_s = now

    def _on_position(self, position: messages.JobPosition) -> None:
        self._last_reply_s[0], self._warming[0] = time.monotonic(), position.warming
        self._note_process(position.server)
        self._requested = (position.requested_mode, position.reason)
        if position.saved is None:
            return
        if position.saved.number:
            if (position.saved.epoch, position.saved.number) < self._asked:
                return  # of a save before the newest: its outcome is not known yet, or was reported
            self.saved = position.saved
            if position.saved.state != "running":
                self._accepted = None
        elif not position.saved.state:
            # A server that knows of no save is a successor of the one that began it, which may be one of a mode before.
            running = self.saved if self.saved is not None and self.saved.state == "running" else None
            if (begun := self._accepted or running) is not None:
                self._save_failed(begun, "the server that was saving its rows has died")
                self._accepted = None

    def _save_failed(self, request: messages.Save | messages.SaveStatus, why: str) -> None:
        self.saved = messages.SaveStatus(request.epoch, request.number, "failed", messages.SaveFacts(why=why))
