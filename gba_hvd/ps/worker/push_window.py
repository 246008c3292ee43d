"""Pushes on the way to the servers, in a bounded in-flight window: at most `MAX_IN_FLIGHT` at a time.

    enter    take a slot in the window, or wait for one         (a training thread)
    sent     to every server
    answers  each server has its part, or refused it             (the client's thread)
    report   the coordinator receives it, once all servers have it, or once one refused it as not finite
    leave    the coordinator has acknowledged it: the slot is free
    abort    instead, by the training thread: an exception, such as Ctrl-C, came while it was being sent

A push that fails on its way frees its slot, too. The failure is stored, and raised at the worker's next call.

An exception at any point of a push leaves it reported, or as if it had never begun, and its slot is freed:

- The thread that trains touches nothing that the client's thread waits for: what is called with a server's answer is
  known before the request is queued, and the locks here are held for a few instructions in a `with` statement.
- Whether it is reported is decided once, by the first of `_answered` and `abort` that settles it. Aborted, it is never
  reported: the servers ignore the parts that they have, and its micro-batch stays leased, to be computed again.
- A slot belongs to its push, so freeing it twice changes nothing, nor does freeing one that was never taken.

What an encoder has taken from the residuals of compression counts as sent, as in a push that is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from gba_hvd.comm.wait_notices import Patience
from gba_hvd.ps.client import Client, Reply, ServerLost
from gba_hvd.ps.messages import JobPosition, Ok, PushDone, Refused
from gba_hvd.ps.worker.replies import refusal

log = logging.getLogger("gba_hvd")
MAX_IN_FLIGHT = 2
_LOOK_S = 0.05


class PushOnTheWay:
    """One push. settle: whether this call decided what becomes of it; true once."""

    def __init__(self) -> None:
        self._undecided, self._has_left = threading.Lock(), threading.Lock()
        self._has_left.acquire()

    def settle(self) -> bool:
        return self._undecided.acquire(blocking=False)

    def left(self) -> None:
        """Its slot is free."""
        self._has_left.release()

    def wait(self, timeout_s: float) -> None:
        """Until its slot is free, or for a while."""
        if self._has_left.acquire(timeout=timeout_s):
            self._has_left.release()


class PushWindow:
    """One worker's. failure: the first thing that went wrong, in any thread."""

    def __init__(self, client: Client, timeout_s: float, on_position: Callable[[JobPosition], None]) -> None:
        self._client, self._timeout_s, self._on_position = client, timeout_s, on_position
        self._lock = threading.Lock()
        self._slots: dict[PushOnTheWay, None] = {}  # taken, the oldest first
        self.failure: Exception | None = None

    def enter(self, push: PushOnTheWay) -> bool:
        """Take a slot; False when none was free in time."""
        return self._wait(MAX_IN_FLIGHT - 1, push)

    def drain(self) -> bool:
        """Wait until nothing is on the way; False when the oldest push still was after the time-out."""
        return self._wait(0)

    def _wait(self, most: int, push: PushOnTheWay | None = None) -> bool:
        """Wait until no more than `most` are on the way, then let this one in."""
        waited_for, deadline, notices = None, 0.0, Patience()
        while True:
            with self._lock:
                if len(self._slots) <= most:
                    if push is not None:
                        self._slots[push] = None
                    return True
                oldest = next(iter(self._slots))
            now = time.monotonic()
            if oldest is not waited_for:
                waited_for, deadline = oldest, now + self._timeout_s
            if now >= deadline:
                return False
            if (waited_s := notices.word(True, now)) is not None:
                log.warning(
                    "this worker has waited %.0f s for the servers to take its gradients; they count as lost when "
                    "they take none for %.0f s", waited_s, self._timeout_s,
                )  # fmt: skip
            oldest.wait(min(_LOOK_S, deadline - now))

    def abort(self, push: PushOnTheWay) -> None:
        """It is not reported any more, unless it has been; its slot is free."""
        if push.settle():
            self._leave(push)

    def fail(self, error: Exception) -> None:
        """From any thread."""
        self.failure = self.failure or error

    def answers(self, push: PushOnTheWay, n_servers: int, done: PushDone) -> Callable[[Future[Reply]], None]:
        """What to call with the answer to each of a push's requests; `done` is reported after the last one."""
        waiting = [n_servers]
        return lambda reply: self._answered(push, reply, waiting, done)

    def _answered(self, push: PushOnTheWay, reply: Future[Reply], waiting: list[int], done: PushDone) -> None:
        """One server answered (on the client's thread); after the last one it is reported to the coordinator."""
        try:
            body = reply.result().body
        except ServerLost as error:
            self._lost(push, error)
            return
        if isinstance(body, Refused):
            if body.kind != "NotFinite":
                self._lost(push, refusal(f"a server refused a gradient: {body.why}", body.kind))
                return
            done = msgspec.structs.replace(done, refused=body.why)
        waiting[0] -= 1
        if (waiting[0] == 0 or done.refused) and push.settle():
            self.report(push, done)

    def report(self, push: PushOnTheWay, done: PushDone) -> None:
        """Report to the coordinator; the slot is free when it has answered, or cannot."""

        def reported(reply: Future[Reply]) -> None:
            try:
                body = reply.result().body
                if isinstance(body, Ok) and body.position is not None:
                    self._on_position(body.position)
                elif isinstance(body, Refused):
                    self.fail(refusal(body.why, body.kind))
            except ServerLost as error:
                self.fail(error)
            self._leave(push)

        if self._client.traffic is not None:
            done = msgspec.structs.replace(done, traffic=self._client.traffic.report())
        self._client.send(0, done, on_reply=reported)

    def _lost(self, push: PushOnTheWay, error: Exception) -> None:
        if push.settle():
            self.fail(error)
            self._leave(push)

    def _leave(self, push: PushOnTheWay) -> None:
        with self._lock:
            if push in self._slots:
                del self._slots[push]
                push.left()
