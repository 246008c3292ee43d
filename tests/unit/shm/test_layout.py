"""Every number has a place of its own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd.errors import BadInput
from gba_hvd.shm.layout import PAGE_WORDS, Layout, SlotSpec, digest, table_seed

SLOTS = (SlotSpec("sum", per_row=True), SlotSpec("exp_avg"))
sizes = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(st.integers(1, 40), st.sampled_from([1, 3, 8])), min_size=1
)


@pytest.mark.slow
@given(sizes, st.integers(1, 9))
def test_no_two_numbers_share_a_word(tables: dict[str, tuple[int, int]], n_shards: int) -> None:
    layout = Layout.of(tables, SLOTS, n_shards, seed=0, init_std=0.01)
    used = [(0, PAGE_WORDS)]
    for group in layout.groups:
        for at in range(group.at, group.at + group.rows_per_shard * group.record, group.record):
            used += [(at, group.dim), (at + group.slots[0], 1), (at + group.slots[1], group.dim)]
            used += [(at + group.record - 1, 1)]
    used.sort()
    for (start, n), (following, _) in itertools.pairwise(used):
        assert start + n <= following
    assert used[-1][0] + used[-1][1] <= layout.region_words
    assert layout.n_bytes == 4 * n_shards * layout.region_words


@pytest.mark.slow
@given(sizes, st.integers(1, 9))
def test_every_row_has_a_key_of_its_own_that_leads_back_to_it(
    tables: dict[str, tuple[int, int]], n_shards: int
) -> None:
    layout = Layout.of(tables, SLOTS, n_shards, seed=0, init_std=0.01)
    seen = set()
    for name, (n_rows, _) in tables.items():
        group, base = layout.place_of_table[name]
        for row in range(n_rows):
            key = base + row
            assert layout.locate(key, group) == (name, row)
            assert key % n_shards == row % n_shards
            assert key // n_shards < layout.groups[group].rows_per_shard
            seen.add((group, key))
    assert len(seen) == sum(n_rows for n_rows, _ in tables.values())


def test_tables_of_one_dimension_form_a_group() -> None:
    layout = Layout.of({"a": (5, 8), "b": (6, 4), "c": (7, 8)}, (), 2, seed=0, init_std=0.01)
    assert [[t.name for t in group.tables] for group in layout.groups] == [["a", "c"], ["b"]]


def test_a_hundred_million_rows_have_keys_too() -> None:
    layout = Layout.of({"small": (10, 64), "huge": (100_000_000, 64)}, SLOTS, 16, seed=0, init_std=0.01)
    group, base = layout.place_of_table["huge"]
    assert layout.locate(base + 99_999_999, group) == ("huge", 99_999_999)
    assert layout.n_bytes > 100_000_000 * 64 * 4 * 2


@pytest.mark.parametrize("size", [(0, 8), (10, 0), (-1, 8)])
def test_an_empty_table_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(BadInput, match=r"table 'user': expected \(rows, dim\) of at least 1"):
        Layout.of({"user": size}, (), 2, seed=0, init_std=0.01)


def test_no_tables_at_all_are_refused() -> None:
    with pytest.raises(BadInput, match="at least one table"):
        Layout.of({}, (), 2, seed=0, init_std=0.01)


def test_the_fingerprint_sees_the_order_of_tables() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"a": 1, "b": 2})
    assert digest({"a": 1, "b": 2}) != digest({"b": 2, "a": 1})
    assert -(2**63) <= digest({"a": 1}) < 2**63


def test_table_seeds_differ_by_seed_and_by_name() -> None:
    seeds = {table_seed(seed, name) for seed in range(20) for name in ("user", "item", "u")}
    assert len(seeds) == 60
    assert np.uint64(max(seeds)) > 0
