"""The newest step wins, nobody goes back."""

from __future__ import annotations

import pytest

from gba_hvd.membership import Agreement, Facts, agree


def old(step: int, held: int = -1) -> Facts:
    return Facts(True, step, held, host=1, settings=1, pid=1)


NEW = Facts(False, 0, -1, host=1, settings=1, pid=1)


@pytest.mark.parametrize(
    ("facts", "step", "source", "catch_up", "is_restart"),
    [
        ([NEW], 0, 0, (), False),
        ([NEW, NEW, NEW], 0, 0, (), False),
        ([old(5), NEW], 5, 0, (), True),
        ([NEW, old(5)], 5, 1, (), True),
        ([NEW, old(5), old(5)], 5, 1, (), True),
        ([old(4, held=5), old(5), NEW], 5, 1, (0,), True),
        ([old(5), old(4, held=5), old(4, held=5)], 5, 0, (1, 2), True),
        # Everybody holds step 6, nobody saw its result: it was not decided, and is computed again.
        ([old(5, held=6), old(5, held=6)], 5, 0, (), True),
        # A step behind without its gradients, or further behind: gone for longer, it takes the newest state.
        ([old(4), old(5)], 5, 1, (), True),
        ([old(2, held=3), old(5)], 5, 1, (), True),
        ([old(0), NEW], 0, 0, (), True),
    ],
)
def test_agreement(facts: list[Facts], step: int, source: int, catch_up: tuple[int, ...], is_restart: bool) -> None:
    agreed = agree(facts)
    assert agreed == Agreement(step, source, catch_up, is_restart, agreed.reason)


def test_the_agreement_says_why() -> None:
    assert agree([NEW]).reason == "a new job: everybody takes the values of rank 0"
    assert agree([NEW, old(7), old(6, held=7)]).reason == "rank 1 has step 7, the newest of 2 survivors"


def test_facts_travel_as_a_row_of_numbers() -> None:
    facts = Facts(True, 5, 6, host=-(2**63), settings=2**63 - 1, pid=77)
    row = facts.row().tolist()
    assert Facts(bool(row[0]), *row[1:]) == facts
