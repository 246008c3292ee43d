"""Rows opened in fewer bits: how far they are off, and that what is stored stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gba_hvd
from gba_hvd import BadInput
from recovery.errors import Damaged
from tests.unit.serving.conftest import CODE, batch, change_rows, evaluated, objects

Trained = Callable[..., nn.Module]


def off_by(row_dtype: str, rows: np.ndarray) -> np.ndarray:
    """The largest error of each value that is documented, with the rounding of the last product."""
    if row_dtype == "bfloat16":
        return np.abs(rows) / 256
    return np.broadcast_to(np.abs(rows).max(axis=1, keepdims=True) / 254 * (1 + 1e-5), rows.shape)


@pytest.mark.parametrize("row_dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("stored", ["all", "touched"])
@pytest.mark.parametrize("hashed", [False, True])
def test_rows_are_off_by_no_more_than_is_documented(
    trained: Trained, tmp_path: Path, hashed: bool, stored: str, row_dtype: str
) -> None:
    arguments = {"users": 100, "hashed": hashed}
    model = trained(touched=20, **arguments)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, arguments=arguments, tables=stored, shard_bytes=4096)
    before = objects(tmp_path / "m")
    opened = gba_hvd.load_for_inference(tmp_path / "m", row_dtype=row_dtype)
    for name, n in (("item", 9), ("word", 5)) if hashed else (("user", 100), ("item", 9), ("word", 5)):
        rows, found = model.tables.rows(name, np.arange(n)), opened.tables.rows(name, np.arange(n))
        assert found.dtype == np.float32
        assert (np.abs(found - rows) <= off_by(row_dtype, rows)).all()
        assert not np.array_equal(found, rows)
    if hashed:
        ids = model.tables.vocabulary("user")
        assert np.array_equal(opened.tables.vocabulary("user"), ids)
        rows = model.tables.rows("user", ids)
        assert (np.abs(opened.tables.rows("user", ids) - rows) <= off_by(row_dtype, rows)).all()
    assert objects(tmp_path / "m") == before
    one = batch(40, 100)
    assert torch.allclose(opened(one), evaluated(model, one), atol=0.2)


def test_rows_of_zeros_stay_zeros_and_the_largest_value_stays_itself(trained: Trained, tmp_path: Path) -> None:
    model = trained()
    change_rows(model, "user", np.arange(50), seed=3)
    memory, group = model.tables.memory, model.tables.layout.groups[model.tables.layout.place_of_table["user"][0]]
    start = int(memory.record_starts(np.array([7]), group)[0])
    memory.flat[start : start + 4] = 0
    gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    opened = gba_hvd.load_for_inference(tmp_path / "m", row_dtype="int8")
    rows, found = model.tables.rows("user", np.arange(50)), opened.tables.rows("user", np.arange(50))
    assert not found[7].any() and not rows[7].any()
    largest = np.abs(rows).argmax(axis=1)
    assert np.allclose(found[np.arange(50), largest], rows[np.arange(50), largest], rtol=1e-6)


def test_a_row_that_is_not_finite_has_no_scale(trained: Trained, tmp_path: Path) -> None:
    model = trained()
    memory, group = model.tables.memory, model.tables.layout.groups[model.tables.layout.place_of_table["user"][0]]
    memory.flat[int(memory.record_starts(np.array([7]), group)[0])] = np.inf
    gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    with pytest.raises(Damaged, match=r"table 'user': rows/.* has a row that is not finite: open the model in float32"):
        gba_hvd.load_for_inference(tmp_path / "m", row_dtype="int8")
    assert np.isinf(gba_hvd.load_for_inference(tmp_path / "m").tables.rows("user", np.arange(50))).any()


def test_what_cannot_be(trained: Trained, tmp_path: Path) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE)
    with pytest.raises(BadInput, match="row_dtype 'int7' is not known"):
        gba_hvd.load_for_inference(tmp_path / "m", row_dtype="int7")
    with pytest.raises(BadInput, match=r"which are float32; row_dtype='int8' needs memory"):
        gba_hvd.load_for_inference(tmp_path / "m", tables="mmap", row_dtype="int8")
