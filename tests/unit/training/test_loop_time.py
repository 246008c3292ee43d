"""What the loop does beside forward, backward and step is time of the micro-batch; work of the job is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import gba_hvd
from gba_hvd.training.commit_fields import StepParticipant
from gba_hvd.training.loop_time import LoopTime


class Times(StepParticipant):
    name, order = "times of a test", 9

    def __init__(self) -> None:
        self.by_step: list[tuple[float, float]] = []

    def n_fields(self) -> int:
        return 0

    def after_step(self, micro_batch_s: Sequence[float], step_s: float, n_micro: int, together: int) -> None:
        self.by_step.append((micro_batch_s[0], step_s))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_work_of_the_loop_after_a_step_is_time_of_the_next_micro_batch_and_of_its_step(
    training: Any, clicks: Any
) -> None:
    job, times, clock = training(global_batch=10, micro_batch=10, epoch=0), Times(), Clock()
    engine = job.state.engine
    engine.register(times)
    engine.loop_time = LoopTime(clock)

    def forward(batch: gba_hvd.Batch) -> Any:
        clock.now_s += 7000.0
        return job.model(batch)

    for batch in gba_hvd.batches(clicks(50), job.state):
        job.micro_step(batch)
        clock.now_s += 1000.0
        if job.state.step == 2:
            gba_hvd.evaluate(job.model, clicks(50), job.state, forward=forward)
    assert [(round(micro_s, -3), round(step_s, -3)) for micro_s, step_s in times.by_step] == [
        (0.0, 0.0),  # nothing came before
        *[(1000.0, 1000.0)] * 4,
    ]


def test_a_worker_in_an_asynchronous_mode_gives_the_servers_the_same_seconds(training: Any, clicks: Any) -> None:
    """They come from `take_gradients`, which modes share."""
    job, clock = training(epoch=0), Clock()
    next(gba_hvd.batches(clicks(50), job.state))
    engine = job.state.engine
    engine.loop_time = LoopTime(clock)
    engine.loop_time.stepped()
    clock.now_s = 1000.0
    engine.forget_micro_batch()
    engine.check_stepped()
    engine.begin_micro_batch(0, 4, is_last=False)
    assert engine.take_gradients(engine.detach_micro_batch(), None).seconds == pytest.approx(1000.0, abs=100.0)
