"""What `gba-hvd status` reports of a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd.ps.messages import DelegateClaim, HeartbeatMsg, JobPosition, SaveSettings, SaveStatus, SwitchTo
from gba_hvd.ps.server.status import StatusService
from gba_hvd.ps.worker.heartbeat import Heartbeat
from recovery.catalog.claims import Claim
from recovery.config import Config


def test_a_request_that_is_repeated_is_shown_once_and_the_newest_are_kept() -> None:
    mode: Any = SimpleNamespace(active_coordinator=None)
    service = StatusService("clicks", 0, mode, SimpleNamespace(url=""))  # type: ignore[arg-type]
    for reason in ("first", "first", "second", "first"):
        service.switch(SwitchTo("gba", reason))
    assert service.status()["decisions"] == ["gba: first", "gba: second", "gba: first"]
    assert len(service.status()["decided_unix_s"]) == 3


def test_a_request_that_the_coordinator_does_not_take_is_not_shown() -> None:
    service_of: Any = SimpleNamespace(request_mode=lambda request: request.pin)
    mode: Any = SimpleNamespace(active_coordinator=service_of)
    service = StatusService("clicks", 0, mode, SimpleNamespace(url=""))  # type: ignore[arg-type]
    service.switch(SwitchTo("gba", "an operator asked", pin=True))
    service.switch(SwitchTo("allreduce", "decided before rank 0 learned of it"))
    mode.active_coordinator = None
    assert service.status()["decisions"] == ["gba: an operator asked"]


def test_the_status_shows_no_credentials_of_the_place_for_checkpoints() -> None:
    saver: Any = SimpleNamespace(url="s3://user:word@host/bucket/job?token=abc")
    mode: Any = SimpleNamespace(active_coordinator=None)
    status = StatusService("clicks", 0, mode, saver).status()
    assert status["checkpoints"] == "s3://***@host/bucket/job?token=***"


@pytest.mark.parametrize("generation", [0, 3])
def test_a_host_s_leader_gets_no_request_back_as_an_order(generation: int) -> None:
    """It passes orders on; what the coordinator was asked for by measurements would come back as one of an operator."""
    asked = JobPosition(requested_mode="allreduce", reason="gba is slower")
    coordinator: Any = SimpleNamespace(beat=lambda request: asked, coordinator=SimpleNamespace(workers={}))
    saver: Any = SimpleNamespace(alive=lambda: None, report=SaveStatus, url="", held=None)
    mode: Any = SimpleNamespace(active_coordinator=coordinator, abandon=lambda numbers: None)
    position = StatusService("clicks", 0, mode, saver).beat(HeartbeatMsg(1, 0, 1, 10, generation))
    assert position.requested_mode == ("" if generation == 0 else "allreduce")


def test_workers_learn_the_claim_on_the_checkpoint_location_with_their_heartbeats() -> None:
    coordinator: Any = SimpleNamespace(beat=lambda _: JobPosition(), coordinator=SimpleNamespace(workers={}))
    held = DelegateClaim(Claim(3, "clicks.a", "0000000a"), SaveSettings("/place", {}, Config()), first_epoch=2)
    saver: Any = SimpleNamespace(alive=lambda: None, report=SaveStatus, url="", held=held)
    mode: Any = SimpleNamespace(active_coordinator=coordinator, abandon=lambda numbers: None)
    worker = Heartbeat(worker=7, rank=1, host=2, pid=3, generation=4)
    assert worker.claim is None
    worker.on_reply(StatusService("clicks", 0, mode, saver).beat(worker.message()))
    assert worker.claim == (held.claim, 2)
    worker.on_reply(JobPosition(step=1))  # to a push
    assert worker.claim == (held.claim, 2)
