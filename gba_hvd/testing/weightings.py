"""`WeightingContract`: what every staleness weighting promises."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from gba_hvd.ps.coordinator.staleness import Weighting


class WeightingContract:
    @pytest.fixture
    def make_weighting(self) -> Callable[[int], Weighting]:
        """Takes the tolerance, in steps."""
        raise NotImplementedError

    @pytest.mark.parametrize("tolerance", [0, 1, 4, 20])
    def test_a_weight_never_rises_with_staleness(
        self, make_weighting: Callable[[int], Weighting], tolerance: int
    ) -> None:
        weights = [make_weighting(tolerance).weight(staleness) for staleness in range(-3, 200)]
        assert all(0 <= after <= before <= 1 for before, after in pairwise(weights))

    def test_what_is_not_stale_counts_in_full(self, make_weighting: Callable[[int], Weighting]) -> None:
        assert [make_weighting(4).weight(staleness) for staleness in (-5, -1, 0)] == [1.0] * 3

    def test_a_weight_depends_on_the_staleness_only(self, make_weighting: Callable[[int], Weighting]) -> None:
        """A server that starts again weighs as the one before."""
        one, other = make_weighting(4), make_weighting(4)
        asked = [3, 0, 9, 3, 1]
        assert [one.weight(staleness) for staleness in asked] == [other.weight(s) for s in asked[::-1]][::-1]
