"""What becomes of pushes on their way: the coordinator hears of each once, and each place is freed once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from gba_hvd.errors import GbaError
from gba_hvd.ps.client import Reply, ServerLost
from gba_hvd.ps.messages import JobPosition, Ok, PushDone, Refused
from gba_hvd.ps.worker.push_window import MAX_IN_FLIGHT, PushWindow

DONE = PushDone(1, 2, 3, 4, 0.5, 0.25)
NOT_FINITE = Refused("gradient of w", kind="NotFinite")
LOST = ServerLost("server 1 did not answer")


class Coordinator:
    """The client, of which only requests to the coordinator are made here; it answers at once."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.told: list[PushDone] = []

    def send(self, server: int, body: PushDone) -> Future[Reply]:
        assert server == 0
        self.told.append(body)
        return answered(self.answer)


def answered(answer: Any) -> Future[Reply]:
    future: Future[Reply] = Future()
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(Reply(answer, []))
    return future


def push(under_way: PushWindow, answers: Sequence[Any]) -> None:
    """One push, and the servers' answers to it in the order in which they come."""
    assert under_way.acquire()
    told = under_way.answers(len(answers), DONE)
    for answer in answers:
        answered(answer).add_done_callback(told)


def of(client: Any) -> tuple[PushWindow, list[JobPosition]]:
    heard: list[JobPosition] = []
    return PushWindow(client, 0.05, heard.append), heard


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
    under_way, _ = of(client)
    push(under_way, answers)
    expected = [] if refused is None else [PushDone(1, 2, 3, 4, 0.5, 0.25, refused)]
    assert client.told == expected
    assert failure == (None if under_way.failure is None else str(under_way.failure))
    assert under_way.drain()  # the place is free,
    with pytest.raises(ValueError, match="released too many times"):
        under_way.release()  # and was freed once: no more than there are


def test_what_the_coordinator_answers_is_heard() -> None:
    position = JobPosition(step=9)
    under_way, heard = of(Coordinator(Ok(position)))
    push(under_way, [Ok()])
    assert heard == [position] and under_way.failure is None


@pytest.mark.parametrize(("answer", "words"), [(LOST, "did not answer"), (Refused("of another mode"), "of another")])
def test_a_coordinator_that_does_not_take_the_report_is_told_later(answer: Any, words: str) -> None:
    under_way, _ = of(Coordinator(answer))
    push(under_way, [Ok()])
    under_way.fail(GbaError("a later failure"))
    assert words in str(under_way.failure)
    assert under_way.drain()


def test_a_push_waits_for_a_place_and_gives_up() -> None:
    under_way, _ = of(Coordinator(Ok()))
    for _ in range(MAX_IN_FLIGHT):
        assert under_way.acquire()
    assert not under_way.acquire()
    under_way.release()
    assert under_way.acquire()
    assert not under_way.drain()
