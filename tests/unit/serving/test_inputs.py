"""Requests become inputs by their fields, and what is wrong with a field is said with its name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.serving import inputs
from gba_hvd.serving.outputs import scores_of
from tests.unit.serving.conftest import batch


class Model(nn.Module):
    def forward(self, x: Any, y: Any = None) -> Any: ...


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, gba_hvd.Batch):
        return same(a.dense, b.dense) and same(dict(a.ids), dict(b.ids))
    if isinstance(a, gba_hvd.Bag):
        have = [one.weights is not None for one in (a, b)]
        same_weights = same(a.weights, b.weights) if all(have) else not any(have)
        return same(a.values, b.values) and same(a.offsets, b.offsets) and same_weights
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b))


def weighted(n: int) -> gba_hvd.Batch:
    """`batch`, with a weight for each id of the histories."""
    one = batch(n)
    history: Any = one.ids["history"]
    return replace(one, ids={**one.ids, "history": replace(history, weights=torch.rand(len(history.values)))})


INPUTS = {
    "batch": batch(5),
    "weights": weighted(5),
    "weights of arguments": ({"h": weighted(3).ids["history"], "weights": torch.randn(3)}, weighted(3).ids["history"]),
    "matrix": torch.randn(4, 3),
    "mapping": {"item": torch.arange(3), "shown": torch.arange(6).view(3, 2).int(), "flag": torch.ones(3).bool()},
    "arguments": (torch.randn(3, 2), {"item": torch.arange(3)}),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_columns_of_an_input_give_that_input(name: str) -> None:
    value = INPUTS[name]
    spec = inputs.spec_of(value, Model())
    columns = inputs.columns_of(spec, value)
    assert same(inputs.input_of(spec, columns), value)
    frame = pd.DataFrame({key: list(one) for key, one in columns.items()})
    assert same(inputs.input_of(spec, frame), value)


def test_fields_come_in_the_order_of_the_example_also_from_sorted_json() -> None:
    """A model may stack its rows, or the parts of a mapping, in that order."""
    ids = {name: torch.arange(3) for name in ("user", "item", "city")}
    for value in (gba_hvd.Batch(ids, torch.empty(3, 0), torch.zeros(3)), ids):
        spec = inputs.spec_of(value, Model())
        stored = json.loads(json.dumps(spec, sort_keys=True))
        found = inputs.input_of(stored, inputs.columns_of(spec, value))
        assert [*(found.ids if isinstance(found, gba_hvd.Batch) else found)] == ["user", "item", "city"]
        with pytest.raises(BadInput, match="saved by an earlier version, without the order of its fields"):
            inputs.input_of({name: one for name, one in stored.items() if name != "order"}, ids)


def test_nan_is_taken_where_the_example_has_it() -> None:
    spec = inputs.spec_of(torch.tensor([1.0, float("nan")]), Model())
    assert inputs.input_of(spec, {"x": [2.0, np.nan]}).isnan().tolist() == [False, True]


def test_booleans_are_numbers_of_a_float_field() -> None:
    spec = inputs.spec_of(torch.tensor([1.0, 2.0]), Model())
    assert inputs.input_of(spec, {"x": [True, 2.5]}).tolist() == [1, 2.5]


def test_a_matrix_may_come_in_columns_of_numbers() -> None:
    spec = inputs.spec_of(torch.randn(4, 2), Model())
    found = inputs.input_of(spec, {"x_0": [1.0, 2.0], "x_1": [3, 4]})
    assert torch.equal(found, torch.tensor([[1.0, 3.0], [2.0, 4.0]]))


GOOD = {"user": [1, 2], "item": [3, 4], "history": [[1], []], "dense": [[0.5, 1.0], [1.0, 2.0]]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"user": None}, "field 'user' is missing: the model needs int64 in column 'user'; the request has item"),
        (
            {"dense": None},
            r"field 'dense' is missing: the model needs \[2\] of float32 in column 'dense', or columns dense_0",
        ),
        ({"user": [0.5, 1.0]}, "field 'user': expected int64, got float64"),
        ({"user": [1.0, np.nan]}, "field 'user': expected int64, got float64 .a column of whole numbers with missing"),
        (
            {"user": ["a", "b"]},
            "field 'user': expected int64, got <U1 .strings of a hashed table as hashes: gba_hvd.data",
        ),
        (
            {"user": ["7", "8"]},
            "got <U1 .numbers without quotes; or, where they were strings in the training, their hashes",
        ),
        ({"user": ["7", "a"]}, "got <U1 .strings of a hashed table as hashes"),
        ({"user": [1, 2, 3]}, "need one number of samples, got"),
        ({"user": [[1, 2], [3, 4]]}, r"field 'user': expected \[B\] of int64, got \[2, 2\]"),
        ({"user": np.array([1, 2**63], np.uint64)}, "does not fit into int64 .view hashes of a hashed table as int64"),
        ({"history": [1, 2]}, "field 'history': expected a list of int64 for each sample, got int"),
        ({"history": [["a"], []]}, "field 'history': expected int64, got"),
        ({"dense": [[1.0], [2.0, 3.0]]}, r"field 'dense': expected \[2\] of float32, got lists of different lengths"),
        ({"dense": [[1.0, np.nan], [2.0, 3.0]]}, "field 'dense': NaN, and the example that the model was saved with"),
        ({"dense": [[1.0, 1e300], [2.0, 3.0]]}, r"field 'dense': 1e.300 does not fit into float32"),
        ({"dense": [[1.0, 1.0], [2.0, -math.inf]]}, "field 'dense': expected finite numbers, got -inf"),
        ({"user": [True, 7]}, "field 'user': expected int64, got bool"),
        ({"user": np.array([False, None], object)}, "field 'user': expected int64, got bool"),
        ({"user": np.array([True, False])}, "field 'user': expected int64, got bool"),
        ({"history": [[1, True], [2]]}, "field 'history': expected int64, got bool"),
        ({"history": [[True], [2]]}, "field 'history': expected int64, got bool"),
        ({"dense": [[1.0], [2.0]]}, r"field 'dense': expected \[B, 2\] of float32, got \[2, 1\]"),
        (
            {"dense": [1.0, 2.0]},
            r"expected \[B, 2\] of float32, got \[2\]: give it lists of 2, or columns dense_0 to dense_1$",
        ),
        (
            {"dense": None, "dense_1": [1.0, 2.0]},
            r"or columns dense_0 to dense_1 .dense_0 is missing.; the request has",
        ),
    ],
)
def test_a_field_that_is_wrong_is_named(change: dict[str, Any], words: str) -> None:
    spec = inputs.spec_of(batch(3), Model())
    inputs.input_of(spec, GOOD)
    request = {name: one for name, one in {**GOOD, **change}.items() if one is not None}
    with pytest.raises(BadInput, match=words):
        inputs.input_of(spec, request)


def test_a_column_of_numbers_for_one_dense_feature_is_told_its_name() -> None:
    spec = inputs.spec_of(torch.randn(4, 1), Model())
    assert inputs.input_of(spec, {"x_0": [1.0, 2.0]}).tolist() == [[1.0], [2.0]]
    with pytest.raises(
        BadInput, match=r"\[B, 1\] of float32, got \[2\]: give it lists of 1, or a column of numbers x_0"
    ):
        inputs.input_of(spec, {"x": [1.0, 2.0]})


NAMED = {**{name: one for name, one in GOOD.items() if name != "dense"}, "price": [0.5, 1.0], "age": [1, 2]}


def named() -> inputs.Spec:
    return inputs.spec_of(batch(3), Model(), ["price", "age"])


def test_dense_values_may_come_by_name() -> None:
    expected = torch.tensor([[0.5, 1.0], [1.0, 2.0]])
    rows = [{"age": 1.0, "price": 0.5}, {"price": 1.0, "age": 2.0}]
    by_position = {"dense_0": [0.5, 1.0], "dense_1": [1.0, 2.0]}
    ids = {name: GOOD[name] for name in ("user", "item", "history")}
    for request in (NAMED, {**ids, "dense": rows}, pd.DataFrame({**ids, "dense": rows}), GOOD, {**ids, **by_position}):
        assert torch.equal(inputs.input_of(named(), request).dense, expected)


def test_the_columns_of_a_named_input_have_the_names() -> None:
    one = batch(4)
    columns = inputs.columns_of(named(), one)
    assert [*columns] == ["user", "item", "history", "price", "age"]
    assert same(inputs.input_of(named(), columns), one)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"age": None},
            "field 'dense': age is missing: by name the model needs price, age; the request has user, item",
        ),
        ({"age": None, "price": None}, "columns dense_0 to dense_1, or columns price, age; the request has user"),
        ({"age": ["a", "b"]}, "field 'age': expected float32, got <U1"),
        ({"age": [1.0, np.nan]}, "field 'age': NaN, and the example"),
        ({"age": [[1.0], [2.0]]}, r"field 'age': expected one number for each sample, got \[2, 1\]"),
        ({"age": [1.0]}, "need one number of samples, got {'price': 2, 'age': 1}"),
        ({"dense": [{"price": 1.0, "age": 1.0}, {"price": 1.0}]}, "field 'dense': sample 1 has no age"),
        (
            {"dense": [{"price": 1.0, "agee": 1.0, "age": 2.0}] * 2},
            "field 'dense': sample 0 has 'agee', which is no name of it; nearest: age",
        ),
        ({"dense": [{"price": 1.0, "age": 1.0}, [1.0, 2.0]]}, r"sample 1 is \[1.0, 2.0\], expected values by name"),
    ],
)
def test_a_dense_value_that_is_wrong_is_named(change: dict[str, Any], words: str) -> None:
    request = {name: one for name, one in {**NAMED, **change}.items() if one is not None}
    with pytest.raises(BadInput, match=words):
        inputs.input_of(named(), request)


def test_values_by_name_need_names() -> None:
    with pytest.raises(BadInput, match="saved without names: give a list of 2, or save the model with dense_names"):
        inputs.input_of(inputs.spec_of(batch(3), Model()), {**GOOD, "dense": [{"price": 1.0, "age": 2.0}] * 2})


@pytest.mark.parametrize(
    ("example", "names", "words"),
    [
        (batch(3), ["price"], "dense_names has 1 names, and Batch.dense of input_example 2 columns"),
        (batch(3), ["price", "price"], "two columns of a request would be called 'price'"),
        (batch(3), ["price", "user"], "two columns of a request would be called 'user'"),
        (batch(3), ["dense_1", "dense_0"], "two columns of a request would be called 'dense_1'"),
        (batch(3), "ab", "must be a list of names"),
        (torch.randn(3, 2), ["price", "age"], "input_example is no Batch that has some"),
    ],
)
def test_names_that_do_not_fit(example: Any, names: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        inputs.spec_of(example, Model(), names)


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ("text", "x is a str"),
        (torch.tensor(1.0), r"x is a torch.float32 \[\]"),
        (
            {"a": gba_hvd.Bag(torch.arange(3), torch.tensor([0]), torch.ones(3)), "a_weights": torch.ones(1)},
            "two fields called 'a_weights'",
        ),
        ({"a": gba_hvd.Bag(torch.arange(3), torch.arange(1)), "b": torch.ones(2)}, "got {'a': 1, 'b': 2}"),
        (
            ({"user": torch.arange(5), "tags": torch.arange(13), "tags_off": torch.arange(5), "tagw": torch.ones(13)},),
            "expected one number of samples in all fields, got {'user': 5, 'tags': 13, 'tags_off': 5, 'tagw': 13}: .*"
            r"let forward\(\) take each as one gba_hvd.Bag\(values, offsets, weights\)",
        ),
        (({"a": torch.ones(1)}, {"a": torch.ones(1)}), "two fields called 'a'"),
    ],
)
def test_an_example_that_no_request_can_be_made_for(example: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        inputs.spec_of(example, Model())


def test_a_field_that_is_broadcast_comes_for_each_sample() -> None:
    spec = inputs.spec_of({"x": torch.randn(4, 3), "scale": torch.ones(1)}, Model())
    found = inputs.input_of(spec, {"x": [[1.0, 2.0, 3.0]] * 2, "scale": [0.5, 2.0]})
    assert found["scale"].tolist() == [0.5, 2.0]


@pytest.mark.parametrize(("weights", "words"), [
    ([[0.5], [1.0, 2.0]], "'history_weights': sample 1: expected a weight for each of its 0 ids in 'history', got 2"),
    ([[0.5, 1.0], []], "'history_weights': sample 0: expected a weight for each of its 1 ids in 'history', got 2"),
    ([[], [0.5]], "'history_weights': sample 0: expected a weight for each of its 1 ids in 'history', got 0"),
    ([[None], []], "'history_weights': NaN, and the example"),
    ([[0.5]], "need one number of samples, got"),
    (None, "'history_weights' is missing: the model needs lists of float32 in column 'history_weights'"),
])  # fmt: skip
def test_each_id_of_a_weighted_bag_has_a_weight(weights: Any, words: str) -> None:
    spec = inputs.spec_of(weighted(3), Model())
    found = inputs.input_of(spec, {**GOOD, "history_weights": [[2], []]}).ids["history"]
    assert (found.values.tolist(), found.weights.tolist()) == ([1], [2.0])
    request = GOOD if weights is None else {**GOOD, "history_weights": weights}
    with pytest.raises(BadInput, match=words):
        inputs.input_of(spec, request)


def test_outputs_are_columns() -> None:
    one, two = torch.tensor([0.0, 2.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert set(scores_of(one[:, None], "none")) == {"score"}
    assert scores_of(one, "sigmoid")["score"][0] == 0.5
    assert {k: v.tolist() for k, v in scores_of(two, "none").items()} == {"score_0": [1, 3], "score_1": [2, 4]}
    assert set(scores_of({"click": one, "buy": two}, "none")) == {"click", "buy_0", "buy_1"}
    assert set(scores_of((one, one), "none")) == {"score_0", "score_1"}
    with pytest.raises(BadInput, match="scores are tensors"):
        scores_of("no", "none")


def test_a_field_that_is_given_twice_is_refused() -> None:
    example = gba_hvd.Batch({"hist": torch.zeros(2, 4, dtype=torch.int64)}, torch.zeros(2, 2), torch.zeros(2))
    spec = inputs.spec_of(example, Model(), ["price", "age"])
    one, hist = [0.0], [[1, 2, 3, 4]]
    for columns, words in (
        ({"hist": hist, "dense": [[0.0, 0.0]], "price": one}, "given as 'dense' and as 'price'"),
        ({"hist": hist, "hist_0": [7], "dense": [[0.0, 0.0]]}, "given as 'hist' and as 'hist_0'"),
        ({"hist": hist, "price": one, "age": one, "dense_0": one}, "given as 'price' and as 'dense_0'"),
        ({**{f"hist_{i}": [i] for i in range(5)}, "price": one, "age": one}, "columns hist_0 to hist_3, got 'hist_4'"),
    ):
        with pytest.raises(BadInput, match=words):
            inputs.refuse_doubtful(spec, columns)
    inputs.refuse_doubtful(spec, {"hist": hist, "price": one, "age": one, "label": one})
    by_name = [None, {"price": 0.0, "age": 0.0}]  # as lines of JSON have it, beside what was in it
    inputs.refuse_doubtful(spec, {"hist": hist * 2, "dense": by_name, "price": one * 2, "age": one * 2})
    inputs.refuse_doubtful(spec, {"hist": hist, "dense": np.float32(0)})


def test_a_field_may_have_the_name_of_a_column_of_another() -> None:
    ids = {"hist": torch.zeros(2, 4, dtype=torch.int64), "hist_0": torch.zeros(2, dtype=torch.int64)}
    spec = inputs.spec_of(gba_hvd.Batch(ids, torch.zeros(2, 2), torch.zeros(2)), Model(), ["price", "age"])
    inputs.refuse_doubtful(spec, {"hist": [[1, 2, 3, 4]], "hist_0": [7], "price": [0.0], "age": [0.0]})


@pytest.mark.parametrize(("request_", "words"), [
    ([{"item": 1}], "expected columns by name.*got list.*of rows"),
    (None, "expected columns by name.*got NoneType"),
    (pd.DataFrame([[1, 2]], columns=["item", "item"]), "column 'item' is there 2 times"),
])  # fmt: skip
def test_what_has_no_columns_is_refused(request_: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        inputs.columns_in(request_)


@pytest.mark.parametrize(("item", "words"), [
    ([1, None], "'item': sample 1 is missing.*expected int64"),
    ([1, pd.NA], "'item': sample 1 is missing"),
    ([None, None], "'item' is missing: expected int64, got null in every sample"),
    ([1, 2**70], f"'item': sample 1: {2**70} does not fit into int64"),
    ([1, 2**63], f"'item': sample 1: {2**63} does not fit into int64"),
    ([2**63, 2**63 + 1], f"'item': sample 1: {2**63 + 1} does not fit into int64"),
    ({"a": 1, "b": 2}, "'item': expected a column of int64, got"),
    ("ab", "'item': expected a column of int64, got the single value 'ab'"),
])  # fmt: skip
def test_values_that_are_no_ids_are_named_with_their_sample(item: Any, words: str) -> None:
    spec = inputs.spec_of({"item": torch.arange(2)}, Model())

    def read() -> Any:
        inputs.lengths_of(spec, {"item": item})
        return inputs.input_of(spec, {"item": item})

    with pytest.raises(BadInput, match=words):
        read()


def test_nulls_in_lists_are_named_with_their_sample() -> None:
    spec = inputs.spec_of(
        {"h": gba_hvd.Bag(torch.arange(2), torch.tensor([0, 1])), "m": torch.zeros(2, 2).long()}, Model()
    )
    for name, other in (("h", {"m": [[1, 2], [1, 2]]}), ("m", {"h": [[1], [2]]})):
        with pytest.raises(BadInput, match=f"'{name}': sample 1 .*null"):
            inputs.input_of(spec, {**other, name: [[1, 2], [None, 3]]})
