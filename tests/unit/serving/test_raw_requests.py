"""The example of docs/SERVING.md: raw rows have the scores of the rows of the store that was prepared of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gba_hvd
from gba_hvd.data import Categorical, ClickLog, Numeric, Recipe, SplitFiles, prepare
from tests.unit.serving.conftest import CODE, change_rows, evaluated
from tests.unit.serving.model_code import OfStore

DOCS = Path(__file__).parents[3] / "docs"
TRAIN = "label,user,item,words,price\n1,u7,i3,red|large,4.5\n0,u8,i1,small,1\n0,u7,i1,red,\n"
VALID = "label,user,item,words,price\n1,u7,i3,red|large,4.5\n0,nobody,i1,,\n"
RECIPE = Recipe(
    "csv",
    "label",
    (Categorical("user"), Categorical("item"), Categorical("words", separator="|")),
    (Numeric("price", standardise=True),),
)


def test_the_example_scores_raw_rows_as_those_of_the_store(
    job_memory: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("train.csv", TRAIN), ("valid.csv", VALID)):
        Path(name).write_text(text)
    prepare(RECIPE, SplitFiles({"train": [Path("train.csv")], "valid": [Path("valid.csv")]}), "store")
    log = ClickLog.open("store", "valid")
    sizes = {"rows": log.tables, "features": log.features}
    model, batch = OfStore(**sizes), log.take(np.arange(2))
    job_memory(model.tables)
    for table, n in log.tables.items():
        change_rows(model, table, np.arange(n))
    build = CODE.replace("make_model", "OfStore")
    gba_hvd.save_model(model, "model", build=build, arguments=sizes, input_example=batch, dense_names=log.dense_names)
    found: dict[str, Any] = {}
    exec(example(), found)
    assert np.array_equal(found["scores"], evaluated(model, batch).numpy()) and len(set(found["scores"])) == 2


def example() -> str:
    page = (DOCS / "SERVING.md").read_text()
    (text,) = re.findall(r"^## Raw values of a prepared dataset$.*?^```python\n(.*?)^```$", page, re.M | re.S)
    return str(text)
