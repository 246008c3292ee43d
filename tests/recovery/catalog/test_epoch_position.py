"""How far a job was in its data, by its checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recovery.catalog.epoch_position import EpochPosition, newest_before, position_of


@pytest.mark.parametrize(
    ("position", "words", "is_complete"),
    [
        (EpochPosition(4, 40, 40), "epoch 4, complete", True),
        (EpochPosition(5, 1500, 4000), "epoch 5, 1,500 of 4,000 steps", False),
        (EpochPosition(5, 15), "epoch 5, 15 steps", False),
        (EpochPosition(5, 4, 4, segment=2, n_segments=8), "epoch 5, segment 3 of 8, 4 of 4 steps", False),
        (EpochPosition(5, 4, 4, segment=7, n_segments=8), "epoch 5, complete", True),
        (EpochPosition(5, 4, 4, segment=7, n_segments=0), "epoch 5, segment 8, 4 of 4 steps", False),
        (EpochPosition(5, 4, 4, n_segments=0), "epoch 5, 4 of 4 steps", False),
    ],
)
def test_words(position: EpochPosition, words: str, is_complete: bool) -> None:
    assert (position.words, position.is_complete) == (words, is_complete)


def saved(**about: Any) -> Any:
    return SimpleNamespace(about=about)


def test_the_newest_checkpoint_before_an_epoch() -> None:
    of_5, of_4 = ({"epoch": epoch, "steps_done": 3, "n_steps": 3} for epoch in (5, 4))
    found = [saved(position=of_5), saved(), saved(position=of_4), saved(position=of_4)]
    before = newest_before(found, 5)
    assert before is not None and before[0] is found[2] and before[1] == EpochPosition(4, 3, 3)
    assert newest_before(found, 4) is None
    begun = saved(position={"epoch": 5, "steps_done": 0})
    assert newest_before([begun, *found], 5) == (begun, EpochPosition(5, 0)), "as after a switch before its first step"


@pytest.mark.parametrize("about", [{}, {"position": None}, {"position": {"epoch": "x"}}, {"position": 3}])
def test_a_position_that_makes_no_sense_is_none(about: Any) -> None:
    manifest: Any = SimpleNamespace(about=about)
    assert position_of(manifest) is None
