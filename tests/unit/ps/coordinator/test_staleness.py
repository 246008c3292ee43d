"""The staler, the lighter; what is ahead of its step is fresh."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd.errors import BadInput
from gba_hvd.ps.coordinator.staleness import WEIGHTINGS, InverseDecay, LinearDecay, Threshold, Unweighted, weighting


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("threshold", [1, 1, 1, 1, 0, 0]),
        ("linear", [1, 0.75, 0.5, 0.25, 0, 0]),
        ("inverse", [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6]),
        ("none", [1, 1, 1, 1, 1, 1]),
        ("gap_aware", [1, 1, 1, 1, 1, 1]),  # damped by distance, elsewhere
    ],
)
def test_weights_for_a_staleness_of_0_to_5_and_a_tolerance_of_3(name: str, weights: list[float]) -> None:
    assert [weighting(name, tolerance=3).weight(staleness) for staleness in range(6)] == weights


@given(st.sampled_from(WEIGHTINGS.names()), st.integers(0, 20), st.integers(-50, 50))
def test_a_weight_is_between_0_and_1_and_never_rises(name: str, tolerance: int, staleness: int) -> None:
    rule = weighting(name, tolerance)
    assert 1 >= rule.weight(staleness) >= rule.weight(staleness + 1) >= 0
    assert rule.weight(min(0, staleness)) == 1


@pytest.mark.slow
@given(st.integers(0, 20), st.integers(0, 50))
def test_linear_decay_drops_what_the_threshold_drops(tolerance: int, staleness: int) -> None:
    dropped = [rule(tolerance).weight(staleness) == 0 for rule in (Threshold, LinearDecay)]
    assert dropped[0] == dropped[1] == (staleness > tolerance)


def test_the_default_is_a_tolerance_of_4() -> None:
    assert weighting("threshold") == Threshold() == Threshold(tolerance=4)
    assert weighting("linear") == LinearDecay(tolerance=4)


def test_rules_without_a_tolerance_do_not_mind_one() -> None:
    assert weighting("inverse", 7) == InverseDecay()
    assert weighting("none", 7) == Unweighted()


def test_a_misspelt_name_is_answered_with_the_right_one() -> None:
    with pytest.raises(BadInput, match="staleness weighting 'treshold' is not known: did you mean 'threshold'"):
        weighting("treshold")


def test_a_name_like_no_other_is_answered_with_all_of_them() -> None:
    with pytest.raises(BadInput, match="choose one of threshold, linear, inverse, none, gap_aware"):
        weighting("xyz")


@pytest.mark.parametrize("tolerance", [-1, 1.5, "4", None, True])
def test_a_tolerance_is_a_whole_number_from_0(tolerance: int) -> None:
    for rule in (Threshold, LinearDecay, lambda t: weighting("none", t)):
        with pytest.raises(BadInput, match=r"tolerance .the paper.s iota. must be a number of steps"):
            rule(tolerance)
