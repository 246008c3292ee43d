"""A model that was saved with hashed columns takes their strings, wherever it is asked."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from mlflow.exceptions import MlflowException

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.data.hashing import hash_strings
from gba_hvd.serving.http_server import app_of
from gba_hvd.serving.log_model import write_facts
from gba_hvd.serving.manifest import read_manifest
from gba_hvd.serving.pyfunc_model import SavedModel
from gba_hvd.serving.score_file import score_file
from recovery.storage.open import open_store
from tests.unit.serving import model_code
from tests.unit.serving.conftest import CODE, batch, change_rows, evaluated

BUILD = f"{Path(model_code.__file__)}:OfStrings"
USERS = [f"u{i}" for i in range(6)]
HISTORY = [["u1", "u2"], [], ["u3"], ["u0"], ["u5", "u5"], ["none"]]
RAW = {"user": USERS, "history": HISTORY, "dense_0": [0.0] * 6}


def hashes(texts: list[str]) -> torch.Tensor:
    return torch.from_numpy(hash_strings(pa.array(texts, pa.string())).view(np.int64))


def encoded() -> gba_hvd.Batch:
    lengths = np.array([len(one) for one in HISTORY])
    history = gba_hvd.Bag(hashes([*chain(*HISTORY)]), torch.from_numpy(np.cumsum(lengths) - lengths))
    return gba_hvd.Batch({"user": hashes(USERS), "history": history}, torch.zeros(6, 1), torch.zeros(6))


@pytest.fixture
def model(job_memory: Callable[[gba_hvd.EmbeddingTables], None]) -> model_code.OfStrings:
    made = model_code.OfStrings()
    job_memory(made.tables)
    change_rows(made, "user", hashes(USERS).numpy())
    return made


@pytest.fixture
def url(model: model_code.OfStrings, tmp_path: Path) -> Path:
    gba_hvd.save_model(model, tmp_path / "m", build=BUILD, input_example=encoded(), hashed=["user", "history"])
    return tmp_path / "m"


def test_predict_hashes_the_strings(model: model_code.OfStrings, url: Path) -> None:
    opened, expected = gba_hvd.open_model(url), evaluated(model, encoded()).numpy()
    assert len(set(expected)) == 6
    assert np.array_equal(opened.predict(RAW)["score"], expected)
    assert np.array_equal(opened.predict(pd.DataFrame(RAW), batch=4)["score"], expected)
    made = {"user": encoded().ids["user"].numpy(), "history": [hashes(one).numpy() for one in HISTORY]}
    assert np.array_equal(opened.predict({**made, "dense_0": np.zeros(6)}, encoded=True)["score"], expected)
    with pytest.raises(BadInput, match=r"hashed column 'user' holds int64, not strings: give the text .*encoded=True"):
        opened.predict({**RAW, "user": made["user"]})


@pytest.mark.parametrize("value", ["u7", 7, None])
def test_a_single_value_is_no_column(url: Path, value: Any) -> None:
    with pytest.raises(BadInput, match=f"hashed column 'user': expected a column .*, got the single value {value!r}"):
        gba_hvd.open_model(url).predict({**RAW, "user": value})


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("user", [2**63] * 6, f"or lists of strings: sample 0 has {2**63}: give the text .*encoded=True"),
        ("user", [1, 2, 3, 4, 5, 2**64], "or lists of strings: sample 0 has 1: give the text"),
        ("user", ["a", "b", 2**63, "c", "d", "e"], f"or lists of strings: sample 2 has {2**63}: give the text"),
        ("user", ["a", "b", 0.5, "c", "d", "e"], r"or lists of strings: sample 2 has 0\.5$"),
        ("user", ["a", None, "b", "c", "d", None], "2 of 6 values are missing: of sample 1 expected a string, got"),
        ("history", [["a"], ["b", 2**63], [], [], [], []], f"or lists of strings: sample 1 has {2**63}: give the"),
        ("history", [["a"], None, ["b", None], [], [], []], "1 of 3 values are missing: of sample 2 expected a list"),
    ],
)
def test_a_value_that_is_no_string_is_named_with_its_sample(url: Path, column: str, values: Any, words: str) -> None:
    with pytest.raises(BadInput, match=f"^hashed column {column!r}: .*{words}"):
        gba_hvd.open_model(url).predict({**RAW, column: values})


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ("user", "line 3: hashed column 'user': 1 of 1 values are missing: of sample 0 expected a string, got null"),
        ("dense_0", "line 3: field 'dense_0': NaN, and .*: sample 0: expected a number, got NaN or nothing"),
    ],
)
def test_a_line_that_lacks_a_column_is_named_with_it(url: Path, tmp_path: Path, lacks: str, words: str) -> None:
    lines = [{name: values[i] for name, values in RAW.items()} for i in range(6)]
    del lines[2][lacks]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    with pytest.raises(BadInput, match=words):
        score_file(gba_hvd.open_model(url), tmp_path / "in.jsonl", tmp_path / "out.csv")


def test_the_example_of_a_request_has_strings(url: Path) -> None:
    opened = gba_hvd.open_model(url)
    assert opened.example is not None
    assert all(isinstance(one, str) for one in (*opened.example["user"], *chain(*opened.example["history"])))
    assert len(opened.predict(opened.example)["score"]) == 6
    document = json.loads((url / "versions" / "000001.json").read_bytes())
    assert document["format"] == 4 and document["model"]["hashed"] == ["user", "history"]


def test_files_and_requests_hold_strings(model: model_code.OfStrings, url: Path, tmp_path: Path) -> None:
    opened, expected = gba_hvd.open_model(url), evaluated(model, encoded()).numpy()
    (tmp_path / "in.jsonl").write_text(pd.DataFrame(RAW).to_json(orient="records", lines=True))
    score_file(opened, tmp_path / "in.jsonl", tmp_path / "out.parquet", batch=4)
    assert np.array_equal(pd.read_parquet(tmp_path / "out.parquet")["score"], expected)
    pd.DataFrame(RAW).to_parquet(tmp_path / "in.parquet")
    score_file(opened, tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert np.array_equal(pd.read_parquet(tmp_path / "out.parquet")["score"], expected)
    pd.DataFrame({**RAW, "user": range(6)}).to_parquet(tmp_path / "ids.parquet")
    with pytest.raises(BadInput, match="hashed column 'user' holds int64, not strings: give the text"):
        score_file(opened, tmp_path / "ids.parquet", tmp_path / "out.csv")
    words = "--hashed user: the model was saved with the hashed columns user, history, and makes the ids"
    for ask in (
        lambda: score_file(opened, tmp_path / "in.jsonl", tmp_path / "out.csv", hashed=["user"]),
        lambda: app_of(opened, ["user"]),
    ):
        with pytest.raises(BadInput, match=words):
            ask()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_is_given_strings(model: model_code.OfStrings, url: Path, tmp_path: Path) -> None:
    served = SavedModel()
    served.load_context(SimpleNamespace(artifacts={"model": str(url)}))  # type: ignore[arg-type]
    found = served.predict(cast(Any, None), pd.DataFrame(RAW))["score"]
    assert np.array_equal(found, evaluated(model, encoded()).numpy())
    frame = pd.read_csv(io.StringIO("user,dense_0\n007,0\n")).assign(history=[["u1"]])
    with pytest.raises(MlflowException, match="hashed column 'user' holds int64, not strings"):
        served.predict(cast(Any, None), frame)
    (tmp_path / "logged").mkdir()
    url.rename(tmp_path / "logged" / "model")
    write_facts(tmp_path / "logged", name="m", registered_model_name=None, alias=None, step=1, tags={}, requirements=())
    facts = json.loads((tmp_path / "logged" / "log.json").read_text())
    assert facts["raw"] and any(one.startswith("pyarrow==") for one in facts["requirements"])
    assert all(isinstance(one, str) for one in facts["columns"]["user"])


@pytest.mark.parametrize(
    ("hashed", "how", "words"),
    [
        (["usr"], {}, "hashed column 'usr' is no field of ids of the model: these are user, item, history"),
        ("user", {}, r"hashed must be a list of columns, such as \['user', 'item'\], got 'user'"),
        (["user"], {}, r"hashed column 'user': its table 'user' is not hashed \(keys='hash64'\)"),
        (["user"], {"input_example": None}, "hashed needs input_example"),
        (["item"], {"input_example": batch(4), "width": 32}, "a hash has 64 bits, and the model takes int32"),
    ],
)
def test_columns_that_are_no_ids_of_hashed_tables_are_refused(
    trained: Callable[..., Any], tmp_path: Path, hashed: Any, how: dict[str, Any], words: str
) -> None:
    given: dict[str, Any] = {"input_example": batch(4), "build": CODE, "hashed": hashed}
    if how.pop("width", 64) == 32:
        one = how["input_example"]
        how["input_example"] = gba_hvd.Batch({**one.ids, "item": one.ids["item"].int()}, one.dense, one.label)
    with pytest.raises(BadInput, match=words):
        gba_hvd.save_model(trained(), tmp_path / "m", **{**given, **how})
    assert not (tmp_path / "m").exists()


def test_a_string_in_another_column_is_refused_by_what_helps(model: model_code.OfStrings, tmp_path: Path) -> None:
    gba_hvd.save_model(model, tmp_path / "m", build=BUILD, input_example=encoded(), hashed=["user"])
    opened = gba_hvd.open_model(tmp_path / "m")
    pd.DataFrame(RAW).to_parquet(tmp_path / "in.parquet")
    (tmp_path / "in.jsonl").write_text(pd.DataFrame(RAW).to_json(orient="records", lines=True))
    words = "field 'history': expected numbers, got .*The model was saved with the hashed columns user: where this one"
    for ask in (
        lambda: opened.predict(RAW),
        lambda: score_file(opened, tmp_path / "in.parquet", tmp_path / "out.csv"),
        lambda: score_file(opened, tmp_path / "in.jsonl", tmp_path / "out.csv"),
    ):
        with pytest.raises(BadInput, match=words):
            ask()


class OfAnArgument(torch.nn.Module):
    """Its argument has another name than its feature."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = gba_hvd.EmbeddingTables({"user": (50, 4)}, gba_hvd.SGD(lr=0.1))

    def forward(self, user_id: torch.Tensor) -> torch.Tensor:
        return self.tables({"user": user_id})["user"].sum(1)


