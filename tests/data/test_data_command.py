"""`gba-hvd data prepare` and `gba-hvd data show`, as a person types them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from gba_hvd_tools import data_command
from gba_hvd_tools.data_report import plain_lines

from gba_hvd.data import ClickLog
from gba_hvd.data.splits import Progress
from gba_hvd.errors import BadInput

from .colours import GOOD, HEADER

Write = Callable[[str, str | bytes], Path]
BY_HAND = ["--categorical", "colour,shape", "--numeric", "size"]


def gba_hvd(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    data_command.add_parser(parser.add_subparsers())
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
    "unknown preset": (["--preset", "criteo-kagle", "{in}"], "no such preset; there is criteo-kaggle"),
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
        show(Progress("writing", second * 10, 110, second * 1000, 1))
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


def test_a_damaged_manifest_is_said_to_be_one(tmp_path: Path, write: Write) -> None:
    write("set/dataset.json", '{"format": "gba_hvd click log", "version": 1}')
    with pytest.raises(BadInput, match=r"its dataset\.json lacks 'splits'; prepare the dataset again"):
        gba_hvd("show", tmp_path / "set")
