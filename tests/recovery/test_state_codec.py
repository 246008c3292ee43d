"""State goes through bytes and comes back the same."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gba_hvd.errors import BadInput
from recovery.errors import Damaged
from recovery.state_codec import decode, encode


def there_and_back(value: Any) -> Any:
    return decode(encode(value))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=15,
)


@pytest.mark.slow
@given(plain)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert repr(back) == repr(value)


def test_nan_and_infinity_travel() -> None:
    back = there_and_back([math.nan, math.inf, -math.inf, torch.tensor([math.nan, math.inf])])
    assert math.isnan(back[0])
    assert back[1:3] == [math.inf, -math.inf]
    assert math.isnan(back[3][0])
    assert back[3][1] == math.inf


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(0, 4, dtype=torch.int64),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([1.5, -2.0], dtype=torch.float16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        nn.Parameter(torch.ones(3)),
    ],
    ids=str,
)
def test_tensors_keep_type_shape_and_values(tensor: torch.Tensor) -> None:
    back = there_and_back({"x": tensor})["x"]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor.detach())


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool", ">i4"])
@pytest.mark.parametrize("shape", [(2, 3), (), (0,), (0, 3)])
def test_arrays_keep_type_shape_and_values(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype=dtype)
    back = there_and_back(array)
    assert back.dtype == array.dtype
    assert back.shape == shape
    assert np.array_equal(back, array)


def test_what_comes_back_can_be_written_to() -> None:
    back = there_and_back({"t": torch.zeros(2), "a": np.zeros(2)})
    back["t"] += 1
    back["a"] += 1
    assert back["t"].tolist() == back["a"].tolist() == [1.0, 1.0]


def test_numpy_numbers_become_numbers() -> None:
    assert there_and_back([np.float32(0.5), np.int64(3), np.bool_(True)]) == [0.5, 3, True]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_an_optimizer_goes_on_as_before(kind: Any) -> None:
    def a_model() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        return model, kind(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
            optimizer.step()

    model, optimizer = a_model()
    train(model, optimizer, 3)
    data = encode({"model": OrderedDict(model.state_dict()), "optimizer": optimizer.state_dict()})
    other, resumed = a_model()
    state = decode(data)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    train(model, optimizer, 2)
    train(other, resumed, 2)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, {2}]}, r"state\['a'\]\[1\] is a set"),
        ({"f": (1, open)}, r"state\['f'\]\[1\] is a builtin_function_or_method"),
        ({"x": np.array(["a"])}, r"state\['x'\] is a ndarray"),
        ({"d": np.datetime64("2020-01-01")}, r"state\['d'\] is a datetime64"),
        ({"s": torch.eye(2).to_sparse()}, r"state\['s'\] is a sparse Tensor"),
    ],
)
def test_what_cannot_travel_is_named_with_its_place(value: Any, place: str) -> None:
    with pytest.raises(BadInput, match=place):
        encode(value)


def forged(header: str, blobs: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + blobs


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"short", "unpack_from requires a buffer"),
        (b"state of step 1", "Expecting value"),
        (forged("[" * 100_000), "recursion"),
        (forged('{"kind": "tensor", "dtype": "float9", "shape": [1], "start": 0, "size": 1}', b"x"), "dtype 'float9'"),
        (forged('{"kind": "tensor", "dtype": "load", "shape": [1], "start": 0, "size": 1}', b"x"), "no dtype 'load'"),
        (forged('{"kind": "array", "dtype": "<x4", "shape": [1], "start": 0, "size": 4}', b"xxxx"), "x4"),
        (forged('{"kind": "array", "dtype": "<f4", "shape": [1], "start": 9, "size": 4}'), "reshape"),
        (forged('{"kind": "tensor", "dtype": "int32", "shape": [2], "start": 0, "size": 4}', b"xxxx"), "shape"),
        (forged('{"kind": "dict", "items": [[[], 1]]}'), "unhashable"),
        (forged('{"items": []}'), "KeyError: 'kind'"),
    ],
)
def test_bytes_of_another_program_are_damaged_with_where_they_were_read(data: bytes, why: str) -> None:
    with pytest.raises(Damaged, match=why) as raised:
        decode(data, "the checkpoint at file:///runs (manifests/1.json)")
    said = str(raised.value)
    assert said.startswith("the checkpoint at file:///runs (manifests/1.json): its ")
    assert said.endswith("read them with what wrote them, or go back to another checkpoint")