def test_a_field_whose_table_is_found_by_a_forward_pass_is_checked_by_one(job_memory: Any, tmp_path: Path) -> None:
    made = OfAnArgument()
    job_memory(made.tables)
    with pytest.raises(BadInput, match=r"The hashed columns \(user_id\) have to be ids of hashed tables"):
        gba_hvd.save_model(
            made, tmp_path / "m", build=f"{Path(__file__)}:OfAnArgument", input_example=torch.arange(3),
            hashed=["user_id"],
        )  # fmt: skip
    assert not (tmp_path / "m").exists()


def test_a_logged_model_is_checked_before_the_training(model: model_code.OfStrings) -> None:
    log = gba_hvd.LogModel(name="m", input_example=encoded(), build=BUILD, hashed=["usr"])
    with pytest.raises(BadInput, match="hashed column 'usr' is no field of ids"):
        log.check(model)
    gba_hvd.LogModel(name="m", input_example=encoded(), build=BUILD, hashed=["user"]).check(model)


@pytest.mark.parametrize("text", ["", "u7", "12345678", "123456789", "a longer text, of ümläuts and of 3 words"])
def test_the_hash_is_as_the_format_has_it(text: str) -> None:
    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    data, g = text.encode(), 0x9E3779B97F4A7C15
    first, *more = [int.from_bytes(data[at : at + 8], "little") for at in range(0, max(len(data), 1), 8)]
    h = mix(mix((len(data) * g + mix(g)) % 2**64) ^ first)
    for word in more:
        h = mix((h + g) % 2**64 ^ word)
    assert hashes([text]).numpy().view(np.uint64)[0] == h


def test_the_version_says_what_it_hashes(url: Path) -> None:
    assert read_manifest(open_store(url)).hashed == ("user", "history")
