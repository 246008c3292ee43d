"""What becomes of pushes on their way: each is reported to the coordinator once, and each place is freed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from gba_hvd.comm.traffic import Traffic
from gba_hvd.errors import GbaError
from gba_hvd.ps.client import Reply, ServerLost, ServerRefused
from gba_hvd.ps.messages import JobPosition, Ok, PushDone, Refused
from gba_hvd.ps.worker.push_window import MAX_IN_FLIGHT, PushOnTheWay, PushWindow

DONE = PushDone(1, 2, 3, 4, 0.5, 0.25)
NOT_FINITE = Refused("gradient of w", kind="NotFinite")
LOST = ServerLost("server 1 did not answer")


class Coordinator:
    """The client, of which only requests to the coordinator are made here; it answers at once."""

    def __init__(self, answer: Any, traffic: Traffic | None = None) -> None:
        self.answer, self.traffic = answer, traffic
        self.reported: list[PushDone] = []

    def send(self, server: int, body: PushDone, *, on_reply: Callable[[Future[Reply]], None]) -> None:
        assert server == 0
        self.reported.append(body)
        on_reply(answered(self.answer))


def answered(answer: Any) -> Future[Reply]:
    future: Future[Reply] = Future()
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(Reply(answer, []))
    return future


def push(push_window: PushWindow, answers: Sequence[Any]) -> None:
    """One push, and the servers' answers to it in the order in which they come."""
    one = PushOnTheWay()
    assert push_window.enter(one)
    reported = push_window.answers(one, len(answers), DONE)
    for answer in answers:
        reported(answered(answer))


def of(client: Any) -> tuple[PushWindow, list[JobPosition]]:
    received: list[JobPosition] = []
    return PushWindow(client, 0.05, received.append), received


@pytest.mark.parametrize(("kind", "is_lasting"), [("", True), ("ProtocolError", False)])
def test_a_refusal_that_would_come_again_is_told_from_one_of_this_push(kind: Any, is_lasting: bool) -> None:
    for answer in ([Refused("no room", kind=kind)], [Ok()]):
        push_window, _ = of(Coordinator(Refused("no room", kind=kind)))
        push(push_window, answer)
        assert isinstance(push_window.failure, ServerRefused) == is_lasting


@pytest.mark.parametrize(
    ("answers", "refused", "failure"),
    [
        ([Ok()], "", None),
        ([Ok(), Ok(), Ok()], "", None),
        ([NOT_FINITE, Ok()], "gradient of w", None),
        ([Ok(), NOT_FINITE], "gradient of w", None),
        ([NOT_FINITE, NOT_FINITE], "gradient of w", None),
        ([NOT_FINITE, LOST], "gradient of w", None),
        ([LOST, Ok()], None, "server 1 did not answer"),
        ([Ok(), LOST], None, "server 1 did not answer"),
        ([LOST, NOT_FINITE], None, "server 1 did not answer"),
        ([Refused("it has no shard 3"), Ok()], None, "a server refused a gradient: it has no shard 3"),
        ([LOST, Refused("it has no shard 3")], None, "server 1 did not answer"),
    ],
)
def test_what_the_servers_answer(answers: list[Any], refused: str | None, failure: str | None) -> None:
    client = Coordinator(Ok())
    push_window, _ = of(client)
    push(push_window, answers)
    expected = [] if refused is None else [PushDone(1, 2, 3, 4, 0.5, 0.25, refused)]
    assert client.reported == expected
    assert failure == (None if push_window.failure is None else str(push_window.failure))
    assert push_window.drain()  # the place is free,
    assert all(push_window.enter(PushOnTheWay()) for _ in range(MAX_IN_FLIGHT))
    assert not push_window.enter(PushOnTheWay())  # and there are no more places than before


def test_what_the_coordinator_answers_is_received() -> None:
    position = JobPosition(step=9)
    push_window, received = of(Coordinator(Ok(position)))
    push(push_window, [Ok()])
    assert received == [position] and push_window.failure is None


@pytest.mark.parametrize(("answer", "words"), [(LOST, "did not answer"), (Refused("of another mode"), "of another")])
def test_a_coordinator_that_does_not_take_the_report_is_reported_later(answer: Any, words: str) -> None:
    push_window, _ = of(Coordinator(answer))
    push(push_window, [Ok()])
    push_window.fail(GbaError("a later failure"))
    assert words in str(push_window.failure)
    assert push_window.drain()


@pytest.mark.slow
def test_a_push_waits_for_a_place_and_gives_up() -> None:
    push_window, _ = of(Coordinator(Ok()))
    first, *others = [PushOnTheWay() for _ in range(MAX_IN_FLIGHT)]
    for one in (first, *others):
        assert push_window.enter(one)
    late = PushOnTheWay()
    assert not push_window.enter(late)
    push_window.abort(first)
    assert push_window.enter(late)
    assert not push_window.drain()
    for one in (late, *others):
        push_window.abort(one)
    assert push_window.drain()


def test_a_push_that_was_aborted_is_not_reported_and_one_that_was_reported_is_not_aborted() -> None:
    client = Coordinator(Ok())
    push_window, _ = of(client)
    first, second = PushOnTheWay(), PushOnTheWay()
    assert push_window.enter(first) and push_window.enter(second)
    push_window.abort(first)
    for answer in (Ok(), LOST, NOT_FINITE):
        push_window.answers(first, 1, DONE)(answered(answer))
    assert not client.reported and push_window.failure is None
    push_window.answers(second, 1, DONE)(answered(Ok()))
    push_window.abort(second)
    assert client.reported == [DONE] and push_window.drain()


def test_the_report_has_this_workers_bytes_since_it_came_into_the_mode() -> None:
    traffic = Traffic()
    traffic.count("sent", "dense", 100)
    traffic.report()  # with a commit, in allreduce mode
    traffic.mode = "gba"
    client = Coordinator(Ok(), traffic)
    push_window, _ = of(client)
    for n_rows in (7, 8):
        traffic.count("sent", "rows", n_rows)
        traffic.count("received", "header", 1)
        push(push_window, [Ok()])
    assert [done.traffic for done in client.reported] == [(0, 7, 0, 0, 0, 1), (0, 15, 0, 0, 0, 2)]
