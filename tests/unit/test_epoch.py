"""Every sample once an epoch, in an order that only the seed and the epoch decide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd.epoch import EpochOrder, EpochPlan, SampleAccount, position_in, shares
from gba_hvd.errors import BadInput
from gba_hvd.training.job_state import Cursor
from recovery.catalog.epoch_position import EpochPosition


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 1000, 4095, 4096, 4097, 100_003])
def test_an_epoch_has_every_sample_once(n: int) -> None:
    assert np.array_equal(np.sort(EpochOrder(n, seed=5, epoch=2).rows(0, n)), np.arange(n))


@given(st.integers(1, 3000), st.integers(0, 2**31), st.integers(0, 100), st.data())
def test_any_part_can_be_read_on_its_own(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, n - 1))
    count = data.draw(st.integers(0, n - first))
    order = EpochOrder(n, seed, epoch)
    assert np.array_equal(order.rows(first, count), order.rows(0, n)[first : first + count])


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(EpochOrder(200, seed, epoch).rows(0, 200)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25


def test_neighbours_do_not_stay_neighbours() -> None:
    order = EpochOrder(10_000, seed=0, epoch=0).rows(0, 10_000)
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.001
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


def test_without_shuffling_samples_come_as_they_are() -> None:
    assert np.array_equal(EpochOrder(10, seed=1, epoch=1, shuffle=False).rows(3, 4), [3, 4, 5, 6])


@given(st.integers(1, 500), st.integers(1, 8), st.integers(1, 12), st.integers(1, 9))
def test_every_micro_batch_is_computed_by_one_worker(n: int, micro: int, per_step: int, workers: int) -> None:
    cut = EpochPlan(n, micro * per_step, micro)
    seen = []
    for step in range(cut.n_steps):
        indices = cut.micro_of_step(step)
        dealt = [indices[worker::workers] for worker in range(workers)]
        assert [len(part) for part in dealt] == shares(len(indices), workers)
        assert sum(cut.samples_of_micro(i) for i in indices) == cut.samples_of_step(step)
        seen += [i for part in dealt for i in part]
    assert sorted(seen) == list(range(-(-n // micro)))
    assert sum(cut.samples_of_micro(i) for i in seen) == n


def test_shares_differ_by_one_at_most() -> None:
    assert shares(8, 3) == [3, 3, 2]
    assert shares(2, 4) == [1, 1, 0, 0]


@pytest.mark.parametrize(("g", "b"), [(10, 4), (3, 4), (4, 0), (0, 4), (4, -2)])
def test_a_global_batch_is_a_multiple_of_the_micro_batch(g: int, b: int) -> None:
    with pytest.raises(BadInput, match="global_batch must be a multiple of micro_batch"):
        EpochPlan(100, g, b)


def test_the_refusal_names_the_nearest_global_batch() -> None:
    with pytest.raises(BadInput, match="got 1000 and 384; the nearest is 1152"):
        EpochPlan(100, 1000, 384)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(BadInput, match="no samples"):
        EpochPlan(0, 8, 4)


@pytest.mark.parametrize(
    ("state", "was_asynchronous", "found"),
    [
        ({"dropped": 7}, False, {"overflow": 7}),
        ({"dropped": 7}, True, {"stale": 7}),
        ({"dropped": 7, "not_finite": 0, "overflowed": 2}, False, {"stale": 5, "overflow": 2}),
    ],
)
def test_without_an_asynchronous_mode_an_older_account_has_overflows_alone(
    state: dict[str, int], was_asynchronous: bool, found: dict[str, int]
) -> None:
    assert SampleAccount.of_state(state, was_asynchronous=was_asynchronous).dropped_for == found


IN_SEGMENTS = EpochOrder(100, 0, 4, segment=2, n_shards=25, in_segment=4, shards=1)


@pytest.mark.parametrize(
    ("cursor", "order", "position"),
    [
        (Cursor(), None, None),
        (Cursor(), EpochOrder(100, 0, 0), None),
        (Cursor(4, 3, n_steps=7), EpochOrder(100, 0, 4), EpochPosition(4, 3, 7)),
        (Cursor(4, 7, n_steps=7), EpochOrder(100, 0, 4), EpochPosition(4, 7, 7)),
        (Cursor(4, 7, n_steps=7), EpochOrder(100, 0, 5), EpochPosition(4, 7, 7, 0, 0)),
        (Cursor(4, 3, segment=2, n_steps=7), IN_SEGMENTS, EpochPosition(4, 3, 7, 2, 7)),
        (Cursor(3, 3, segment=6, n_steps=7), IN_SEGMENTS, EpochPosition(3, 3, 7, 6, 0)),
    ],
)
def test_where_a_job_stands_in_its_data(
    cursor: Cursor, order: EpochOrder | None, position: EpochPosition | None
) -> None:
    assert position_in({"cursor": vars(cursor), "order": order and vars(order)}) == position
