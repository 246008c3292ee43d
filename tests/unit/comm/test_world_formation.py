"""What is reported of a world that takes long to form, or breaks up meanwhile."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import gba_hvd
from gba_hvd.comm import collectives
from gba_hvd.comm.collectives import SoloWorld
from gba_hvd.comm.world_formation import Forming, Wait, stands, still_forms
from gba_hvd.elastic.world_rejoin import WorldRejoin
from gba_hvd.membership import JoinResult
from gba_hvd.modes.parameter_server import ParameterServerMode
from gba_hvd.ps.messages import JobPosition
from gba_hvd.tracking import ProgressLine

PATIENCE_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Events(gba_hvd.Callback):
    def __init__(self) -> None:
        self.received: list[gba_hvd.Event] = []
        self.ended = 0  # events that came before the end

    def on_event(self, event: gba_hvd.Event) -> None:
        self.received.append(event)

    def on_end(self, status: str, error: BaseException | None) -> None:
        self.ended = len(self.received)

    @property
    def late(self) -> list[gba_hvd.Event]:
        return [event for event in self.received if event.kind == "world_late"]


class Horovod:
    """The world breaks up so often, each time after 40 s."""

    def __init__(self, clock: Clock, breaks: int) -> None:
        self.clock, self.breaks = clock, breaks

    def init(self) -> None:
        self.clock.now_s += 40.0
        if self.breaks:
            self.breaks -= 1
            raise ValueError("a peer did not come")

    def shutdown(self) -> None:
        pass

    def is_initialized(self) -> bool:
        return False  # also where another test of this process has imported Horovod


def forms(monkeypatch: pytest.MonkeyPatch, forming: Forming, clock: Clock, breaks: int) -> None:
    monkeypatch.setattr(collectives, "_horovod", lambda: Horovod(clock, breaks))
    monkeypatch.setattr(collectives, "_ASK_AGAIN_S", 0.0)
    collectives.initialise_again(forming, PATIENCE_S)


def test_a_world_that_broke_up_says_how_often_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    forming = Forming(clock := Clock())
    forms(monkeypatch, forming, clock, breaks=2)
    wait = forming.end()
    assert wait == Wait(120.0, 2, "ValueError: a peer did not come") and wait.is_worth_a_word
    event = stands(7, wait, 2, "this worker's training stood still meanwhile")
    assert (event.kind, event.step, event.level) == ("world_late", 7, "warning")
    assert event.data == {"seconds": 120.0, "broken": 2, "why": "ValueError: a peer did not come", "stands": True}
    assert event.message.startswith(
        "the world of 2 workers took 120 s, in which it broke up 2 times (at last: ValueError: a peer did not come) to "
        "form; this worker's training stood still meanwhile. When this comes again"
    )
    assert "raise HOROVOD_GLOO_TIMEOUT_SECONDS" in event.message
    assert forming.end() is None


def test_a_wait_goes_on_until_the_workers_have_agreed_and_a_short_one_is_no_news() -> None:
    forming = Forming(clock := Clock())
    assert forming.wait() is None and forming.word() is None
    forming.begin()
    clock.now_s = 20.0
    assert (wait := forming.wait()) is not None and not wait.is_worth_a_word
    forming.begin()
    clock.now_s = 31.0
    assert (wait := forming.end()) is not None and wait.is_worth_a_word


def test_while_a_world_forms_a_word_comes_after_30_s_and_then_ever_less_often() -> None:
    forming = Forming(clock := Clock())
    for _ in range(2):
        forming.begin()
        began_s, reported_s = clock.now_s, []
        while clock.now_s < began_s + 300.0:
            if (wait := forming.word()) is not None:
                assert wait.seconds == clock.now_s - began_s
                reported_s.append(clock.now_s - began_s)
            clock.now_s += 1.0
        assert reported_s == [30, 60, 120, 240]
        forming.end()


def test_survivors_learn_how_long_training_stood_still(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job, reported, out = training(epoch=0), Events(), io.StringIO()
    state = job.state
    state.register_callbacks([reported, ProgressLine(stream=out)])
    state.sync()
    state.engine.forming = Forming(clock := Clock())
    forms(monkeypatch, state.engine.forming, clock, breaks=1)  # as Horovod's loop does
    state.on_reset()
    state.sync()
    assert [event.data["seconds"] for event in reported.late] == [80.0]
    state.on_reset()
    state.sync()  # of a world that nobody waited for
    assert len(reported.late) == 1
    state.close()
    assert "warning, over: [world late] step 0: the world of 1 worker took 80 s, in which it broke up" in out.getvalue()


@pytest.mark.slow
def test_beside_an_asynchronous_mode_it_is_reported_meanwhile_and_when_the_world_stands(training: Any) -> None:
    job, reported = training(epoch=0), Events()
    state, engine = job.state, job.state.engine
    state.register_callbacks([reported])
    state.sync()
    engine.forming = Forming(clock := Clock())
    engine.forming.begin()
    state.late_joiners.report_wait()
    assert not reported.late
    clock.now_s = 35.0
    engine.forming.broke_up(ValueError("a peer did not come"))
    state.late_joiners.report_wait()
    (late,) = reported.late
    assert "has been forming for 35 s, in which it broke up 1 time (at last" in late.message
    assert "training continues with the workers that are there" in late.message
    joined = JoinResult(state.job_id, 0, 1, True, True, 0, 0, host=1, asynchronous=True, membership=1)
    state.late_joiners._met.append((joined, SoloWorld(), None, engine.forming.end(), {}))
    state.late_joiners.report()
    state.late_joiners.report_wait()
    assert [event.data["seconds"] for event in reported.late] == [35.0, 35.0]
    assert "those that were there continued to train" in reported.late[-1].message


def test_while_a_world_forms_beside_a_mode_its_workers_are_those_that_the_servers_hear(training: Any) -> None:
    job, workers = training(epoch=0), list[int]()
    callback = gba_hvd.Callback()
    callback.on_step = lambda record: workers.append(record.workers)  # type: ignore[method-assign]
    job.state.register_callbacks([callback])
    job.state.sync()
    engine = job.state.engine

    def step() -> None:
        engine.observe(JobPosition(rates=[(0, 0.1), (2, 0.2)]))
        engine.reports.step(64, None, "gba", None)

    step()
    engine.forming.begin()
    step()
    engine.forming.end()
    step()
    assert workers == [1, 2, 1]
    job.state.close()


@pytest.fixture
def held(training: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job beside which a world has been forming for 50 s; `let_go` ends that."""
    job, reported, let_go, waits = training(epoch=0), Events(), threading.Event(), threading.Event()
    state, engine = job.state, job.state.engine
    state.register_callbacks([reported])
    state.sync()

    def check(timeout_s: float) -> None:
        waits.set()
        assert let_go.wait(PATIENCE_S)
        raise OSError("no world")

    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    engine.forming = Forming(clock := Clock())
    servers: Any = SimpleNamespace(position=SimpleNamespace(membership_epoch=1), contact=SimpleNamespace())
    rejoin = WorldRejoin(servers, 0, lambda world: 1, SimpleNamespace(verify=check), PATIENCE_S, engine.forming)  # type: ignore[arg-type]
    engine.mode.rejoin = rejoin
    rejoin.start()
    assert waits.wait(PATIENCE_S)
    clock.now_s = 50.0
    yield SimpleNamespace(state=state, reported=reported, let_go=let_go, engine=engine, rejoin=rejoin)
    let_go.set()
    rejoin._thread.join(PATIENCE_S)


