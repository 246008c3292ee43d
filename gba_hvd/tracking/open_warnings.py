"""Which warnings still hold: one that named a state, such as a server that is not up, is over when an event shows so.

Warnings of what has happened, such as rows that were lost, are never over, unless nothing can be done about it any
more: row updates of one step that a worker died in, or that are made twice. Pure functions over plain values; events
and records of events are asked for alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gba_hvd.tracking.records import Record

_OF_ONE_HOST = ("recovery_idle", "row_compression_idle")
_OF_CHECKPOINTS = ("checkpoint_late", "checkpoint_failed")


def ends(kind: str, data: Mapping[str, Any], by: str, by_data: Mapping[str, Any], step: int = 0) -> bool:
    """Whether a warning is over with a later event. kind, data, step: of the warning; by, by_data: of the event."""
    if kind == "server_missing":  # waiting: "mode gba", "the checkpoint that is due"
        modes = [what.removeprefix("mode ") for what in data.get("waiting", ()) if what.startswith("mode ")]
        return by_data.get("to") in modes if modes and by == "switch" else by == "checkpoint" and not modes
    if kind == "switch_failed":
        return by == "switch" and by_data.get("to") == data.get("to")
    if kind in _OF_CHECKPOINTS:
        return by == "checkpoint"
    if kind == "not_saved":  # the last step of a job: another launch has saved it, or a later one
        return by == "checkpoint" and int(by_data.get("saved_step", -1)) >= step
    if kind == "best_not_saved":  # a model that was better still is saved
        is_later = int(by_data.get("best_step") or 0) > int(data.get("best_step", 0))
        return by == "checkpoint" and is_later and by_data.get("best_unsaved_step") is None
    if kind == "backups_too_many":  # reported again if it is so in the next world
        return by in ("switch", "membership", "resumed")
    if kind == "negatives_local":  # the same
        return by in ("membership", "resumed")
    if kind == "many_dropped":  # reported again if it is so with other workers, too
        return by in ("many_dropped_over", "switch", "membership", "resumed")
    if kind == "worker_dropped":
        return by in ("switch", "membership", "resumed") or (
            by == "worker_kept" and by_data.get("worker") == data.get("worker")
        )
    if kind == "worker_hangs":  # all workers enter allreduce together
        entered = by == "switch" and by_data.get("to") == "allreduce"
        return entered or by == "membership" or (by == "worker_works" and by_data.get("pid") == data.get("pid"))
    if kind == "leaders_not_connected":  # reported again in a world where it is so
        return by in ("membership", "started")
    if kind in _OF_ONE_HOST:
        return by == "started" or (by == "membership" and int(by_data.get("hosts", 1)) > 1)
    if kind == "learning_rates_kept":  # of one launch
        return by == "started"
    if kind == "table_full":  # reported again if the table is still full
        return by == "resumed"
    return kind == "world_late" and not data.get("stands") and by in ("membership", "world_late")


def is_over_at_once(kind: str, data: Mapping[str, Any]) -> bool:
    """Whether a warning reports a state that has ended already."""
    return kind in ("shard_steps_missed", "rows_of_other_steps") or (kind == "world_late" and bool(data.get("stands")))


def over_since(events: Sequence[Record]) -> list[int | None]:
    """For each record of an event, in order: the step since which it is over, if it is a warning that is."""
    return [
        _over(warning, events[at + 1 :]) if warning.get("level") == "warning" else None
        for at, warning in enumerate(events)
    ]


def _over(warning: Record, later: Iterable[Record]) -> int | None:
    kind, data = str(warning.get("event")), warning.get("data", {})
    if is_over_at_once(kind, data):
        return int(warning.get("step", 0))
    for event in later:
        if ends(kind, data, str(event.get("event")), event.get("data", {}), int(warning.get("step", 0))):
            return int(event.get("step", 0))
    return None
