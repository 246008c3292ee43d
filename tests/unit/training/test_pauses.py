"""When training stands still, and for how long, as the job's account has it."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gba_hvd
from gba_hvd.elastic import training_state
from gba_hvd.training.pauses import JOINED, LOSS, Pause, Pauses
from recovery import state_codec
from tests.unit.thread_world import EventLog, Workers


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def run(*events: str) -> list[tuple[float, int | None]]:
    """`12 step`, `5 begin`: what happens, and how long after what was before it."""
    clock = Clock()
    pauses, step = Pauses(clock), 0
    for event in events:
        after_s, what = event.split()
        clock.now_s += float(after_s)
        if what == "step":
            step += 1
            pauses.stepped(step)
        elif what == "begin":
            pauses.begin(LOSS)
        elif what in ("ends", "finishes"):
            pauses.job_ends(finished=what == "finishes")
        else:
            {
                "evaluation": pauses.evaluation_begins, "evaluated": pauses.evaluated, "forms": pauses.world_formed,
            }[what]()  # fmt: skip
    return [(pause.seconds, pause.step) for pause in pauses.over]


@pytest.mark.parametrize(
    ("events", "over"),
    [
        (["9 begin", "5 step"], []),  # the start is no pause
        (["0 step", "3 begin", "5 step", "4 step"], [(8.0, 2)]),
        (["0 step", "3 begin", "2 begin", "5 step"], [(10.0, 2)]),
        (["0 step", "3 begin", "5 ends", "1 ends"], [(8.0, None)]),
        (["0 step", "5 ends"], []),
        (["0 step", "3 begin", "1 evaluation", "60 evaluated", "30 ends"], [(4.0, None)]),
        (["0 step", "3 begin", "1 forms", "2 evaluation", "60 evaluated", "30 finishes"], [(6.0, None)]),
        (["0 step", "3 begin", "2 forms", "30 finishes"], [(5.0, None)]),
        (["0 step", "3 begin", "2 forms", "30 ends"], [(35.0, None)]),  # it was to train on
        (["0 forms", "0 step", "3 begin", "30 finishes"], [(33.0, None)]),  # of the world before it
        (["0 step", "3 begin", "1 evaluation", "60 evaluated", "7 begin", "2 forms", "9 finishes"], [(13.0, None)]),
        (["0 step", "1 evaluation", "60 evaluated", "3 begin", "5 step"], [(8.0, 2)]),  # before it
        (["0 step", "1 evaluation", "60 evaluated", "9 begin", "1 evaluation", "60 evaluated", "5 step"], [(15.0, 2)]),
        (["0 step", "3 begin", "1 evaluation", "60 evaluated", "60 evaluated", "5 step"], [(9.0, 2)]),  # within it
        (["0 step", "1 evaluation", "9 evaluated", "20 begin", "5 step"], [(25.0, 2)]),  # it was lost in mid evaluation
        (["0 evaluation", "60 evaluated", "3 begin", "5 step"], []),
    ],
)
def test_a_pause_counts_from_the_newest_work(events: list[str], over: list[tuple[float, int | None]]) -> None:
    assert run(*events) == over


def test_the_account_travels_and_an_open_pause_to_those_who_meet_at_this_moment() -> None:
    clock = Clock()
    pauses = Pauses(clock)
    pauses.stepped(1)
    for cause in (LOSS, JOINED):
        pauses.begin(cause)
        clock.now_s += 5.0
        if cause == LOSS:
            pauses.stepped(2)
    state = json.loads(json.dumps(pauses.state_dict()))
    newcomer, next_launch, of_an_older_version = (Pauses(clock) for _ in range(3))
    newcomer.load_state_dict(state, with_open=True)
    next_launch.load_state_dict(state, with_open=False)
    of_an_older_version.load_state_dict(None, with_open=False)
    assert newcomer.stepped(3) == pauses.stepped(3) == Pause(JOINED, 5.0, 3)
    assert next_launch.stepped(3) is None
    assert [one.total_s for one in (newcomer, pauses, next_launch, of_an_older_version)] == [10.0, 10.0, 5.0, 0.0]


def test_a_pause_that_a_launch_was_interrupted_in_counts_for_the_next_one_until_its_state_was_taken() -> None:
    clock = Clock()
    before, after = Pauses(clock), Pauses(clock)
    before.stepped(1)
    before.begin(LOSS)
    clock.now_s += 5.0
    state = json.loads(json.dumps(before.state_dict()))
    clock.now_s += 600.0  # until it is started again
    after.resume(state)
    assert after.over == [Pause(LOSS, 5.0, None)] and after.total_s == 5.0
    assert after.stepped(2) is None
    of_an_older_version = Pauses(clock)
    of_an_older_version.resume({"open": {"cause": LOSS, "since_unix_s": 1000.0}, "over": []})
    assert of_an_older_version.over == []


def test_workers_that_meet_keep_the_longer_account_and_their_own_clock() -> None:
    clock, behind = Clock(), Clock()
    behind.now_s -= 30.0
    survivor, joined_before, source = Pauses(behind), Pauses(behind), Pauses(clock)
    for pauses in (survivor, joined_before, source):
        pauses.stepped(1)
    for pauses in (survivor, source):
        pauses.begin(LOSS)
        pauses.stepped(2)
    clock.now_s, behind.now_s = clock.now_s + 5.0, behind.now_s + 5.0
    for pauses in (survivor, joined_before, source):
        pauses.begin(JOINED)
    state = joined_before.state_dict()
    joined_before.meet(source.state_dict())
    source.meet(state)
    assert [len(one.over) for one in (joined_before, source)] == [1, 1]
    survivor.meet(source.state_dict())
    newcomer = Pauses(behind)
    newcomer.meet(source.state_dict(), ahead_s=-30.0)
    ended = [one.stepped(3) for one in (survivor, joined_before, newcomer, source)]
    assert ended == [Pause(JOINED, 5.0, 3)] * 4


def test_a_checkpoint_within_an_asynchronous_epoch_has_the_pauses_until_then(
    training: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, later = training(epoch=0), training(epoch=0)
    job.epoch(clicks())
    state, pauses = job.state.training_state, job.state.engine.reports.pauses
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    state.take_snapshot()
    assert state.snapshot and state.snapshot_to_save() is state.snapshot, "nothing has changed"
    pauses.begin(LOSS)
    state.take_snapshot()
    monkeypatch.delenv("HOROVOD_ELASTIC")
    pauses.stepped(9)
    later.state.training_state.resume(state_codec.decode(state.snapshot_to_save()))
    assert later.state.engine.reports.pauses.over == pauses.over and len(pauses.over) == 1


def test_the_next_launch_has_the_pauses_of_those_before_it(training: Any, clicks: Any) -> None:
    before, job = training(epoch=0), training(epoch=0)
    for cause in (LOSS, JOINED):
        before.epoch(clicks())
        before.state.engine.reports.pauses.begin(cause)
        before.state.epoch += 1
    job.state.training_state.resume(before.state.training_state.state_dict())
    pauses = job.state.engine.reports.pauses
    assert [one.cause for one in pauses.over] == [LOSS, JOINED], "the second one until the state was taken"
    assert pauses.job_ends(finished=True) is None


def test_a_late_joiner_knows_of_the_pause_that_let_it_in(on_host: Any, workers: Workers, clicks: Any) -> None:
    jobs = [on_host("a", epoch=0) for _ in range(3)]
    for job in jobs:
        job.log = EventLog()
        job.state.register_callbacks([job.log])

    def run(job: Any) -> None:
        job.state.on_reset()
        job.state.sync()
        job.epoch(clicks())

    workers.together(jobs[:2], run)
    for job in jobs:
        job.state.epoch = 1
    workers.together(jobs, run)
    found = [[(one.step, one.data["cause"], one.data["workers"]) for one in job.log.of("training_continues")]
             for job in jobs]  # fmt: skip
    assert found[2] == found[0] == found[1] and [cause for _, cause, _ in found[2]] == [JOINED]
    assert [len(job.state.engine.reports.pauses.over) for job in jobs] == [1, 1, 1]
    launched = [job.state.engine.progress.launched_unix_s for job in jobs]
    assert launched == [launched[0]] * 3 and launched[0] is not None, "the launch is older than the late joiner"


def test_a_newcomer_on_another_host_measures_by_its_own_clock(
    on_host: Any, workers: Workers, clicks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, here = [on_host("a", epoch=0), on_host("b", epoch=0)], threading.local()

    def clock() -> float:
        return time.time() - (3600.0 if getattr(here, "job", None) is jobs[1] else 0.0)

    monkeypatch.setattr(training_state, "time", SimpleNamespace(time=clock))
    for job in jobs:
        job.state.engine.reports.pauses = Pauses(clock)

    def run(job: Any) -> None:
        here.job = job
        job.state.on_reset()
        job.state.sync()
        job.epoch(clicks())

    workers.together(jobs[:1], run)
    began_unix_s = time.time()
    for job in jobs:
        job.state.epoch = 1
    workers.together(jobs, run)
    first, newcomer = (job.state.engine for job in jobs)
    for engine in (first, newcomer):
        (pause,) = engine.reports.pauses.over
        assert pause.cause == JOINED and 0.0 < pause.seconds < 1.0 + time.time() - began_unix_s
    launches_apart_s = first.progress.launched_unix_s - newcomer.progress.launched_unix_s
    assert launches_apart_s == pytest.approx(3600.0, abs=60.0)


def test_an_evaluation_is_no_part_of_a_pause(training: Any, clicks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before it, nor within it."""
    job, clock, log = training(epoch=0), Clock(), EventLog()
    job.state.engine.reports.pauses = pauses = Pauses(clock)
    job.state.register_callbacks([log])
    job.epoch(clicks())
    dataset = Slow(clicks(), clock)
    for seconds in (2.0, 3.0):
        gba_hvd.evaluate(job.model, dataset, job.state, batch=8, activation="sigmoid")
        pauses.begin(JOINED)
        clock.now_s += seconds
    assert clock.now_s > 1100.0
    job.state.epoch = 1
    job.epoch(clicks())
    assert [event.data["seconds"] for event in log.of("training_continues")] == [5.0]


