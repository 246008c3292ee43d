"""Raw rows have the scores of the rows of the store that was prepared of them.

By the example of docs/SERVING.md, and by models that have the encoder of the store.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from mlflow.exceptions import MlflowException

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.data import (
    Categorical,
    ClickLog,
    Hashed,
    Identity,
    Numeric,
    Recipe,
    RowEncoder,
    SplitFiles,
    json_lines,
    prepare,
)
from gba_hvd.data.encoding import VocabularyEncoder
from gba_hvd.reading.trained_scaling import scaling_of, to_state
from gba_hvd.reading.trained_vocabularies import digests_of, with_digests
from gba_hvd.serving.compare import verify_model
from gba_hvd.serving.http_server import _Scorer, app_of
from gba_hvd.serving.log_model import check_names
from gba_hvd.serving.log_saved import _source_of
from gba_hvd.serving.manifest import _document, from_json, read_manifest, version_name
from gba_hvd.serving.pyfunc_model import SavedModel
from gba_hvd.serving.save import described_vocabularies
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_bad_raw_value_of_a_file_is_named(saved: Saved) -> None:
    source = saved.url.parent / "in.jsonl"
    rows = saved.raw.assign(age=["-2", "2", "7"]).to_dict("records")
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadInput, match=r"in.jsonl, line 3: malformed: .* age is 7, expected an integer from -2 to 2"):
        score_file(gba_hvd.open_model(saved.url), source, saved.url.parent / "out.csv")


@pytest.mark.slow
def test_columns_are_not_hashed_beside_an_encoder(saved: Saved) -> None:
    opened = gba_hvd.open_model(saved.url)
    with pytest.raises(BadInput, match="--hashed user: the model has the encoder of the training data"):
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


@pytest.mark.slow
def test_an_export_has_the_encoder_too(saved: Saved) -> None:
    how, url = saved.log_model, saved.url.parent / "exported"
    gba_hvd.export_model(
        saved.url.parent / "c", url, build=str(how.build), arguments=how.arguments, input_example=how.input_example,
        encoder=how.encoder,
    )  # fmt: skip
    assert np.array_equal(gba_hvd.open_model(url).predict(saved.raw)["score"], saved.scores)


@pytest.mark.slow
def test_a_logged_model_says_that_it_takes_raw_values(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    saved.log_model.check(saved.model)
    assert isinstance(saved.log_model.encoder, RowEncoder)
    kept = saved.log_model.encoder._encoders.tables["user"]
    assert isinstance(kept, VocabularyEncoder) and "_index" not in vars(kept)
    folder = saved.url.parent / "logged"
    saved.log_model.write(saved.model, folder, 3, None)
    words = "has the encoder of .*/store: 4 values of vocabularies.*; that the model was trained with it is not checked"
    assert re.search(words, capsys.readouterr().err)
    digests = digests_of(saved.log_model.encoder)
    saved.model.tables.trained_vocabularies = with_digests({}, digests)  # as `batches` sets them
    saved.log_model.write(saved.model, saved.url.parent / "again", 3, None)
    assert "encoder of its training data: 4 values of vocabularies" in capsys.readouterr().err
    facts = json.loads((folder / "log.json").read_text())
    assert facts["raw"] and facts["columns"]["user"] == ["u7", "8"]
    assert [one for one in facts["requirements"] if one.startswith("pyarrow==")]


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_encoder_of_as_many_other_values_is_refused(saved: Saved, tmp_path: Path) -> None:
    encoder = saved.log_model.encoder
    how: dict[str, Any] = {name: getattr(saved.log_model, name) for name in ("build", "arguments", "input_example")}
    (tmp_path / "other.csv").write_text(ROWS_OF_ALL.replace("u7", "u9"))
    other = tmp_path / "other"
    prepare(STORE_OF_ALL, SplitFiles({"train": [tmp_path / "other.csv"]}), other)
    trained = {"vocabularies": digests_of(encoder)}
    states: dict[str, Any] = {"sync": {"position": trained}, "gba": {"snapshot": {"position": trained}}}
    states["gba"]["snapshot"]["model"] = dict(saved.model.state_dict())
    for name, state in states.items():
        checkpoint(saved.model, saved.model.tables, tmp_path / name, dense={}, **state)
        words = "encoder: table 'user': expected the vocabulary that was trained, 2 values .*other: its ids"
        with pytest.raises(BadInput, match=words):
            gba_hvd.export_model(tmp_path / name, tmp_path / "e", encoder=other, **how)
        found = gba_hvd.export_model(tmp_path / name, tmp_path / "e", encoder=encoder, **how)
        assert "has the encoder of its training data" in described_vocabularies(found)
    found = gba_hvd.export_model(tmp_path / "c", tmp_path / "e", encoder=other, **how)
    assert re.search("encoder of .*/other: .* trained with it is not checked", described_vocabularies(found))
    of_model = gba_hvd.open_model(tmp_path / "e").encoder
    found = gba_hvd.export_model(tmp_path / "c", tmp_path / "again", encoder=of_model, **how)
    assert re.search("encoder of the model at .*/e: [1-9].* is not checked", described_vocabularies(found))
    hashed = dataclasses.replace(found, vocabulary_values=0, vocabulary_bytes=0, encoder="store")
    assert described_vocabularies(hashed) == (
        "the model has the encoder of store, without vocabularies. Requests hold raw values"
    )
    saved.model.tables.trained_vocabularies = with_digests({}, digests_of(encoder))
    with pytest.raises(BadInput, match=words):
        gba_hvd.save_model(saved.model, saved.url, encoder=other, **how)


@pytest.mark.slow
def test_an_encoder_with_other_means_than_the_newest_that_were_trained_is_refused(saved: Saved, tmp_path: Path) -> None:
    how: dict[str, Any] = {name: getattr(saved.log_model, name) for name in ("build", "arguments", "input_example")}
    (tmp_path / "other.csv").write_text(ROWS_OF_ALL.replace("4.5", "45"))
    newest, other = saved.log_model.encoder, tmp_path / "other"
    assert isinstance(newest, RowEncoder)
    prepare(STORE_OF_ALL, SplitFiles({"train": [tmp_path / "other.csv"]}), other)
    trained = {"vocabularies": digests_of(newest), "scaling": to_state(scaling_of(newest))}
    checkpoint(saved.model, saved.model.tables, tmp_path / "job", dense={}, position=trained)
    words = r"encoder: column 'price': expected the scaling that was trained last, .*/other: .* leave it out"
    with pytest.raises(BadInput, match=words):
        gba_hvd.export_model(tmp_path / "job", tmp_path / "e", encoder=other, **how)
    gba_hvd.export_model(tmp_path / "job", tmp_path / "e", encoder=newest, **how)
    saved.model.tables.trained_scaling = scaling_of(newest)  # as `batches` sets it
    with pytest.raises(BadInput, match=words):
        gba_hvd.save_model(saved.model, saved.url, encoder=other, **how)
    gba_hvd.save_model(saved.model, saved.url, encoder=newest, **how)
    meant = RowEncoder.open(other)
    meant.dense_scaling = None
    gba_hvd.save_model(saved.model, saved.url, encoder=meant, **how)


def of_size(saved: Saved, job_memory: Callable[..., None], **rows: int) -> tuple[Any, dict[str, Any]]:
    """A model whose tables have other rows, and how to save it without an encoder."""
    assert saved.log_model.arguments is not None
    sizes = {**saved.log_model.arguments}
    sizes["rows"] = {**sizes["rows"], **rows}
    model = OfStore(**sizes)
    job_memory(model.tables)
    one = saved.log_model.input_example
    few = gba_hvd.Batch({**one.ids, "user": torch.ones(2, dtype=torch.int64)}, one.dense, one.label)
    return model, {"build": saved.log_model.build, "arguments": sizes, "input_example": few}


SIZES = [({"user": 2}, "'user' has 3 ids, .* 2 rows"), ({"user": 4}, "'user' has 3 ids, .* 4 rows"),
         ({"item": 51}, "'item' has 50 ids, .* 51 rows"), ({"age": 4}, "'age' has 5 ids, .* 4 rows")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "words"), SIZES)
def test_an_encoder_of_another_size_is_refused_where_it_is_saved(
    saved: Saved, job_memory: Callable[..., None], rows: dict[str, int], words: str
) -> None:
    model, how = of_size(saved, job_memory, **rows)
    encoder = saved.log_model.encoder
    with pytest.raises(BadInput, match=f"encoder: feature {words}"):
        gba_hvd.save_model(model, saved.url, encoder=encoder, **how)
    with pytest.raises(BadInput, match=f"encoder: feature {words}"):
        dataclasses.replace(saved.log_model, arguments=how["arguments"]).check(model)


@pytest.mark.slow
def test_an_encoder_of_another_size_is_refused_before_it_makes_ids(
    saved: Saved, job_memory: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, how = of_size(saved, job_memory, user=4)
    with monkeypatch.context() as patched:
        patched.setattr("gba_hvd.serving.stored_encoder.check_sizes", lambda encoder, tables: None)
        gba_hvd.save_model(model, saved.url, encoder=saved.log_model.encoder, **how)
    opened = gba_hvd.open_model(saved.url)
    for use in (lambda: opened.predict(saved.raw), lambda: app_of(opened)):
        with pytest.raises(BadInput, match="encoder: feature 'user' has 3 ids, and its table in the model 4 rows"):
            use()
    assert len(opened.predict(saved.columns, encoded=True)["score"]) == 3


@pytest.mark.slow
def test_a_table_may_have_more_rows_than_ids_of_the_input(saved: Saved, job_memory: Callable[..., None]) -> None:
    model, how = of_size(saved, job_memory, age=9)
    gba_hvd.save_model(model, saved.url, encoder=saved.log_model.encoder, **how)
    assert len(gba_hvd.open_model(saved.url).predict(saved.raw)["score"]) == 3


@pytest.mark.slow
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


@pytest.mark.slow
def test_only_a_model_with_an_encoder_is_in_a_format_that_earlier_versions_refuse(saved: Saved) -> None:
    how = saved.log_model
    gba_hvd.save_model(saved.model, saved.url, build=how.build, arguments=how.arguments)
    documents = [json.loads((saved.url / f"versions/00000{n}.json").read_bytes()) for n in (1, 2)]
    assert [one["format"] for one in documents] == [3, 1]
    assert gba_hvd.open_model(saved.url, version=1).encoder is not None
    with_encoder, without = (one["model"] for one in documents)
    assert from_json(_document(with_encoder, 1), "versions/000001.json").encoder is not None
    for model, kind in ((with_encoder, 2), (without, 3)):
        with pytest.raises(Damaged, match=f"format {kind} of another kind of model"):
            from_json(_document(model, kind), version_name(model["version"]))


def saved_of(job_memory: Callable[..., None], recipe: Recipe, path: Path, **how: Any) -> Any:
    """A model that was saved with the encoder of a file, open."""
    folder = path.parent
    prepare(recipe, SplitFiles({"train": [path]}), folder / "store")
    log = ClickLog.open(folder / "store", "train")
    model = OfStore(rows=log.tables, features=log.features)
    job_memory(model.tables)
    for table, n in log.tables.items():
        change_rows(model, table, np.arange(n))
    how = {
        "build": CODE.replace("make_model", "OfStore"), "arguments": {"rows": log.tables, "features": log.features},
        "input_example": log.take(np.arange(2)), "dense_names": log.dense_names, "encoder": folder / "store", **how,
    }  # fmt: skip
    gba_hvd.save_model(model, folder / "model", **how)
    return gba_hvd.open_model(folder / "model")


def written(path: Path, ids: list[str], between: str = ",") -> Path:
    """A file of these users, with labels and prices."""
    lines = [["label", "user", "price"], *([str(i % 2), one, f"{i}.5"] for i, one in enumerate(ids))]
    path.write_text("".join(between.join(line) + "\n" for line in lines))
    return path


def recipe_of(format: Any, **how: Any) -> Recipe:
    return Recipe(format, "label", (Categorical("user"),), (Numeric("price", standardise=True),), **how)


PADDED = ["005", "006", "007", "NA"]


@pytest.fixture
def padded(job_memory: Callable[..., None], tmp_path: Path) -> Any:
    """A model whose ids lose their meaning where a reader takes them for numbers, or for missing ones."""
    return saved_of(job_memory, recipe_of("csv"), written(tmp_path / "a.csv", PADDED))


@pytest.mark.parametrize("value", [7, np.int64(7), 7.0])
def test_a_number_is_refused_where_an_id_has_zeros_before_it(padded: Any, value: Any) -> None:
    for ids in ([value], pd.Series([value]), np.array([value]), pa.array([value]), pa.chunked_array([[value]])):
        with pytest.raises(BadInput, match=r"column 'user': .* is a number, .* is the text '007': give the text"):
            padded.predict({"user": ids, "price": [1]})


def test_a_number_is_scored_where_other_ids_have_zeros_before_them(padded: Any) -> None:
    found = padded.predict({"user": ["8", 8], "price": ["1", "1"]})["score"]
    assert found[0] == found[1]  # an id that the training data does not have


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_frame_that_mlflow_made_of_csv_is_refused_where_it_lost_ids(padded: Any, tmp_path: Path) -> None:
    served = SavedModel()
    served.load_context(SimpleNamespace(artifacts={"model": str(tmp_path / "model")}))  # type: ignore[arg-type]

    def scores(users: str, **how: Any) -> Any:
        lines = "".join(f"{user},1\n" for user in users.split())
        return served.predict(cast(Any, None), pd.read_csv(io.StringIO(f"user,price\n{lines}"), **how))["score"]

    with pytest.raises(MlflowException, match="column 'user': 7 is a number"):
        scores("007 006")
    with pytest.raises(MlflowException, match="nan is a missing value, or in CSV the text 'NA', which is an id"):
        scores("NA u7")
    expected = padded.predict({"user": ["007", "NA"], "price": [1, 1]})["score"]
    assert np.array_equal(scores("007 NA", dtype={"user": str}, keep_default_na=False), expected)


def posted(app: Any, body: str | bytes, kind: str = "text/csv") -> tuple[int, str]:
    """Status and text of the answer to a request."""
    answers: list[Any] = []
    data = body.encode() if isinstance(body, str) else body

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Any) -> None:
        answers.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": "/invocations",
        "raw_path": b"/invocations", "root_path": "", "scheme": "http", "query_string": b"",
        "headers": [(b"content-type", kind.encode())], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return answers[0]["status"], b"".join(one.get("body", b"") for one in answers).decode()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_csv_request_has_ids_as_they_are_written(padded: Any) -> None:
    app = app_of(padded)
    status, text = posted(app, "user,price\n007,2.5\nNA,3.5\n", "text/csv; charset=utf-8")
    found = [one["score"] for one in json.loads(text)["predictions"]]
    expected = padded.predict({"user": ["007", "NA", "?"], "price": ["2.5", "3.5", "2.5"]})["score"]
    assert status == 200 and len(set(expected)) == 3 and np.array_equal(np.float32(found), expected[:2])
    assert posted(app, "usr,price\n007,2.5\n")[0] == 400
    assert posted(app, "user,price\n007,2.5,9\n")[0] == 400
    assert posted(app, "user,user,price\n007,1,2.5\n") == (
        400, "the request: column 'user' is there 2 times: rename one",
    )  # fmt: skip


LARGE = 2**53 + 1  # is another number as a float


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_null_in_a_request_leaves_the_other_ids_as_they_are(
    job_memory: Callable[..., None], tmp_path: Path, format: str
) -> None:
    users = [LARGE, LARGE - 1, 3]
    source = tmp_path / f"a.{format}"
    frame = pd.DataFrame({"label": [1.0, 0.0, 1.0], "user": users, "price": [0.5, 1.5, 2.5]})
    frame.to_parquet(source) if format == "parquet" else frame.to_json(source, orient="records", lines=True)
    app = app_of(model := saved_of(job_memory, recipe_of(format), source))
    given = {"user": [LARGE, None], "price": [1, None]}
    rows = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
    expected = model.predict({name: pa.array(values) for name, values in given.items()})["score"]
    bodies = [
        {"dataframe_records": rows},
        {"dataframe_records": [rows[0], {}]},
        {"dataframe_split": {"columns": ["price", "user"], "data": [[1, LARGE], [None]]}},
        {"dataframe_split": {"columns": ["user", "price"], "index": [4, 4], "data": [[LARGE, 1], [None, None]]}},
    ]
    pq.write_table(pa.table(given), tmp_path / "in.parquet")
    asked = [(json.dumps(body), "application/json") for body in bodies]
    for data, kind in [*asked, ((tmp_path / "in.parquet").read_bytes(), "application/vnd.apache.parquet")]:
        status, text = posted(app, data, kind)
        assert status == 200, text
        found = [one["score"] for one in json.loads(text)["predictions"]]
        assert np.array_equal(np.float32(found), expected) and len(set(found)) == 2


@pytest.mark.slow
def test_a_server_of_ids_reads_no_vocabulary(saved: Saved) -> None:
    for vocabulary in (saved.url / "files").glob("*.arrow"):
        vocabulary.unlink()
    with pytest.raises(Damaged):
        _Scorer(gba_hvd.open_model(saved.url), [], False)
    _Scorer(gba_hvd.open_model(saved.url), [], True)


def scored(model: Any, source: Path, **how: Any) -> pd.DataFrame:
    out = source.with_name("out.parquet")
    score_file(model, source, out, **how)
    return pd.read_parquet(out)


def test_a_tsv_file_is_written_as_the_input_was(job_memory: Callable[..., None], tmp_path: Path) -> None:
    source = written(tmp_path / "a.tsv", ['"u 5"', '"u 6"'], "\t")
    model = saved_of(job_memory, recipe_of("csv", delimiter="\t"), source)
    expected = model.predict({"user": ["u 5", "u 6"], "price": ["0.5", "1.5"]})["score"]
    assert np.array_equal(scored(model, source)["score"], expected) and len(set(expected)) == 2


def test_a_delimiter_of_several_characters_is_refused(job_memory: Callable[..., None], tmp_path: Path) -> None:
    source = written(tmp_path / "a.csv", PADDED, "::")
    model = saved_of(job_memory, recipe_of("csv", delimiter="::"), source)
    with pytest.raises(BadInput, match="has '::' between columns, and here a delimiter is one character"):
        scored(model, source)


def test_a_column_that_a_file_has_twice_is_refused(padded: Any, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("user,user,price\n007,006,2.5\n")
    with pytest.raises(BadInput, match=r"in\.csv: column 'user' is there 2 times"):
        scored(padded, source)


def lines(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"user": "007", "price": 2.5, **row}) + "\n" for row in rows))
    return path


@pytest.fixture
def of_ids(job_memory: Callable[..., None], tmp_path: Path) -> Any:
    """A model without an encoder."""
    return saved_of(job_memory, recipe_of("csv"), written(tmp_path / "a.csv", PADDED), encoder=None)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('"user": true', "field 'user': expected int64, got bool"),
        ('"user": NaN', "field 'user': expected int64, got float64"),
        ('"price": Infinity', "field 'price': expected finite numbers, got inf"),
        ('"price": 1e999', "field 'price': expected finite numbers, got inf"),
        ('"price": NaN', "field 'price': NaN, and the example that the model was saved with has none"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_value_of_json_that_is_no_number_is_refused_in_files_and_requests(
    of_ids: Any, tmp_path: Path, value: str, words: str
) -> None:
    good, bad = '{"user": 1, "price": 2.5}', f'{{"user": 1, "price": 2.5, {value}}}'
    (tmp_path / "in.jsonl").write_text(f"{good}\n{bad}\n{good}\n")
    with pytest.raises(BadInput, match=f"in.jsonl, line 2: {words}"):
        scored(of_ids, tmp_path / "in.jsonl")
    app, body = app_of(of_ids), f'{{"dataframe_records": [{good}, {bad}]}}'
    status, text = posted(app, body, "application/json")
    assert status == 400 and words in text
    assert posted(app, body.replace(bad, good), "application/json")[0] == 200


def test_columns_of_json_lines_are_copied_as_they_are(padded: Any, tmp_path: Path) -> None:
    source = lines(tmp_path, {"k": 1}, {"k": None}, {"k": 3.0})
    found = scored(padded, source, keep=["k", "price"], batch=1)
    assert found["k"].dropna().tolist() == [1, 3] and found["price"].tolist() == [2.5] * 3


def test_a_line_of_raw_values_is_parsed_once(padded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, objects = [], json_lines.objects

    def counted(data: bytes, **how: Any) -> Any:
        parsed.append(data.count(b"\n"))
        return objects(data, **how)

    monkeypatch.setattr(json_lines, "objects", counted)
    found = scored(padded, lines(tmp_path, {"k": [1, 2.5]}, {"k": ["a"][:0]}), keep=["k", "price"])
    assert parsed == [2] and found["price"].tolist() == [2.5, 2.5] and found["k"][0].tolist() == [1, 2.5]


def test_a_number_that_python_does_not_read_is_no_column_to_copy(padded: Any, tmp_path: Path) -> None:
    source = lines(tmp_path, {"k": 7})
    source.write_text(source.read_text().replace('"k": 7', f'"k": {"7" * 5000}'))
    assert len(scored(padded, source)) == 1
    with pytest.raises(BadInput, match="column 'k' cannot be copied: Exceeds the limit"):
        scored(padded, source, keep=["k"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, 2.9], "truncated"),
        ([1, True], "column 'k' has bool, and int64 in the lines before"),
        ([10**30], "column 'k' cannot be copied"),
    ],
)
def test_what_cannot_be_copied_is_named(padded: Any, tmp_path: Path, values: list[Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        scored(padded, lines(tmp_path, *({"k": one} for one in values)), keep=["k"], batch=1)


def test_lists_and_scores_are_no_columns_to_copy(padded: Any, tmp_path: Path) -> None:
    source = lines(tmp_path, {"k": [1, 2], "score": 1})
    with pytest.raises(BadInput, match="column 'k' has lists, which a CSV file does not hold: write Parquet"):
        score_file(padded, source, tmp_path / "out.csv", keep=["k"])
    with pytest.raises(BadInput, match="--keep score: the scores have this name"):
        scored(padded, source, keep=["score"])
    assert scored(padded, source, keep=["k"])["k"].tolist()[0].tolist() == [1, 2]


def test_a_misspelt_column_is_named_for_json_lines_too(job_memory: Callable[..., None], tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"label": i % 2, "user": i, "price": i}) + "\n" for i in range(4)))
    model = saved_of(job_memory, recipe_of("jsonl"), source)
    with pytest.raises(BadInput, match="no column 'user'; nearest: usr"):
        model.predict({"usr": [1], "price": [1]})


def test_an_example_that_the_encoder_does_not_have_is_refused(tmp_path: Path) -> None:
    small = tmp_path / "small"
    prepare(recipe_of("csv"), SplitFiles({"train": [written(tmp_path / "small.csv", PADDED[:1])]}), small)
    with pytest.raises(BadInput, match="its table 'user' has 2 ids, and the example has id 3"):
        RowEncoder.open(small).decoded({"user": [3]}, 1)
    with pytest.raises(BadInput, match="'price' is column 0 of dense, and the example has 0 columns there"):
        RowEncoder.open(small).decoded({"user": [1], "dense": np.zeros((1, 0))}, 1)


def test_the_step_of_a_model_is_that_of_its_source(job_memory: Callable[..., None], tmp_path: Path) -> None:
    source = written(tmp_path / "a.csv", PADDED)
    model = saved_of(job_memory, recipe_of("csv"), source, source={"step": 120})
    assert _source_of(model.manifest)[0] == 120


@pytest.mark.parametrize("name", ["a/b", "a:b"])
def test_a_registered_name_that_mlflow_refuses_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="MLflow takes names without / and :"):
        check_names("model log", "ctr", name, None)
