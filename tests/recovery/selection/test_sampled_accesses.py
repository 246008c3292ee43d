"""CPR-SSU's list: bounded, without duplicates, fuller of what is used often, and shared by a writer and a reader."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.errors import BadInput
from recovery.selection.sampled_accesses import SampledAccesses

same = settings(derandomize=True, database=None, deadline=None)  # examples, however busy the machine is


class Phases:
    """Of the generator, only the phases are not random: those given, one for each step."""

    def __init__(self, phases: list[int], seed: int = 0) -> None:
        self._phases, self._rng = iter(phases), np.random.default_rng(seed)

    def integers(self, high: int, size: int | None = None) -> object:
        return next(self._phases) if size is None else self._rng.integers(high, size=size)


@pytest.mark.slow
@same
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 29), max_size=40), st.integers(0, 3)), max_size=8),
    st.integers(1, 10),
    st.integers(1, 4),
)
def test_the_list_is_distinct_bounded_and_out_of_the_rows_looked_at(steps, capacity, period):
    sampled = SampledAccesses.private(30, capacity, period)
    looked_at: set[int] = set()
    for rows, phase in steps:
        sampled.add(np.array(rows, np.int64), Phases([phase % period]))
        looked_at |= set(rows[phase % period :: period])
    assert len(sampled) == min(capacity, len(looked_at))
    taken = sampled.take().tolist()
    assert taken == sorted(set(taken))
    assert set(taken) <= looked_at
    assert len(sampled) == 0


def test_no_row_is_passed_over_for_ever_where_each_step_has_the_same_rows():
    rng, found = np.random.default_rng(0), set()
    sampled = SampledAccesses.private(10, 10)
    for _ in range(20):
        sampled.add(np.arange(10), rng)
        found |= set(sampled.take().tolist())
    assert found == set(range(10))


def test_a_list_that_was_taken_is_empty():
    sampled, rng = SampledAccesses.private(10, 4, period=1), np.random.default_rng(0)
    sampled.add(np.arange(4), rng)
    assert sampled.take().tolist() == [0, 1, 2, 3]
    assert sampled.take().tolist() == []
    sampled.add(np.array([3, 9]), rng)
    assert sampled.take().tolist() == [3, 9]


def test_rows_used_often_are_in_it_more_often_than_others():
    n_popular = []
    popularity = 1 / np.arange(1, 1001)
    for seed in range(10):
        sampled, rng = SampledAccesses.private(1000, 100), np.random.default_rng(seed)
        for _ in range(20):
            sampled.add(rng.choice(1000, 200, p=popularity / popularity.sum()), rng)
        taken = sampled.take()
        assert len(taken) == 100
        assert taken.mean() < 400  # of rows alike it would be 500
        n_popular.append(np.isin(np.arange(10), taken).sum())
    assert np.mean(n_popular) > 6  # of 10; of rows alike it would be 1


def test_what_a_step_in_flight_lists_is_taken_when_it_is_over():
    """The step saw that nothing was asked for; the reader asks, and waits for its end."""
    sampled, rng = SampledAccesses.private(10, 4, period=1), np.random.default_rng(0)
    sampled.add(np.array([1]), rng)
    looks: list[tuple[int, int]] = []

    def step_marks() -> tuple[int, int]:
        looks.append((6, 7) if len(looks) < 3 else (7, 7))
        if looks[-1] == (7, 7) and len(looks) == 4:
            words = sampled._lists[0]  # as a writer leaves it that began before it was asked
            words[:3] = [2, 1, 5]
        return looks[-1]

    assert sampled.take(step_marks).tolist() == [1, 5]
    assert len(looks) == 4


def test_what_a_dead_writer_left_half_written_names_rows_of_the_shard():
    sampled, rng = SampledAccesses.private(10, 4, period=1), np.random.default_rng(0)
    sampled.add(np.array([1, 2]), rng)
    sampled._lists[0][:] = [9, 2, 2, 77, 1]  # a length above the capacity, a row twice, one that does not exist
    assert sampled.take(lambda: (7, 7)).tolist() == [1, 2]
    sampled.add(np.array([1, 2, 3]), rng)
    assert sampled.take().tolist() == [1, 2, 3]  # marks of the list before are gone


def test_impossible_sizes_are_refused():
    with pytest.raises(BadInput, match="capacity"):
        SampledAccesses.private(10, 11)
