"""Which files of an input are read: each one that is not is refused, or named in the summary."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gba_hvd.data import Categorical, ClickLog, ParquetStream, Recipe, SplitFiles, SplitShares, prepare
from gba_hvd.data.sniff import look
from gba_hvd.data.sources import files_by_split, find_files, refuse_same_file_twice
from gba_hvd.errors import BadInput

from .colours import COLOURS, GOOD, HEADER
from .test_data_command import BY_HAND, gba_hvd

Write = Callable[[str, str | bytes], Path]
DATA = HEADER + GOOD * 3


def names(files: list[Path]) -> list[str]:
    return [path.name for path in files]


def test_endings_of_any_case_and_none_are_read_and_names_of_no_data_are_not(tmp_path: Path, write: Write) -> None:
    for name in (
        "a.csv",
        "b.CSV",
        "c.Csv.GZ",
        "part-00000",
        "_SUCCESS",
        ".part-0.csv.crc",
        "a.csv.crc",
        "_tmp/0/d.csv",
    ):
        write(f"in/{name}", "x")
    for name in ("README", "FRAPPE_README.txt", "LICENSE.txt", "schema.json", "notes.MD"):
        write(f"in/{name}", "x")
    found = find_files([tmp_path / "in"], "csv")
    assert names(found.read) == ["a.csv", "b.CSV", "c.Csv.GZ", "part-00000"]
    assert names(found.notes) == ["FRAPPE_README.txt", "LICENSE.txt", "README", "notes.MD", "schema.json"]
    assert not found.others
    assert names(find_files([tmp_path / "in"], "jsonl").read) == ["part-00000", "schema.json"]


@pytest.mark.parametrize("name", ["b.csv.bz2", "b.csv.xz", "b.log", "b.csv.2026-11-01", "b.csv.part", "b.parquet"])
def test_a_file_of_a_folder_that_would_not_be_read_is_refused(name: str, tmp_path: Path, write: Write) -> None:
    write("in/a.csv", DATA)
    other = write(f"in/{name}", DATA)
    with pytest.raises(
        BadInput, match=rf"these files are not read: .*/{name}\. Expected of csv .*name the files to read"
    ):
        prepare(COLOURS, SplitFiles({"train": [tmp_path / "in"]}), tmp_path / "out")
    assert find_files([other], "csv").read == [other]  # named itself, it is read


def test_a_link_to_a_folder_or_to_nothing_is_refused(tmp_path: Path, write: Write) -> None:
    write("in/a.csv", DATA)
    write("elsewhere/b.csv", DATA)
    (tmp_path / "in/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in/c.csv").symlink_to(tmp_path / "absent")
    with pytest.raises(BadInput, match=r"these files are not read: .*/c\.csv, .*/more\."):
        prepare(COLOURS, SplitFiles({"train": [tmp_path / "in"]}), tmp_path / "out")


@pytest.mark.parametrize("other", ["train_2.csv", "validation.csv", "train-00001.csv", "test.csv.bz2", "more/a.csv"])
def test_a_folder_of_splits_with_anything_else_is_refused(other: str, tmp_path: Path, write: Write) -> None:
    for name in ("Train.CSV", "valid/part-00000", "test.csv", "README.md", "_SUCCESS"):
        write(f"in/{name}", DATA)
    splits, notes = files_by_split(tmp_path / "in", "csv")
    assert {split: names(files) for split, files in splits.items()} == {
        "train": ["Train.CSV"],
        "valid": ["valid"],
        "test": ["test.csv"],
    }
    assert names(notes) == ["README.md"]
    write(f"in/{other}", DATA)
    with pytest.raises(BadInput, match=rf"these are not read: .*/in/{other.split('/')[0]}\. .*--train, --valid"):
        files_by_split(tmp_path / "in", "csv")


def test_the_same_file_twice_is_refused(tmp_path: Path, write: Write) -> None:
    one = write("in/1.csv", DATA)
    with pytest.raises(BadInput, match=r"1\.csv: this file is in the input twice, so"):
        prepare(COLOURS, SplitShares([tmp_path / "in", one], {"train": 0.5, "valid": 0.5}), tmp_path / "out")
    with pytest.raises(BadInput, match=r"1\.csv: this file is in the input twice, so"):
        prepare(COLOURS, SplitFiles({"train": [tmp_path / "in"], "test": [one]}), tmp_path / "out")
    with pytest.raises(BadInput, match=r"1\.csv: this file is in the input twice, so"):
        refuse_same_file_twice([one, one])
    (tmp_path / "link").symlink_to(one)
    with pytest.raises(BadInput, match=r"link: this file is in the input twice, also as .*1\.csv"):
        refuse_same_file_twice([one, tmp_path / "link"])


def test_blank_files_and_names_with_licence_in_them(tmp_path: Path, write: Write) -> None:
    for name, data in {"a.csv": DATA, "driver_license.csv": DATA, "b.csv": "\n", "c.csv": "\ufeff\r\n"}.items():
        write(f"in/{name}", data)
    write("in/DATA_README.txt", "about")
    found = find_files([tmp_path / "in"], "csv")
    assert names(found.read) == ["a.csv", "driver_license.csv"]
    assert (names(found.empty), names(found.notes)) == (["b.csv", "c.csv"], ["DATA_README.txt"])


def test_a_test_set_without_a_training_set_of_that_name_is_not_cut_into_the_training(
    tmp_path: Path, write: Write
) -> None:
    for name in ("train_1.csv", "valid.csv", "test.csv"):
        write(f"in/{name}", DATA)
    with pytest.raises(BadInput, match=r"has .*/test\.csv, .*/valid\.csv, and nothing that is called train: .*--train"):
        files_by_split(tmp_path / "in", "csv")


@pytest.mark.parametrize("name", ["1.csv", "train.csv"])
def test_a_dataset_in_the_folder_of_its_input_is_not_read(name: str, tmp_path: Path, write: Write) -> None:
    write(f"in/{name}", DATA)
    write("in/store/dataset.json", "{}")
    write("in/store/vocabulary/colour.arrow", "x")
    write("in/store/train/part-00000.arrow", "x")
    found = find_files([tmp_path / "in"], "csv")
    assert (names(found.read), len(found.notes), found.others) == ([name], 3, [])
    assert files_by_split(tmp_path / "in", "csv")[1] == ([tmp_path / "in/store"] if name == "train.csv" else [])


@pytest.mark.slow
def test_parts_without_rows_are_passed_over_and_counted(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("in/part-0", "")
    write("in/part-1", HEADER)
    write("in/part-2", gzip.compress(b""))
    write("in/part-3", DATA)
    write("in/README", "a log of colours")
    for options in (["--split", "1"], ["--split", "0.5,0.5", "--split-by", "order"]):
        assert gba_hvd("prepare", tmp_path / "in", "--out", tmp_path / "out", *BY_HAND, *options) == 0
        shown = capsys.readouterr().out
        assert f"files without rows: 3 ({tmp_path}/in/part-0, " in shown
        assert f"files not read: 1 ({tmp_path}/in/README)" in shown
        assert "malformed rows left out: 0 of 6" in shown
        assert gba_hvd("show", tmp_path / "out") == 0
        assert capsys.readouterr().out.count("files without rows: 3") == 1
        (tmp_path / "out").rename(tmp_path / f"out {len(options)}")
    assert [len(ClickLog.open(tmp_path / "out 4", split)) for split in ("train", "valid")] == [3, 3]


@pytest.mark.slow
def test_what_is_not_read_beside_splits_is_named(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train.csv", "README.md", "_SUCCESS"):
        write(f"in/{name}", DATA)
    assert gba_hvd("prepare", tmp_path / "in", "--out", tmp_path / "out", *BY_HAND) == 0
    assert f"not read: {tmp_path}/in/README.md\n" in capsys.readouterr().err


def test_an_input_without_any_row_is_refused(tmp_path: Path, write: Write) -> None:
    files = [write("in/a.csv", HEADER), write("in/b.csv", HEADER), write("in/c.csv", "")]
    with pytest.raises(BadInput, match=r"a\.csv: no rows in this file, nor in the 1 others .*give files with rows"):
        prepare(COLOURS, SplitFiles({"train": files}), tmp_path / "out")
    with pytest.raises(BadInput, match=r"c\.csv: the file is empty, as are all 2 of this input; fetch it again"):
        find_files([files[2], write("in/d.csv", "")], "csv")
    with pytest.raises(BadInput, match=r"no rows in this file"):
        look([write("in/empty.gz", gzip.compress(b""))])


@pytest.mark.slow
def test_an_empty_parquet_part_is_passed_over(tmp_path: Path) -> None:
    table = pa.table({"label": [1, 0, 1], "colour": ["a", "b", "a"]})
    for number, part in enumerate((table.slice(0, 0), table)):
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(part, tmp_path / f"in/part-{number}.parquet")
    recipe = Recipe("parquet", "label", (Categorical("colour"),))
    manifest = prepare(recipe, SplitFiles({"train": [tmp_path / "in"]}), tmp_path / "out")
    assert manifest["splits"]["train"]["rows"] == 3
    assert manifest["input"]["files_without_rows"] == [f"{tmp_path}/in/part-0.parquet"]
    assert look([tmp_path / "in"]).path.name == "part-1.parquet"


def test_the_first_file_with_rows_is_looked_at(tmp_path: Path, write: Write) -> None:
    write("in/part-0", HEADER)
    write("in/part-1", DATA)
    looks = look([tmp_path / "in"])
    assert (looks.path.name, looks.format, looks.delimiter) == ("part-1", "csv", ",")


def test_a_stream_of_a_folder_leaves_out_what_is_hidden(tmp_path: Path) -> None:
    rows: dict[str, Any] = {"user": [1, 2], "click": [0, 1]}
    for name in ("a.parquet", "b.PARQUET", "day=1/c.pq", "_temporary/0/d.parquet", ".old/e.parquet", ".f.parquet"):
        path = tmp_path / ".home/log" / name  # what is above the folder does not matter
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(rows), path)
    for url in (f"{tmp_path}/.home/log", f"file://{tmp_path}/.home/log/"):
        assert len(ParquetStream(url, ids=["user"], label="click")) == 6
    (tmp_path / "new").mkdir()
    (tmp_path / ".home/log").rename(tmp_path / "new/_log")
    with pytest.raises(BadInput, match="names that begin with _ or"):
        ParquetStream(f"{tmp_path}/new", ids=["user"], label="click")
