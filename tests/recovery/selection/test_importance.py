"""Which rows a save takes: of one table, over its shards, and which tables are always taken whole."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.errors import BadInput
from recovery.rows import Column, Schema, Table
from recovery.selection import importance

same = settings(derandomize=True, database=None, deadline=None)  # examples, however busy the machine is

counts = st.lists(st.integers(0, 2000), max_size=60).map(lambda values: np.array(values, np.uint32))


def by_sorting(since: np.ndarray, k: int) -> list[int]:
    """The same, spelt out: most updates first, then earlier places, unchanged rows never."""
    order = sorted(np.flatnonzero(since).tolist(), key=lambda place: (-int(since[place]), place))
    return sorted(order[:k])


@same
@given(counts, st.integers(0, 70))
def test_mfu_takes_the_rows_with_the_most_updates_and_no_unchanged_one(since, k):
    assert importance.largest(since, k).tolist() == by_sorting(since, k)


@same
@given(st.lists(counts, min_size=1, max_size=5), st.integers(0, 100))
def test_a_share_of_the_table_is_the_same_rows_however_it_is_sharded(shards, k):
    limit = importance.threshold([importance.histogram(since) for since in shards], k)
    taken = [importance.at_least(since, limit.key, quota) for since, quota in zip(shards, limit.quotas, strict=True)]
    starts = np.cumsum([0, *map(len, shards)])
    assert [start + p for start, places in zip(starts, taken, strict=False) for p in places] == by_sorting(
        np.concatenate(shards), k
    )
    assert limit.n_rows == sum(map(len, taken))


def test_very_large_counts_are_distinguished_to_a_thousandth():
    since = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint32)
    taken = importance.largest(since, 500)
    left = np.delete(since, taken)
    assert len(taken) == 500
    assert since[taken].min() >= left.max() * (1 - 1 / 1024)


@pytest.mark.parametrize("n_rows", [0, 1, 1 << 18, (1 << 20) + 7])
def test_pieces_and_whole_tables_agree(n_rows):
    since = np.random.default_rng(n_rows).integers(0, 5, n_rows, dtype=np.uint32)
    k = n_rows // 8
    expected = np.sort(np.argsort(-since.astype(np.int64), kind="stable")[:k])
    assert importance.largest(since, k).tolist() == expected.tolist()


def test_choosing_needs_little_memory_beyond_what_is_chosen():
    since = np.ones(1 << 22, np.uint32)
    tracemalloc.start()
    taken = importance.largest(since, 1 << 10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken.tolist() == list(range(1 << 10))
    assert peak < 40e6  # of a piece, not of the table: the keys of all rows alone would be 32 MB more for each 4 M


def test_scar_takes_what_moved_most_and_the_smallest_move_is_one():
    kept = np.zeros((5, 2), np.float32)
    now = np.array([[0, 0], [1, 1], [1e-18, 0], [-3, 0], [0.5, 0]], np.float32)
    far = importance.l2_change(now, kept)
    assert far.tolist() == pytest.approx([0, 2, 1e-36, 9, 0.25])
    assert importance.largest(far, 2).tolist() == [1, 3]
    assert importance.largest(far, 5).tolist() == [1, 2, 3, 4]


def test_a_row_that_is_not_a_number_is_not_overlooked():
    assert importance.largest(np.array([1, -np.nan, 5], np.float32), 1).tolist() == [1]


@pytest.mark.parametrize(("policy", "r"), [("lru", 0.5), ("mfu", 0.0), ("mfu", 1.5)])
def test_unknown_policies_and_impossible_shares_are_refused(policy, r):
    with pytest.raises(BadInput):
        importance.n_taken(policy, 10, r)


def test_the_smallest_tables_under_a_hundredth_of_the_bytes_are_always_saved_whole():
    sizes = [1_000_000, 500, 2_000_000, 9_000, 40_000]
    schema = Schema(tuple(Table(str(n), n, (Column("weight", 16),)) for n in sizes), n_shards=4)
    assert importance.small_tables(schema) == {1, 3}
    assert importance.small_tables(schema, whole_share=0.05) == {1, 3, 4}
    assert importance.small_tables(schema, whole_share=0, whole_rows=0) == set()


@pytest.mark.parametrize("hosts", [2, 8, 32])
@pytest.mark.parametrize("exponent", [0.8, 1.3])
def test_hosts_that_each_choose_among_their_own_rows_choose_nearly_as_well(hosts, exponent):
    rng, n, r = np.random.default_rng(0), 5000, 0.125
    popularity = (1.0 + np.arange(n)) ** -exponent
    since = rng.poisson(popularity * 5 * n / popularity.sum())[rng.permutation(n)].astype(np.uint32)
    together = int(since[importance.largest(since, round(n * r))].sum())
    apart = sum(
        int(own[importance.largest(own, round(len(own) * r))].sum())
        for own in (since[host::hosts] for host in range(hosts))
    )
    assert apart == pytest.approx(together, rel=0.01)
