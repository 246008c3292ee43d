"""What the chief asks of the coordinator in asynchronous modes, and what all workers note."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from gba_hvd import Event, GBACallback
from gba_hvd.comm.world_formation import Forming
from gba_hvd.mode_names import MODE_NUMBERS
from gba_hvd.modes.parameter_server import ParameterServerMode
from gba_hvd.ps.messages import JobPosition, SwitchTo
from gba_hvd.switching import leave_ps, requests
from gba_hvd.switching.policy import Decision
from gba_hvd.switching.requested_mode import SERVERS_NOT_UP
from gba_hvd.training.job_state import Progress
from gba_hvd.training.step_hooks import StepHooks


class Chief:
    def __init__(self, callback: GBACallback, rank: int = 0) -> None:
        self.events, self.sent = list[Event](), list[SwitchTo]()
        self.progress = Progress(None, StepHooks())
        engine: Any = SimpleNamespace(
            world=SimpleNamespace(rank=rank, size=2), progress=self.progress, elp=12, emit=self.events.append,
            model=SimpleNamespace(together=1, micro_batch=4, global_batch=16, dense_lrs=[0.1]),
            host=SimpleNamespace(server=None), forming=Forming(),
        )  # fmt: skip
        self.engine, self.participant = engine, requests.ModeRequests(engine, callback)
        self.participant.mode_entered()

    def micro_batch(self, step: int, mode: str = "gba", **position: Any) -> None:
        servers: Any = SimpleNamespace(
            name=mode, position=JobPosition(step=step, rates=[(0, 0.2), (1, 0.2)], **position),
            drain_metrics=lambda: ({}, []), contact=(contact := SimpleNamespace(report={})),
            client=SimpleNamespace(send=lambda server, request: self.sent.append(request)),
        )  # fmt: skip
        self.progress.step = step
        self.participant.before_micro_batch(servers, 0.004)
        self.report = contact.report


def test_a_planned_auto_ends_the_hold_of_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_ASK_AGAIN_S", 0.0)
    callback = GBACallback(mode="gba", switch_at={20: "auto"})
    chief, held = Chief(callback), {"requested_mode": "gba", "reason": "why", "pinned": True}
    chief.micro_batch(5, **held)
    assert (callback.mode, chief.sent) == ("gba", [])
    chief.micro_batch(21, **held)
    assert callback.mode == "auto"
    assert [(one.mode, one.pin) for one in chief.sent] == [("auto", True)]
    chief.micro_batch(22, requested_mode="auto", pinned=True)
    assert callback.mode == "auto"
    assert len(chief.sent) == 1


@pytest.mark.parametrize("mode", ["shadow", "ma", "async", "bsp", "hop_bs"])
def test_auto_in_a_mode_that_it_does_not_measure_returns_to_allreduce(mode: str) -> None:
    callback = GBACallback()
    chief, asked = Chief(callback), {"requested_mode": "auto", "reason": "asked for by root", "pinned": True}
    callback.last, callback.decided_at_step = Decision("allreduce", "stay in allreduce", 1.0, 1.0, 1.0, "gain"), 85
    assert chief.participant.for_people()["decided_at_step"] == 85
    callback.switched(mode, 100)
    callback.pin(mode)
    chief.micro_batch(101, mode)
    assert (chief.sent, chief.report) == ([], {"setting": mode})
    chief.micro_batch(102, mode, **asked)
    (sent,) = chief.sent
    assert (sent.mode, sent.pin) == ("allreduce", False), "not pinned: measurements decide again"
    assert "auto was asked for" in sent.reason
    assert chief.report == {"setting": "auto"}, "what was decided in the mode before is no decision of now"


def test_a_planned_auto_after_a_mode_that_it_does_not_measure_returns_to_allreduce() -> None:
    callback = GBACallback(mode="allreduce", switch_at={10: "async", 200: "auto"})
    chief = Chief(callback)
    chief.micro_batch(199, "async")
    assert chief.sent == []
    chief.micro_batch(200, "async")
    assert [(one.mode, one.pin) for one in chief.sent] == [("allreduce", False)]


def test_as_many_backups_as_workers_are_a_warning_in_each_world_of_the_mode() -> None:
    chief = Chief(GBACallback(mode="hop_bw", backups=2))
    for n_workers in (2, 2, 3, 1, 2):
        chief.engine.world = SimpleNamespace(rank=0, size=n_workers)
        for _ in range(2):
            chief.micro_batch(5, "hop_bw")
    said = [event for event in chief.events if event.kind == "backups_too_many"]
    assert [(event.level, event.data["workers"]) for event in said] == [("warning", 2)] * 3
    assert "backups=2 with 2 workers counts as backups=1" in said[0].message
    assert "up to 1 of 2 gradients are dropped. Choose fewer backups than workers" in said[0].message
    chief.participant.mode_entered()
    chief.micro_batch(6, "hop_bw")
    chief.micro_batch(7, "gba")
    assert len([event for event in chief.events if event.kind == "backups_too_many"]) == 4


@pytest.mark.parametrize(("is_pinned", "setting"), [(True, "allreduce"), (False, "auto")])
def test_a_worker_that_leaves_a_mode_has_the_setting_of_the_chief(is_pinned: bool, setting: str) -> None:
    """Not pinned is what the chief requests in auto, of which the other workers may not know."""
    callback = GBACallback(mode="allreduce", switch_at={10: "async", 200: "auto"})
    callback.pin("async")
    idle: Any = SimpleNamespace(name="allreduce", exchange=SimpleNamespace(resume=lambda: None))
    mode = MagicMock(spec=ParameterServerMode, rejoin=None, idle=idle, servers=MagicMock())
    mode.name = "async"
    engine = MagicMock(mode=mode, progress=Chief(callback).progress)
    engine.participant.return_value = SimpleNamespace(callback=callback)
    leave_ps.leave(engine, JobPosition(step=201, requested_mode="allreduce", pinned=is_pinned))
    assert callback.mode == setting


def test_what_gba_dropped_until_it_is_left_within_an_epoch_counts() -> None:
    chief = Chief(GBACallback(mode="gba", tolerance=2))
    chief.participant.mode_entered()
    idle: Any = SimpleNamespace(name="allreduce", exchange=SimpleNamespace(resume=lambda: None))
    mode = MagicMock(spec=ParameterServerMode, rejoin=None, idle=idle, servers=MagicMock())
    mode.name = mode.servers.name = "gba"
    engine = MagicMock(mode=mode, progress=chief.progress, participants=[chief.participant])
    engine.participant.return_value, mode.servers.position.drops = chief.participant, []
    engine.observe = lambda _: setattr(chief.progress, "staleness", {0: 33, 5: 27})
    engine.emit = chief.events.append
    leave_ps.leave(engine, JobPosition(step=9, requested_mode="allreduce"))
    assert [event.kind for event in chief.events] == ["many_dropped", "switch"]
    assert chief.events[0].data["share"] == 0.45


def test_a_hold_is_noted_once_and_ends_what_measurements_decide() -> None:
    callback = GBACallback(mode="auto")
    chief = Chief(callback)
    for step in (5, 6, 7):
        chief.micro_batch(step, requested_mode="gba", reason="by an operator", pinned=True)
    assert callback.mode == "gba"
    assert [event.kind for event in chief.events if event.kind == "mode_held"] == ["mode_held"]


def test_an_operator_overrides_what_was_planned_before_and_is_not_requested_yet() -> None:
    callback = GBACallback(mode="gba", switch_at={20: "auto", 30: "auto"})
    chief, held = Chief(callback), {"requested_mode": "gba", "reason": "by an operator", "pinned": True}
    chief.micro_batch(19)
    for step in (21, 22, 29):
        chief.micro_batch(step, **held)
        assert (callback.mode, chief.sent) == ("gba", [])
    assert [event.kind for event in chief.events] == ["mode_held"]
    chief.micro_batch(30, **held)
    assert callback.mode == "auto" and [one.mode for one in chief.sent] == ["auto"]


def test_servers_that_are_not_up_at_a_later_try_are_the_newest_obstacle() -> None:
    chief = Chief(callback := GBACallback(mode="gba"))
    chief.participant._engine.mode = SimpleNamespace(name="allreduce")
    chief.participant._engine.signals = SimpleNamespace(requested_mode=None)
    callback.failed(5, "a server refused a gradient: no room")
    agreed = [0.0] * chief.participant.n_fields()
    chief.participant.after_commit(agreed)
    assert callback.asked.obstacle == "a server refused a gradient: no room"
    agreed[MODE_NUMBERS["gba"]] = agreed[requests._NOT_READY] = 1.0
    chief.participant.after_commit(agreed)
    assert (callback.asked.obstacle, chief.participant.waiting) == (SERVERS_NOT_UP, ["mode gba"])


def test_the_reason_of_an_operator_stays_while_servers_start() -> None:
    chief = Chief(callback := GBACallback(mode="allreduce"))
    chief.engine.mode = SimpleNamespace(name="allreduce")
    chief.engine.signals = SimpleNamespace(requested_mode=None)
    chief.participant._requested = "shadow", "asked for by root at 11:48:23"
    agreed = [0.0] * chief.participant.n_fields()
    agreed[len(MODE_NUMBERS) + MODE_NUMBERS["shadow"]] = agreed[requests._NOT_READY] = 1.0
    chief.participant.after_commit(agreed)
    assert chief.participant.waiting == ["mode shadow"]
    assert callback.mode_request(9, "allreduce") == ("shadow", "asked for by root at 11:48:23")
    callback.pin("shadow")
    assert callback.mode_request(9, "allreduce") == ("shadow", "mode 'shadow' was asked for")


@pytest.mark.parametrize(("rank", "is_forming", "now_s"), [(0, False, 30.0), (0, True, 500.0), (1, False, 30.0)])
def test_every_worker_knows_in_gba_of_one_that_was_lost(
    monkeypatch: pytest.MonkeyPatch, rank: int, is_forming: bool, now_s: float
) -> None:
    """Any may become the chief."""
    callback, clock_s = GBACallback(), [0.0]
    monkeypatch.setattr(requests.time, "perf_counter", lambda: clock_s[0])
    chief = Chief(callback, rank)
    both = [(0, 7, 3, 0.1), (1, 9, 3, 0.3)]
    chief.micro_batch(5, newest=both)
    clock_s[0] = 20.0
    chief.micro_batch(6, newest=both[:1])
    if is_forming:
        chief.engine.forming.begin()
    clock_s[0] = now_s
    chief.micro_batch(7, newest=both[:1])
    assert callback.n_awaited == 1
    chief.micro_batch(8, newest=both)
    assert callback.n_awaited == 0


def test_what_was_decided_with_a_worker_that_is_lost_is_not_requested() -> None:
    chief = Chief(callback := GBACallback())
    both, decided = [(0, 7, 3, 0.1), (1, 9, 3, 0.3)], ("allreduce", "faster")
    chief.micro_batch(5, newest=both)
    callback._request = decided
    chief.micro_batch(5, newest=both[:1], membership_epoch=1)  # within a step: nothing is measured
    assert chief.sent == []
    callback._request = decided
    chief.micro_batch(5, newest=both, membership_epoch=2)
    assert [(one.mode, one.pin, one.world) for one in chief.sent] == [("allreduce", False, 2)]
