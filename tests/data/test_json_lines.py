"""JSON lines: known by their looks, read like the same rows in CSV, and refused in a sentence where they are not."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gba_hvd_tools.cli import main

from gba_hvd.data import Categorical, ClickLog, Numeric, Recipe, SplitFiles, json_lines, prepare
from gba_hvd.data.nested_json import nested_columns
from gba_hvd.errors import BadInput

Write = Callable[[str, str | bytes], Path]
N = 3000
COLUMNS = ["--label", "click", "--categorical", "user,item", "--numeric", "price", "--timestamp", "ts"]


def error_of(capsys: pytest.CaptureFixture[str], out: Path, *words: str | Path) -> str:
    status = main(["data", "prepare", *map(str, words), "--out", str(out)])
    said = capsys.readouterr()
    assert status == 1
    assert not out.exists()
    return said.err


def rows() -> list[dict[str, object]]:
    made = []
    for i in range(N):
        row: dict[str, object] = {"user": f"u{i % 37}", "item": i % 11, "price": i % 7 / 4, "click": i % 3 == 0}
        row |= {"ts": 1_700_000_000 + 3600 * i, "genres": ["a", "é|"][: i % 3]}
        row["price"] = None if i % 13 == 0 else row["price"]
        if i % 17 == 0:
            del row["user"]
        made.append(row)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_the_same_rows_as_json_and_csv_are_the_same_dataset(
    pack: Callable[[bytes], bytes], tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows()))
    log = write("in/log.jsonl", pack(lines.encode()))
    text = ["user,item,price,click,ts,genres"]
    for row in rows():
        row["click"] = str(row["click"]).lower()
        row["genres"] = ";".join(row["genres"])  # type: ignore[arg-type]
        text.append(",".join("" if row.get(name) is None else str(row[name]) for name in text[0].split(",")))
    csv = write("in/log.csv", "\n".join(text) + "\n")
    assert main(["data", "prepare", str(log), "--out", str(tmp_path / "json"), *COLUMNS, "--multi", "genres"]) == 0
    assert "JSON, an object a line" in capsys.readouterr().err
    assert main(["data", "prepare", str(csv), "--out", str(tmp_path / "csv"), *COLUMNS, "--multi", "genres=;"]) == 0
    manifests = [json.loads((tmp_path / kind / "dataset.json").read_text()) for kind in ("json", "csv")]
    assert manifests[0]["splits"] == manifests[1]["splits"]  # with the checksums of every part
    for part in ("fields", "numeric"):
        assert [one["missing"] for one in manifests[0][part]] == [one["missing"] for one in manifests[1][part]]
    assert manifests[0]["numeric"][0]["missing"]["train"] > 0


def test_small_blocks_and_bad_lines(tmp_path: Path, write: Write) -> None:
    lines = [json.dumps({"label": i % 2, "user": f"u{i}", "tags": ["a"] if i else None}) for i in range(400)]
    bad = {
        7: "{",
        8: "",
        50: "[1]",
        51: '{"label": 1, "user": {"id": 3}}',
        52: '{"label": 1, "user": ["u1"]}',
        53: '{"label": 1, "user": "u", "tags": "a|b"}',
        54: '{"label": 1, "user": "\\ud800"}',
        399: '{"label": 5, "user": "u"}',
    }
    for at, line in bad.items():
        lines[at] = line
    path = write("in/train.jsonl", "\ufeff" + "\n".join(lines))
    fields = (Categorical("user"), Categorical("tags", is_list=True))
    recipe = Recipe(format="jsonl", label="label", categorical=fields)
    manifest = prepare(recipe, SplitFiles({"train": [path]}), tmp_path / "out", max_bad_rows=8, block_bytes=2000)
    report = manifest["input"]["bad_rows"]
    assert (report["count"], report["rows_read"]) == (8, 400)
    for line, flaw in zip(
        report["first"], ["not JSON: ", "not JSON: ", "not a JSON object", "user is ", "user is "], strict=True
    ):
        assert f": {flaw}" in line
    assert [int(line.split("line ")[1].split(":")[0]) for line in report["first"]] == [8, 9, 51, 52, 53]
    assert 'user is ["u1"], expected one value' in report["first"][4]
    assert len(ClickLog.open(tmp_path / "out")) == 392
    with pytest.raises(BadInput, match="8 malformed rows among"):
        prepare(recipe, SplitFiles({"train": [path]}), tmp_path / "other", max_bad_rows=7, block_bytes=2000)


def test_numbers_are_ids_as_they_are_written(tmp_path: Path, write: Write) -> None:
    large = ["12345678901234567890123", "12345678901234567890124", "7", "7.0"]
    path = write("in/train.json", "".join(f'{{"label": {i % 2}, "user": {one}}}\n' for i, one in enumerate(large * 5)))
    recipe = Recipe(format="jsonl", label="label", categorical=(Categorical("user"),))
    prepare(recipe, SplitFiles({"train": [path]}), tmp_path / "out")
    log = ClickLog.open(tmp_path / "out")
    assert log.tables == {"user": 5}
    assert len(np.unique(log.take(np.arange(4)).ids["user"])) == 4  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_what_to_do(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    log = write("in/log.jsonl", "".join(json.dumps(row) + "\n" for row in rows() if row["genres"]))
    assert "no column 'label': name the one with 0 or 1" in error_of(capsys, out, log, "--categorical", "user")
    assert "no column 'clik'; nearest: click" in error_of(capsys, out, log, "--label", "clik", "--categorical", "user")
    assert "a JSON-lines file has its names" in error_of(capsys, out, log, *COLUMNS, "--columns", "a,b")
    said = error_of(capsys, out, log, "--label", "click", "--categorical", "user", "--max-bad-rows", "-1")
    assert "not used: item, price, ts, genres;" in said
    assert "column 'genres' has lists: --multi genres" in error_of(
        capsys, out, log, *COLUMNS, "--categorical", "genres"
    )
    array = write("in/array.json", json.dumps(rows()[:3], indent=1))
    assert "JSON, but not an object with names and values on each line ([)" in error_of(capsys, out, array, *COLUMNS)
    assert "jq -c '.[]'" in error_of(capsys, out, write("in/line.json", json.dumps(rows()[:3])), *COLUMNS)
    recipe = Recipe("jsonl", "click", (Categorical("usr"),), (Numeric("price"),))
    with pytest.raises(BadInput, match="no column 'usr'; nearest: user"):
        prepare(recipe, SplitFiles({"train": [log]}), out)


def test_a_folder_of_json_lines(tmp_path: Path, write: Write) -> None:
    for split in ("train", "valid", "test"):
        write(f"in/{split}.ndjson", "".join(json.dumps(row) + "\n" for row in rows()[:90]))
    assert main(["data", "prepare", str(tmp_path / "in"), "--out", str(tmp_path / "out"), *COLUMNS]) == 0
    assert len(ClickLog.open(tmp_path / "out", "valid")) == 90


@pytest.mark.slow
def test_columns_of_objects_are_named_with_the_program_that_flattens_them(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[dict[str, object]] = [dict(row) for row in rows()[:90]]
    for row in lines[1:]:
        row["device"] = {"os": {"name": "a", "major": 7}, "app-version": "1.2"}
    lines[5]["device"] = {"locale": "it"}
    log = write("in/log.jsonl", "".join(json.dumps(row) + "\n" for row in lines))
    remedy = (
        "column 'device' is an object on line 2: flatten it, for instance jq -c '. + {device_os_name: .device.os.name, "
        'device_os_major: .device.os.major, "device_app-version": .device."app-version", '
        "device_locale: .device.locale} | del(.device)'"
    )
    for role in (["--categorical", "device"], ["--numeric", "device"], ["--label", "device"], ["--timestamp=device"]):
        assert remedy in error_of(capsys, tmp_path / "out", log, *COLUMNS, *role)
    assert main(["data", "prepare", str(log), "--out", str(tmp_path / "unused"), *COLUMNS]) == 0
    assert f"not used: {remedy}" in capsys.readouterr().err
    ignored = [*COLUMNS[:2], "--categorical", "rest", "--ignore", "device,genres"]
    assert main(["data", "prepare", str(log), "--out", str(tmp_path / "ignored"), *ignored]) == 0
    assert "device" not in capsys.readouterr().err
    assert set(ClickLog.open(tmp_path / "ignored").tables) == {"user", "item", "price", "ts"}


def test_a_list_of_objects_becomes_a_list_for_each_key_of_which_not_all_are_shown(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = [{"id": 7, "price": 1.5}, {"id": 8}]
    many = {f"k{i}": i for i in range(14)}
    log = write(
        "in/log.jsonl", "".join(json.dumps({"click": i % 2, "seen": seen, "many": many}) + "\n" for i in (0, 1))
    )
    refused = error_of(capsys, tmp_path / "out", log, "--label=click", "--multi=seen")
    assert (
        "column 'seen' is a list of objects on line 1: flatten it, for instance "
        "jq -c '. + {seen_id: [.seen[]? | .id?], seen_price: [.seen[]? | .price?]} | del(.seen)'"
    ) in refused
    refused = error_of(capsys, tmp_path / "out", log, "--label=click", "--categorical=many")
    assert "many_k11: .many.k11} | del(.many)' (the first 12 of 14 keys)" in refused


@pytest.mark.parametrize(
    ("history", "program"),
    [
        ([{"item": "9", "t": 17}], ". + {hist_item: [.hist[]? | .item?], hist_t: [.hist[]? | .t?]} | del(.hist)"),
        ([["9", 17], ["8"]], ". + {hist_0: [.hist[]? | .[0]?], hist_1: [.hist[]? | .[1]?]} | del(.hist)"),
    ],
)
def test_a_history_of_pairs_gets_its_program_where_the_first_ones_are_empty(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str], history: Any, program: str
) -> None:
    lines = [{"click": i % 2, "hist": one} for i, one in enumerate([[], None, history])]
    log = write("in/log.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    refused = error_of(capsys, tmp_path / "out", log, "--label=click", "--multi=hist")
    what = "a list of objects" if isinstance(history[0], dict) else "a list of lists"
    assert f"column 'hist' is {what} on line 3: flatten it, for instance jq -c '{program}'" in refused


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize("history", [[1, [2]], [{"item": 1}, [1, 2]], [["9", 17], ["8"]]])
def test_the_program_of_a_history_runs_on_it(history: Any) -> None:
    (text,) = nested_columns([{"hist": history}]).values()
    program = text.partition("jq -c '")[2].partition("'")[0]
    line = json.dumps({"hist": history})
    run = subprocess.run(["jq", "-c", program], check=False, input=line, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert all(isinstance(made, list) and made for made in json.loads(run.stdout).values())


def test_values_in_errors_are_as_they_are_written() -> None:
    _, flaws = json_lines.parse(b'{"a": 1.50}\n{"a": [1.50, {"b": "7"}, null, true]}\n', {"a": False})
    assert flaws == {1: 'a is [1.50, {"b": "7"}, null, true], expected one value'}
    _, flaws = json_lines.parse(b'{"a": 1}\n{"a": ["%s"]}\n' % (b"x" * 100), {"a": False})
    assert flaws == {1: f'a is ["{"x" * 38}..., expected one value'}