class Slow:
    """A batch of it takes 60 s."""

    def __init__(self, dataset: Any, clock: Clock) -> None:
        self.dataset, self.clock = dataset, clock

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, numbers: np.ndarray) -> Any:
        self.clock.now_s += 60.0
        return self.dataset.take(numbers)


@pytest.mark.parametrize(("status", "error", "is_over"), [("FINISHED", None, True), ("FAILED", ValueError(), False)])
def test_a_pause_that_the_job_ends_in_is_counted_unless_others_continue(
    on_host: Any, workers: Workers, clicks: Any, status: str, error: Exception | None, is_over: bool
) -> None:
    jobs = [on_host("a", epoch=0) for _ in range(2)]
    logs = [EventLog() for _ in jobs]
    for job, log in zip(jobs, logs, strict=True):
        job.state.register_callbacks([log])

    def run(job: Any) -> None:
        job.epoch(clicks())
        job.state.engine.reports.worker_lost()
        gba_hvd.elastic.job_events.ended(job.state.engine, status, error)

    workers.together(jobs, run)
    for log in logs:
        (end,) = log.of("finished" if error is None else "failed")
        assert [pause[::2] for pause in end.data["pauses"]] == [[LOSS, None]] * is_over
        assert len(log.of("ended_in_pause")) == is_over
