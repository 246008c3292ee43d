"""What `prepare` writes is what a slow, plain reading of the input gives."""

from __future__ import annotations

import csv
import gzip
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard

from gba_hvd.batch import Bag, Batch
from gba_hvd.data import (
    Categorical,
    ClickLog,
    Hashed,
    Identity,
    Numeric,
    Recipe,
    SplitFiles,
    SplitShares,
    Vocabulary,
    prepare,
)
from gba_hvd.data.hashing import hash_strings
from gba_hvd.data.presets import CRITEO_COLUMNS, FRAPPE_FIELDS, criteo, frappe
from gba_hvd.data.sources import read_blocks
from gba_hvd.errors import BadInput

from .colours import COLOURS, GOOD, HEADER

Prepared = Callable[..., dict[str, Any]]
Write = Callable[[str, str | bytes], Path]


def everything(log: ClickLog) -> Batch:
    return log.take(np.arange(len(log)))


def ids_of(log: ClickLog, name: str) -> list[int]:
    ids = everything(log).ids[name]
    assert isinstance(ids, torch.Tensor)
    as_list: list[int] = ids.tolist()
    return as_list


def slow_vocabulary(values: list[str], min_count: int) -> dict[str, int]:
    counts = Counter(value for value in values if value)
    kept = sorted((value for value, n in counts.items() if n >= min_count), key=lambda value: (-counts[value], value))
    return {value: i for i, value in enumerate(kept, start=1)}


@pytest.mark.slow
def test_frappe_equals_a_slow_reading(real_data: Path, tmp_path: Path) -> None:
    folder = real_data / "frappe_x1"
    splits = ("train", "valid", "test")
    source = SplitFiles({split: [folder / f"{split}.csv.gz"] for split in splits})
    manifest = prepare(frappe(Vocabulary()), source, tmp_path / "out", rows_per_part=50_000, block_bytes=1 << 18)
    assert manifest["input"]["bad_rows"]["count"] == 0

    rows = {}
    for split in splits:
        with gzip.open(folder / f"{split}.csv.gz", "rt", encoding="utf-8") as file:
            rows[split] = list(csv.DictReader(file))
    vocabularies = {f: slow_vocabulary([row[f] for row in rows["train"]], 1) for f in FRAPPE_FIELDS}
    for split in splits:
        log = ClickLog.open(tmp_path / "out", split)
        batch = everything(log)
        assert batch.label.tolist() == [float(row["label"]) for row in rows[split]]
        for field, vocabulary in vocabularies.items():
            assert log.tables[field] == len(vocabulary) + 1
            assert ids_of(log, field) == [vocabulary.get(row[field], 0) for row in rows[split]]


@pytest.mark.slow
def test_criteo_equals_a_slow_reading(real_data: Path, tmp_path: Path) -> None:
    path = real_data / "criteo_head10k" / "train_head10000.txt.gz"
    source = SplitShares([path], {"train": 0.7, "valid": 0.3}, by="order")
    prepare(criteo(Vocabulary(min_count=3)), source, tmp_path / "out", block_bytes=1 << 19, rows_per_part=2000)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [dict(zip(CRITEO_COLUMNS, line.rstrip("\n").split("\t"), strict=True)) for line in file]
    cut = {"train": rows[:7000], "valid": rows[7000:]}
    for split, expected in cut.items():
        log = ClickLog.open(tmp_path / "out", split)
        batch = everything(log)
        assert batch.label.tolist() == [float(row["label"]) for row in expected]
        for i in range(13):
            values = [math.log1p(max(float(row[f"I{i + 1}"] or 0), 0)) for row in expected]
            np.testing.assert_allclose(batch.dense[:, i].numpy(), values, rtol=1e-6)
        for i in range(26):
            vocabulary = slow_vocabulary([row[f"C{i + 1}"] for row in cut["train"]], 3)
            assert ids_of(log, f"C{i + 1}") == [vocabulary.get(row[f"C{i + 1}"], 0) for row in expected]


