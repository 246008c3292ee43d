"""Durations and sizes are shown in a unit in which they are not 0."""

from __future__ import annotations

import pytest

from recovery.units import duration, durations, size


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (100_800, "28.0 h"),
        (180, "3.0 min"),
        (7.2, "7.2 s"),
        (0.04, "40 ms"),
        (0, "0 s"),
        (7.2e6, "2,000.0 h"),
        (0.9996, "1.0 s"),
        (4e-4, "under 1 ms"),
    ],
)
def test_a_duration_is_in_the_unit_that_shows_it(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_two_durations_share_a_unit_where_they_can() -> None:
    assert durations(55_080, 256_320) == "15.3 to 71.2 h"
    assert durations(120, 5040) == "2.0 min to 1.4 h"


@pytest.mark.parametrize(("n_bytes", "words"), [(1.2e12, "1.2 TB"), (31e6, "31.0 MB"), (7200, "7.2 kB"), (40, "40 B")])
def test_a_size_is_in_the_unit_that_shows_it(n_bytes: float, words: str) -> None:
    assert size(n_bytes) == words
