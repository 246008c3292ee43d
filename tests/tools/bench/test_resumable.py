"""Measurements in pieces: what a result file has is kept, only the rest is run, and no other file is overwritten."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from gba_hvd_tools.bench.harness.measure import RunFailed, cell
from gba_hvd_tools.bench.harness.resumable import Results, earlier, missing, read, run_each


@dataclass(frozen=True)
class Run:
    mode: str
    seed: int


RUNS = [Run("sync", 1), Run("gba", 1), Run("sync", 2)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


def test_a_run_without_a_row_is_missing() -> None:
    rows = [{"mode": "gba", "seed": 1, "auc": 0.5}]
    assert missing(RUNS, rows, ("mode", "seed")) == [Run("sync", 1), Run("sync", 2)]
    assert missing(RUNS, [], ("mode", "seed")) == RUNS
    with pytest.raises(RunFailed, match="has no 'seed': give --out another name"):
        missing(RUNS, [{"mode": "gba"}], ("mode", "seed"))


def test_before_the_first_piece_there_are_no_rows(file: Path) -> None:
    assert (earlier(file, ("mode",), {"days": 3}), read(file)) == ({"rows": []}, {})
    file.write_text("")
    assert (earlier(file, ("mode",), {"days": 3}), read(file)) == ({"rows": []}, {})


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "hello", '{"rows": [{"auc": 1}], "settings": {}}', '{"rows": [1], "settings": {}}', '{"rows": []}'],
)
def test_a_file_of_something_else_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(RunFailed, match="no result of this benchmark: give --out another name"):
        earlier(file, ("mode",), {"days": 3})


def test_rows_of_other_settings_are_refused_with_both_values(file: Path) -> None:
    file.write_text(json.dumps({"rows": [], "settings": {"days": 3, "config": "x" * 100, "more": 1}}))
    assert earlier(file, ("mode",), {"days": 3, "config": "x" * 100})["rows"] == []
    with pytest.raises(RunFailed, match=r"other settings \(days: 3 in the file, 9 now, config\): give --out another"):
        earlier(file, ("mode",), {"days": 9, "config": "y" * 100})
    with pytest.raises(RunFailed, match=r"\(new: None in the file, 1 now\)"):
        earlier(file, ("mode",), {"new": 1})


def test_the_result_is_written_after_each_run_and_a_failure_stops_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[int] = []
    written: list[tuple[list[int], list[str]]] = []
    failures: dict[str, str] = {}

    def run(number: int) -> None:
        if number == 2:
            raise RunFailed("no luck")
        done.append(number)

    run_each([1, 2, 3], run, lambda: written.append(([*done], [*failures])), failures)
    assert written == [([1], []), ([1], ["2"]), ([1, 3], ["2"])]
    assert failures == {"2": "no luck"}
    assert capsys.readouterr().err == "gba-hvd: 2: no luck\n"


def test_a_file_is_continued_where_it_was_left(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measured(n: int) -> int:
        results = Results(file, ("mode", "seed"), {"days": 3}, lambda rows: {"n": len(rows)})
        results.run_each(results.waiting(RUNS)[:n], lambda run: results.rows.append({**vars(run), "auc": 0.5}))
        return results.end()

    assert measured(1) == 0
    (before := json.loads(file.read_text()))["machine"]["cores"] = 1000
    file.write_text(json.dumps(before))
    assert measured(2) == 0
    found = json.loads(file.read_text())
    assert [(row["mode"], row["seed"]) for row in found["rows"]] == [("sync", 1), ("gba", 1), ("sync", 2)]
    assert (found["machine"]["cores"], found["settings"], found["n"], found["failures"]) == (1000, {"days": 3}, 3, {})
    assert f"1 rows in {file}, 2 runs to do" in capsys.readouterr().out


def test_a_figure_that_is_not_there_is_a_dash() -> None:
    row = {"auc": 0.5, "lost": None, "pls": {"mean": 0.125}}
    texts = ["{auc:.2f}", "{lost:+.2f}", "{gain:.2f}", "{pls[mean]:.3f}", "{auc:.0%} of {pls[mean]:g}"]
    assert [cell(text, row) for text in texts] == ["0.50", "-", "-", "0.125", "50% of 0.125"]


def test_no_run_starts_when_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    run_each([1, 2], pytest.fail, pytest.fail, {}, noun="trainings", until=time.monotonic() - 1)
    assert capsys.readouterr().out == "no time left for 2 trainings; the same command continues with them\n"
