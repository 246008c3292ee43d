"""Inputs that are wrong: each is counted or refused, with its file and line, and what to do."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from gba_hvd.data import Categorical, ClickLog, Identity, Numeric, Recipe, SplitFiles, SplitShares, prepare
from gba_hvd.data.bad_rows import BadRows
from gba_hvd.data.raw_rows import read_rows
from gba_hvd.data.sources import read_blocks
from gba_hvd.errors import BadInput

from .colours import COLOURS, GOOD, HEADER

Prepared = Callable[..., dict[str, Any]]
Write = Callable[[str, str | bytes], Path]

MALFORMED = {
    "too few columns": ("1,3,red\n", "3 columns, expected 4"),
    "too many columns": ("1,3,red,round,extra\n", "5 columns, expected 4"),
    "label is 2": ("2,3,red,round\n", "label label is '2', expected 0 or 1"),
    "label is missing": (",3,red,round\n", "label label is missing, expected 0 or 1"),
    "not a number": ("1,three,red,round\n", "size is 'three', expected a number"),
    "infinite": ("1,inf,red,round\n", "size is 'inf', expected a number"),
    "larger than a float32": ("1,1e39,red,round\n", "size is '1e39', expected a number"),
    "not UTF-8": (b"1,3,r\xe9d,round\n", "not UTF-8: byte 0xe9 at column 6"),
    "carriage return inside": ("1,3,r\red,round\n", "a carriage return inside the line"),
    "quote left open": ('1,3,"red,round\n', "a quote is not closed"),
    "empty line": ("\n", "expected 0 or 1"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_row_is_counted_and_reported_with_its_line(name: str, prepared: Prepared, tmp_path: Path) -> None:
    row, reason = MALFORMED[name]
    bad = row if isinstance(row, bytes) else row.encode()
    manifest = prepared((HEADER + GOOD).encode() + bad + GOOD.encode(), max_bad_rows=1)
    report = manifest["input"]["bad_rows"]
    assert report["count"] == 1
    assert report["rows_read"] == 5
    assert f"{tmp_path}/in/train.csv, line 4: " in report["first"][0]
    assert reason in report["first"][0]
    assert len(ClickLog.open(tmp_path / "out")) == 4


@pytest.mark.parametrize("name", MALFORMED)
def test_past_the_limit_it_stops_and_shows_the_first(name: str, prepared: Prepared, tmp_path: Path) -> None:
    row, reason = MALFORMED[name]
    bad = row if isinstance(row, bytes) else row.encode()
    with pytest.raises(BadInput, match="2 malformed rows among 4 read, the limit is 1;") as error:
        prepared((HEADER + GOOD).encode() + bad * 2, max_bad_rows=1)
    for line in (4, 5):
        assert any(f"train.csv, line {line}: " in row and reason in row for row in str(error.value).splitlines())
    assert not (tmp_path / "out").exists()


def test_lines_are_counted_over_many_blocks_and_several_bad_rows(prepared: Prepared) -> None:
    rows = [f"{i % 2},{i},red,round\n" for i in range(1000)]
    for line in (2, 400, 401, 1001):
        rows[line - 2] = "1,red\n"
    rows[700 - 2] = "7,3,red,round\n"
    rows[701 - 2] = "0,x,red,round\n"
    report = prepared(HEADER + "".join(rows), max_bad_rows=6, block_bytes=512)["input"]["bad_rows"]
    assert report["count"] == 6
    assert [int(row.split("line ")[1].split(":")[0]) for row in report["first"]] == [2, 400, 401, 700, 701]


OPEN, PART = "a quote is not closed in this line", "a part of a quoted value that line 3 leaves open"
DOUBLED = '1,3,r""d,""\n'
UNCLOSED = {
    "by an inch mark and a quote": ('1,3,5" disc,"open\n', {3: OPEN}),
    "twice": ('1,3,"red,round\n' * 2, {3: OPEN, 4: OPEN}),
    "before values in quotes": ('1,3,"red,round\n1,3,"blue, light",square\n', {3: OPEN}),
    "before quotes in text": (f'1,3,"red,round\n{DOUBLED}', {3: OPEN}),
    "by a value over three lines": ('1,3,red,"title\n1,3,fake,row\nend"\n', {3: OPEN, 4: PART, 5: PART}),
    "by a value with quotes inside": ('1,3,"a ""title""\n1,3,fa""ke,row\nend",b\n', {3: OPEN, 4: PART, 5: PART}),
    "by two values": ('1,3,"a\nb","c\n1,3,fake,row\nd"\n', {3: OPEN, 4: PART, 5: PART, 6: PART}),
}


@pytest.mark.parametrize("block_bytes", [8, 1 << 20])
@pytest.mark.parametrize("name", UNCLOSED)
def test_a_line_that_leaves_a_quote_open_takes_no_good_line_with_it(
    name: str, block_bytes: int, prepared: Prepared
) -> None:
    lines, flaws = UNCLOSED[name]
    text = HEADER + "1,3,red,round\n" + lines + '1,3,5" disc,round\n' + GOOD
    manifest = prepared(text, max_bad_rows=9, block_bytes=block_bytes)
    report = manifest["input"]["bad_rows"]
    assert report["count"] == len(flaws)
    for row, (line, flaw) in zip(report["first"], flaws.items(), strict=True):
        assert f"train.csv, line {line}: {flaw}" in row
    assert manifest["splits"]["train"]["rows"] == text.count("\n") - 1 - len(flaws)


def test_the_end_of_a_quoted_value_is_looked_for_near_by(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gba_hvd.data.raw_rows._MOST_QUOTED_BYTES", len(GOOD) * 10)
    text = HEADER + '1,3,"red,round\n' + GOOD * 10 + '1,3,red,8"\n'
    assert prepared(text, max_bad_rows=9)["input"]["bad_rows"]["count"] == 1


def test_lines_with_open_quotes_are_read_in_blocks(write: Write) -> None:
    path = write("train.csv", HEADER + '1,3,"red,round\n1,3,red,"a\nb"\n' * 300)
    blocks = [raw for _, raw in read_rows([path], COLOURS, BadRows(1000), block_bytes=256)]
    assert sum(raw.n_read for raw in blocks) == 900
    assert max(raw.n_read for raw in blocks) < 50


def test_a_file_cut_in_the_middle_of_a_row_says_so(prepared: Prepared) -> None:
    manifest = prepared(HEADER + GOOD + "1,3,re", max_bad_rows=1)
    assert "line 4: 3 columns, expected 4; the file ends in the middle of this row" in str(manifest["input"])


def test_a_last_line_without_line_end_is_a_row(prepared: Prepared) -> None:
    assert prepared(HEADER + GOOD + "1,3,red,round")["splits"]["train"]["rows"] == 3


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gzip", "zstd"])
def test_a_cut_compressed_file_stops_with_the_line_it_reached(
    pack: Callable[[bytes], bytes], prepared: Prepared, tmp_path: Path
) -> None:
    rows = "".join(f"{i % 2},{i},colour {i * 7919 % 1000},round\n" for i in range(20_000))
    whole = pack((HEADER + rows).encode())
    with pytest.raises(BadInput, match=r"train\.csv, line \d+: the compressed file is cut or damaged here"):
        prepared(whole[: len(whole) // 2])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gzip", "zstd"])
def test_a_damaged_compressed_file_stops(pack: Callable[[bytes], bytes], prepared: Prepared) -> None:
    whole = bytearray(pack((HEADER + GOOD * 1000).encode()))
    whole[len(whole) // 2] ^= 0xFF
    with pytest.raises(BadInput):
        prepared(bytes(whole))


@pytest.mark.parametrize("packed", [b"BZh91AY", b"\xfd7zXZ\x00", b"PK\x03\x04", b"PAR1"])
def test_other_kinds_of_file_are_named(packed: bytes, prepared: Prepared) -> None:
    with pytest.raises(BadInput, match=r"this is a (bzip2|xz|zip|Parquet) file, expected text"):
        prepared(packed + b"...")


def test_an_empty_file_is_refused(prepared: Prepared) -> None:
    with pytest.raises(BadInput, match=r"train\.csv: the file is empty"):
        prepared("")


@pytest.mark.parametrize("content", [HEADER, HEADER.strip()])
def test_a_file_with_a_header_only_is_refused(content: str, prepared: Prepared) -> None:
    with pytest.raises(BadInput, match=r"train\.csv: no rows in this file"):
        prepared(content)


def test_a_missing_column_is_answered_with_the_nearest_names(prepared: Prepared) -> None:
    with pytest.raises(BadInput, match=r"train\.csv, line 1: no column 'colour'; nearest: color \(4 columns in all\)"):
        prepared("label,size,color,shape\n" + GOOD)


def test_a_column_that_is_there_twice_is_refused(prepared: Prepared) -> None:
    with pytest.raises(BadInput, match="column 'colour' is there 2 times"):
        prepared("label,size,colour,shape,colour\n1,2,red,round,red\n")


def test_a_missing_file_and_a_folder_without_fitting_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file or folder"):
        prepare(COLOURS, SplitFiles({"train": [tmp_path / "absent.csv"]}), tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="no csv file in this folder"):
        prepare(COLOURS, SplitFiles({"train": [tmp_path / "empty"]}), tmp_path / "out")


@pytest.mark.slow
def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gba_hvd.data.sources.MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(BadInput, match="no line end within"):
        prepared(gzip.compress(bytes(64 << 20)), block_bytes=1 << 16)


@pytest.mark.parametrize("value", ["-1", "9", "15", "x", "", "1.5", "99999999999999999999"])
def test_an_identity_id_out_of_range_is_a_malformed_row(value: str, prepared: Prepared, tmp_path: Path) -> None:
    recipe = Recipe(format="csv", label="label", categorical=(Categorical("user", Identity(rows=5, offset=10)),))
    manifest = prepared(f"label,user\n1,10\n0,14\n1,{value}\n", recipe=recipe, max_bad_rows=1)
    assert "line 4: user is " in manifest["input"]["bad_rows"]["first"][0]
    assert "expected an integer from 10 to 14" in manifest["input"]["bad_rows"]["first"][0]
    assert list(ClickLog.open(tmp_path / "out").take([0, 1]).ids["user"]) == [0, 4]


def test_a_share_is_checked_at_the_end_too(prepared: Prepared) -> None:
    rows = GOOD * 499 + "2,3,red,round\n" * 2
    with pytest.raises(BadInput, match=r"2 malformed rows among 1000 read, the limit is 0\.100% of the rows"):
        prepared(HEADER + rows, max_bad_rows=0.001)
    assert prepared(HEADER + rows, max_bad_rows=0.002)["input"]["bad_rows"]["count"] == 2


def test_a_hopeless_input_stops_early() -> None:
    bad = BadRows(limit=0.001)
    bad.rows_read = 1000
    for line in range(101):
        bad.report("file", f"line {line}", "reason")
    with pytest.raises(BadInput, match="and 96 more"):
        bad.check()


def test_parquet_rows_are_checked_alike(tmp_path: Path) -> None:
    table = {"label": [1, 0, 3], "size": [1.5, None, float("inf")], "colour": ["red", None, "blue"], "shape": [1, 2, 3]}
    pq.write_table(pa.table(table), tmp_path / "train.parquet")
    recipe = Recipe(
        format="parquet", label="label", categorical=COLOURS.categorical, numeric=(Numeric("size", "none"),)
    )
    source = SplitFiles({"train": [tmp_path / "train.parquet"]})
    manifest = prepare(recipe, source, tmp_path / "out", max_bad_rows=1)
    assert manifest["input"]["bad_rows"]["count"] == 1
    assert "row 3: label label is '3', expected 0 or 1" in manifest["input"]["bad_rows"]["first"][0]


def test_a_cut_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"label": [1, 0], "colour": ["a", "b"]}), path)
    path.write_bytes(path.read_bytes()[:-20])
    recipe = Recipe(format="parquet", label="label", categorical=(Categorical("colour"),))
    with pytest.raises(BadInput, match=r"train\.parquet: not a whole Parquet file"):
        prepare(recipe, SplitFiles({"train": [path]}), tmp_path / "out")


def test_lists_where_single_values_are_expected_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [1, 0], "colour": [["a"], ["b"]]}), tmp_path / "train.parquet")
    recipe = Recipe(format="parquet", label="label", categorical=(Categorical("colour"),))
    with pytest.raises(BadInput, match="column 'colour' has lists: --multi colour takes them"):
        prepare(recipe, SplitFiles({"train": [tmp_path / "train.parquet"]}), tmp_path / "out")


@pytest.mark.parametrize(("type", "bits"), [("float32", 24), ("float64", 53)])
def test_ids_that_are_floats_of_lost_digits_are_refused(type: str, bits: int, tmp_path: Path) -> None:
    ids = pa.array([7.0, None, 2.0**bits], pa.float64()).cast(type)
    pq.write_table(pa.table({"label": [1, 0, 1], "user": ids}), tmp_path / "train.parquet")
    recipe = Recipe(format="parquet", label="label", categorical=(Categorical("user"),))
    words = rf"train\.parquet: column 'user': ids are floats, .* from 2\*\*{bits} on \(here {2**bits}\): .* as int64"
    with pytest.raises(BadInput, match=words):
        prepare(recipe, SplitFiles({"train": [tmp_path / "train.parquet"]}), tmp_path / "out")


def test_labels_of_minus_one_and_one_are_refused_with_their_option(prepared: Prepared) -> None:
    with pytest.raises(BadInput, match=r"label is '-1', expected 0 or 1, .*; of -1 and 1 --label-from 1 makes them"):
        prepared(HEADER + GOOD + "-1,3,red,round\n")


def test_a_split_without_rows_is_refused(tmp_path: Path, write: Write) -> None:
    path = write("in/all.csv", HEADER + GOOD)
    with pytest.raises(BadInput, match="split 'valid' got no rows"):
        prepare(COLOURS, SplitShares([path], {"train": 0.999, "valid": 0.001}, by="order"), tmp_path / "out")


@pytest.mark.parametrize("shares", [{"train": 0.5}, {"train": 1.5, "valid": -0.5}, {"train": float("nan")}, {}])
def test_shares_must_sum_to_one(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected positive numbers that sum to 1"):
        SplitShares([], shares)


def test_without_a_train_split_nothing_can_be_fitted(tmp_path: Path, write: Write) -> None:
    with pytest.raises(BadInput, match="one must be called train"):
        prepare(COLOURS, SplitFiles({"test": [write("in/test.csv", HEADER + GOOD)]}), tmp_path / "out")


def test_a_recipe_with_a_column_in_two_roles_is_refused() -> None:
    with pytest.raises(ValueError, match="column size has more than one role"):
        Recipe(format="csv", label="label", categorical=(Categorical("size"),), numeric=(Numeric("size"),))


@pytest.mark.parametrize("type", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()], ids=str)
def test_parquet_text_that_is_not_utf8_is_a_malformed_row(type: pa.DataType, tmp_path: Path) -> None:
    values = pa.array([b"red", b"r\xe9d", None, b"blue"], type if "binary" in str(type) else pa.binary())
    colour = values if values.type == type else _as_it_is(values, type)
    pq.write_table(pa.table({"label": [1, 0, 1, 0], "colour": colour}), tmp_path / "train.parquet")
    recipe = Recipe(format="parquet", label="label", categorical=(Categorical("colour"),))
    source = SplitFiles({"train": [tmp_path / "train.parquet"]})
    report = prepare(recipe, source, tmp_path / "out", max_bad_rows=1)["input"]["bad_rows"]
    assert report["count"] == 1
    assert "row 2: colour: not UTF-8: byte 0xe9 at column 2" in report["first"][0]
    assert ClickLog.open(tmp_path / "out").tables == {"colour": 3}


def _as_it_is(values: pa.Array, type: pa.DataType) -> pa.Array:
    """Bytes called text without a look at them, as some writers do."""
    if type == pa.large_string():
        values = values.cast(pa.large_binary())
    return pa.Array.from_buffers(type, len(values), values.buffers(), null_count=values.null_count)


def test_a_parquet_type_without_use_is_named_with_its_column(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"label": [1, 0], "colour": [{"r": 1}, {"r": 2}]}), path)
    for column in ({"categorical": (Categorical("colour"),)}, {"categorical": (Categorical("colour", Identity(9)),)}):
        with pytest.raises(BadInput, match=r"train\.parquet: column 'colour' is of type struct<r: int64>"):
            prepare(Recipe(format="parquet", label="label", **column), SplitFiles({"train": [path]}), tmp_path / "out")


def test_a_header_that_cannot_be_one_is_refused(prepared: Prepared) -> None:
    with pytest.raises(BadInput, match=r"train\.csv, line 1: expected a header with the names of the columns: field"):
        prepared("x" * 200_000 + "\n1,2\n")


def test_a_train_split_without_rows_is_refused(tmp_path: Path, write: Write) -> None:
    path = write("in/all.csv", HEADER + GOOD)
    with pytest.raises(BadInput, match="split 'train' got no rows"):
        prepare(COLOURS, SplitShares([path], {"train": 0.001, "valid": 0.999}), tmp_path / "out")


@pytest.mark.parametrize("limit", [-1.0, float("nan"), float("inf")])
def test_a_limit_of_bad_rows_that_is_none_is_refused(limit: float) -> None:
    with pytest.raises(BadInput, match="the limit of bad rows is"):
        BadRows(limit)


@pytest.mark.parametrize("settings", [{"separator": ""}, {"separator": "|", "is_list": True}])
def test_a_separator_that_separates_nothing_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tags: separator is"):
        Categorical("tags", **settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zst", "gz"])
def test_a_small_packed_file_that_becomes_gigabytes_is_refused_in_little_memory(tmp_path: Path, kind: str) -> None:
    n_bytes = 1500 << 20
    path = tmp_path / f"train.csv.{kind}"
    if kind == "zst":
        piece = zstandard.ZstdCompressor(level=3).compressobj()
        packed = b"".join(piece.compress(bytes(50 << 20)) for _ in range(n_bytes // (50 << 20))) + piece.flush()
        assert len(packed) < 100_000
    else:
        piece = zlib.compressobj(9, wbits=31)
        packed = b"".join(piece.compress(bytes(50 << 20)) for _ in range(4)) + piece.flush()
    path.write_bytes(packed)
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match="no line end within 64 MiB"):
            list(read_blocks(path))
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()
