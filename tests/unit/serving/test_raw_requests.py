"""Raw rows have the scores of the rows of the store that was prepared of them.

By the example of docs/SERVING.md, and by models that have the encoder of the store.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.data import Categorical, ClickLog, Hashed, Identity, Numeric, Recipe, RowEncoder, SplitFiles, prepare
from gba_hvd.serving.compare import verify_model
from gba_hvd.serving.http_server import _Scorer, app_of
from gba_hvd.serving.manifest import read_manifest
from gba_hvd.serving.score_file import score_file
from recovery.errors import Damaged
from recovery.storage.open import open_store
from tests.unit.serving.conftest import CODE, change_rows, evaluated
from tests.unit.serving.model_code import OfStore
from tests.unit.serving.test_export import checkpoint

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
    section = page.partition("\n## Raw values of a prepared dataset\n")[2].partition("\n## ")[0]
    (text,) = [one for one in re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S) if "RowEncoder" in one]
    return str(text)


STORE_OF_ALL = Recipe(
    "csv",
    "label",
    (
        Categorical("user"), Categorical("item", Hashed(50)), Categorical("age", Identity(5, offset=-2)),
        Categorical("words", separator="|"), Categorical.of_time("when", "hour", "iso"),
        Categorical.of_time("when", "weekday", "iso"), Categorical.of_time("day", "weekday", "%Y%m%d"),
        Categorical.of_time("at", "hour", "unix_ms"),
    ),
    (Numeric("price", standardise=True), Numeric("clicks", "none")),
)  # fmt: skip
ROWS_OF_ALL = """label,user,item,age,words,when,day,at,price,clicks
1,u7,i3,-2,red|large,2024-02-03T23:10:00,20240203,1709478000000,4.5,17
0,8,i1,2,,2024-02-06T01:00:00Z,20240206,1709485200000,,
0,u7,,0,red,2024-02-06T01:00:00Z,20240206,1709485200000,0.25,3
"""


@dataclass(frozen=True)
class Saved:
    """A model with the encoder of its data, whose folder is gone.

    raw: rows as the file had them. one, columns: the same, encoded
    """

    model: Any
    url: Path
    raw: pd.DataFrame
    one: gba_hvd.Batch
    columns: dict[str, Any]
    log_model: gba_hvd.LogModel

    @property
    def scores(self) -> np.ndarray:
        found: np.ndarray = evaluated(self.model, self.one).numpy()
        return found


@pytest.fixture
def saved(job_memory: Callable[..., None], tmp_path: Path) -> Saved:
    (tmp_path / "train.csv").write_text(ROWS_OF_ALL)
    store = tmp_path / "store"
    prepare(STORE_OF_ALL, SplitFiles({"train": [tmp_path / "train.csv"]}), store)
    log = ClickLog.open(store, "train")
    sizes = {"rows": log.tables, "features": log.features}
    model = OfStore(**sizes)
    job_memory(model.tables)
    for table, n in log.tables.items():
        change_rows(model, table, np.arange(n), seed=n)
    how: dict[str, Any] = {"build": CODE.replace("make_model", "OfStore"), "arguments": sizes, "encoder": store}
    how |= {"input_example": log.take(np.arange(2)), "dense_names": log.dense_names}
    found = gba_hvd.save_model(model, tmp_path / "m", **how)
    assert found.vocabulary_values == 4 and 0 < found.vocabulary_bytes < found.n_bytes
    raw = pd.read_csv(tmp_path / "train.csv", dtype=str, keep_default_na=False).drop(columns="label")
    columns = RowEncoder.open(store).columns(raw)
    log_model = gba_hvd.LogModel("ctr", **how)
    checkpoint(model, model.tables, tmp_path / "c")
    one = log.take(np.arange(3))
    shutil.rmtree(store)
    return Saved(model, tmp_path / "m", raw, one, columns, log_model)


def test_a_model_takes_raw_values_where_the_prepared_data_is_gone(saved: Saved) -> None:
    opened = gba_hvd.open_model(saved.url)
    assert np.array_equal(opened.predict(saved.raw)["score"], saved.scores) and len(set(saved.scores)) == 3
    assert np.array_equal(opened.predict(saved.raw.to_dict("list"), batch=2)["score"], saved.scores)
    assert np.array_equal(opened.predict(saved.columns, encoded=True)["score"], saved.scores)
    unknown, missing = saved.raw.assign(user="not in train"), saved.raw.assign(user="")
    expected = opened.predict(missing)["score"]
    assert np.array_equal(opened.predict(unknown)["score"], expected) and not np.array_equal(expected, saved.scores)
    with pytest.raises(BadInput, match="sample 1: price is 'cheap', expected a number or nothing"):
        opened.predict(saved.raw.assign(price=["", "cheap", ""]))
    with pytest.raises(BadInput, match="no column 'user'"):
        opened.predict(saved.raw.drop(columns="user"))
    with pytest.raises(BadInput, match="need one number of samples"):
        opened.predict({**saved.raw.to_dict("list"), "user": ["u7"]})


def test_the_example_of_a_request_is_raw_and_has_the_ids_of_the_input_example(saved: Saved) -> None:
    opened = gba_hvd.open_model(saved.url)
    assert opened.example is not None and opened.encoder is not None
    assert [opened.example[name][0] for name in ("user", "age", "words", "price", "clicks")] == [
        "u7", -2, "red|large", 4.5, 17.0,
    ]  # fmt: skip
    found = opened.encoder.encoded(opened.example)
    for name, ids in saved.columns.items():
        if name != "item":  # a hash does not say what it was made of
            assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(found[name], ids[:2], strict=True)), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["in.csv", "in.tsv.gz", "in.jsonl", "in.parquet"])
def test_files_of_raw_values_are_scored(saved: Saved, name: str) -> None:
    source, more = saved.url.parent / name, saved.raw.assign(request=[1, 2, 3])
    if "jsonl" in name:
        rows = [
            {**row, "age": int(row["age"]), "price": float(row["price"] or "nan")} for row in more.to_dict("records")
        ]
        lines = (json.dumps({k: None if v != v else v for k, v in row.items()}) for row in rows)
        source.write_text("".join(f"{line}\n" for line in lines))
    elif "parquet" in name:
        more.to_parquet(source)
    else:
        more.to_csv(source, index=False, sep="\t" if "tsv" in name else ",")
    out = saved.url.parent / "out.parquet"
    score_file(gba_hvd.open_model(saved.url), source, out, keep=["request", "user"], batch=2)
    found = pd.read_parquet(out)
    assert np.array_equal(found["score"], saved.scores)
    assert found["request"].tolist() == [1, 2, 3] and found["user"].tolist() == ["u7", "8", "u7"]


def test_a_bad_raw_value_of_a_file_is_named(saved: Saved) -> None:
    source = saved.url.parent / "in.jsonl"
    rows = saved.raw.assign(age=["-2", "2", "7"]).to_dict("records")
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadInput, match=r"in.jsonl, line 3: malformed: .* age is 7, expected an integer from -2 to 2"):
        score_file(gba_hvd.open_model(saved.url), source, saved.url.parent / "out.csv")


def test_columns_are_not_hashed_beside_an_encoder(saved: Saved) -> None:
    opened = gba_hvd.open_model(saved.url)
    with pytest.raises(BadInput, match="--hashed user: the encoder of the training data"):
        app_of(opened, ["user"])
    source = saved.url.parent / "in.csv"
    saved.raw.to_csv(source, index=False)
    with pytest.raises(BadInput, match="leave --hashed out, or give --encoded"):
        score_file(opened, source, saved.url.parent / "out.csv", hashed=["user"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_server_takes_raw_values_or_ids(saved: Saved) -> None:
    opened = gba_hvd.open_model(saved.url)
    assert np.array_equal(_Scorer(opened, [], False).predict(saved.raw)["score"], saved.scores)
    ids = pd.DataFrame({name: list(values) for name, values in saved.columns.items()})
    assert np.array_equal(_Scorer(opened, [], True).predict(ids)["score"], saved.scores)


def test_an_export_has_the_encoder_too(saved: Saved) -> None:
    how, url = saved.log_model, saved.url.parent / "exported"
    gba_hvd.export_model(
        saved.url.parent / "c", url, build=str(how.build), arguments=how.arguments, input_example=how.input_example,
        encoder=how.encoder,
    )  # fmt: skip
    assert np.array_equal(gba_hvd.open_model(url).predict(saved.raw)["score"], saved.scores)


def test_a_logged_model_says_that_it_takes_raw_values(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    saved.log_model.check(saved.model)
    folder = saved.url.parent / "logged"
    saved.log_model.write(saved.model, folder, 3, None)
    assert "encoder of its training data: 4 values of vocabularies" in capsys.readouterr().err
    facts = json.loads((folder / "log.json").read_text())
    assert facts["raw"] and facts["columns"]["user"] == ["u7", "8"]
    assert [one for one in facts["requirements"] if one.startswith("pyarrow==")]


def test_an_encoder_of_other_data_is_refused(saved: Saved) -> None:
    log_model = saved.log_model
    how: dict[str, Any] = {"build": log_model.build, "arguments": log_model.arguments, "encoder": log_model.encoder}
    with pytest.raises(BadInput, match="encoder needs input_example"):
        gba_hvd.save_model(saved.model, saved.url, **how)
    one = log_model.input_example
    other = gba_hvd.Batch({f"his_{name}": ids for name, ids in one.ids.items()}, one.dense, one.label)
    with pytest.raises(BadInput, match=r"encoder: its fields \(.*\) are not those of the model's input.*'his_"):
        dataclasses.replace(log_model, input_example=other, dense_names=()).check(saved.model)
    lists = {**one.ids, "words": torch.zeros(2, 3, dtype=torch.int64)}
    with pytest.raises(BadInput, match="takes lists of 'words' in a fixed length"):
        dataclasses.replace(log_model, input_example=gba_hvd.Batch(lists, one.dense, one.label)).check(saved.model)


def test_an_encoder_with_more_ids_than_the_model_has_rows_is_refused(
    saved: Saved, job_memory: Callable[..., None]
) -> None:
    assert saved.log_model.arguments is not None
    sizes = {**saved.log_model.arguments}
    sizes["rows"] = {**sizes["rows"], "user": 2}
    model = OfStore(**sizes)
    job_memory(model.tables)
    one = saved.log_model.input_example
    few = gba_hvd.Batch({**one.ids, "user": torch.ones(2, dtype=torch.int64)}, one.dense, one.label)
    how: dict[str, Any] = {"build": saved.log_model.build, "arguments": sizes, "input_example": few}
    with pytest.raises(BadInput, match="its table 'user' has 3 ids, and that of the model 2 rows"):
        gba_hvd.save_model(model, saved.url, encoder=saved.log_model.encoder, **how)


def test_a_vocabulary_that_is_damaged_is_named(saved: Saved) -> None:
    store = open_store(saved.url)
    manifest = read_manifest(store)
    assert manifest.encoder is not None and not verify_model(store, manifest)
    name = manifest.encoder.vocabularies["user"].name
    (saved.url / name).write_bytes((saved.url / name).read_bytes()[:-1])
    assert [name in flaw for flaw in verify_model(store, manifest)] == [True]
    opened = gba_hvd.open_model(saved.url)
    assert np.array_equal(opened.predict(saved.columns, encoded=True)["score"], saved.scores)
    with pytest.raises(Damaged, match=name):
        opened.predict(saved.raw)
