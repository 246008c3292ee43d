"""How the lists of files of several workers differ, in words."""

from __future__ import annotations

import pytest

from gba_hvd.comm.name_lists import differing


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ([["a", "b"], ["a", "b"]], ""),
        ([["a", "b", "c"], ["a", "c"]], "3 on rank 0; 2 on rank 1, missing: b"),
        ([["a", "c"], ["a", "b", "c"], ["a"]], "3 on rank 1; 2 on rank 0, missing: b; 1 on rank 2, missing: b, c"),
        ([["a", "b"], ["a", "d"]], "2 on rank 0; 2 on rank 1, missing: b; only there: d"),
        ([["a", "b"], ["b", "a"]], "2 on rank 0; 2 on rank 1, the same in another order: sort them, glob() does not"),
        ([list("abcdefgh"), []], "8 on rank 0; 0 on rank 1, missing: a, b, c, d, e and 3 more"),
    ],
)
def test_what_differs_is_named(lists: list[list[str]], words: str) -> None:
    assert differing(lists) == words


def test_some_ranks_alone_can_be_compared() -> None:
    assert differing([["a"], ["a", "b"]], [3, 5]) == "2 on rank 5; 1 on rank 3, missing: b"
