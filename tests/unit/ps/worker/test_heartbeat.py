"""What a worker says with its heartbeats, and what it makes of the answers."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from gba_hvd.ps.client import Reply
from gba_hvd.ps.messages import HeartbeatMsg, JobPosition, Ok, Refused, SaveFacts, SaveStatus
from gba_hvd.ps.worker.heartbeat import Heartbeat


def contact() -> Heartbeat:
    return Heartbeat(worker=7, rank=1, host=2, pid=3, generation=4)


def test_a_heartbeat_says_who_and_where() -> None:
    ours = contact()
    ours.rank, ours.leaving, ours.awaited = 0, True, True
    assert ours.message() == HeartbeatMsg(7, 0, 2, 3, 4, False, leaving=True, awaited=True)
    assert ours.question() == HeartbeatMsg(7, 0, 2, 3, 0)


def test_that_hosts_were_updated_is_said_until_the_membership_has_changed() -> None:
    ours = contact()
    ours.on_reply(JobPosition(membership_epoch=5))
    ours.hosts_updated = True
    assert [ours.message().hosts_updated for _ in range(2)] == [True, True]
    ours.on_reply(JobPosition(step=1, membership_epoch=5))
    assert ours.message().hosts_updated
    ours.on_reply(JobPosition(step=1, membership_epoch=6))
    assert not ours.message().hosts_updated
    ours.hosts_updated = True  # again: it is sent again, until the next change
    assert ours.message().hosts_updated
    ours.on_reply(JobPosition(step=1, membership_epoch=7))
    assert not ours.message().hosts_updated


@pytest.mark.parametrize(
    "late",
    [
        JobPosition(epoch=1, step=20, membership_epoch=9),
        JobPosition(epoch=2, step=9),
        JobPosition(epoch=2, step=10, membership_epoch=2),
    ],
)
def test_an_answer_that_comes_late_is_not_believed(late: JobPosition) -> None:
    ours, newest = contact(), JobPosition(epoch=2, step=10, membership_epoch=3)
    ours.on_reply(newest)
    ours.on_reply(late)
    assert ours.position is newest


def test_only_answers_to_heartbeats_report_checkpoints_and_workers_that_leave() -> None:
    ours, saved = contact(), SaveStatus(1, 30, "done")
    ours.on_reply(JobPosition(saved=saved, leaving=True))
    ours.on_reply(JobPosition(step=1))  # to a push
    assert (ours.saved, ours.worker_leaves) == (saved, True)
    ours.on_reply(JobPosition(step=2, saved=SaveStatus()))
    assert (ours.saved, ours.worker_leaves) == (saved, False)


def answer(body: Any) -> Future[Reply]:
    future: Future[Reply] = Future()
    future.set_result(Reply(body, []))
    return future


def test_reports_older_than_the_save_that_was_asked_for_are_ignored() -> None:
    ours = contact()
    ours.on_reply(JobPosition(saved=SaveStatus(1, 16, "done"), server=5))
    ours.asked_to_save(1, 26)
    ours.save_answered(answer(Refused("no")))
    ours.on_reply(JobPosition(saved=SaveStatus(1, 16, "done"), server=5))
    assert ours.saved == SaveStatus(1, 26, "failed", SaveFacts(why="no"))
    ours.on_reply(JobPosition(saved=SaveStatus(1, 27, "done"), server=5))
    assert ours.saved == SaveStatus(1, 27, "done")


@pytest.mark.parametrize("report", [SaveStatus(), SaveStatus(1, 16, "done")])
def test_a_successor_of_the_server_that_was_to_save_means_that_the_save_failed(report: SaveStatus) -> None:
    ours = contact()
    ours.on_reply(JobPosition(saved=SaveStatus(1, 16, "done"), server=5))
    ours.asked_to_save(1, 26)
    ours.save_answered(answer(Ok()))
    ours.on_reply(JobPosition(saved=SaveStatus(1, 16, "done"), server=5))  # it waits for a moment between two steps
    assert ours.saved == SaveStatus(1, 16, "done")
    ours.on_reply(JobPosition(saved=report, server=6))
    assert ours.saved is not None and ours.saved.state == "failed" and "has died" in ours.saved.facts.why


def test_a_successor_of_the_server_that_was_saving_when_the_mode_began_means_that_the_save_failed() -> None:
    """It was asked for in the mode before, so not by this contact."""
    ours = contact()
    ours.on_reply(JobPosition(saved=SaveStatus(1, 36, "running"), server=5))
    ours.on_reply(JobPosition(saved=SaveStatus(), server=6))
    assert ours.saved is not None and (ours.saved.number, ours.saved.state) == (36, "failed")


def test_a_successor_that_saves_what_its_predecessor_was_asked_for_is_believed() -> None:
    ours = contact()
    ours.on_reply(JobPosition(saved=SaveStatus(), server=5))
    ours.asked_to_save(1, 26)
    ours.on_reply(JobPosition(saved=SaveStatus(1, 27, "running"), server=6))
    ours.on_reply(JobPosition(saved=SaveStatus(1, 27, "done"), server=6))
    assert ours.saved == SaveStatus(1, 27, "done")
