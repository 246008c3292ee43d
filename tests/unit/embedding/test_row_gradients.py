"""Row gradients are merged, sorted by owner and unpacked without loss; dense ones live in one buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gba_hvd import kernels
from gba_hvd.embedding.row_gradients import (
    Packed,
    PickedRows,
    RowGrad,
    RowSum,
    add_in_order,
    distinct,
    distinct_by_owner,
    distinct_parts,
    merge,
    pack_by_owner,
    unpack,
)
from gba_hvd.errors import BadInput
from gba_hvd.gradients.dense_gradients import DenseGradients


def row_grad(keys: list[int], dim: int, seed: int = 0) -> RowGrad:
    rng = np.random.default_rng(seed)
    return RowGrad(np.array(keys, dtype=np.int64), rng.normal(size=(len(keys), dim)).astype(np.float32))


@pytest.mark.slow
@given(st.lists(st.integers(0, 2**62) | st.integers(0, 20), max_size=200))
def test_distinct_keys_are_numbered_by_first_appearance(keys: list[int]) -> None:
    found, number, _ = distinct(np.array(keys, dtype=np.int64))
    assert found.tolist() == list(dict.fromkeys(keys))
    assert found[number].tolist() == keys


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 30), max_size=60), max_size=5))
def test_keys_of_several_tables_are_numbered_as_all_of_them_at_once(parts: list[list[int]]) -> None:
    keys = np.array([1000 * i + key for i, some in enumerate(parts) for key in some], dtype=np.int64)
    found, number = distinct_parts(keys, np.cumsum([len(some) for some in parts]).tolist())
    expected, numbers, _ = distinct(keys)
    assert found.tolist() == expected.tolist()
    assert number.tolist() == numbers.tolist()


@pytest.mark.parametrize("ascending", [False, True])
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 40), max_size=200),
    owner=st.lists(st.integers(-1, 2), min_size=1, max_size=9),
)
def test_keys_are_distinct_and_together_by_owner(keys: list[int], owner: list[int], ascending: bool) -> None:
    array, of_shard = np.array(keys, dtype=np.int64), np.array(owner, np.int32)
    found, start, slots = distinct_by_owner(array, of_shard, 3, ascending)
    assert start[0] == 0
    assert start[-1] == len(found)
    for who in range(3):
        expected = list(dict.fromkeys(key for key in keys if owner[key % len(owner)] == who))
        if ascending:
            expected.sort(key=lambda key: key % 2**64)
        assert found[start[who] : start[who + 1]].tolist() == expected
    number = np.empty(len(found), np.int32)
    assert kernels.find_keys(found[::-1].copy(), slots, found, number) < 0
    assert number.tolist() == list(range(len(found)))[::-1]
    strangers = array[of_shard[array % len(owner)] < 0]
    assert kernels.find_keys(strangers, slots, found, np.empty(len(strangers), np.int32)) == min(0, len(strangers) - 1)


def test_keys_that_may_not_be_written_are_grouped_as_well() -> None:
    keys = np.arange(6)
    keys.flags.writeable = False
    found, start, _ = distinct_by_owner(keys, np.array([1, 0], np.int32), 2)
    assert (found.tolist(), start.tolist()) == ([1, 3, 5, 0, 2, 4], [0, 3, 6])


def test_a_gradient_with_a_row_twice_is_added_up_as_well() -> None:
    merged = merge([(row_grad([3, 5, 3], 2), 1.0), (row_grad([5], 2), 2.0)])
    first, second = row_grad([3, 5, 3], 2).values, row_grad([5], 2).values
    assert merged.keys.tolist() == [3, 5]
    np.testing.assert_allclose(merged.values, [first[0] + first[2], first[1] + 2 * second[0]], rtol=1e-6)


keys_lists = st.lists(st.lists(st.integers(0, 12), unique=True, max_size=10), min_size=1, max_size=4)


@given(keys_lists, st.integers(1, 4))
def test_merging_adds_up_what_belongs_to_one_row(lists: list[list[int]], dim: int) -> None:
    parts = [(row_grad(keys, dim, seed), 0.5 + seed) for seed, keys in enumerate(lists)]
    expected: dict[int, np.ndarray] = {}
    for part, weight in parts:
        for key, value in zip(part.keys.tolist(), part.values, strict=True):
            expected[key] = expected.get(key, 0.0) + weight * value
    merged = merge(parts)
    assert merged.keys.tolist() == list(expected)
    np.testing.assert_allclose(merged.values, np.array(list(expected.values())).reshape(-1, dim), rtol=1e-5, atol=1e-6)


@given(keys_lists, st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_an_addition_that_waits_gives_the_bits_of_one_that_does_not(
    lists: list[list[int]], dim: int, picked: int, is_counted: bool
) -> None:
    counts = np.arange(1, 13, dtype=np.uint32)
    parts = [row_grad(keys, dim, seed) for seed, keys in enumerate(lists)]
    if is_counted:
        parts = [RowGrad(part.keys, part.values, counts[: len(part.keys)]) for part in parts]
    expected = merge([(part, 1.0) for part in parts])
    some: list[RowGrad | PickedRows] = list(parts)
    if picked < len(parts):  # one of them is the back half of a longer gradient, turned round
        longer = row_grad([*range(100, 105), *parts[picked].keys[::-1]], dim)
        longer.values[5:] = parts[picked].values[::-1]
        accesses = None if not is_counted else np.concatenate([counts[:5], parts[picked].accesses[::-1]])  # type: ignore[index]
        rows = np.arange(len(longer.keys) - 1, 4, -1, dtype=np.int32)
        some[picked] = PickedRows(RowGrad(longer.keys, longer.values, accesses), rows)
    found = add_in_order(some)
    assert isinstance(found, RowSum) == (len(parts) > 1)
    added_up = found.added_up() if isinstance(found, RowSum) else found
    assert added_up.keys.tolist() == expected.keys.tolist()
    assert np.array_equal(added_up.values, expected.values)
    assert np.array_equal(added_up.accesses, expected.accesses) if is_counted else added_up.accesses is None


@pytest.mark.parametrize("order", [1, -1])
def test_an_addition_does_not_wait_where_a_row_comes_twice(order: int) -> None:
    parts = [row_grad([3, 5, 3], 2), row_grad([5, 4], 2)][::order]
    found = add_in_order(parts)
    assert isinstance(found, RowGrad)
    assert np.array_equal(found.values, merge([(part, 1.0) for part in parts]).values)


def test_owners_that_are_not_written_to_get_no_message() -> None:
    grads, owner = [row_grad([0, 1, 2, 3, 4, 5], 3), row_grad([6, 1], 2)], np.array([0, 1, 1], np.int32)
    every, packed = Packed.of(grads, owner, 2), Packed.of(grads, owner, 2, written=[0])
    assert packed.words.tolist() == [every.words[0], 0]
    messages = [np.empty(int(of.words.sum()), np.float32) for of in (every, packed)]
    for of, message in zip((every, packed), messages, strict=True):
        of.write(message)
    assert messages[1].tobytes() == messages[0][: every.words[0]].tobytes()
    sent = unpack(messages[0][every.words[0] :], [3, 2])
    for kept, whole in zip(packed.picked(1), sent, strict=True):
        assert kept.keys.tolist() == whole.keys.tolist()
        assert np.array_equal(kept.grad.values[kept.rows], whole.values)


@pytest.mark.slow
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), min_size=1, max_size=3), st.data())
def test_every_owner_gets_its_rows_and_only_those(
    n_owners: int, groups: list[tuple[int, int]], data: st.DataObject
) -> None:
    n_shards = 7
    owners = st.lists(st.integers(0, n_owners - 1), min_size=n_shards, max_size=n_shards)
    owner = np.array(data.draw(owners), dtype=np.int32)
    big = 2**55  # keys are 64 bits wide and must survive as float32 words
    grads = [row_grad([(3 * i) % 100 + big * (i % 2) for i in range(n)], dim, seed=dim) for dim, n in groups]
    message, words = pack_by_owner(grads, owner, n_owners)
    assert words.sum() == len(message)
    for rank, part in enumerate(np.split(message, np.cumsum(words)[:-1])):
        for sent, received in zip(grads, unpack(part, [dim for dim, _ in groups]), strict=True):
            mine = owner[sent.keys % n_shards] == rank
            assert np.array_equal(received.keys, sent.keys[mine])
            assert np.array_equal(received.values, sent.values[mine])
    packed = Packed.of(grads, owner, n_owners)
    for rank, part in enumerate(np.split(message, np.cumsum(words)[:-1])):
        assert packed.message(rank).tobytes() == part.tobytes()
        for sent, received in zip(packed.of_owner(rank), unpack(part, [dim for dim, _ in groups]), strict=True):
            assert np.array_equal(sent.keys, received.keys)
            assert np.array_equal(sent.values, received.values)


def test_a_row_that_is_not_finite_is_found() -> None:
    grad = row_grad([4, 9, 2], 3)
    assert grad.non_finite() is None
    grad.values[1, 2] = np.inf
    assert grad.non_finite() == 9
    grad.values[0, 0] = -np.inf
    assert grad.non_finite() == 4


def test_the_gradient_of_a_parameter_is_a_view_of_the_buffer() -> None:
    model = nn.Linear(3, 2)
    dense = DenseGradients(list(model.parameters()), n_extra=2)
    model(torch.ones(1, 3)).sum().backward()
    assert dense.flat.tolist() == [1.0] * 8
    dense.collect_()
    dense.add_micro_batch_(0.5)
    dense.extra[0] += 7
    assert dense.total.tolist() == [0.5] * 8 + [7.0, 0.0]
    assert dense.flat.tolist() == [0.0] * 8
    assert model.weight.grad is not None
    assert not model.weight.grad.any()


@pytest.mark.parametrize("own", [None, torch.full((2, 3), 4.0)], ids=["none", "another tensor"])
def test_a_gradient_somebody_replaced_still_counts(own: Tensor | None) -> None:
    model = nn.Linear(3, 2, bias=False)
    dense = DenseGradients(list(model.parameters()), n_extra=0)
    dense.flat.fill_(9)
    model.weight.grad = own
    dense.collect_()
    dense.add_micro_batch_(1.0)
    assert dense.total.tolist() == [0.0 if own is None else 4.0] * 6


def test_frozen_parameters_have_no_place_in_the_buffer() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert DenseGradients(list(model.parameters()), n_extra=0).n == 6
    assert DenseGradients([], n_extra=3).total.shape == (3,)


def test_counts_that_travel_with_half_precision_gradients_stay_exact() -> None:
    model = nn.Linear(3, 2).bfloat16()
    dense = DenseGradients(list(model.parameters()), n_extra=1)
    dense.extra[0] += 4097
    assert dense.extra.tolist() == [4097.0]


def test_parameters_of_two_types_are_refused() -> None:
    with pytest.raises(BadInput, match="must share one dtype and device"):
        DenseGradients([torch.zeros(1, requires_grad=True), torch.zeros(1, dtype=torch.float64, requires_grad=True)], 0)
