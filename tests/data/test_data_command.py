"""`gba-hvd data prepare` and `gba-hvd data show`, as a person types them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gba_hvd_tools.commands import data
from gba_hvd_tools.commands.data_output import plain_lines

from gba_hvd.data import ClickLog
from gba_hvd.data.splits import PrepareProgress
from gba_hvd.errors import BadInput

from .colours import GOOD, HEADER

Write = Callable[[str, str | bytes], Path]
BY_HAND = ["--categorical", "colour,shape", "--numeric", "size"]


def gba_hvd(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    data.add_parser(parser.add_subparsers())
    args = parser.parse_args(["data", *map(str, arguments)])
    status: int = args.run(args)
    return status


def test_a_folder_with_a_file_per_split(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "valid", "test"):
        write(f"in/{split}.csv", HEADER + GOOD * 5)
    assert gba_hvd("prepare", tmp_path / "in", "--out", tmp_path / "out", *BY_HAND) == 0
    shown = capsys.readouterr().out
    assert "malformed rows left out: 0 of 30" in shown
    assert [line.split()[0] for line in shown.splitlines()[1:4]] == ["train", "valid", "test"]
    assert [len(ClickLog.open(tmp_path / "out", split)) for split in ("train", "valid", "test")] == [10, 10, 10]


def test_one_file_is_cut_by_shares(tmp_path: Path, write: Write) -> None:
    path = write("in/all.csv", HEADER + GOOD * 50)
    gba_hvd("prepare", path, "--out", tmp_path / "out", *BY_HAND, "--split", "0.5,0.3,0.2", "--split-by", "order")
    assert [len(ClickLog.open(tmp_path / "out", split)) for split in ("train", "valid", "test")] == [50, 30, 20]


def test_encodings_by_field(tmp_path: Path, write: Write) -> None:
    path = write("in/train.csv", "label,user,item,tags\n" + "1,11,a,x|y\n0,12,b,x\n" * 5)
    fields = ["--categorical", "user,item", "--multi", "tags=|", "--identity", "user=5:10", "--hash", "item=100"]
    gba_hvd("prepare", "--train", path, "--out", tmp_path / "out", *fields)
    assert ClickLog.open(tmp_path / "out").tables == {"user": 5, "item": 100, "tags": 3}


@pytest.mark.slow
def test_new_data_gets_the_ids_and_the_numbers_of_another_store(tmp_path: Path, write: Write) -> None:
    first = write("first.csv", "label,user,price\n1,a,1\n0,b,3\n0,b,3\n")
    second = write("second.csv", "label,user,price\n1,a,1\n0,c,\n0,b,3\n1,c,7\n")
    how = ["--categorical", "user", "--numeric", "price", "--standardise"]
    gba_hvd("prepare", "--train", first, "--out", tmp_path / "first", *how)
    gba_hvd("prepare", "--train", second, "--out", tmp_path / "second", *how, "--like", tmp_path / "first")
    gba_hvd("prepare", "--train", first, "--out", tmp_path / "third", *how, "--like", tmp_path / "second")
    of_first, of_second, of_third = (ClickLog.open(tmp_path / one) for one in ("first", "second", "third"))
    assert of_second.tables == of_first.tables == {"user": 3}
    one, new, again = (log.take(np.arange(3)) for log in (of_first, of_second, of_third))
    assert one.ids["user"].tolist() == again.ids["user"].tolist() == [2, 1, 1]
    assert new.ids["user"].tolist() == [2, 0, 1]
    assert new.dense[[0, 2]].tolist() == one.dense[:2].tolist() and new.dense[1].item() == 0
    assert again.dense.tolist() == one.dense.tolist()
    with pytest.raises(BadInput, match=r"column 'price': expected .*standardise=True.*first, got .*standardise=False"):
        gba_hvd("prepare", "--train", second, "--out", tmp_path / "x", *how[:4], "--like", tmp_path / "first")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "folder", "rows"),
    [
        ("frappe", "frappe_x1", [202_027, 57_722, 28_860]),
        ("criteo-kaggle", "criteo_head10k/train_head10000.txt.gz", None),
        ("criteo-1tb", "criteo_terabyte_1000", [800, 100, 100]),
    ],
)
def test_presets_need_nothing_else(
    preset: str, folder: str, rows: list[int] | None, real_data: Path, tmp_path: Path
) -> None:
    assert gba_hvd("prepare", "--preset", preset, real_data / folder, "--out", tmp_path / "out") == 0
    sizes = [len(ClickLog.open(tmp_path / "out", split)) for split in ("train", "valid", "test")]
    assert sizes == rows if rows else sum(sizes) == 10_000


def test_show_prints_the_dataset_and_finds_damage(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    gba_hvd("prepare", "--train", write("in/a.csv", HEADER + GOOD), "--out", tmp_path / "out", *BY_HAND)
    assert gba_hvd("show", tmp_path / "out", "--verify") == 0
    assert "every part is as it was written" in capsys.readouterr().err
    assert gba_hvd("show", tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["rows"] == 2
    part = tmp_path / "out/train/part-00000.arrow"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    assert gba_hvd("show", tmp_path / "out", "--verify") == 1
    assert "part-00000.arrow: checksum" in capsys.readouterr().err


WRONG = {
    "no columns": (["{in}"], "no --preset, and no columns"),
    "no input": (BY_HAND, "no input: name files or folders"),
    "unknown preset": (
        ["--preset", "criteo-kagle", "{in}"],
        r"no such preset; did you mean criteo-kaggle\? There are criteo-kaggle, criteo-1tb, frappe$",
    ),
    "preset like no other": (["--preset", "mine", "{in}"], "there are criteo-kaggle, criteo-1tb, frappe$"),
    "text without separator": (
        ["{in}", "--categorical", "shape", "--multi", "colour"],
        r"'colour' has single values, not lists: --multi 'colour=\|' cuts text at each '\|'",
    ),
    "preset and columns": (["--preset", "frappe", "{in}", *BY_HAND], "leave out --categorical, --numeric"),
    "preset without its files": (["--preset", "frappe", "{in}"], "expected a folder with files named train, valid"),
    "two encodings": (["{in}", *BY_HAND, "--min-count", "2", "--hash-rows", "9"], "choose one"),
    "hash into nothing": (["{in}", *BY_HAND, "--hash-rows", "0"], "a hashed field has 0 rows"),
    "half a hash": (["{in}", *BY_HAND, "--hash", "colour"], "colour: expected FIELD=ROWS"),
    "two ways to split": (["{in}", "--train", "{in}", *BY_HAND], "leave out INPUT"),
    "shares": (["{in}", *BY_HAND, "--split", "0.5,0.1"], "expected positive numbers that sum to 1"),
    "no separator": (["{in}", "--multi", "colour="], "separator is ''"),
    "column with two roles": (["{in}", "--categorical", "size", "--numeric", "size"], "more than one role"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_answered_in_a_sentence(name: str, tmp_path: Path, write: Write) -> None:
    arguments, message = WRONG[name]
    path = write("in/all.csv", HEADER + GOOD)
    with pytest.raises(BadInput, match=message):
        gba_hvd("prepare", "--out", tmp_path / "out", *(a.replace("{in}", str(path)) for a in arguments))
    assert not (tmp_path / "out").exists()


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    show = plain_lines(lambda: now)
    for second in range(12):
        now = float(second)
        show(PrepareProgress("writing", second * 10, 110, second * 1000, 1))
    assert capsys.readouterr().err.splitlines() == [
        "writing 45%, 5,000 rows, 1 malformed",
        "writing 91%, 10,000 rows, 1 malformed",
    ]


def test_an_option_given_twice_adds_to_the_first(tmp_path: Path, write: Write) -> None:
    one, two = write("in/a.csv", HEADER + GOOD), write("in/b.csv", HEADER + GOOD)
    columns = ["--categorical", "colour", "--categorical", "shape", "--numeric", "size"]
    gba_hvd("prepare", "--train", one, "--train", two, "--out", tmp_path / "out", *columns)
    log = ClickLog.open(tmp_path / "out")
    assert (len(log), list(log.tables)) == (4, ["colour", "shape"])


def test_columns_without_a_role_are_named(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("in/all.csv", "label,user,price,shop,id\n" + "1,u,2.5,s,7\n" * 50)
    gba_hvd("prepare", path, "--out", tmp_path / "a", "--categorical", "user,shop", "--ignore", "id")
    said = capsys.readouterr()
    assert "not used: price; --numeric price or --categorical price takes it in, --ignore price" in said.err
    assert "columns not used: price\n" in said.out
    assert json.loads((tmp_path / "a/dataset.json").read_text())["input"]["not_used"] == ["price"]
    gba_hvd("prepare", path, "--out", tmp_path / "b", "--categorical", "rest", "--ignore", "id,price")
    said = capsys.readouterr()
    assert "not used" not in said.err + said.out


def test_a_column_that_a_later_file_alone_has_is_named_too(tmp_path: Path, write: Write) -> None:
    one, two = write("in/a.csv", HEADER + GOOD), write("in/b.csv", "extra," + HEADER + "x,1,3,red,round\n")
    gba_hvd("prepare", "--train", one, two, "--out", tmp_path / "out", *BY_HAND)
    assert json.loads((tmp_path / "out/dataset.json").read_text())["input"]["not_used"] == ["extra"]


def test_missing_values_are_counted_by_column_and_split(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    n = 60
    columns: dict[str, list[Any]] = {
        "label": [i % 2 for i in range(n)],
        "price": [None if i % 3 == 0 else 1.5 for i in range(n)],
        "size": [None if i % 6 == 0 else 4.0 for i in range(n)],
        "city": ["" if i % 5 == 0 else "c" for i in range(n)],
        "genres": [None if i % 4 == 0 else [] if i % 4 == 1 else ["a", "b"] for i in range(n)],
        "user": ["u"] * n,
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    lines = ["label,price,size,city,genres,user"]
    for i in range(n):
        numbers = ["" if columns[name][i] is None else str(columns[name][i]) for name in ("price", "size")]
        lines.append(",".join([str(i % 2), *numbers, columns["city"][i], "|".join(columns["genres"][i] or []), "u"]))
    text = write("in/log.csv", "\n".join(lines) + "\n")
    fields = ["--categorical", "city,user", "--numeric", "price,size", "--transform", "none", "--standardise"]
    for path, multi in ((tmp_path / "log.parquet", "genres"), (text, "genres=|")):
        out = tmp_path / f"out of {path.suffix}"
        gba_hvd("prepare", path, "--out", out, *fields, "--multi", multi, "--split", "0.5,0.5", "--split-by", "order")
        manifest = json.loads((out / "dataset.json").read_text())
        missing = {one["name"]: one["missing"] for one in manifest["fields"] + manifest["numeric"]}
        assert missing == {
            "price": {"train": 10, "valid": 10},
            "size": {"train": 5, "valid": 5},
            "city": {"train": 6, "valid": 6},
            "genres": {"train": 16, "valid": 14},
            "user": {"train": 0, "valid": 0},
        }
        shown = capsys.readouterr().out
        assert "genres           no id: a vector of zeros train 53.33%  valid 46.67%" in shown
        assert "city             id 0                     train 20.00%  valid 20.00%" in shown
        price = manifest["numeric"][0]
        assert (price["mean"], price["missing_becomes"]) == (1.5, 0)  # of the two thirds that are there
        assert "price            0 (the mean)             train 33.33%" in shown
        assert ClickLog.open(out).take([0]).dense[0, 0] == 0


def test_where_nothing_is_missing_it_says_so(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("in/a.csv", HEADER + GOOD)
    gba_hvd("prepare", "--train", path, "--out", tmp_path / "out", "--categorical", "colour,shape")
    assert "missing values: none" in capsys.readouterr().out
    manifest = tmp_path / "out/dataset.json"
    old = json.loads(manifest.read_text())  # as it was before they were counted
    for one in old["fields"] + old["numeric"]:
        del one["missing"]
    del old["input"]["not_used"]
    manifest.write_text(json.dumps(old))
    assert gba_hvd("show", tmp_path / "out") == 0
    assert "missing values" not in capsys.readouterr().out


def test_lists_are_refused_with_the_option_that_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"label": [1, 0], "user": ["a", "b"], "genres": [["a"], ["b"]]}), path)
    for options in (["--categorical", "rest"], ["--categorical", "user", "--multi", "genres=|"]):
        with pytest.raises(BadInput, match=r"column 'genres' has lists: --multi genres takes them"):
            gba_hvd("prepare", "--train", path, "--out", tmp_path / "out", *options)


def test_a_folder_without_a_table_is_said_to_be_one(tmp_path: Path, write: Write) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        BadInput, match=r"empty: no file to prepare in this folder \(looked for .*; the folder is empty"
    ):
        gba_hvd("prepare", tmp_path / "empty", "--out", tmp_path / "out", *BY_HAND)
    for name in ("a/b.py", "c.md", "d.html", "e.h"):
        write(f"source/{name}", "import os\n")
    with pytest.raises(BadInput, match=r"no file to prepare .*; it has a/b\.py, c\.md, d\.html and 1 more"):
        gba_hvd("prepare", tmp_path / "source", "--out", tmp_path / "out", *BY_HAND)
    write("source/constraints.txt", "# The exact versions, of everything\nnumpy==1.26.4\ntorch==2.5.1\npyyaml==6.0.2\n")
    with pytest.raises(
        BadInput, match=r"constraints\.txt: no table: its lines \(# The exact versions, of everything\)"
    ):
        gba_hvd("prepare", tmp_path / "source", "--out", tmp_path / "out", *BY_HAND)
    write("images/picture", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" * 9)
    with pytest.raises(BadInput, match=r"picture: neither text nor Parquet"):
        gba_hvd("prepare", tmp_path / "images", "--out", tmp_path / "out", *BY_HAND)


def test_a_damaged_manifest_is_said_to_be_one(tmp_path: Path, write: Write) -> None:
    write("set/dataset.json", '{"format": "gba_hvd click log", "version": 1}')
    with pytest.raises(BadInput, match=r"its dataset\.json lacks 'splits'; prepare the dataset again"):
        gba_hvd("show", tmp_path / "set")


def test_labels_ratings_and_shared_tables_are_named_by_options(tmp_path: Path) -> None:
    text = "click,buy,stars,history,candidate,user\n1,0,4.5,a|b,c,u\n0,0,2,c,b,v\n"
    (tmp_path / "log.csv").write_text(text)
    options = ["--label", "click,buy", "--rating", "stars", "--multi", "history=|", "--categorical", "rest"]
    options += ["--table", "item=history,candidate", "--hash", "item=50", "--split", "1"]
    assert gba_hvd("prepare", tmp_path / "log.csv", "--out", tmp_path / "out", *options) == 0
    log = ClickLog.open(tmp_path / "out")
    assert (log.tables["item"], log.features) == (50, {"candidate": "item", "user": "user", "history": "item"})
    assert sorted(log.take(np.array([0, 1])).label.tolist()) == [[0.0, 0.0, 2.0], [1.0, 0.0, 4.5]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--table", "item"], "expected TABLE=FIELD,FIELD"),
        (["--table", "item=user", "--table", "other=user"], "user is in item and in other"),
        (["--table", "item=usr"], "no column 'usr'"),
        (["--table", "item=user,shop", "--hash", "user=9"], "need one encoding"),
    ],
)
def test_tables_that_cannot_be_shared_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "log.csv").write_text("label,user,shop\n1,u,s\n0,v,t\n")
    with pytest.raises(BadInput, match=message):
        gba_hvd("prepare", tmp_path / "log.csv", "--out", tmp_path / "out", "--categorical", "rest", *options)
