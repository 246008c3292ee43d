"""When the next round of replicas is due, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from gba_hvd.averaging.algorithms import Averaging
from gba_hvd.averaging.schedule import ASK_AGAIN_S, LONG_MICRO_S, PASSIVE_AFTER_S, SyncView, next_action

NOW = 100.0
BACKGROUND, FOREGROUND = Averaging("ma"), Averaging("ma", every=5)
ELASTIC, ELASTIC_FOREGROUND = Averaging("easgd"), Averaging("easgd", every=5)
RESTS = {"not_before_s": NOW + 3}
COMPUTES = {"idle_since_s": NOW + LONG_MICRO_S / 2}
IDLE = {"idle_since_s": NOW - 2 * PASSIVE_AFTER_S}


@pytest.mark.parametrize(
    ("averaging", "n_workers", "facts", "act"),
    [
        (BACKGROUND, 2, COMPUTES, "round"),
        (BACKGROUND, 2, RESTS, "wait"),
        (BACKGROUND, 2, {**RESTS, "round_requested": True}, "wait"),
        (BACKGROUND, 0, {}, "wait"),
        (FOREGROUND, 2, COMPUTES, "wait"),
        (FOREGROUND, 2, {**COMPUTES, **RESTS, "round_requested": True}, "round"),
        (FOREGROUND, 2, IDLE, "round"),
        (FOREGROUND, 2, {**IDLE, **RESTS}, "wait"),
        (FOREGROUND, 2, {"idle_since_s": NOW - PASSIVE_AFTER_S / 2}, "wait"),
        (FOREGROUND, 2, {"idle_since_s": NOW - PASSIVE_AFTER_S / 2, "is_open": False}, "round"),
        (FOREGROUND, 1, COMPUTES, "round"),
        (ELASTIC_FOREGROUND, 2, IDLE, "wait"),
        (ELASTIC_FOREGROUND, 2, {**COMPUTES, "round_requested": True}, "round"),
        (BACKGROUND, 2, {"ending": "now"}, "end"),
        (BACKGROUND, 2, {**RESTS, "ending": "together"}, "round"),
        (FOREGROUND, 2, {**RESTS, **COMPUTES, "ending": "together"}, "round"),
        (BACKGROUND, 1, {"ending": "together"}, "end"),
        (BACKGROUND, 0, {"ending": "together"}, "end"),
        (ELASTIC, 2, {"ending": "together"}, "end"),
        (BACKGROUND, 0, {"lost_s": NOW - ASK_AGAIN_S - 1}, "ask for a world"),
        (BACKGROUND, 0, {"lost_s": NOW - ASK_AGAIN_S - 1, "is_open": False}, "wait"),
        (BACKGROUND, 0, {"lost_s": NOW - ASK_AGAIN_S + 1}, "wait"),
    ],
)
def test_what_is_due(averaging: Averaging, n_workers: int, facts: dict[str, Any], act: str) -> None:
    assert next_action(NOW, SyncView(n_workers, **facts), averaging).act == act


def test_a_rest_is_slept_through_and_what_training_does_is_looked_at_often() -> None:
    assert next_action(NOW, SyncView(2, **RESTS), BACKGROUND).look_again_s == 3
    assert next_action(NOW, SyncView(1, **RESTS), FOREGROUND).look_again_s == 3
    assert next_action(NOW, SyncView(2, **RESTS), FOREGROUND).look_again_s == PASSIVE_AFTER_S / 2
    assert next_action(NOW, SyncView(0), BACKGROUND).look_again_s == PASSIVE_AFTER_S / 2