def test_the_1tb_layout_goes_through_the_hash(real_data: Path, tmp_path: Path) -> None:
    path = real_data / "criteo_terabyte_1000" / "day0_head1000.tsv.gz"
    prepare(criteo(Hashed(1000)), SplitShares([path], {"train": 0.9, "test": 0.1}), tmp_path / "out")
    logs = [ClickLog.open(tmp_path / "out", split) for split in ("train", "test")]
    assert sum(len(log) for log in logs) == 1000
    assert sum(float(everything(log).label.sum()) for log in logs) == 21
    assert all(0 <= i < 1000 for log in logs for i in ids_of(log, "C3"))


def test_vocabularies_and_statistics_come_from_train_alone(prepared: Prepared, tmp_path: Path) -> None:
    recipe = Recipe(
        format="csv",
        label="label",
        categorical=COLOURS.categorical,
        numeric=(Numeric("size", "none", standardise=True),),
    )
    train = "1,2,red,round\n0,4,red,square\n1,6,blue,round\n"
    one = prepared(HEADER + train, HEADER + "1,1000,green,round\n" * 9, recipe=recipe)
    train_ids = ids_of(ClickLog.open(tmp_path / "out", "train"), "colour")
    other = prepared(HEADER + train, HEADER + "0,-7,red,star\n", recipe=recipe, overwrite=True)
    assert ids_of(ClickLog.open(tmp_path / "out", "train"), "colour") == train_ids == [1, 1, 2]
    assert one["numeric"] == other["numeric"]
    assert one["numeric"][0]["mean"] == 4
    assert one["numeric"][0]["std"] == pytest.approx(math.sqrt(8 / 3))
    assert [f["rows"] for f in one["fields"]] == [f["rows"] for f in other["fields"]] == [3, 3]
    valid = everything(ClickLog.open(tmp_path / "out", "valid"))
    assert float(valid.dense[0, 0]) == pytest.approx((-7 - 4) / math.sqrt(8 / 3))
    assert ids_of(ClickLog.open(tmp_path / "out", "valid"), "shape") == [0]


def test_a_missing_number_is_the_mean_of_those_that_are_there(prepared: Prepared, tmp_path: Path) -> None:
    numeric = (Numeric("size", "none", standardise=True),)
    recipe = Recipe(format="csv", label="label", categorical=COLOURS.categorical, numeric=numeric)
    train = "1,2,red,round\n0,,red,square\n1,6,blue,round\n0,,red,square\n"
    manifest = prepared(HEADER + train, HEADER + "1,,green,round\n0,0,red,round\n", recipe=recipe)
    assert [manifest["numeric"][0][fact] for fact in ("mean", "std", "missing_becomes")] == [4, 2, 0]
    dense = [everything(ClickLog.open(tmp_path / "out", split)).dense[:, 0].tolist() for split in ("train", "valid")]
    assert dense == [[-1, 0, 1, 0], [0, -2]]
    none = prepared(HEADER + "1,,red,round\n" * 3, HEADER + "1,5,red,round\n", recipe=recipe, overwrite=True)
    assert [none["numeric"][0][fact] for fact in ("mean", "std")] == [0, 1]


def test_random_splits_of_one_file_are_fitted_on_their_train_rows_alone(tmp_path: Path, write: Write) -> None:
    path = write("in/all.csv", HEADER + "".join(f"{i % 2},{i},colour{i},round\n" for i in range(500)))
    source = SplitShares([path], {"train": 0.6, "valid": 0.4}, by="random", seed=3)
    prepare(COLOURS, source, tmp_path / "out", block_bytes=1000)
    train, valid = (ClickLog.open(tmp_path / "out", split) for split in ("train", "valid"))
    assert len(train) + len(valid) == 500
    assert 250 < len(train) < 350
    assert train.tables["colour"] == len(train) + 1
    assert set(ids_of(valid, "colour")) == {0}


