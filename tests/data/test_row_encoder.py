"""Rows that are encoded for a request are those that `prepare` wrote."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gba_hvd.batch import Bag, Batch
from gba_hvd.data import (
    Categorical,
    ClickLog,
    Hashed,
    Identity,
    Numeric,
    Recipe,
    RowEncoder,
    SplitShares,
    Vocabulary,
    prepare,
)
from gba_hvd.data.presets import CRITEO_COLUMNS, criteo
from gba_hvd.errors import BadInput

Write = Callable[[str, str | bytes], Path]
N = 300


def same(a: Batch, b: Batch) -> bool:
    assert list(a.ids) == list(b.ids)
    return torch.equal(a.dense, b.dense) and all(same_ids(a.ids[name], b.ids[name]) for name in a.ids)


def same_ids(a: Any, b: Any) -> bool:
    if isinstance(a, Bag):
        return torch.equal(a.values, b.values) and torch.equal(a.offsets, b.offsets)
    return a.dtype == b.dtype and torch.equal(a, b)


def recipe_of(format: Any) -> Recipe:
    tags = {"is_list": True} if format in ("parquet", "jsonl") else {"separator": "|"}
    return Recipe(
        format,
        "label",
        (
            Categorical("user", Vocabulary(2)),
            Categorical("tags", table="item", **tags),
            Categorical("item", table="item"),
            Categorical("city", Hashed(50)),
            Categorical("shelf", Identity(9, offset=10)),
            Categorical.of_time("at", "hour", "unix"),
            Categorical.of_time("at", "weekday", "unix"),
        ),
        (Numeric("price"), Numeric("age", "none", standardise=True)),
    )


def raw_rows() -> list[dict[str, Any]]:
    """Values that are missing, rare, in lists, and below 0."""
    rng = np.random.default_rng(4)
    names = [f"i{i}" for i in range(12)] + [""]
    return [
        {
            "label": int(rng.integers(2)),
            "user": int(rng.integers(120)),
            "tags": [names[i] for i in rng.integers(0, 13, rng.integers(0, 4))],
            "item": names[int(rng.integers(13))] or None,
            "city": [None, "Köln", "Bonn", " Ulm"][int(rng.integers(4))],
            "shelf": int(rng.integers(10, 19)),
            "at": int(1_400_000_000 + rng.integers(10**6)),
            "price": None if rng.random() < 0.1 else float(rng.normal(3, 4)),
            "age": None if rng.random() < 0.1 else int(rng.integers(90)),
        }
        for _ in range(N)
    ]


def written(folder: Path, format: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows.{format}"
    if format == "parquet":
        pd.DataFrame(rows).astype({"age": "Int64"}).to_parquet(path)
    elif format == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(
                file, list(rows[0]), delimiter="\t" if format == "tsv" else ",", lineterminator="\n"
            )
            writer.writeheader()
            writer.writerows({**row, "tags": "|".join(row["tags"])} for row in rows)
    return path


def in_file(path: Path, format: str) -> Any:
    """The rows as a program would read them from the file."""
    if format == "parquet":
        return pq.read_table(path).to_pylist()
    if format == "jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if format == "tsv" else ","))


@pytest.mark.parametrize("format", ["csv", "tsv", "jsonl", "parquet"])
def test_the_rows_of_a_file_are_encoded_as_they_were_prepared(tmp_path: Path, format: str) -> None:
    path = written(tmp_path, format, raw_rows())
    shares = SplitShares([path], {"train": 0.8, "valid": 0.2}, by="order")
    manifest = prepare(recipe_of(format), shares, tmp_path / "out")
    assert manifest["input"]["bad_rows"]["count"] == 0
    encoder, rows = RowEncoder.open(tmp_path / "out"), in_file(path, format)
    for split, part in (("train", rows[:240]), ("valid", rows[240:])):
        log = ClickLog.open(tmp_path / "out", split)
        stored = log.take(np.arange(len(log)))
        assert same(encoder.batch(part), stored)
        assert same(encoder.batch(part[7]), log.take(np.array([7])))
        frame = pd.DataFrame(part).drop(columns=["label"])
        assert same(encoder.batch(frame), stored)
    assert (encoder.tables, encoder.features) == (log.tables, log.features)
    assert encoder.dense_names == log.dense_names == ("price", "age")
    columns = encoder.columns(part)
    assert np.array_equal(columns["user"], stored.ids["user"].numpy()) and 0 in columns["user"]
    assert np.concatenate(columns["tags"]).tolist() == stored.ids["tags"].values.tolist()
    assert [len(one) for one in columns["tags"]] == np.diff(
        [*stored.ids["tags"].offsets, len(stored.ids["tags"].values)]
    ).tolist()
    assert np.array_equal(columns["dense"], stored.dense.numpy())


def test_criteo_is_encoded_as_it_was_prepared(real_data: Path, tmp_path: Path) -> None:
    path = real_data / "criteo_terabyte_1000" / "day0_head1000.tsv.gz"
    prepare(criteo(Hashed(1000)), SplitShares([path], {"train": 0.9, "test": 0.1}, by="order"), tmp_path / "out")
    frame = pd.read_csv(path, sep="\t", names=CRITEO_COLUMNS, dtype=str, keep_default_na=False)
    log = ClickLog.open(tmp_path / "out", "test")
    assert same(RowEncoder.open(tmp_path / "out").batch(frame[900:]), log.take(np.arange(100)))


@pytest.fixture(params=["csv", "jsonl", "parquet"])
def encoder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RowEncoder, str]:
    path = written(tmp_path, request.param, raw_rows())
    prepare(recipe_of(request.param), SplitShares([path], {"train": 0.8, "valid": 0.2}), tmp_path / "out")
    return RowEncoder.open(tmp_path / "out"), request.param


def one_row(format: str) -> dict[str, Any]:
    tags = ["i1"] if format != "csv" else "i1"
    return {
        "user": 5,
        "tags": tags,
        "item": "i1",
        "city": "Bonn",
        "shelf": 10,
        "at": 1_400_000_000,
        "price": 2,
        "age": 3,
    }


def test_a_whole_number_is_the_text_that_the_file_has(encoder: tuple[RowEncoder, str]) -> None:
    its, format = encoder
    row = one_row(format)
    text = {name: value if name == "tags" else str(value) for name, value in row.items()}
    assert same(its.batch(row), its.batch(text))
    known = its.batch([{**row, "user": user} for user in range(120)]).ids["user"]
    assert isinstance(known, torch.Tensor) and len(set(known.tolist())) == its.tables["user"]


def test_what_is_not_in_the_train_split_is_id_0(encoder: tuple[RowEncoder, str]) -> None:
    its, format = encoder
    unknown = {**one_row(format), "user": "nobody", "item": None, "city": None}
    found = its.columns([unknown])
    assert [found[name].tolist() for name in ("user", "item", "city")] == [[0], [0], [0]]


def test_rows_of_no_samples(encoder: tuple[RowEncoder, str]) -> None:
    assert len(encoder[0].batch([])) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"price": "abc"}, "1 of 2 rows are malformed.* sample 1: price is 'abc', expected a number or nothing"),
        ({"shelf": 5}, "sample 1: shelf is 5, expected an integer from 10 to 18"),
        ({"at": None}, r"sample 1: at is None, expected a time \(unix\)"),
    ],
)
def test_a_row_that_prepare_leaves_out_is_refused(encoder: tuple[RowEncoder, str], change: Any, words: str) -> None:
    its, format = encoder
    rows = [{name: str(one) if name in change else one for name, one in one_row(format).items()} for _ in range(2)]
    value = {name: one if one is None else str(one) for name, one in change.items()}
    with pytest.raises(BadInput, match=words):
        its.columns([rows[0], rows[1] | value])


def test_lists_are_where_the_input_has_them(encoder: tuple[RowEncoder, str]) -> None:
    its, format = encoder
    with pytest.raises(BadInput, match="column 'item': expected one value in each row, not a list"):
        its.columns({**one_row(format), "item": ["i1"]})
    words = "text with '|' between the values" if format == "csv" else "a list of values in each row"
    with pytest.raises(BadInput, match=re.escape(f"column 'tags': expected {words}")):
        its.columns({**one_row(format), "tags": ["i1"] if format == "csv" else "i1"})


def test_a_column_that_is_not_there_is_named(encoder: tuple[RowEncoder, str]) -> None:
    its, format = encoder
    row = one_row(format)
    del row["city"]
    with pytest.raises(BadInput, match="the data frame: no column 'city'"):
        its.columns(pd.DataFrame([row]))
    if format == "jsonl":
        assert its.columns([row])["city"].tolist() == [0]
    else:
        with pytest.raises(BadInput, match=r"sample 1 .None is a missing value.: no column 'city'"):
            its.columns([one_row(format), row])


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["text", [1, 2], 7, None])
def test_what_are_no_rows(encoder: tuple[RowEncoder, str], rows: Any) -> None:
    with pytest.raises(BadInput, match="expected rows: a list of mappings, one mapping or a pandas DataFrame, got "):
        encoder[0].columns(rows)


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_a_number_whose_text_is_not_known_is_refused(tmp_path: Path, format: str) -> None:
    path = written(tmp_path, format, raw_rows())
    prepare(recipe_of(format), SplitShares([path], {"train": 0.8, "valid": 0.2}), tmp_path / "out")
    with pytest.raises(
        BadInput, match=r"column 'user': 7\.0 is a float, and how it was written in the input is not known"
    ):
        RowEncoder.open(tmp_path / "out").columns({**one_row(format), "user": 7.0})


def test_half_a_surrogate_pair_is_no_text(encoder: tuple[RowEncoder, str]) -> None:
    with pytest.raises(BadInput, match="not UTF-8"):
        encoder[0].columns({**one_row(encoder[1]), "city": "\ud800"})


def test_a_damaged_vocabulary_is_named(encoder: tuple[RowEncoder, str], tmp_path: Path) -> None:
    path = tmp_path / "out" / "vocabulary" / "user.arrow"
    whole = path.read_bytes()
    (tmp_path / "out" / "vocabulary" / "item.arrow").rename(path)
    with pytest.raises(BadInput, match=r"user\.arrow: 12 values, expected \d+: damaged"):
        RowEncoder.open(tmp_path / "out")
    path.write_bytes(whole[:100])
    with pytest.raises(BadInput, match=r"user\.arrow: missing or damaged"):
        RowEncoder.open(tmp_path / "out")
    path.unlink()
    with pytest.raises(BadInput, match=r"user\.arrow: missing or damaged"):
        RowEncoder.open(tmp_path / "out")
    os.mkfifo(path)
    with pytest.raises(BadInput, match=r"user\.arrow: it is no regular file"):
        RowEncoder.open(tmp_path / "out")


def test_only_the_manifest_and_the_vocabularies_are_read(encoder: tuple[RowEncoder, str], tmp_path: Path) -> None:
    row = one_row(encoder[1])
    for path in [*(tmp_path / "out").glob("*/*.arrow")]:
        if path.parent.name != "vocabulary":
            path.unlink()
    assert same(RowEncoder.open(tmp_path / "out").batch(row), encoder[0].batch(row))


@pytest.mark.parametrize("format", ["csv", "tsv", "jsonl", "parquet"])
def test_a_recipe_comes_back_from_its_json(format: str) -> None:
    recipe = recipe_of(format)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))).to_json() == recipe.to_json()
    more = Recipe("csv", ("a", "b"), (Categorical("x"),), label_from=3.0, ratings=("b",), ignored=("c",), delimiter=";")
    assert Recipe.from_json(json.loads(json.dumps(more.to_json()))) == more


def test_a_float_has_the_id_of_its_integer(tmp_path: Path) -> None:
    users = [17, -3, 0, 10**10, 1_790_000_000_123, 10**15 + 1]
    days = {"monday": pa.array(users), "tuesday": pa.array([float(user) for user in users])}
    for day, column in days.items():
        lists = pa.array([[user] for user in column.to_pylist()])
        pq.write_table(
            pa.table({"label": [0, 1] * 3, "user": column, "seen": lists, "city": column}), tmp_path / f"{day}.parquet"
        )
    recipe = Recipe("parquet", "label", (Categorical("user"), Categorical("seen", is_list=True), CITY))
    files = [tmp_path / f"{day}.parquet" for day in days]
    prepare(recipe, SplitShares(files, {"train": 1.0}), tmp_path / "out")
    its = RowEncoder.open(tmp_path / "out")
    for table in ("user", "seen"):
        assert set(its.vocabularies[table].to_pylist()) == set(map(str, users))
    log = ClickLog.open(tmp_path / "out")
    monday, tuesday = (log.take(np.arange(first, first + 6)) for first in (0, 6))
    assert same(monday, tuesday)
    assert same(its.batch(pq.read_table(files[1]).to_pylist()), monday)


CITY = Categorical("city", Hashed(10**6))


@pytest.mark.parametrize("type", ["float16", "float32", "float64"])
def test_nan_is_a_missing_id_and_other_floats_keep_their_text(tmp_path: Path, type: str) -> None:
    column = pa.array(np.array([3, np.nan, 2.5, -0.0], type))
    lists = pa.ListArray.from_arrays([0, 2, 2, 3, 4], column)
    table = pa.table({"label": [0, 1, 0, 1], "user": column, "seen": lists})
    assert not table["user"].null_count
    pq.write_table(table, tmp_path / "in.parquet")
    recipe = Recipe("parquet", "label", (Categorical("user"), Categorical("seen", is_list=True)))
    manifest = prepare(recipe, SplitShares([tmp_path / "in.parquet"], {"train": 1.0}), tmp_path / "out")
    assert manifest["fields"][0]["missing"] == {"train": 1}
    its = RowEncoder.open(tmp_path / "out")
    assert set(its.vocabularies["user"].to_pylist()) == set(its.vocabularies["seen"].to_pylist()) == {"3", "2.5", "0"}
    stored = ClickLog.open(tmp_path / "out").take(np.arange(4))
    assert stored.ids["user"][1] == 0
    assert same(its.batch(table.to_pylist()), stored)
    raw = its.encoded({"user": column, "seen": lists})
    assert raw["user"].tolist() == stored.ids["user"].tolist()


def test_ids_that_pandas_makes_floats_of_are_whole_numbers(tmp_path: Path) -> None:
    big = [12345678901, 7, 10**15 + 1]
    pd.DataFrame({"label": [0, 1, 0], "user": big}).to_parquet(tmp_path / "in.parquet")
    recipe = Recipe("parquet", "label", (Categorical("user"),))
    prepare(recipe, SplitShares([tmp_path / "in.parquet"], {"train": 1.0}), tmp_path / "out")
    its = RowEncoder.open(tmp_path / "out")
    found = its.columns(pd.DataFrame({"user": [*big, None]}))["user"]
    assert found[3] == 0 and len(set(found)) == 4
    assert np.array_equal(found[:3], its.columns(pd.DataFrame({"user": big}))["user"])
    for changed in (2**53 + 1, -(2**53) - 1, 2**60 + 1):
        with pytest.raises(
            BadInput, match=r"column 'user': ids are floats, which have changed whole numbers from 2\*\*53 on"
        ):
            its.columns(pd.DataFrame({"user": [changed, None]}))


def test_a_missing_number_of_an_older_dataset_or_model_is_encoded_as_it_was(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl", raw_rows())
    prepare(recipe_of("jsonl"), SplitShares([path], {"train": 0.8, "valid": 0.2}, by="order"), tmp_path / "out")
    row = raw_rows()[0] | {"age": None}
    new = RowEncoder.open(tmp_path / "out")
    assert float(new.batch(row).dense[0, 1]) == 0
    facts = json.loads(json.dumps(new.facts))
    again = RowEncoder.of(facts, new.vocabularies.__getitem__)
    assert float(again.batch(row).dense[0, 1]) == 0
    fitted = facts["numeric"]["age"]
    del fitted["missing_becomes"]  # models had only the other two
    old = RowEncoder.of(facts, new.vocabularies.__getitem__)
    as_0 = -fitted["mean"] / fitted["std"]
    assert float(old.batch(row).dense[0, 1]) == pytest.approx(as_0)
    manifest = json.loads((tmp_path / "out" / "dataset.json").read_text())
    manifest["numeric"][1]["missing_becomes"] = as_0
    (tmp_path / "out" / "dataset.json").write_text(json.dumps(manifest))
    assert float(RowEncoder.open(tmp_path / "out").batch(row).dense[0, 1]) == pytest.approx(as_0)
