"""A wait for companion servers that was asked for is a note, and a warning when it is nearly over.

And what a switch says of functions that run at each step.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd import GBACallback
from gba_hvd.callbacks import Event
from gba_hvd.errors import GbaError
from gba_hvd.switching import enter_ps
from gba_hvd.training.step_hooks import StepHooks


def waited(monkeypatch: pytest.MonkeyPatch, up_after_s: float, wait_s: float) -> list[Event]:
    """What is reported until the servers of this host are up. Raises GbaError as `enter_ps` does."""
    now, events = [100.0], list[Event]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(enter_ps, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr("gba_hvd.ps.launch.why_not_started", lambda folder, index: "")
    server = SimpleNamespace(
        is_ready=lambda to_enter: now[0] >= 100.0 + up_after_s,
        why_not_ready=lambda to_enter=False: "server 0 of this host has not answered yet",
        folder_lost="",
    )
    engine: Any = SimpleNamespace(
        host=SimpleNamespace(server=server), progress=SimpleNamespace(step=7), folder=Path("/nowhere"),
        emit=lambda event, only_here: events.append(event),
    )  # fmt: skip
    try:
        enter_ps._await_own(engine, GBACallback(mode="gba", wait_s=wait_s), "gba")
    finally:
        levels = [event.level for event in events]
        assert levels == ["info", "warning"][: len(levels)], "each is reported once"
    return events


def test_a_wait_that_was_asked_for_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited(monkeypatch, 2.0, wait_s=60) == []
    (note,) = waited(monkeypatch, 40.0, wait_s=60)
    assert (note.kind, note.level, note.data["waiting"]) == ("server_awaited", "info", ["mode gba"])
    assert note.message.endswith("to enter mode gba, for 60 s at most (wait_s)")


def test_a_wait_that_is_nearly_over_is_a_warning_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    _, warning = waited(monkeypatch, 50.0, wait_s=60)
    assert warning.kind == "server_missing"
    assert warning.message.endswith(
        "for 60 s at most (wait_s), of which 45 s are over: server 0 of this host has not answered yet"
    )
    with pytest.raises(GbaError, match="the companion servers of this host were not up in 60 s"):
        waited(monkeypatch, 1000.0, wait_s=60)


@pytest.mark.parametrize(
    ("mode", "words"),
    [("shadow", "run 4 times as often"), ("async", "run 4 times as often"), ("hop_bw", "at another pace"), ("gba", "")],
)
def test_a_switch_says_that_step_functions_run_more_often(mode: str, words: str) -> None:
    hooks, model = StepHooks(), SimpleNamespace(global_batch=16, micro_batch=4)
    engine: Any = SimpleNamespace(model=model, step_hooks=hooks)
    assert enter_ps._pace_of_step_functions(engine, mode) == "", "no function is registered"
    hooks.functions.append(print)
    said = enter_ps._pace_of_step_functions(engine, mode)
    assert words in said and bool(said) == bool(words)