def test_the_split_of_a_row_depends_on_its_place_and_the_seed_only(tmp_path: Path, write: Write) -> None:
    def train_sizes(path: Path, seed: int, name: str) -> list[float]:
        source = SplitShares([path], {"train": 0.5, "valid": 0.5}, seed=seed)
        recipe = Recipe(
            format="csv", label="label", categorical=COLOURS.categorical, numeric=(Numeric("size", "none"),)
        )
        prepare(recipe, source, tmp_path / name, max_bad_rows=0.5)
        sizes: list[float] = everything(ClickLog.open(tmp_path / name)).dense[:, 0].tolist()
        return sizes

    rows = [f"1,{i},red,round\n" for i in range(200)]
    whole = train_sizes(write("in/whole.csv", HEADER + "".join(rows)), 1, "whole")
    rows[::10] = ["malformed\n"] * 20
    holed = train_sizes(write("in/holed.csv", HEADER + "".join(rows)), 1, "holed")
    assert holed == [size for size in whole if size % 10]
    assert train_sizes(tmp_path / "in/whole.csv", 2, "other") != whole


def test_rare_and_missing_values_share_id_0(prepared: Prepared, tmp_path: Path) -> None:
    recipe = Recipe(format="csv", label="label", categorical=(Categorical("colour", Vocabulary(min_count=2)),))
    manifest = prepared(
        "label,colour\n" + "".join(f"1,{c}\n" for c in ["b", "a", "b", "c", "a", "", ""]), recipe=recipe
    )
    assert ids_of(ClickLog.open(tmp_path / "out"), "colour") == [2, 1, 2, 0, 1, 0, 0]
    assert manifest["fields"][0]["distinct_in_train"] == 3
    assert manifest["fields"][0]["id_0"] == {"train": 3}
    with pa.memory_map(str(tmp_path / "out/vocabulary/colour.arrow")) as file:
        assert pa.ipc.open_file(file).read_all().to_pydict() == {"value": ["a", "b"], "count": [2, 2]}


def test_hashed_ids_never_change(prepared: Prepared, tmp_path: Path) -> None:
    recipe = Recipe(format="csv", label="label", categorical=(Categorical("colour", Hashed(1000)),))
    prepared("label,colour\n1,red\n1,some colour with a long name\n1,\n1,été\n", recipe=recipe)
    assert ids_of(ClickLog.open(tmp_path / "out"), "colour") == [586, 952, 0, 252]


def test_the_hash_sees_each_string_alone() -> None:
    words = ["", "a", "12345678", "123456789", "x" * 100, "été", "a\0", "12345678" * 2]
    together = hash_strings(pa.array(["pad", *words])[1:])
    assert len(set(together.tolist())) == len(words)
    assert together.tolist() == [int(hash_strings(pa.array([word]))[0]) for word in words]
    assert together.tolist() == hash_strings(pa.array(words, pa.large_string())).tolist()


def test_numeric_columns_are_cleaned_then_transformed(prepared: Prepared, tmp_path: Path) -> None:
    prepared(HEADER + "1,,a,b\n1,-5,a,b\n1,2.5e1,a,b\n0,nan,a,b\n")
    dense = everything(ClickLog.open(tmp_path / "out")).dense[:, 0].tolist()
    assert dense == pytest.approx([0, 0, math.log(26), 0])


def test_a_constant_column_survives_standardising(prepared: Prepared, tmp_path: Path) -> None:
    recipe = Recipe(
        format="csv", label="label", categorical=COLOURS.categorical, numeric=(Numeric("size", "none", True),)
    )
    prepared(HEADER + "1,0.1,a,b\n" * 100, recipe=recipe)
    assert everything(ClickLog.open(tmp_path / "out")).dense.abs().max() < 1e-6


MULTI = Recipe(
    format="csv",
    label="label",
    categorical=(
        Categorical("tags", separator="|"),
        Categorical("user"),
        Categorical("seen", Identity(5), separator="|"),
    ),
)


