"""A worker that was refused for other samples: what it reads against what another one reads."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest

from gba_hvd.errors import GbaError, StateMismatch
from gba_hvd.ps.client import Reply
from gba_hvd.ps.coordinator.source_lists import SourceLists
from gba_hvd.ps.messages import JobPosition, OtherSources, Sources
from gba_hvd.ps.worker.heartbeat import Heartbeat
from gba_hvd.ps.worker.source_names import SourceNames

GENERATION = 1
REFUSAL = StateMismatch("epoch 1 has 10 samples for others and 9 here")


class Coordinator:
    """Answers as the server does, at once; the rank of a worker is its number."""

    def __init__(self) -> None:
        self.lists, self.asked, self.is_gone = SourceLists(), list[Sources](), False

    def call(self, server: int, request: Sources, frames: list[bytes]) -> Reply:
        if self.is_gone:
            raise GbaError("it is gone")
        self.asked.append(request)
        found = self.lists.add(request, frames[0])
        return Reply(OtherSources(), []) if found is None else Reply(OtherSources(found[0]), [found[1]])

    def send(self, *request: Any) -> Future[Reply]:
        future: Future[Reply] = Future()
        future.set_result(self.call(*request))
        return future


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    """Time passes as it is waited for."""
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now_s.append(now_s.pop() + seconds))
    return Coordinator()


def a_worker(coordinator: Any, rank: int, *names: str) -> SourceNames:
    contact = Heartbeat(worker=rank, rank=rank, host=0, pid=1, generation=GENERATION)
    worker = SourceNames(coordinator, contact, rank, GENERATION)
    worker.names = lambda: names
    return worker


def test_the_refusal_names_what_differs_from_another_worker(coordinator: Coordinator) -> None:
    other, refused = a_worker(coordinator, 2, "a", "b"), a_worker(coordinator, 1, "b")
    assert refused.explained(REFUSAL) is REFUSAL, "the other one was not asked yet"
    for _ in range(2):
        other.on_reply(JobPosition(sources_wanted=coordinator.lists.wanted))
    assert sum(not request.asks for request in coordinator.asked) == 1, "once for each question"
    assert "dataset: 2 on rank 2; 1 on rank 1, missing: a. All need" in str(refused.explained(REFUSAL))


def test_nothing_is_sent_while_no_worker_was_refused(coordinator: Coordinator) -> None:
    a_worker(coordinator, 2, "a").on_reply(JobPosition())
    assert not coordinator.asked


def test_the_refusal_stays_as_it_is_where_sources_have_no_names_or_the_coordinator_is_gone(
    coordinator: Coordinator,
) -> None:
    assert a_worker(coordinator, 1).explained(REFUSAL) is REFUSAL
    assert not coordinator.asked
    coordinator.is_gone = True
    assert a_worker(coordinator, 1, "a").explained(REFUSAL) is REFUSAL
