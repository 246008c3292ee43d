"""The pushes that wait for their step, and their weighted sum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gba_hvd.embedding.row_gradients import RowGrad, pack_by_owner
from gba_hvd.ps.partition.push_buffer import BufferedPush, PushBuffer, merge_pushes

DIMS = [2, 3]


def a_push(micro: int, serial: int, value: float = 1.0, keys: tuple[int, ...] = (0, 1)) -> BufferedPush:
    rows = [RowGrad(np.array(keys, np.int64), np.full((len(keys), dim), value, np.float32)) for dim in DIMS]
    message, _ = pack_by_owner(rows, np.zeros(4, np.int32), 1)
    return BufferedPush(micro, serial, np.full(5, value, np.float32), message)


def test_a_push_that_comes_twice_is_kept_once() -> None:
    buffer = PushBuffer()
    assert buffer.add(a_push(0, 1, 1.0))
    assert not buffer.add(a_push(0, 1, 9.0))
    assert len(buffer) == 1
    assert buffer.n_bytes == a_push(0, 1).n_bytes
    assert buffer.take([(0, 1)])[0, 1].dense[0] == 1.0


def test_the_same_micro_batch_under_another_lease_is_another_push() -> None:
    buffer = PushBuffer()
    assert buffer.add(a_push(0, 1))
    assert buffer.add(a_push(0, 2))
    assert set(buffer.take([(0, 2), (7, 7)])) == {(0, 2)}
    assert len(buffer) == 1


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=30), st.integers(0, 31))
def test_bytes_are_those_of_the_pushes_that_are_there(leases: list[tuple[int, int]], oldest: int) -> None:
    buffer = PushBuffer()
    for micro, serial in leases:
        buffer.add(a_push(micro, serial))
    buffer.discard_before(oldest)
    kept = {lease for lease in leases if lease[1] >= oldest}
    assert len(buffer) == len(kept)
    assert buffer.n_bytes == len(kept) * a_push(0, 1).n_bytes
    assert set(buffer.take(leases)) == kept
    assert buffer.n_bytes == 0


def test_the_sum_is_weighted_and_has_each_row_once() -> None:
    pushes = [(a_push(0, 1, 1.0, (3, 1)), 1.0), (a_push(1, 2, 2.0, (1, 2)), 0.5), (a_push(2, 3, 100.0, (9,)), 0.0)]
    dense, rows = merge_pushes(pushes, 5, DIMS)
    np.testing.assert_array_equal(dense, np.full(5, 2.0, np.float32))
    for grad, dim in zip(rows, DIMS, strict=True):
        found = dict(zip(grad.keys.tolist(), grad.values.tolist(), strict=True))
        assert found == {3: [1.0] * dim, 1: [2.0] * dim, 2: [1.0] * dim}  # row 9: only a push of weight 0 touched it


def test_no_push_makes_an_empty_sum() -> None:
    dense, rows = merge_pushes([], 5, DIMS)
    assert not dense.any()
    assert [grad.values.shape for grad in rows] == [(0, 2), (0, 3)]