@pytest.mark.parametrize("rows_per_part", [2, 100])
def test_multi_valued_fields_come_as_bags(rows_per_part: int, prepared: Prepared, tmp_path: Path) -> None:
    text = "label,tags,user,seen\n1,a|b,u,0|4\n0,,v,\n1,a,u,3\n0,a||c|b,w,1|1|2\n"
    prepared(text, recipe=MULTI, rows_per_part=rows_per_part, block_bytes=25)
    log = ClickLog.open(tmp_path / "out")
    assert list(log.tables) == ["tags", "user", "seen"]
    batch = log.take(np.array([3, 0, 1, 3]))
    assert list(batch.ids) == list(log.tables)
    tags, seen = batch.ids["tags"], batch.ids["seen"]
    assert isinstance(tags, Bag)
    assert isinstance(seen, Bag)
    assert bag_lists(tags) == [[1, 0, 3, 2], [1, 2], [], [1, 0, 3, 2]]
    assert bag_lists(seen) == [[1, 1, 2], [0, 4], [], [1, 1, 2]]


def test_lists_that_belong_together_keep_their_lengths(tmp_path: Path) -> None:
    """A value that is missing inside a list is id 0, as one that is missing alone."""
    lists = {"items": [["a", None, "b"], ["b"], None, []], "kinds": [["x", "y", None], [None], None, []]}
    pq.write_table(pa.table({"label": [1, 0, 1, 0], **lists}), tmp_path / "train.parquet")
    fields = tuple(Categorical(name, is_list=True) for name in lists)
    prepare(Recipe("parquet", "label", fields), SplitFiles({"train": [tmp_path / "train.parquet"]}), tmp_path / "out")
    batch = everything(ClickLog.open(tmp_path / "out"))
    items, kinds = batch.ids["items"], batch.ids["kinds"]
    assert isinstance(items, Bag)
    assert isinstance(kinds, Bag)
    assert bag_lists(items) == [[2, 0, 1], [1], [], []]
    assert bag_lists(kinds) == [[1, 2, 0], [0], [], []]


def test_lists_of_one_length_are_lists(tmp_path: Path) -> None:
    users = pa.array([["a", "b"], ["c", None]], pa.list_(pa.string(), 2))
    pq.write_table(pa.table({"label": [0, 1], "user": users}), tmp_path / "in.parquet")
    recipe = Recipe("parquet", "label", (Categorical("user", is_list=True),))
    prepare(recipe, SplitShares([tmp_path / "in.parquet"], {"train": 1.0}), tmp_path / "out")
    found = ClickLog.open(tmp_path / "out").take(np.arange(2)).ids["user"]
    assert isinstance(found, Bag)
    assert (found.offsets.tolist(), found.values.tolist()) == ([0, 2], [1, 2, 3, 0])


def test_a_cell_that_is_cut_has_no_value_after_its_last_separator(prepared: Prepared, tmp_path: Path) -> None:
    prepared("label,tags,user,seen\n1,a|b|,u,0\n0,a||,v,1|\n1,|a,u,\n", recipe=MULTI)
    tags = everything(ClickLog.open(tmp_path / "out")).ids["tags"]
    assert isinstance(tags, Bag)
    assert bag_lists(tags) == [[1, 2], [1, 0], [0, 1]]


def test_a_list_of_ids_with_a_null_is_malformed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [1, 0], "seen": [[1, None], [2]]}), tmp_path / "train.parquet")
    recipe = Recipe("parquet", "label", (Categorical("seen", Identity(5), is_list=True),))
    with pytest.raises(BadInput, match="seen is None, expected an integer from 0 to 4"):
        prepare(recipe, SplitFiles({"train": [tmp_path / "train.parquet"]}), tmp_path / "out")


