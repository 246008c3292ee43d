"""When a warning does not hold any more."""

from __future__ import annotations

from typing import Any

import pytest

from gba_hvd.comm.world_formation import Wait, stands, still_forms
from gba_hvd.tracking.open_warnings import ends, is_over_at_once, over_since

MODE, CHECKPOINT = {"waiting": ["mode gba"]}, {"waiting": ["the checkpoint that is due"]}
BOTH = {"waiting": ["mode gba", "the checkpoint that is due"]}


@pytest.mark.parametrize(
    ("kind", "data", "by", "by_data", "over"),
    [
        ("server_missing", MODE, "switch", {"to": "gba"}, True),
        ("server_missing", MODE, "switch", {"to": "allreduce"}, False),
        ("server_missing", MODE, "checkpoint", {}, False),
        ("server_missing", CHECKPOINT, "checkpoint", {}, True),
        ("server_missing", BOTH, "checkpoint", {}, False),
        ("server_missing", BOTH, "switch", {"to": "gba"}, True),
        ("switch_failed", {"to": "gba"}, "switch", {"to": "gba"}, True),
        ("switch_failed", {"to": "gba"}, "switch", {"to": "async"}, False),
        ("checkpoint_late", {}, "checkpoint", {}, True),
        ("checkpoint_failed", {}, "checkpoint", {}, True),
        ("checkpoint_failed", {}, "checkpoint_late", {}, False),
        ("best_not_saved", {"best_step": 20}, "checkpoint", {"best_step": 30}, True),
        ("best_not_saved", {"best_step": 20}, "checkpoint", {"best_step": 30, "best_unsaved_step": 20}, False),
        ("best_not_saved", {"best_step": 20}, "checkpoint", {"best_step": 10}, False),
        ("best_not_saved", {"best_step": 20}, "checkpoint", {}, False),
        ("table_full", {"table": "item"}, "resumed", {}, True),
        ("table_full", {"table": "item"}, "checkpoint", {}, False),
        ("many_dropped", {}, "many_dropped_over", {}, True),
        ("many_dropped", {}, "switch", {"to": "allreduce"}, True),
        ("many_dropped", {}, "checkpoint", {}, False),
        ("negatives_local", {"workers": 1}, "membership", {"workers": 2}, True),
        ("negatives_local", {"workers": 1}, "resumed", {}, True),
        ("negatives_local", {"workers": 1}, "switch", {"to": "gba"}, False),
        ("recovery_idle", {"hosts": 1}, "membership", {"hosts": 2}, True),
        ("recovery_idle", {"hosts": 1}, "membership", {"hosts": 1}, False),
        ("row_compression_idle", {"hosts": 1}, "started", {}, True),
        ("backups_too_many", {}, "membership", {}, True),
        ("backups_too_many", {}, "checkpoint", {}, False),
        ("worker_dropped", {"worker": 7}, "worker_kept", {"worker": 7}, True),
        ("worker_dropped", {"worker": 7}, "worker_kept", {"worker": 8}, False),
        ("worker_dropped", {"worker": 7}, "membership", {}, True),
        ("worker_hangs", {"pid": 5}, "worker_works", {"pid": 5}, True),
        ("worker_hangs", {"pid": 5}, "worker_works", {"pid": 6}, False),
        ("worker_hangs", {"pid": 5}, "membership", {}, True),
        ("worker_hangs", {"pid": 5}, "switch", {"to": "allreduce"}, True),
        ("worker_hangs", {"pid": 5}, "switch", {"to": "gba"}, False),
        ("rows_lost", {}, "rows_restored", {}, False),
        ("world_late", {"stands": False}, "membership", {}, True),
        ("leaders_not_connected", {}, "membership", {}, True),
        ("leaders_not_connected", {}, "checkpoint", {}, False),
    ],
)
def test_what_ends_a_warning(kind: str, data: dict[str, Any], by: str, by_data: dict[str, Any], over: bool) -> None:
    assert ends(kind, data, by, by_data) is over


@pytest.mark.parametrize(
    ("by", "by_data", "over"),
    [
        ("checkpoint", {"saved_step": 76}, True),
        ("checkpoint", {"saved_step": 80}, True),
        ("checkpoint", {"saved_step": 60}, False),
        ("checkpoint", {}, False),
        ("finished", {}, False),
    ],
)
def test_a_last_step_that_was_not_saved_is_over_once_a_launch_saves_it_or_a_later_one(
    by: str, by_data: dict[str, Any], over: bool
) -> None:
    assert ends("not_saved", {}, by, by_data, 76) is over
    warned = {"event": "not_saved", "step": 76, "level": "warning", "data": {}}
    assert over_since([warned, {"event": by, "step": 80, "data": by_data}]) == [80 if over else None, None]


def test_a_world_that_was_late_and_stands_is_over_at_once() -> None:
    late, forming = stands(5, Wait(40.0), 2, "training stood still"), still_forms(5, Wait(40.0), "training continues")
    assert is_over_at_once(late.kind, late.data) and not is_over_at_once(forming.kind, forming.data)
    assert ends(forming.kind, forming.data, late.kind, late.data)


@pytest.mark.parametrize("kind", ["shard_steps_missed", "rows_of_other_steps"])
def test_row_updates_of_a_step_that_a_worker_died_in_ask_for_nothing(kind: str) -> None:
    assert over_since([{"event": kind, "step": 5, "level": "warning", "data": {}}]) == [5]


def test_records_are_asked_in_their_order() -> None:
    late = {"event": "checkpoint_late", "step": 5, "level": "warning", "data": {}}
    saved = {"event": "checkpoint", "step": 7, "data": {}}
    assert over_since([late, saved, late]) == [7, None, None]
