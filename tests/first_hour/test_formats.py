"""`gba-hvd data prepare` on files as people have them: what is guessed is right, what cannot be guessed is said."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from gba_hvd_tools.cli import main

from gba_hvd.data import ClickLog, RowEncoder
from gba_hvd.data.recipe import Part
from gba_hvd.data.sniff import have_commas, why_no_number
from gba_hvd.data.times import format_of, part_of

from .clicks import ratings, tagged

N = 2000


def prepared(out: Path, *words: str | Path) -> dict[str, ClickLog]:
    assert main(["data", "prepare", *map(str, words), "--out", str(out)]) == 0
    return {split: ClickLog.open(out, split) for split in ("train", "valid", "test")}


def refused(capsys: pytest.CaptureFixture[str], out: Path, *words: str | Path) -> str:
    assert main(["data", "prepare", *map(str, words), "--out", str(out)]) == 1
    assert not out.exists()
    return capsys.readouterr().err


def avazu(path: Path) -> Path:
    """As Avazu's log: `hour` is YYMMDDHH, ids are eight hexadecimal digits, some of which read as numbers (1e5)."""
    rng = np.random.default_rng(3)
    lines = ["id,click,hour,C1,banner_pos,site_id,device_ip,C14"]
    for i in range(N):
        site = "10000e05" if i % 171 == 0 else f"{rng.integers(0, 2**32):08x}"
        hour = f"1410{21 + i % 7:02}{i % 24:02}"
        lines.append(f"{i},{int(rng.random() < 0.2)},{hour},1005,{i % 3},{site},{rng.integers(0, 50):08x},{i % 9}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_avazu_with_all_other_columns_and_features_of_its_hour(tmp_path: Path) -> None:
    columns = ["--label", "click", "--timestamp", "hour", "--ignore", "id", "--categorical", "rest"]
    columns += ["--split-by", "order"]
    log = prepared(tmp_path / "out", avazu(tmp_path / "train.csv"), *columns, "--min-count", "2")["train"]
    assert list(log.tables) == ["C1", "banner_pos", "site_id", "device_ip", "C14", "hour_hour", "hour_weekday"]
    assert (log.tables["hour_hour"], log.tables["hour_weekday"]) == (24, 7)
    batch = log.take(np.arange(len(log)))
    assert set(batch.ids["hour_hour"].tolist()) == set(range(24))  # type: ignore[union-attr]
    days = batch.ids["hour_weekday"]
    assert int(days[0]) == 1  # type: ignore[index]  # 21 October 2014 was a Tuesday


def test_ids_in_hexadecimal_are_refused_as_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = avazu(tmp_path / "train.csv")
    reported = refused(
        capsys, tmp_path / "out", path, "--label", "click", "--numeric", "site_id", "--categorical", "C1"
    )
    assert "--numeric site_id: its values look like ids in hexadecimal" in reported
    assert "can be read as numbers, such as 10000e05; make it --categorical site_id" in reported


@pytest.mark.slow
def test_ratings_between_colons_without_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ratings(tmp_path / "ratings.dat")
    reported = refused(capsys, tmp_path / "out", path, "--label", "like", "--categorical", "user,movie")
    assert "the first line looks like data, not like names" in reported
    assert "name its 4 columns in order with --columns A,B,..." in reported
    names = ["--columns", "user,movie,like,time", "--label", "like", "--timestamp", "time", "--categorical", "rest"]
    logs = prepared(tmp_path / "out", path, *names)
    assert "'::' between columns, no header" in capsys.readouterr().err
    assert list(logs["train"].tables) == ["user", "movie", "time_hour", "time_weekday"]
    assert sum(map(len, logs.values())) == 6000


@pytest.mark.slow
def test_ratings_become_labels_from_a_number_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{i % 50}::{i % 30}::{i % 5 + 1}::978300760" for i in range(N)]
    (tmp_path / "ratings.dat").write_text("\n".join(lines) + "\n")
    words = [tmp_path / "ratings.dat", "--columns", "user,movie,rating,time", "--label", "rating"]
    words += ["--categorical", "user,movie"]
    assert "(of ratings --label-from N makes it; --rating rating keeps the number)" in refused(
        capsys, tmp_path / "out", *words
    )
    logs = prepared(tmp_path / "out", *words, "--label-from", "4")
    labels = np.concatenate([log.take(np.arange(len(log))).label.numpy() for log in logs.values()])
    assert labels.mean() == pytest.approx(2 / 5)


@pytest.mark.slow
def test_a_tsv_with_a_header(tmp_path: Path) -> None:
    lines = ["label\tuser\tprice", *(f"{i % 2}\tu{i % 9}\t{i / 7:.2f}" for i in range(N))]
    (tmp_path / "log.tsv").write_text("\n".join(lines) + "\n")
    log = prepared(tmp_path / "out", tmp_path / "log.tsv", "--categorical", "user", "--numeric", "price")["train"]
    assert (log.tables, log.n_dense) == ({"user": 10}, 1)


@pytest.mark.slow
def test_quotes_between_tabs_are_reported_with_the_option_for_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["label\tuser", *(f'{i % 2}\t"{i % 9}"' for i in range(90))]
    (tmp_path / "log.tsv").write_text("\n".join(lines) + "\n")
    reported = "tab between columns, a header, quotes around values (--format tsv: quotes are text)"
    for options, is_reported, first in (((), True, "0"), (("--format", "tsv"), False, '"0"')):
        out = tmp_path / f"out{len(options)}"
        prepared(out, tmp_path / "log.tsv", "--categorical", "user", *options)
        assert (reported in capsys.readouterr().err) == is_reported
        assert first in RowEncoder.open(out).vocabularies["user"].to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize("delimiter", [";", "|", ","])
def test_quoted_values_hold_their_delimiter(tmp_path: Path, delimiter: str) -> None:
    lines = [delimiter.join(["label", '"C1, site_id"', "user"])]
    lines += [delimiter.join([str(i % 2), f'"a{delimiter} {i % 4}"', f"u{i % 9}"]) for i in range(N)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    for number, name in enumerate(["C1, site_id", '"C1, site_id", user']):  # given alone, and among others
        log = prepared(tmp_path / str(number), tmp_path / "log.csv", "--categorical", name, "--categorical", "user")
        assert log["train"].tables == {"C1, site_id": 5, "user": 10}


@pytest.mark.slow
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gz", "zst"])
def test_packed_text_is_looked_at_like_plain_text(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    packed = tmp_path / "log.csv.packed"
    packed.write_bytes(pack(tagged(tmp_path / "log.csv").read_bytes()))
    columns = ["--categorical", "rest", "--multi", "tags=|", "--numeric", "price"]
    assert list(prepared(tmp_path / "out", packed, *columns)["train"].tables) == ["user", "tags"]


def test_parquet_with_times_of_its_own(tmp_path: Path) -> None:
    seconds = np.arange(N) * 3600
    table = pa.table({
        "label": np.arange(N) % 2, "user": [f"u{i % 9}" for i in range(N)],
        "at": pa.array(seconds * 1_000_000, pa.timestamp("us")),
    })  # fmt: skip
    pa.parquet.write_table(table, tmp_path / "log.parquet")
    columns = ["--categorical", "rest", "--timestamp", "at", "--split-by", "order"]
    log = prepared(tmp_path / "out", tmp_path / "log.parquet", *columns)["train"]
    batch = log.take(np.array([0, 25]))
    assert [ids.tolist() for ids in (batch.ids["at_hour"], batch.ids["at_weekday"])] == [[0, 1], [3, 4]]  # type: ignore[union-attr]


WRONG = {
    "the label alone": (["--label", "click"], "--categorical rest (here: id, hour, C1, banner_pos"),
    "no label": (["--categorical", "rest"], "no column 'label': name the one with 0 or 1, --label COLUMN"),
    "a label that is not there": (["--label", "clik", "--categorical", "rest"], "no column 'clik'; nearest: click"),
    "names beside a header": (
        ["--columns", "id,click,x", "--label", "click", "--categorical", "rest"], "its first line names the columns",
    ),
    "too few names": (
        ["--no-header", "--columns", "a,b", "--label", "a", "--categorical", "b"], "8 columns with comma between them",
    ),
    "a time that is none": (
        ["--label", "click", "--categorical", "C1", "--timestamp", "site_id"], "are no times in a known way",
    ),
    "ignored and used": (
        ["--label", "click", "--categorical", "C1", "--ignore", "C1"], "--ignore C1: has another role as well",
    ),
    "another format": (["--label", "click", "--categorical", "C1", "--format", "parquet"], "this is no Parquet file"),
    "an option that says nothing new": (["--preset", "frappe", "--delimiter", "tab"], "leave out --delimiter"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_guessed_is_said_with_the_option_that_mends_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = WRONG[name]
    assert message in refused(capsys, tmp_path / "out", avazu(tmp_path / "log.csv"), *words)


@pytest.mark.parametrize(
    ("values", "format"),
    [
        (["978300760", "1046454590"], "unix"),
        (["1609459200000"], "unix_ms"),
        (["14102100", "14103023"], "%y%m%d%H"),
        (["20141021"], "%Y%m%d"),
        (["2014102100"], "%Y%m%d%H"),
        (["1413849600"], "unix"),
        (["2014-10-21 13:00:00", "2014-10-21T13:00:00+02:00", "2014-10-21"], "iso"),
        (["a99f214a"], None),
        (["12"], "unix"),
        ([], None),
    ],
)
def test_times_are_known_by_their_looks(values: list[str], format: str | None) -> None:
    assert format_of(values) == format


@pytest.mark.parametrize("zone", ["", "Z", "+02", "+0200", "-08:00", ".5+02:00", ".123456789Z", ".1234567"])
def test_an_iso_time_keeps_the_hour_and_the_day_that_are_written(zone: str) -> None:
    texts = [f"2026-03-01T23:30:00{zone}"]
    assert format_of(texts) == "iso"
    wrong: list[str] = []
    parts: tuple[Part, ...] = ("hour", "weekday")
    found = [part_of(pa.array(texts), "iso", part, lambda at, value: wrong.append(value))[0].as_py() for part in parts]
    assert (found, wrong) == ([23, 6], [])


def test_a_parquet_time_has_the_hour_of_its_zone() -> None:
    at = pa.array([1_772_407_800], pa.timestamp("s", "Europe/Rome"))  # 23:30 in UTC
    assert part_of(at, "iso", "hour", lambda at, value: None).to_pylist() == [0]


def test_a_bad_value_now_and_then_makes_no_column_of_numbers_text() -> None:
    assert why_no_number(["1.5"] * 999 + ["n/a"]) is None
    assert why_no_number(["12345678", "123e4567"] * 50) is None
    assert "text" in (why_no_number(["red", "blue", "1"]) or "")


@pytest.mark.parametrize(
    "numbers",
    [
        ["59,12", "7", ",5", "-1,5e-3"],
        ["1.234,56", "1.234.567,8"],
        ["1,234", "12,345,678.9"],
        ["1 234,5", "1\u00a0234\u202f567,8"],
        ["59,12", "", "NA", "1,5", "NULL"],
    ],
)
def test_numbers_with_commas_are_recognised(numbers: list[str]) -> None:
    assert "its values look like numbers with commas (" in (why_no_number(numbers) or "")
    assert have_commas(numbers)


@pytest.mark.parametrize(
    "texts", [["red,blue"], ["1,2,3"], ["1,234,5"], ["12.34,5", "x"], ["7"], ["NA", ""], ["12 34,5"], []]
)
def test_other_texts_and_plain_numbers_are_no_numbers_with_commas(texts: list[str]) -> None:
    assert not have_commas(texts)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_decimal_commas_are_refused_with_how_to_write_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path, dwell = tmp_path / f"a.{kind}", ["59,12", "3,5", "8"] * 20
    if kind == "csv":
        path.write_text("user;dwell;click\n" + "".join(f"u{i};{one};{i % 2}\n" for i, one in enumerate(dwell)))
    else:
        columns = {"user": [f"u{i}" for i in range(60)], "dwell": dwell, "click": [i % 2 for i in range(60)]}
        pa.parquet.write_table(pa.table(columns), path)
    reported = refused(
        capsys, tmp_path / "out", path, "--label", "click", "--numeric", "dwell", "--categorical", "user"
    )
    assert "--numeric dwell: its values look like numbers with commas (59,12 and 3,5); 20 of 60 can be read" in reported
    assert "write them with a point before the decimals and nothing between thousands, such as 1234.5" in reported
    assert "(lists of ids: --multi 'dwell=,')" in reported and "--categorical" not in reported
