"""CPR-SSU's list: bounded, without duplicates, and fuller of what is used often."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.errors import BadInput
from recovery.selection.subsampled_updates import SubSampled

same = settings(derandomize=True, database=None, deadline=None)  # examples, however busy the machine is


@same
@given(
    st.lists(st.lists(st.integers(0, 29), max_size=40), max_size=8),
    st.integers(1, 10),
    st.integers(1, 4),
    st.integers(),
)
def test_the_list_is_distinct_bounded_and_out_of_the_rows_looked_at(batches, capacity, period, seed):
    rng = np.random.default_rng(abs(seed))
    stream = SubSampled(30, capacity, rng=rng, period=period)
    for batch in batches:
        stream.add(np.array(batch, np.int64))
    looked_at = {row for row in [row for batch in batches for row in batch][period - 1 :: period]}
    assert len(stream) == min(capacity, len(looked_at))
    taken = stream.take().tolist()
    assert taken == sorted(set(taken))
    assert set(taken) <= looked_at
    assert len(stream) == 0


def test_a_list_that_was_taken_begins_afresh():
    stream = SubSampled(10, 4, rng=np.random.default_rng(0), period=1)
    stream.add(np.arange(4))
    assert stream.take().tolist() == [0, 1, 2, 3]
    stream.add(np.array([3, 9]))
    assert stream.take().tolist() == [3, 9]


def test_rows_used_often_are_in_it_more_often_than_others():
    rng = np.random.default_rng(1)
    stream = SubSampled(1000, 100, rng=rng)
    popularity = 1 / np.arange(1, 1001)
    for _ in range(20):
        stream.add(rng.choice(1000, 200, p=popularity / popularity.sum()))
    taken = stream.take()
    assert len(taken) == 100
    assert np.isin(np.arange(10), taken).sum() >= 9
    assert taken.mean() < 400  # of rows alike it would be 500


def test_impossible_sizes_are_refused():
    with pytest.raises(BadInput, match="capacity"):
        SubSampled(10, 11, rng=np.random.default_rng(0))
