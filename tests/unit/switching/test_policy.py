"""A job changes its mode when that pays, for long enough, and says why."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd.errors import BadInput
from gba_hvd.mode_names import MODES, known_mode
from gba_hvd.switching.measurements import FORGET_S
from gba_hvd.switching.policy import (
    LOST_S,
    UNCERTAIN,
    Decision,
    Options,
    Record,
    Stance,
    decide,
    learned,
    leaving,
)
from gba_hvd.switching.predictions import Rates, StepWaits, predicted

EVEN = Rates((0.1, 0.1, 0.1, 0.1), (2, 2, 2, 2), n_micro=8, exchange_s=0.01, serve_s=0.004)
BUSY_SERVER = replace(EVEN, serve_s=0.3)
STRAGGLER = replace(EVEN, seconds_per_micro=(0.1, 0.1, 0.6, 0.1))
times = st.floats(1e-3, 10.0)


@st.composite
def measured(draw: st.DrawFn) -> Rates:
    n = draw(st.integers(1, 8))
    shares = tuple(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n).filter(any)))
    seconds = tuple(draw(st.lists(times, min_size=n, max_size=n)))
    return Rates(seconds, shares, sum(shares), draw(st.floats(0, 1)), draw(st.floats(0, 1)), draw(st.floats(0, 1)))


def run(stance: Stance, rates: list[Rates], options: Options, first: int = 1) -> tuple[list[Decision], Stance]:
    """Decide once per step, steps counted from `first`."""
    decisions = []
    for step, found in enumerate(rates, first):
        decision, stance = decide(stance, step, found, options)
        decisions.append(decision)
    return decisions, stance


def test_a_straggler_sends_the_job_to_gba_after_patience_and_the_sentence_has_the_numbers() -> None:
    decisions, stance = run(Stance("allreduce", 0), [STRAGGLER] * 5, Options(1.2, 1.05, patience=5, min_stay=0))
    assert [d.mode for d in decisions] == ["allreduce"] * 4 + ["gba"]
    assert decisions[0].reason == (
        "stay in allreduce: worker 2 takes 6.0x the median, "
        "predicted 4.61x as fast, above the 1.20x it is entered for, for 1 of 5 steps"
    )
    assert decisions[-1].why == (
        "worker 2 takes 6.0x the median, predicted 4.61x as fast, above the 1.20x it is entered for, for 5 steps"
    )
    assert decisions[-1].reason == f"to gba: {decisions[-1].why}"
    assert decisions[-1].gain == pytest.approx(4.61, abs=0.01)
    assert stance == Stance("gba", since_step=5, promised=decisions[-1].gain)


BURSTS = replace(
    EVEN, seconds_per_micro=(0.11, 0.1, 0.1, 0.12), exchange_s=0.05,
    waits=StepWaits(worker=1, n_slowest=14, n_steps=32, median_s=0.21, slowest_s=0.84),
    draws=np.array([[0.1, 0.12], [0.05, 1.2], [0.1, 0.1], [0.12, 0.12]]),
)  # fmt: skip


def test_the_sentence_names_whom_steps_waited_for_though_the_newest_times_hide_it_and_explains_the_rest() -> None:
    decision, _ = decide(Stance("allreduce", 0), 9, BURSTS, Options(1.2, 1.05, patience=1, min_stay=0))
    assert decision.reason == (
        f"to gba: steps wait longest for worker 1, predicted {decision.gain:.2f}x as fast, above the 1.20x it is "
        "entered for, for 1 steps; of a step 210.0 ms are the median worker's, 630.0 ms waiting for the slowest one "
        "(worker 1 in 14 of 32 steps), 50.0 ms the exchange"
    )
    assert decision.gain > 4


def test_what_the_slowest_worker_explains_needs_no_other_word() -> None:
    waits = StepWaits(worker=2, n_slowest=32, n_steps=32, median_s=0.2, slowest_s=1.2)
    options = Options(1.2, 1.05, patience=1, min_stay=0)
    decision, _ = decide(Stance("allreduce", 0), 9, replace(STRAGGLER, waits=waits), options)
    assert decision == decide(Stance("allreduce", 0), 9, STRAGGLER, options)[0]


def test_of_two_workers_the_sentence_compares_the_slower_with_the_faster() -> None:
    two = Rates((0.1, 0.8), (4, 4), n_micro=8, exchange_s=0.01, serve_s=0.004)
    decision, _ = decide(Stance("allreduce", 0), 9, two, Options(1.2, 1.05, patience=1, min_stay=0))
    assert decision.reason.startswith("to gba: worker 1 takes 8.0x the time of worker 0, predicted ")


def test_the_sentence_names_what_staleness_would_drop() -> None:
    decision, _ = decide(
        Stance("allreduce", 0), 9, replace(STRAGGLER, dropped_share=0.03), Options(1.2, 1.05, patience=1, min_stay=0)
    )
    assert decision.reason.endswith(
        "predicted 4.47x as fast with 3.0% dropped as stale, above the 1.20x it is entered for, for 1 steps"
    )


def test_the_job_returns_when_the_straggler_has_recovered() -> None:
    decisions, stance = run(Stance("gba", 0), [BUSY_SERVER] * 3, Options(1.2, 1.05, patience=3, min_stay=0), first=40)
    assert [d.mode for d in decisions] == ["gba", "gba", "allreduce"]
    assert (
        decisions[-1].reason == "to allreduce: gba predicted 0.26x as fast, below the 1.05x it is kept for, for 3 steps"
    )
    assert (stance.mode, stance.since_step) == ("allreduce", 42)


def test_a_slow_worker_is_no_reason_to_return_to_allreduce() -> None:
    decisions, _ = run(
        Stance("gba", 0), [replace(STRAGGLER, serve_s=0.9)], Options(1.2, 1.05, patience=1, min_stay=0), first=40
    )
    assert decisions[0].mode == "allreduce"
    assert decisions[0].reason.startswith("to allreduce: although worker 2 takes 6.0x the median, gba predicted 0.")


def test_a_small_gain_is_worth_a_switch_once_it_has_cost_a_second_of_work() -> None:
    slower = replace(EVEN, exchange_s=0.03)
    allreduce, gba = predicted(slower)
    lost_s = 8 / allreduce * (gba / allreduce - 1.01)
    decisions, _ = run(Stance("allreduce", 0), [slower] * 200, Options(min_stay=0))
    switched = [d.mode for d in decisions].index("gba")
    assert switched + 1 == math.ceil(LOST_S / lost_s)
    assert decisions[9].reason.endswith(f"which has cost {10 * lost_s:.2f} s of work so far")


def test_a_gain_that_comes_and_goes_alike_costs_nothing_on_balance() -> None:
    faster, slower = replace(EVEN, exchange_s=0.05), replace(EVEN, exchange_s=0.0, serve_s=0.04)
    decisions, _ = run(Stance("allreduce", 0), ([faster] * 10 + [slower] * 10) * 20, Options(min_stay=0))
    assert {d.mode for d in decisions} == {"allreduce"}


def test_without_a_gain_the_job_stays_and_says_so() -> None:
    decision, stance = decide(Stance("allreduce", 0), 50, EVEN, Options(1.2, 1.05))
    assert decision.mode == "allreduce"
    assert decision.reason == "stay in allreduce: gba predicted 1.01x as fast, enter at 1.20x"
    assert stance == Stance("allreduce", 0, 0)
    assert decide(Stance("gba", 0), 50, STRAGGLER, Options(1.2, 1.05))[0].reason == (
        "stay in gba: gba predicted 4.61x as fast, leave below 1.05x"
    )


def test_one_step_against_it_begins_the_patience_again() -> None:
    series = [STRAGGLER] * 4 + [EVEN] + [STRAGGLER] * 4
    decisions, stance = run(Stance("allreduce", 0), series, Options(1.2, 1.05, patience=5, min_stay=0))
    assert {d.mode for d in decisions} == {"allreduce"}
    assert stance.in_favour == 4


def test_a_mode_is_not_left_before_its_minimum_stay() -> None:
    decisions, _ = run(
        Stance("allreduce", 100), [STRAGGLER] * 20, Options(1.2, 1.05, patience=5, min_stay=20), first=101
    )
    assert [d.mode for d in decisions] == ["allreduce"] * 19 + ["gba"]
    assert decisions[10].reason.endswith("but only 11 of 20 steps in allreduce")


def test_gba_is_not_entered_before_the_warm_up_is_over_and_left_at_any_step() -> None:
    options = Options(1.2, 1.05, patience=2, min_stay=0, warm_up_steps=30)
    decisions, _ = run(Stance("allreduce", 0), [STRAGGLER] * 30, options)
    assert [d.mode for d in decisions] == ["allreduce"] * 29 + ["gba"]
    assert decisions[10].reason.endswith("but the warm-up takes 30 steps, this is 11")
    decisions, _ = run(Stance("gba", 0), [BUSY_SERVER] * 3, options)
    assert decisions[-1].mode == "allreduce"


@pytest.mark.parametrize("mode", ["allreduce", "gba"])
def test_a_gain_between_the_two_limits_changes_nothing(mode: str) -> None:
    seconds = 0.1 * 1.12
    between = replace(EVEN, seconds_per_micro=(0.1, 0.1, 0.1, seconds), exchange_s=0.0, serve_s=0.0)
    allreduce, gba = predicted(between)
    assert 1.05 < gba / allreduce < 1.2
    decisions, stance = run(Stance(mode, 0), [between] * 50, Options(1.2, 1.05, patience=1, min_stay=0))
    assert {d.mode for d in decisions} == {mode}
    assert stance == Stance(mode, 0, 0)


@pytest.mark.slow
@given(st.lists(measured(), min_size=1, max_size=60), st.integers(1, 6), st.integers(0, 12))
def test_switches_are_never_closer_than_patience_and_minimum_stay(
    series: list[Rates], patience: int, min_stay: int
) -> None:
    options = Options(1.2, 1.05, patience=patience, min_stay=min_stay)
    decisions, _ = run(Stance("allreduce", 0), series, options)
    modes = ["allreduce", *(d.mode for d in decisions)]
    switches = [0] + [step for step in range(1, len(modes)) if modes[step] != modes[step - 1]]
    for before, after in itertools.pairwise(switches):
        assert after - before >= max(patience, min_stay)
        # What is switched to was favoured at every step of the patience.
        gains = [d.gain for d in decisions[after - patience : after]]
        assert all(g >= 1.2 for g in gains) if modes[after] == "gba" else all(g < 1.05 for g in gains)


def test_only_allreduce_and_gba_are_entered_and_left_automatically() -> None:
    with pytest.raises(BadInput, match="choose one of allreduce, gba"):
        decide(Stance("hop_bw", 0), 1, EVEN, Options(1.2, 1.05))


@pytest.mark.parametrize(
    ("name", "meant"), [("gbaa", "gba"), ("hop-bs", "hop_bs"), ("AllReduce", "allreduce"), ("atuo", "auto")]
)
def test_a_misspelt_mode_suggests_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(BadInput, match=f"did you mean '{meant}'"):
        known_mode(name)


def test_known_modes_are_known() -> None:
    assert [known_mode(name) for name in (*MODES, "auto")] == [*MODES, "auto"]
    with pytest.raises(BadInput, match="choose one of"):
        known_mode("auto", among=("allreduce", "gba"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"enter_gain": 0.98}, "leave_gain must be positive and not above enter_gain"),
        ({"leave_gain": 0.0}, "leave_gain must be positive"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"min_stay": -1}, "min_stay not negative"),
        ({"warm_up_steps": -1}, "warm_up_steps must not be negative"),
        ({"trial_budget": 1.0}, "trial_budget must be a share of the work"),
    ],
)
def test_options_that_make_no_sense_are_refused(change: dict[str, float], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Options(**change)  # type: ignore[arg-type]


# --- promises --------------------------------------------------------------------------------------------------------

PROMISED = replace(EVEN, exchange_s=0.05)  # gba predicted 1.2 times as fast


def entered_gba() -> Stance:
    """At step 100, by what the last steps in allreduce say."""
    allreduce, _ = predicted(PROMISED)
    before = replace(PROMISED, achieved=allreduce, at_s=60.0)
    return leaving(Stance("gba", 100, promised=1.2, since_s=60.0), Stance("allreduce", 0), before, before, 32)


def test_nothing_is_learned_from_a_switch_whose_cause_is_newer_than_what_is_compared() -> None:
    entered, before = Stance("gba", 100, promised=1.2), Stance("allreduce", 0)
    newest, alike = replace(PROMISED, achieved=20.0), replace(PROMISED, achieved=30.0)
    assert leaving(entered, before, newest, alike, 32).left is None
    assert leaving(entered, before, alike, alike, 15).left is None, "too few"
    assert leaving(entered, before, alike, alike, 16).left is not None
    trial = replace(entered, is_trial=True)
    assert leaving(trial, before, newest, alike, 32).left is not None


def in_gba(gain: float, at_s: float = 70.0) -> Rates:
    """Measurements in gba, which makes so many times what allreduce made."""
    return replace(PROMISED, achieved=predicted(PROMISED)[0] * gain, at_s=at_s)


def test_a_promise_that_is_not_kept_sends_the_job_back_and_the_sentence_has_both() -> None:
    stance, options = entered_gba(), Options()
    for step in range(101, 200):
        stance = learned(stance, step, in_gba(0.9), options)
        decision, stance = decide(stance, step, in_gba(0.9), options)
        if decision.mode == "allreduce":
            break
    assert decision.mode == "allreduce" and step >= 120
    assert decision.gain == pytest.approx(0.9)
    assert decision.reason.endswith("; gba was promised 1.20x, and is 0.90x")


def test_a_mode_that_is_far_slower_than_promised_is_left_before_its_minimum_stay() -> None:
    stance, options = entered_gba(), Options()
    decisions = []
    for step in range(101, 112):
        stance = learned(stance, step, in_gba(0.3), options)
        decision, stance = decide(stance, step, in_gba(0.3), options)
        decisions.append(decision.mode)
    assert "allreduce" in decisions


def test_what_a_switch_has_shown_corrects_the_next_prediction() -> None:
    stance = learned(entered_gba(), 120, in_gba(0.9), Options())
    assert stance.gba == Record(pytest.approx(0.9 * predicted(PROMISED)[0] / predicted(PROMISED)[1]), 70.0)
    assert stance.allreduce == Record(pytest.approx(1.0), 70.0)
    back = replace(stance, mode="allreduce", since_step=140, left=None)
    decision, _ = decide(back, 200, replace(PROMISED, achieved=predicted(PROMISED)[0], at_s=90.0), Options())
    assert decision.gain == pytest.approx(0.9)
    assert decision.reason == (
        f"stay in allreduce: gba predicted 0.90x as fast (gba was {stance.gba.ratio:.2f}x its prediction before), "
        "enter at 1.01x"
    )


def test_what_comes_long_after_a_switch_is_not_its_doing() -> None:
    late = learned(entered_gba(), 400, in_gba(0.5), Options())
    assert late.gba == late.allreduce == Record()


def test_a_worker_that_becomes_slow_after_a_switch_spoils_no_prediction() -> None:
    options, usual = Options(), in_gba(1.1)
    stance = learned(entered_gba(), 105, usual, options)
    assert stance.left is not None
    known = stance.allreduce
    slow = replace(usual, seconds_per_micro=(*usual.seconds_per_micro[:-1], 3 * usual.seconds_per_micro[-1]))
    stance = learned(stance, 110, slow, options)
    assert (stance.allreduce, stance.left) == (known, None)
    assert learned(stance, 120, usual, options) == stance, "the times are mixed for a while"


def test_with_other_workers_ratios_are_a_guess() -> None:
    stance = learned(entered_gba(), 120, in_gba(0.9), Options()).with_other_workers()
    assert stance.left is None and stance.gba.at_s is None and stance.gba.ratio < 1


def test_a_promise_made_with_other_workers_is_not_broken() -> None:
    entered = Stance("gba", 100, in_favour=4, lost_s=3.0, n_lost=9, promised=2.38)
    alone = replace(EVEN, seconds_per_micro=(0.1,), shares=(8,), serve_s=0.015, achieved=8.7)
    (first, *_, left), _ = run(entered.with_other_workers(), [alone] * 60, Options(), first=130)
    assert first.kind == "patience" and "for 1 of 5 steps" in first.reason
    assert left.mode == "gba" or "promised" not in left.reason


def test_gba_is_not_left_and_no_mode_is_tried_while_a_lost_worker_may_come_back() -> None:
    alone = replace(EVEN, seconds_per_micro=(0.1,), shares=(8,), serve_s=0.015, achieved=8.7, awaited=1, at_s=9e4)
    decisions, stance = run(Stance("gba", 100), [alone] * 60, Options(), first=130)
    assert {(d.mode, d.kind) for d in decisions} == {("gba", "awaited")}
    assert decisions[0].reason == "stay in gba: a lost worker may come back, for which gba does not stand still"
    decisions, _ = run(stance, [replace(alone, awaited=0)] * 60, Options(), first=190)
    assert decisions[0].kind == "patience", "what was counted before was not of these workers"
    assert any(d.mode == "allreduce" for d in decisions)


def test_a_stance_is_stored_and_one_of_an_older_version_is_read() -> None:
    stance = learned(entered_gba(), 120, in_gba(0.9), Options())
    assert Stance.load(asdict(stance)) == stance
    assert Stance.load({"mode": "gba", "since_step": 7, "in_favour": 2}) == Stance("gba", 7, 2)


# --- trials ----------------------------------------------------------------------------------------------------------

UNCLEAR = replace(EVEN, serve_s=0.012, achieved=8 / 0.21)  # gba predicted a little slower


def trial_at(at_s: float, stance: Stance | None = None, options: Options | None = None) -> Decision:
    return decide(stance or Stance("allreduce", 0), 5000, replace(UNCLEAR, at_s=at_s), options or Options())[0]


def test_a_mode_that_may_be_faster_is_tried_once_the_budget_allows_it() -> None:
    gain = predicted(UNCLEAR)[1] / predicted(UNCLEAR)[0]
    assert 1 / (1 + UNCERTAIN) < gain < 1.01
    cost_s = 20 * 8 / (predicted(UNCLEAR)[1] * (1 - UNCERTAIN)) * (1 - gain * (1 - UNCERTAIN)) + 1.0
    assert not trial_at(cost_s / 0.02 - 1).is_trial
    decision = trial_at(cost_s / 0.02 + 1)
    assert decision.is_trial and decision.mode == "gba"
    assert decision.reason == (
        f"to gba as a trial: gba predicted {gain:.2f}x as fast, which no switch of these workers has shown for 1 h; "
        f"it costs {cost_s:.1f} s of work at most"
    )
    assert not trial_at(1e6, options=Options(trial_budget=0.0)).is_trial


def test_a_mode_that_was_measured_is_not_tried_again_for_an_hour() -> None:
    stance = Stance("allreduce", 0, gba=Record(0.97, 1000.0))
    assert not trial_at(1000.0 + FORGET_S - 1, stance).is_trial
    assert trial_at(1000.0 + FORGET_S, stance).is_trial


def test_a_mode_that_cannot_be_faster_is_not_tried() -> None:
    assert not trial_at(1e6, Stance("allreduce", 0), Options(enter_gain=3.0)).is_trial
    decision, _ = decide(Stance("allreduce", 0), 5000, replace(BUSY_SERVER, achieved=8 / 0.21, at_s=1e6), Options())
    assert not decision.is_trial


def test_what_a_trial_has_cost_is_taken_from_the_budget() -> None:
    options = Options()
    decision, stance = decide(Stance("allreduce", 0), 5000, replace(UNCLEAR, at_s=200.0), options)
    assert decision.is_trial and stance.is_trial
    half = replace(UNCLEAR, achieved=0.5 * predicted(UNCLEAR)[0], at_s=210.0)
    for step in range(5001, 5030):
        decision, stance = decide(stance, step, half, options)
        if decision.mode == "allreduce":
            break
    assert decision.mode == "allreduce" and "gba was tried at" in decision.reason
    assert stance.spent_s == pytest.approx(10 * 0.5 + 1.0) and not stance.is_trial


@pytest.mark.slow
def test_trials_that_lost_hosts_end_are_within_the_budget_too() -> None:
    options, stance, n_trials = Options(), Stance("allreduce", 0), 0
    for step, at_s in enumerate(range(0, 3600, 4), 5000):
        decision, stance = decide(stance, step, replace(UNCLEAR, at_s=float(at_s)), options)
        if decision.is_trial:
            n_trials += 1
            stance = stance.in_mode("allreduce", step - options.min_stay).with_other_workers()
    assert 1 < n_trials <= 0.02 * 3600 and stance.spent_s == pytest.approx(n_trials * 1.0)
