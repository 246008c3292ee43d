"""What a worker says with its heartbeats, and what it makes of the answers."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from gba_hvd.ps.client import Reply
from gba_hvd.ps.messages import Beat, Ok, Position, Refused, Saved, SaveFacts
from gba_hvd.ps.worker.heartbeat import Contact


def contact() -> Contact:
    return Contact(worker=7, rank=1, host=2, pid=3, generation=4)


def test_a_heartbeat_says_who_and_where() -> None:
    ours = contact()
    ours.rank, ours.leaving = 0, True
    assert ours.beat() == Beat(7, 0, 2, 3, 4, False, leaving=True)
    assert ours.question() == Beat(7, 0, 2, 3, 0)


def test_that_hosts_were_updated_is_said_until_the_membership_has_changed() -> None:
    ours = contact()
    ours.hear(Position(world=5))
    ours.hosts_updated = True
    assert [ours.beat().hosts_updated for _ in range(2)] == [True, True]
    ours.hear(Position(step=1, world=5))
    assert ours.beat().hosts_updated
    ours.hear(Position(step=1, world=6))
    assert not ours.beat().hosts_updated
    ours.hosts_updated = True  # again: it is said anew, until the next change
    assert ours.beat().hosts_updated
    ours.hear(Position(step=1, world=7))
    assert not ours.beat().hosts_updated


@pytest.mark.parametrize(
    "late", [Position(epoch=1, step=20, world=9), Position(epoch=2, step=9), Position(epoch=2, step=10, world=2)]
)
def test_an_answer_that_comes_late_is_not_believed(late: Position) -> None:
    ours, newest = contact(), Position(epoch=2, step=10, world=3)
    ours.hear(newest)
    ours.hear(late)
    assert ours.position is newest


def test_only_answers_to_heartbeats_tell_of_checkpoints_and_of_workers_that_leave() -> None:
    ours, saved = contact(), Saved(1, 30, "done")
    ours.hear(Position(saved=saved, leaving=True))
    ours.hear(Position(step=1))  # to a push
    assert (ours.saved, ours.somebody_leaves) == (saved, True)
    ours.hear(Position(step=2, saved=Saved()))
    assert (ours.saved, ours.somebody_leaves) == (saved, False)


def answer(body: Any) -> Future[Reply]:
    future: Future[Reply] = Future()
    future.set_result(Reply(body, []))
    return future


def test_reports_older_than_the_save_that_was_asked_for_are_ignored() -> None:
    ours = contact()
    ours.hear(Position(saved=Saved(1, 16, "done"), server=5))
    ours.asked_to_save(1, 26)
    ours.save_answered(answer(Refused("no")))
    ours.hear(Position(saved=Saved(1, 16, "done"), server=5))
    assert ours.saved == Saved(1, 26, "failed", SaveFacts(why="no"))
    ours.hear(Position(saved=Saved(1, 27, "done"), server=5))
    assert ours.saved == Saved(1, 27, "done")


@pytest.mark.parametrize("report", [Saved(), Saved(1, 16, "done")])
def test_a_successor_of_the_server_that_was_to_save_means_that_the_save_failed(report: Saved) -> None:
    ours = contact()
    ours.hear(Position(saved=Saved(1, 16, "done"), server=5))
    ours.asked_to_save(1, 26)
    ours.save_answered(answer(Ok()))
    ours.hear(Position(saved=Saved(1, 16, "done"), server=5))  # it waits for a moment between two steps
    assert ours.saved == Saved(1, 16, "done")
    ours.hear(Position(saved=report, server=6))
    assert ours.saved is not None and ours.saved.state == "failed" and "has died" in ours.saved.facts.why


def test_a_successor_of_the_server_that_was_saving_when_the_mode_began_means_that_the_save_failed() -> None:
    """It was asked for in the mode before, so not by this contact."""
    ours = contact()
    ours.hear(Position(saved=Saved(1, 36, "running"), server=5))
    ours.hear(Position(saved=Saved(), server=6))
    assert ours.saved is not None and (ours.saved.number, ours.saved.state) == (36, "failed")


def test_a_successor_that_saves_what_its_predecessor_was_asked_for_is_believed() -> None:
    ours = contact()
    ours.hear(Position(saved=Saved(), server=5))
    ours.asked_to_save(1, 26)
    ours.hear(Position(saved=Saved(1, 27, "running"), server=6))
    ours.hear(Position(saved=Saved(1, 27, "done"), server=6))
    assert ours.saved == Saved(1, 27, "done")
