"""Pushes on the way to the servers, in a bounded in-flight window: at most `MAX_IN_FLIGHT` at a time.

    acquire  take a slot of the window, or wait for one          (a training thread)
    sent     to every server
    answers  each server has its part, or refused it             (the client's thread)
    report   the coordinator receives it, once all servers have it, or once one refused it as not finite
    release  the coordinator has acknowledged it: the slot is free

A push that fails on its way frees its slot, too. The failure is stored, and raised at the worker's next call. Each slot
that is taken is freed exactly once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from gba_hvd.errors import GbaError
from gba_hvd.ps.client import Client, Reply, ServerLost
from gba_hvd.ps.messages import JobPosition, Ok, PushDone, Refused

MAX_IN_FLIGHT = 2


class PushWindow:
    """One worker's. failure: the first thing that went wrong, in any thread."""

    def __init__(self, client: Client, timeout_s: float, on_position: Callable[[JobPosition], None]) -> None:
        self._client, self._timeout_s, self._on_position = client, timeout_s, on_position
        self._slots = threading.BoundedSemaphore(MAX_IN_FLIGHT)
        self.failure: Exception | None = None

    def acquire(self) -> bool:
        """Take a slot; False when none was free in time."""
        return self._slots.acquire(timeout=self._timeout_s)

    def release(self) -> None:
        self._slots.release()

    def drain(self) -> bool:
        """Wait until nothing is on the way; False when something still was after the time-out, for each push."""
        for _ in range(MAX_IN_FLIGHT):
            if not self._slots.acquire(timeout=self._timeout_s):
                return False
        for _ in range(MAX_IN_FLIGHT):
            self._slots.release()
        return True

    def fail(self, error: Exception) -> None:
        """From any thread."""
        self.failure = self.failure or error

    def answers(self, n_servers: int, done: PushDone) -> Callable[[Future[Reply]], None]:
        """What to add to the future of each of a push's requests; `done` is reported after the last one."""
        waiting = [n_servers]
        return lambda reply: self._answered(reply, waiting, done)

    def _answered(self, reply: Future[Reply], waiting: list[int], done: PushDone) -> None:
        """One server answered (on the client's thread); after the last one it is reported to the coordinator."""
        if waiting[0] < 0:
            return  # another server settled it
        try:
            body = reply.result().body
        except ServerLost as error:
            waiting[0] = -1
            self._lost(error)
            return
        if isinstance(body, Refused):
            if body.kind != "NotFinite":
                waiting[0] = -1
                self._lost(GbaError(f"a server refused a gradient: {body.why}"))
                return
            done = msgspec.structs.replace(done, rejected=body.why)
        waiting[0] -= 1
        if waiting[0] == 0 or done.rejected:
            waiting[0] = -1
            self.report(done)

    def report(self, done: PushDone) -> None:
        """Report to the coordinator; the slot is free when it has answered, or cannot."""

        def reported(reply: Future[Reply]) -> None:
            try:
                body = reply.result().body
                if isinstance(body, Ok) and body.position is not None:
                    self._on_position(body.position)
                elif isinstance(body, Refused):
                    self.fail(GbaError(body.why))
            except ServerLost as error:
                self.fail(error)
            self.release()

        if self._client.traffic is not None:
            done = msgspec.structs.replace(done, traffic=self._client.traffic.report())
        self._client.send(0, done).add_done_callback(reported)

    def _lost(self, error: Exception) -> None:
        self.fail(error)
        self.release()
