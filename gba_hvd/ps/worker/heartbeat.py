"""What a worker and the coordinator send each other with heartbeats: who lives, where the job stands, who is to leave.

No socket and no clock here: the client sends what `message` returns periodically and passes the answers to `on_reply`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from gba_hvd.ps.client import Reply
from gba_hvd.ps.messages import HeartbeatMsg, JobPosition, Refused, SaveFacts, SaveStatus
from recovery.catalog.claims import Claim


class Heartbeat:
    """One worker's. Written by several threads: `message` and `on_reply` run on the client's, one other sets each flag.

    rank: of the worker, in the world it is in now. host_name: for people
    position: the newest that was received. saved: status of the newest checkpoint.
    hosts_updated: Horovod notified this worker; somebody_leaves: some worker is preempted; leaving: this one is, and
    the chief is to have a checkpoint made first. awaited: see `others_wait`.
    report: from the chief, what `gba-hvd status` shows beside what the coordinator knows
    claim: on the checkpoint location, and the job's first epoch there, as the coordinator's server knows them
    acknowledged_membership: the change of membership that this worker knew of when it last formed a world
    """

    def __init__(self, worker: int, rank: int, host: int, pid: int, generation: int) -> None:
        self._worker, self._host, self._pid, self._generation = worker, host, pid, generation
        self.rank, self.host_name = rank, ""
        self.position = JobPosition()
        self.saved: SaveStatus | None = None
        self.hosts_updated = self.worker_leaves = self.leaving = self.awaited = False
        self.acknowledged_membership = 0
        self.claim: tuple[Claim, int] | None = None
        self.report: dict[str, Any] = {}
        self._server, self._saving_server = 0, 0  # process that answers heartbeats, and that was asked to save
        self._asked = (0, 0)  # (epoch, number) of the newest save
        self._reported_epoch: int | None = None  # the membership epoch when hosts_updated was first sent
        self._newest = threading.Lock()

    def message(self) -> HeartbeatMsg:
        """The message to send now. Heartbeats are not repeated: `hosts_updated` is sent until acknowledged."""
        if self.hosts_updated and self._reported_epoch is None:
            self._reported_epoch = self.position.membership_epoch
        elif self._reported_epoch is not None and self.position.membership_epoch > self._reported_epoch:
            self.hosts_updated, self._reported_epoch = False, None
        return HeartbeatMsg(
            self._worker, self.rank, self._host, self._pid, self._generation, self.hosts_updated,
            leaving=self.leaving, report=self.report, host_name=self.host_name, awaited=self.awaited,
        )  # fmt: skip

    @contextlib.contextmanager
    def others_wait(self) -> Iterator[None]:
        """Between two epochs the others wait for this worker as long as the body takes."""
        before, self.awaited = self.awaited, True
        try:
            yield
        finally:
            self.awaited = before

    def question(self) -> HeartbeatMsg:
        """To a server that is not the coordinator's, of no mode: its answer reports its part of a save."""
        return HeartbeatMsg(self._worker, self.rank, self._host, self._pid, 0)

    def asked_to_save(self, epoch: int, number: int) -> None:
        """On the chief: a save is asked for now. Reports of older ones are ignored from here on."""
        self._asked, self._saving_server = (epoch, number), self._server

    def save_answered(self, future: Future[Reply]) -> None:
        """The coordinator took the request, or did not."""
        error = future.exception()
        body = None if error is not None else future.result().body
        why = str(error) if error is not None else body.why if isinstance(body, Refused) else ""
        if why:
            self._save_failed(why)

    def _on_save_status(self, saved: SaveStatus, server: int) -> None:
        if server and self._saving_server and server != self._saving_server:
            # A successor knows nothing of a save that waited for its moment, or that was being made.
            self._saving_server = 0
            if saved.number == 0 or (saved.epoch, saved.number) < self._asked:
                self._save_failed("the server that was to save has died; another one has taken over")
        self._server = server or self._server
        if saved.number and (saved.epoch, saved.number) >= self._asked:
            self.saved = saved
            self._saving_server = 0
            if saved.state == "running":  # also one that was asked for before this mode
                self._asked, self._saving_server = (saved.epoch, saved.number), server

    def _save_failed(self, why: str) -> None:
        self.saved = SaveStatus(*self._asked, "failed", SaveFacts(why=why))

    def on_reply(self, position: JobPosition) -> None:
        """An answer, from any thread; they may come in another order than they were given in."""
        with self._newest:
            now = self.position
            if (position.epoch, position.step, position.membership_epoch) >= (
                now.epoch,
                now.step,
                now.membership_epoch,
            ):
                self.position = position
        if position.saved is not None:  # the answer to a heartbeat
            self.worker_leaves = position.leaving  # after the position: it has the step of the worker that leaves
            self._on_save_status(position.saved, position.server)
            if position.claim is not None:
                self.claim = position.claim, position.first_epoch
