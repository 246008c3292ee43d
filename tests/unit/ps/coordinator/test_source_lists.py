"""Lists of files that workers send where one of them was refused."""

from __future__ import annotations

from gba_hvd.ps.coordinator.source_lists import SourceLists
from gba_hvd.ps.messages import Sources

GENERATION = 1


def test_a_worker_that_asks_receives_a_list_that_differs_from_its_own() -> None:
    lists = SourceLists()
    assert lists.add(Sources(1, GENERATION, asks=True), b"a") is None and lists.wanted == 1
    assert lists.add(Sources(2, GENERATION), b"a") is None
    assert lists.add(Sources(1, GENERATION, asks=True), b"a") is None, "the same"
    assert lists.add(Sources(3, GENERATION), b"ab") is None
    assert lists.add(Sources(1, GENERATION, asks=True), b"a") == (3, b"ab")
    assert lists.wanted == 1, "it is one question"


def test_a_later_question_is_not_answered_with_what_workers_read_before() -> None:
    lists = SourceLists()
    lists.add(Sources(1, GENERATION, asks=True), b"a")
    lists.add(Sources(2, GENERATION), b"ab")
    assert lists.add(Sources(4, GENERATION, asks=True), b"c") is None
    assert lists.wanted == 2
    lists.add(Sources(2, GENERATION), b"abc")
    assert lists.add(Sources(4, GENERATION, asks=True), b"c") == (2, b"abc")