def test_fields_of_one_table_share_a_vocabulary(prepared: Prepared, tmp_path: Path) -> None:
    fields = (Categorical("history", separator="|", table="item"), Categorical("candidate", table="item"))
    recipe = Recipe("csv", "label", (*fields, Categorical("user")))
    manifest = prepared("label,history,candidate,user\n1,a|b,c,u\n0,c|a|a,b,v\n", recipe=recipe)
    log = ClickLog.open(tmp_path / "out")
    assert log.tables == {"item": 4, "user": 3}
    assert log.features == {"history": "item", "candidate": "item", "user": "user"}
    assert pickle.loads(pickle.dumps(log)).features == log.features
    batch = everything(log)
    history, candidate = batch.ids["history"], batch.ids["candidate"]
    assert isinstance(history, Bag)
    assert bag_lists(history) == [[1, 2], [3, 1, 1]]
    assert candidate.tolist() == [3, 2]  # type: ignore[union-attr]
    assert [path.name for path in sorted((tmp_path / "out" / "vocabulary").iterdir())] == ["item.arrow", "user.arrow"]
    assert [field["distinct_in_train"] for field in manifest["fields"]] == [3, 3, 2]


def test_fields_of_one_table_need_one_encoding() -> None:
    with pytest.raises(ValueError, match="table 'item': its columns history, candidate need one encoding"):
        Recipe(
            "csv", "label",
            (Categorical("history", Hashed(10), table="item"), Categorical("candidate", table="item")),
        )  # fmt: skip


def test_several_labels_and_ratings_are_numbers(prepared: Prepared, tmp_path: Path) -> None:
    recipe = Recipe("csv", ("click", "stars"), (Categorical("user"),), ratings=("stars",))
    text = "click,stars,user\n1,4.5,u\n0,-1,v\n1,,w\n"
    manifest = prepared(text, recipe=recipe, max_bad_rows=1)
    batch = everything(ClickLog.open(tmp_path / "out"))
    assert batch.label.dtype == torch.float32
    assert batch.label.tolist() == [[1.0, 4.5], [0.0, -1.0]]
    assert manifest["splits"]["train"]["label_means"] == {"click": 0.5, "stars": 1.75}
    assert manifest["input"]["bad_rows"]["count"] == 1


def test_one_rating_is_one_number(prepared: Prepared, tmp_path: Path) -> None:
    prepared("stars,user\n3,u\n5,v\n", recipe=Recipe("csv", "stars", (Categorical("user"),), ratings=("stars",)))
    log = ClickLog.open(tmp_path / "out")
    assert log.take(np.array([1, 0])).label.tolist() == [5.0, 3.0]
    assert "positives" not in log.description


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": ()}, "no label"),
        ({"label": "a", "ratings": ("b",)}, "rating b is no label"),
        ({"label": "a", "ratings": ("a",), "label_from": 4.0}, "all labels are ratings"),
        ({"label": ("a", "a")}, "column a has more than one role"),
    ],
)
def test_labels_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(format="csv", categorical=(Categorical("user"),), **settings)


def bag_lists(bag: Bag) -> list[list[int]]:
    return [part.tolist() for part in torch.tensor_split(bag.values, bag.offsets[1:])]


def test_text_and_parquet_give_the_same_dataset(prepared: Prepared, tmp_path: Path) -> None:
    prepared("label,tags,user,seen\n1,a|b,7,0|4\n0,,8,\n1,a,7,3\n", recipe=MULTI)
    table = {"label": [True, False, True], "tags": [["a", "b"], None, ["a"]], "user": [7, 8, 7]}
    pq.write_table(pa.table(table | {"seen": [[0, 4], [], [3]]}), tmp_path / "train.parquet")
    fields = (
        Categorical("tags", is_list=True),
        Categorical("user"),
        Categorical("seen", Identity(5), is_list=True),
    )
    recipe = Recipe(format="parquet", label="label", categorical=fields)
    prepare(recipe, SplitFiles({"train": [tmp_path / "train.parquet"]}), tmp_path / "from_parquet")
    ours, theirs = (everything(ClickLog.open(tmp_path / name)) for name in ("out", "from_parquet"))
    assert torch.equal(ours.label, theirs.label)
    for name, ids in ours.ids.items():
        other = theirs.ids[name]
        if isinstance(ids, Bag) and isinstance(other, Bag):
            assert bag_lists(ids) == bag_lists(other)
        else:
            assert torch.equal(ids, other)  # type: ignore[arg-type]


