"""Short steps are read a tenth of a second at a time, and stops of a worker count by their share of the time."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from gba_hvd import GBACallback
from gba_hvd.switching.measurements import PushReadings
from gba_hvd.switching.policy import Options, Stance, decide
from gba_hvd.switching.predictions import Rates
from gba_hvd.switching.short_steps import READING_S, Reading, ShortSteps, Steps

COMPUTE_S, EXCHANGE_S, RUNS_S, STOPS_S = 0.004, 0.003, 0.15, 0.15


def step(*seconds: float, exchange_s: float = EXCHANGE_S) -> Steps:
    return Steps(1, 2 * len(seconds), max(seconds) + exchange_s, tuple((2, s) for s in seconds))


def steps_with_stops(training_s: float, waits_too: bool = False) -> Iterator[Steps]:
    """Worker 2 runs for 0.15 s, and then is stopped for 0.15 s within a step, every other time while it exchanges."""
    at_s, ran_s, n_stops = 0.0, 0.0, 0
    while at_s < training_s:
        is_stopped = ran_s >= RUNS_S
        n_stops += is_stopped
        is_in_exchange = waits_too and n_stops % 2 == 0
        stop_s = STOPS_S if is_stopped else 0.0
        own = (0.0, stop_s) if is_in_exchange else (stop_s, 0.0)
        one = step(COMPUTE_S, COMPUTE_S, COMPUTE_S + own[0], exchange_s=EXCHANGE_S + own[1])
        ran_s = 0.0 if is_stopped else ran_s + one.elapsed_s
        at_s += one.elapsed_s
        yield one


def readings(short: ShortSteps, steps: Iterator[Steps] | Sequence[Steps]) -> list[Reading]:
    return [reading for one in steps if (reading := short.add(one)) is not None]


def test_steps_are_gathered_until_they_span_a_reading() -> None:
    found = readings(ShortSteps(), [step(0.02, 0.01, exchange_s=0.01)] * 8)
    assert [one.n_steps for one in found] == [4, 4]
    assert found[0].elapsed_s == pytest.approx(0.12) and found[0].n_micro == 16
    assert found[0].seconds == pytest.approx((0.01, 0.005))


def test_a_long_step_is_a_reading_as_it_is() -> None:
    short, long = ShortSteps(), step(READING_S, 0.05)
    assert [one.n_steps for one in readings(short, [long] * 5 + [step(2.0, 0.05)] * 5)] == [1] * 10
    assert short.stopped().workers == (0.0, 0.0) and short.stopped().steps == 0.0


@pytest.mark.parametrize("waits_too", [False, True])
def test_a_worker_that_is_stopped_half_of_the_time_is_known_wherever_it_was_stopped(waits_too: bool) -> None:
    short, steps = ShortSteps(), list(steps_with_stops(12.0, waits_too))
    found = readings(short, steps)
    stopped, elapsed_s = short.stopped(), sum(one.elapsed_s for one in steps)
    share = 1 - len(steps) * (COMPUTE_S + EXCHANGE_S) / elapsed_s
    assert 0.47 < share < 0.5
    assert stopped.steps == pytest.approx(share, abs=0.025)
    assert stopped.workers[:2] == (0.0, 0.0) and stopped.workers[2] == pytest.approx(share, abs=0.025)
    assert found[-1].seconds == pytest.approx([COMPUTE_S / 2] * 3), "usual times are without stops"
    short.changed_mode()
    assert short.stopped().workers[2] == pytest.approx(share, abs=0.025) and short.stopped().steps == 0.0


def test_two_stops_move_nothing_and_one_long_one_counts_as_the_next() -> None:
    short, usual = ShortSteps(), [step(COMPUTE_S, COMPUTE_S)] * 40
    stop, pause = step(COMPUTE_S, 0.1), step(COMPUTE_S, 5.0)
    readings(short, [*usual, pause, *usual, stop, *usual])
    assert short.stopped().workers == (0.0, 0.0)
    readings(short, [stop, *usual, pause, *usual])
    assert 0 < short.stopped().workers[1] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("factor", [4.2, 5.0, 20.0])
@pytest.mark.parametrize("mode", ["allreduce", "gba"])
def test_a_worker_that_is_slow_from_now_on_is_not_stopped(mode: str, factor: float) -> None:
    short, rng, now_s, due_s = ShortSteps(), random.Random(0), -5.0, -5.0
    while now_s < 12.0:
        own_s = 0.005 * rng.gauss(1.0, 0.05) * (factor if now_s > 0 else 1.0)
        now_s += own_s + EXCHANGE_S if mode == "allreduce" else 0.005
        has_pushed = now_s >= due_s
        due_s += own_s if has_pushed else 0.0
        look = Steps(1, 3, 0.005, ((1, 0.005), (1, 0.005), (1, own_s) if has_pushed else (0, 0.0)), is_look=True)
        short.add(Steps(1, 3, own_s + EXCHANGE_S, ((1, 0.005), (1, 0.005), (1, own_s))) if mode != "gba" else look)
        assert max(short.stopped().workers, default=0.0) < 0.05, now_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("look_s", "stop_s", "period_s"), [(0.005, 0.3, 1.0), (0.01, 0.5, 1.0), (0.03, 1.2, 2.4), (0.05, 2.0, 3.0)]
)
def test_stops_of_more_looks_than_are_recent_are_known(look_s: float, stop_s: float, period_s: float) -> None:
    short, found = ShortSteps(), list[float]()
    for now_s in np.arange(look_s, 60.0, look_s):
        n = int(now_s % period_s >= stop_s)
        each = (1, 0.8 * look_s)
        short.add(Steps(1, 3 + n, look_s, (each, each, each, (n, n * 0.8 * look_s)), is_look=True))
        found += [short.stopped().workers[3]] if now_s > 20.0 else []
    assert np.mean(found) == pytest.approx(stop_s / period_s, rel=0.3) and min(found) > 0.6 * stop_s / period_s


def test_stalls_of_the_exchange_are_of_no_worker_that_has_a_few_small_stops() -> None:
    short, usual = ShortSteps(), [step(COMPUTE_S, COMPUTE_S)] * 10
    stalls, stop = [*usual, step(COMPUTE_S, COMPUTE_S, exchange_s=0.06)], step(COMPUTE_S, 0.02)
    readings(short, [*stalls * 20, stop, *usual] * 5)
    assert short.stopped().steps > 0.3, "that the job's steps are delayed is known"
    assert 0.0 < short.stopped().workers[1] < 0.02


def test_a_few_stops_in_a_row_are_a_small_share_of_the_time() -> None:
    short, usual = ShortSteps(), [step(COMPUTE_S, COMPUTE_S)] * 6
    readings(short, usual * 20)
    readings(short, [*usual, step(COMPUTE_S, 0.03)] * 4 + usual * 4)
    assert 0.0 < short.stopped().workers[1] < 0.05


def test_stops_that_ended_are_forgotten() -> None:
    short = ShortSteps()
    readings(short, steps_with_stops(5.0))
    assert short.stopped().workers[2] > 0.4
    readings(short, [step(COMPUTE_S, COMPUTE_S, COMPUTE_S)] * 1600)
    assert short.stopped().workers == (0.0, 0.0, 0.0) and short.stopped().steps == 0.0


def test_between_looks_a_worker_that_pushes_nothing_for_long_is_stopped() -> None:
    """It computes as fast as the others: it is stopped while it has nothing to compute."""
    short, runs = ShortSteps(), Steps(1, 6, 0.01, ((2, 0.004),) * 3, is_look=True)
    stands = Steps(1, 4, 0.01, ((2, 0.004), (2, 0.004), (0, 0.0)), is_look=True)
    readings(short, ([runs] * 15 + [stands] * 15) * 20)
    assert short.stopped().workers == (0.0, 0.0, pytest.approx(0.5, abs=0.05))
    assert short.stopped().steps == 0.0


def test_other_workers_begin_anew() -> None:
    short = ShortSteps()
    readings(short, steps_with_stops(5.0))
    short.changed_mode()
    readings(short, [step(COMPUTE_S, COMPUTE_S)] * 40)
    assert short.stopped().workers == (0.0, 0.0)


def test_a_look_has_all_micro_batches_since_the_last_one() -> None:
    pushes = PushReadings()
    pushes.take([(0, 7, 3, 0.1), (1, 9, 2, 0.3)], [(7, 0.3), (9, 0.5)])
    assert pushes.done == ()
    pushes.take([(0, 7, 5, 0.1), (1, 9, 2, 0.3)], [(7, 0.6), (9, 0.5)])
    assert pushes.done == ((2, pytest.approx(0.3)), (0, 0.0))


# --- what mode auto makes of it ---------------------------------------------------------------------------------------


def in_allreduce(callback: GBACallback, steps: Iterator[Steps]) -> float | None:
    """Seconds of training until it requests gba."""
    at_s = 0.0
    for number, one in enumerate(steps, 1):
        at_s += one.elapsed_s
        callback.measured_allreduce(number, [s / n for n, s in one.done], one.elapsed_s, one.n_micro)
        request = callback.mode_request(number, "allreduce")
        if request is not None:
            assert request[0] == "gba" and "worker 2 is stopped" in request[1]
            assert re.search(r"for \d+ measurements, the newest of \d+ steps", request[1])
            return at_s
    return None


@pytest.mark.parametrize("waits_too", [False, True])
def test_auto_enters_gba_for_a_worker_that_is_stopped_and_continued(waits_too: bool) -> None:
    at_s = in_allreduce(GBACallback(), steps_with_stops(20.0, waits_too))
    assert at_s is not None and at_s < 8.0


@pytest.mark.slow
def test_auto_stays_in_gba_while_the_worker_is_stopped_and_continued() -> None:
    callback, now_s, number = GBACallback(trial_budget=0.0), 0.0, 1000
    callback.switched("gba", number)
    run_s = 0.01
    while now_s < 20.0:
        number, now_s = number + 1, now_s + run_s
        runs = now_s % 0.3 < RUNS_S
        is_first = runs and (now_s - run_s) % 0.3 >= RUNS_S
        done = [(2, 0.009), (2, 0.009), (2, 0.009 + STOPS_S * is_first) if runs else (0, 0.0)]
        seconds = [s / n if n else 0.0 for n, s in done]
        callback.measured_async(
            number, seconds, 6, 0.003, n_pushed=sum(n for n, _ in done), elapsed_s=run_s, done=done
        )  # fmt: skip
        assert callback.mode_request(number, "gba") is None
    assert callback.last is not None and callback.last.gain > 1.2


def test_a_worker_that_is_stopped_for_little_of_the_time_is_called_slow() -> None:
    rates = Rates((0.01, 0.01, 0.0112), (2, 2, 2), 6, 0.001, 0.001)
    often, seldom = replace(rates, stopped=(0.0, 0.0, 0.15)), replace(rates, stopped=(0.0, 0.0, 0.14))
    reasons = [decide(Stance("allreduce", 0), 100, one, Options())[0].reason for one in (often, seldom)]
    assert "worker 2 is stopped 15% of the time, " in reasons[0]
    assert "worker 2 takes 1.1x the median, " in reasons[1] and "stopped" not in reasons[1]


def test_only_the_chief_looks_for_stops_and_a_new_one_begins_anew() -> None:
    callback, steps = GBACallback(), list(steps_with_stops(10.0))
    for number, one in enumerate(steps):
        seconds = [s / n for n, s in one.done]
        callback.measured_allreduce(number, seconds, one.elapsed_s, one.n_micro, is_chief=False)
    assert callback.last is None and callback.mode_request(len(steps), "allreduce") is None
    at_s = in_allreduce(callback, steps_with_stops(20.0))
    assert at_s == in_allreduce(GBACallback(), steps_with_stops(20.0)) and at_s is not None
