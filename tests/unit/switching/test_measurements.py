"""What a decision goes by is recent, of the workers that take part, and no single odd time moves it."""

from __future__ import annotations

import numpy as np
import pytest

from gba_hvd.switching.measurements import (
    FORGET_S,
    N_RECENT,
    REPLACED_S,
    LostWorkers,
    PushReadings,
    RecentCost,
    RecentRate,
    RecentTimes,
    mean_times,
    neighbours,
)


def known(times: np.ndarray | None) -> list[list[float]]:
    assert times is not None
    return [own[own < np.inf].tolist() for own in times]


def test_times_are_the_newest_of_each_worker_once_all_have_one() -> None:
    recent = RecentTimes()
    recent.add([1.0, 0.0])
    assert recent.times() is None
    recent.add([2.0, 5.0])
    assert known(recent.times()) == [[1.0, 2.0], [5.0]]
    assert known(recent.times(last=1)) == [[2.0], [5.0]]
    assert recent.median(0) == 1.5 and recent.median(7) is None
    for _ in range(N_RECENT):
        recent.add([3.0, 3.0])
    assert known(recent.times()) == [[3.0] * N_RECENT] * 2


def test_an_odd_time_counts_as_four_times_the_median() -> None:
    recent = RecentTimes()
    for seconds in (1.0, 1.0, 500.0):
        recent.add([seconds])
    times = recent.times()
    assert known(times) == [[1.0, 1.0, 4.0]] and times is not None
    assert mean_times(times) == (2.0,)


def test_another_number_of_workers_begins_anew() -> None:
    recent = RecentTimes()
    recent.add([1.0, 2.0])
    recent.add([0.0, 2.0, 2.0])
    assert recent.times() is None


def test_neighbours_are_means_of_as_many_micro_batches_as_a_worker_has_in_a_step() -> None:
    recent = RecentTimes()
    for seconds in ([1.0, 1.0, 1.0], [2.0, 0.0, 2.0], [3.0, 0.0, 3.0]):
        recent.add(seconds)
    times = recent.times()
    assert times is not None
    assert known(neighbours(times, [2, 2, 1])) == [[1.5, 2.5], [1.0], [1.0, 2.0, 3.0]]


def test_a_rate_is_of_what_was_done_and_a_reading_without_is_part_of_the_next() -> None:
    rate = RecentRate()
    assert rate.value() is None
    rate.add(0, 1.0)
    assert rate.value() is None
    rate.add(4, 1.0)
    rate.add(2, 1.0)
    assert rate.value() == pytest.approx(6 / 3.0)
    assert rate.value(last=1) == pytest.approx(2.0)


def test_a_pause_does_not_move_a_rate_by_more_than_a_slow_step() -> None:
    rate = RecentRate()
    for seconds in (1.0, 1.0, 1.0, 900.0):
        rate.add(8, seconds)
    assert rate.value() == pytest.approx(32 / 7.0)


def test_a_cost_that_was_not_measured_for_an_hour_may_be_the_least_again() -> None:
    cost = RecentCost(first_s=0.2)
    assert cost.value(1e9) == 0.2
    for at_s, seconds in enumerate([0.1] * 9 + [0.5] * 9):
        cost.add(seconds, at_s)
    assert cost.value(18 + FORGET_S / 2) == 0.5
    assert cost.value(18 + FORGET_S) == 0.1


def test_steps_wait_longest_for_the_worker_that_is_slow_at_times() -> None:
    recent = RecentTimes()
    for step in range(30):
        recent.add([0.010, 0.250 if step % 5 == 0 else 0.009, 0.012])
    waits = recent.waits((2, 2, 2))
    assert waits is not None and (waits.worker, waits.n_slowest, waits.n_steps) == (1, 6, 30)
    assert waits.median_s == pytest.approx((6 * 0.024 + 24 * 0.020) / 30)
    assert waits.slowest_s == pytest.approx((6 * 0.500 + 24 * 0.024) / 30)


def test_a_worker_without_a_share_is_not_waited_for() -> None:
    recent = RecentTimes()
    for _ in range(3):
        recent.add([0.01, 0.02, 0.0])
    waits = recent.waits((1, 1, 0), gain=0.5)
    assert waits is not None and (waits.worker, waits.slowest_s) == (1, pytest.approx(0.01))
    assert recent.waits((2, 0, 0)) is None
    assert recent.waits((1, 1)) is None


@pytest.mark.parametrize("first_s", [0.0, 0.01, 1.0])
def test_what_was_assumed_before_the_first_reading_is_forgotten_with_it(first_s: float) -> None:
    cost = RecentCost(first_s)
    for at_s in range(3):
        cost.add(0.08, at_s)
        assert cost.value(at_s) == 0.08
    assert cost.value(3 + FORGET_S) == 0.08


def test_one_odd_reading_is_not_the_least_that_a_cost_was() -> None:
    cost = RecentCost(first_s=0.2)
    for at_s, seconds in enumerate([0.0] + [0.08] * 20):
        cost.add(seconds, at_s)
    assert cost.value(21 + FORGET_S) == 0.08


def test_pushes_are_counted_from_the_second_look_on() -> None:
    readings = PushReadings()
    assert readings.take([(0, 7, 3, 0.1), (1, 8, 5, 0.2)]) == ([0.0, 0.0], 0, False)
    assert readings.take([(0, 7, 5, 0.3), (1, 8, 5, 0.2)]) == ([0.3, 0.0], 2, True)
    assert not readings.members_changed


def test_counts_of_another_server_or_of_other_workers_are_not_compared() -> None:
    readings = PushReadings()
    readings.take([(0, 7, 3, 0.1)])
    assert readings.take([(0, 7, 1, 0.1)]) == ([0.0], 0, False)
    assert not readings.members_changed
    assert readings.take([(0, 7, 2, 0.1), (1, 9, 4, 0.1)]) == ([0.0, 0.0], 0, False)
    assert readings.members_changed


def test_a_lost_worker_is_awaited_until_it_is_back_or_the_wait_is_over() -> None:
    lost = LostWorkers()
    assert [lost.look(n, False, float(now_s)) for now_s, n in enumerate((2, 2, 1, 1, 2, 2))] == [0, 0, 1, 1, 0, 0]
    assert lost.look(1, False, 10.0) == 1
    assert lost.look(1, False, 10.0 + REPLACED_S) == 1
    assert lost.look(1, True, 11.0 + REPLACED_S) == 1, "the launcher waits for the workers of a world"
    assert lost.look(1, False, 12.0 + 2 * REPLACED_S) == 0
    assert lost.look(2, True, 13.0 + 2 * REPLACED_S) == 0, "one more than before is none that was lost"