def packings(text: bytes) -> Iterator[tuple[str, bytes]]:
    half = len(text) // 2
    zstd = zstandard.ZstdCompressor()
    yield "plain", text
    yield "crlf", text.replace(b"\n", b"\r\n")
    yield "byte-order mark", b"\xef\xbb\xbf" + text
    yield "gzip", gzip.compress(text)
    yield "gzip members", gzip.compress(text[:half]) + gzip.compress(text[half:]) + b"\0\0\0"
    yield "zstd", zstd.compress(text)
    yield "zstd frames", zstd.compress(text[:half]) + zstd.compress(text[half:])


@pytest.mark.slow
@pytest.mark.parametrize("block_bytes", [1, 37, 1 << 20])
def test_packing_and_block_size_change_nothing(block_bytes: int, tmp_path: Path, write: Write) -> None:
    text = HEADER + GOOD * 20 + '1,7,"red, dark",round\n'
    seen = []
    for name, content in packings(text.encode()):
        path = write(f"{name}/train.csv", content)
        prepare(COLOURS, SplitFiles({"train": [path]}), tmp_path / name / "out", block_bytes=block_bytes)
        log = ClickLog.open(tmp_path / name / "out")
        batch = everything(log)
        seen.append((batch.label.tolist(), batch.dense.tolist(), ids_of(log, "colour"), ids_of(log, "shape")))
    assert all(one == seen[0] for one in seen)
    assert len(seen[0][0]) == 41


def test_a_folder_is_read_in_sorted_order(tmp_path: Path, write: Write) -> None:
    for name, size in (("day_2", 2), ("day_10", 10), ("sub/day_3.gz", 3)):
        row = f"1\t{size}\tred\n".encode()
        write(f"in/{name}", gzip.compress(row) if name.endswith("gz") else row)
    write("in/README.md", "not data")
    write("in/_SUCCESS", "")
    recipe = Recipe(
        format="tsv",
        columns=("label", "size", "colour"),
        label="label",
        categorical=(Categorical("colour"),),
        numeric=(Numeric("size", "none"),),
    )
    prepare(recipe, SplitFiles({"train": [tmp_path / "in"]}), tmp_path / "out")
    assert everything(ClickLog.open(tmp_path / "out")).dense[:, 0].tolist() == [10, 2, 3]


def test_reading_holds_one_block_at_a_time(write: Write) -> None:
    path = write("in/train.csv.gz", gzip.compress((HEADER + GOOD * 200_000).encode()))
    blocks = list(accumulate((len(block.data) for block in read_blocks(path, block_bytes=100_000)), max))
    assert len(blocks) > 50
    assert blocks[-1] < 500_000


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path: Path, write: Write) -> None:
    def peak(n_rows: int) -> int:
        path = write(f"in/{n_rows}.csv", HEADER + GOOD * (n_rows // 2))
        most = 0

        def watch(_: object) -> None:
            nonlocal most
            most = max(most, pa.total_allocated_bytes())

        before = pa.total_allocated_bytes()
        out = tmp_path / f"out{n_rows}"
        prepare(COLOURS, SplitFiles({"train": [path]}), out, block_bytes=1 << 16, on_progress=watch)
        return most - before

    assert peak(200_000) < 2 * peak(20_000) + (1 << 16)


def test_progress_reaches_the_end(prepared: Prepared) -> None:
    seen: list[Any] = []
    prepared(HEADER + GOOD * 100, on_progress=seen.append, block_bytes=100)
    assert [p.phase for p in seen if p.done_bytes == p.total_bytes][-1] == "writing"
    assert seen[-1].rows == 200
    assert {p.phase for p in seen} == {"fitting", "writing"}