@pytest.mark.slow
def test_an_end_that_waits_for_a_world_reports_it_before_the_end(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gba_hvd.elastic.torch_state._FAILED_TIMEOUT_S", 0.2)
    monkeypatch.setattr("gba_hvd.elastic.torch_state._END_TIMEOUT_S", 0.2)
    held.state.close()
    assert held.rejoin._thread.is_alive()
    (late,) = held.reported.late
    assert (late.level, late.data["seconds"]) == ("warning", 50.0)
    assert late.message.startswith("the training is over, but this process has to wait: workers came or went shortly")
    assert "Nothing is lost by it, and nothing needs to be done" in late.message
    assert [event.kind for event in held.reported.received[-3:]] == ["world_late", "nothing_trained", "finished"]
    assert held.reported.ended == len(held.reported.received)


@pytest.mark.slow
def test_a_mode_that_is_left_while_a_world_forms_says_what_it_waits_for(held: Any) -> None:
    emit = held.engine.emit

    def emit_and_let_go(*reported: Any) -> None:
        emit(*reported)
        held.let_go.set()

    held.engine.emit = emit_and_let_go
    held.engine.forming._patience.first_s = 0.0
    mode = ParameterServerMode(held.engine, SimpleNamespace(name="gba"))  # type: ignore[arg-type]
    mode.rejoin = held.rejoin
    mode.end_rejoin()
    (late,) = held.reported.late
    assert (late.message.count("50 s"), late.message.count("the mode is left")) == (1, 1)


def test_a_wait_without_a_break_says_no_more_than_its_seconds() -> None:
    assert still_forms(1, Wait(31.4), "training continues").message.startswith(
        "a world of workers has been forming for 31 s, and does not stand yet; training continues. "
    )


def test_a_worker_of_this_host_that_died_beside_a_mode_is_reported_once(training: Any, dead: int) -> None:
    """With what Horovod prints of it; late joiners alone are no loss."""
    job, reported = training(), Events()
    job.state.register_callbacks([reported])
    job.state.sync()
    engine, report = job.state.engine, job.state.late_joiners.report_wait

    def lost() -> list[str]:
        return [event.message for event in reported.received if event.kind == "worker_lost"]

    engine.host.neighbours = {1: dead}
    report()
    assert lost() == [], "nobody forms a world"
    engine.forming.begin()
    report(), report()
    (message,) = lost()
    assert "'background loop uncaught exception' and 'Read error'" in message and "are expected" in message
    engine.forming.end()
    engine.host.neighbours = {1: os.getpid()}
    report()
    engine.forming.begin()
    report()
    assert len(lost()) == 1, "all are there"
    engine.forming.end()
    job.state.close()


@pytest.fixture
def dead() -> int:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as process:
        process.wait(60)
    return process.pid
