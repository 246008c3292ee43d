"""A job changes its mode when that pays, for long enough, and says why."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd.errors import BadInput
from gba_hvd.mode_names import MODES, known_mode
from gba_hvd.switching.policy import (
    Decision,
    Options,
    Rates,
    RecentRates,
    Stance,
    decide,
    expected_drops,
    expected_old_values,
    predicted,
)

EVEN = Rates((0.1, 0.1, 0.1, 0.1), (2, 2, 2, 2), n_micro=8, exchange_s=0.01, serve_s=0.004)
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


def test_rates_follow_the_formulas() -> None:
    allreduce, gba = predicted(replace(STRAGGLER, dropped_share=0.1))
    assert allreduce == pytest.approx(8 / (2 * 0.6 + 0.01))
    assert gba == pytest.approx((3 / 0.104 + 1 / 0.604) * 0.9)


def test_allreduce_waits_for_the_largest_share_as_well_as_for_the_slowest_worker() -> None:
    uneven = Rates((0.1, 0.12), (5, 3), n_micro=8, exchange_s=0.0, serve_s=0.0)
    assert predicted(uneven)[0] == pytest.approx(8 / 0.5)


@given(measured(), st.integers(0, 10))
def test_expected_drops_are_a_share_and_a_larger_tolerance_drops_no_more(rates: Rates, tolerance: int) -> None:
    drops = expected_drops(rates, tolerance)
    assert 0 <= expected_drops(rates, tolerance + 1) <= drops <= 1


def drops_by_simulation(seconds: list[float], n_micro: int, tolerance: int, steps: int) -> float:
    """The rules themselves: leases in order, token i // M, M pushes make a step, too stale ones are dropped."""
    working = [(t * (1 + 1e-3 * w), w, w) for w, t in enumerate(seconds)]
    heapq.heapify(working)
    leased, buffered, k, dropped = len(seconds), [], 0, 0
    while k < steps:
        now, worker, micro = heapq.heappop(working)
        buffered.append(micro)
        if len(buffered) == n_micro:
            dropped += sum(k - i // n_micro > tolerance for i in buffered)
            buffered, k = [], k + 1
        heapq.heappush(working, (now + seconds[worker], worker, leased))
        leased += 1
    return dropped / (steps * n_micro)


@pytest.mark.parametrize("n_micro", [4, 8, 16])
@pytest.mark.parametrize("factor", [1, 2, 5, 8, 10, 15, 20, 30, 40])
def test_expected_drops_agree_with_a_run_of_the_rules(n_micro: int, factor: float) -> None:
    seconds = (1.0, 1.0, 1.0, float(factor))
    rates = Rates(seconds, (n_micro // 4,) * 4, n_micro, 0.0, 0.0)
    run = drops_by_simulation(list(seconds), n_micro, tolerance=4, steps=400)
    assert expected_drops(rates, tolerance=4) == pytest.approx(run, abs=0.001)


def test_a_straggler_sends_the_job_to_gba_after_patience_and_the_sentence_has_the_numbers() -> None:
    decisions, stance = run(Stance("allreduce", 0), [STRAGGLER] * 5, Options(1.2, 1.05, patience=5, min_stay=0))
    assert [d.mode for d in decisions] == ["allreduce"] * 4 + ["gba"]
    assert decisions[0].reason == (
        "stay in allreduce: worker 2 takes 6.0x the median, predicted 4.61x faster for 1 of 5 steps"
    )
    assert decisions[-1].reason == "to gba: worker 2 takes 6.0x the median, predicted 4.61x faster for 5 steps"
    assert decisions[-1].gain == pytest.approx(4.61, abs=0.01)
    assert stance == Stance("gba", since_step=5, in_favour=0)


def test_of_two_workers_the_sentence_compares_the_slower_with_the_faster() -> None:
    two = Rates((0.1, 0.8), (4, 4), n_micro=8, exchange_s=0.01, serve_s=0.004)
    decision, _ = decide(Stance("allreduce", 0), 9, two, Options(1.2, 1.05, patience=1, min_stay=0))
    assert decision.reason.startswith("to gba: worker 1 takes 8.0x the time of worker 0, predicted ")


def test_the_sentence_names_what_staleness_would_drop() -> None:
    decision, _ = decide(
        Stance("allreduce", 0), 9, replace(STRAGGLER, dropped_share=0.03), Options(1.2, 1.05, patience=1, min_stay=0)
    )
    assert decision.reason.endswith("predicted 4.47x faster with 3.0% dropped as stale for 1 steps")


def test_the_job_returns_when_the_straggler_has_recovered() -> None:
    decisions, stance = run(Stance("gba", 0), [EVEN] * 3, Options(1.2, 1.05, patience=3, min_stay=0), first=40)
    assert [d.mode for d in decisions] == ["gba", "gba", "allreduce"]
    assert (
        decisions[-1].reason == "to allreduce: worker 0 takes 1.0x the median, gba predicted 1.01x as fast, "
        "below the 1.05x it is kept for, for 3 steps"
    )
    assert stance == Stance("allreduce", since_step=42)


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
    decisions, _ = run(Stance("gba", 0), [EVEN] * 3, options)
    assert decisions[-1].mode == "allreduce"


@given(measured(), st.integers(0, 10))
def test_old_values_are_a_share_and_a_larger_tolerance_admits_no_fewer(rates: Rates, tolerance: int) -> None:
    drops = expected_old_values(rates, tolerance)
    assert 0 <= expected_old_values(rates, tolerance + 1) <= drops <= 1 + 1e-9


def test_the_share_of_old_values_follows_from_the_workers_cycles() -> None:
    even = replace(EVEN, serve_s=0.0)  # 3 pushes of others meanwhile: 3 of 8 gradients see a step end
    assert expected_old_values(even, 0) == pytest.approx(3 / 8)
    assert expected_old_values(even, 1) == 0.0


@pytest.mark.parametrize("mode", ["allreduce", "gba"])
def test_a_gain_between_the_two_limits_changes_nothing(mode: str) -> None:
    seconds = 0.1 * 1.12
    between = replace(EVEN, seconds_per_micro=(0.1, 0.1, 0.1, seconds), exchange_s=0.0, serve_s=0.0)
    allreduce, gba = predicted(between)
    assert 1.05 < gba / allreduce < 1.2
    decisions, stance = run(Stance(mode, 0), [between] * 50, Options(1.2, 1.05, patience=1, min_stay=0))
    assert {d.mode for d in decisions} == {mode}
    assert stance == Stance(mode, 0, 0)


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
        ({"enter_gain": 0.99}, "leave_gain must be positive and not above enter_gain"),
        ({"leave_gain": 0.0}, "leave_gain must be positive"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"min_stay": -1}, "min_stay not negative"),
        ({"warm_up_steps": -1}, "warm_up_steps must not be negative"),
    ],
)
def test_options_that_make_no_sense_are_refused(change: dict[str, float], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Options(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seconds_per_micro": ()}, "one per worker"),
        ({"seconds_per_micro": (0.1, 0.0, 0.1, 0.1)}, "must be positive"),
        ({"seconds_per_micro": (0.1, float("nan"), 0.1, 0.1)}, "must be positive"),
        ({"shares": (8,)}, "1 shares for 4 workers"),
        ({"shares": (2, 2, 2, 1)}, "add up to n_micro = 8"),
        ({"exchange_s": -1.0}, "must not be negative"),
        ({"serve_s": float("inf")}, "must not be negative"),
        ({"dropped_share": 1.5}, "within 0 and 1"),
    ],
)
def test_rates_that_cannot_be_are_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        replace(EVEN, **change)  # type: ignore[arg-type]


def test_recent_rates_are_medians_of_the_last_micro_batches() -> None:
    recent = RecentRates(n=3)
    assert recent.medians([0, 1]) is None
    for seconds in (9.0, 1.0, 100.0, 2.0):  # the first has left the window, the odd one does not count
        recent.add(0, seconds)
    assert recent.median(0) == 2.0
    assert recent.medians([0, 1]) is None
    recent.add(1, 5.0)
    assert recent.medians([1, 0]) == (5.0, 2.0)


def test_recent_rates_forget_workers_that_left_and_everything_after_a_switch() -> None:
    recent = RecentRates()
    recent.add(0, 1.0)
    recent.add(1, 1.0)
    with pytest.raises(BadInput, match="at least 1"):
        RecentRates(0)
