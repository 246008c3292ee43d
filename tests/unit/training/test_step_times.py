"""Where the time of allreduce steps goes, as `gba-hvd status` shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gba_hvd.training.step_times import StepTimes


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def a_step(times: StepTimes, clock: Clock) -> dict[str, Any] | None:
    """Of rank 0 of two: 0.1 s reading, 0.2 s computing, 0.3 s rows, 0.4 s until the sum is there."""

    def batches() -> Iterator[int]:
        clock.now_s += 0.1
        yield 1

    times.begin_step()
    for _ in times.reading(batches()):
        clock.now_s += 0.2
    with times.part("rows"):
        clock.now_s += 0.3
    with times.part("sum"):
        clock.now_s += 0.4
    return times.ended(0, 1.0, 64, [1, 2], [0.2, 0.3], [times.reading_s, 0.0])


def test_the_parts_of_a_step_are_those_that_the_worker_spent() -> None:
    clock = Clock()
    found = a_step(StepTimes(clock), clock)
    assert found == {
        "rank": 0, "steps": 1, "samples_per_s": 64.0, "step_s": 1.0, "slowest_s": 0.6, "waiting_s": 0.3,
        "reading_s": 0.1, "rows_s": 0.3, "sum_s": 0.4,
        "by_rank": [[1, 2.0, 0.6, 0.0], [0, 1.0, 0.2, 0.1]],
    }  # fmt: skip


def test_means_are_shown_every_few_seconds() -> None:
    clock = Clock()
    times = StepTimes(clock)
    shown = [a_step(times, clock) for _ in range(5)]
    assert [one and one["steps"] for one in shown] == [1, None, 2, None, 2]
    assert shown[2] is not None and shown[2]["samples_per_s"] == 64.0 and shown[2]["sum_s"] == 0.4


def test_of_many_workers_the_slowest_are_shown() -> None:
    times = StepTimes(Clock())
    times.begin_step()
    found = times.ended(0, 1.0, 300, [1] * 300, [rank / 1000 for rank in range(300)], [0.0] * 300)
    assert found is not None and [one[0] for one in found["by_rank"]] == list(range(299, 199, -1))
