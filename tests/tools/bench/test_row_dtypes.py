"""What the benchmark of narrow rows concludes; a run on a few samples in Frappe's format."""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gba_hvd_tools import bench
from gba_hvd_tools.bench.harness.measure import RunFailed
from gba_hvd_tools.bench.row_dtypes import command as row_dtypes

from gba_hvd.data.presets import FRAPPE_FIELDS
from tests.processes import prefork


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "row-dtypes", *words])


def row(seed: int, dtype: str, auc: float) -> dict[str, Any]:
    return {"seed": seed, "dtype": dtype, "auc": auc}


def test_what_is_lost_is_of_the_same_seed_and_the_worst_one_decides() -> None:
    rows = [row(1, "float32", 0.98), row(1, "int8", 0.9799), row(2, "float32", 0.97), row(2, "int8", 0.9697)]
    found = row_dtypes.headline(rows)
    assert found["by_dtype"]["int8"]["lost"] == pytest.approx(0.0002)
    assert found["by_dtype"]["int8"]["lost_most"] == pytest.approx(0.0003)
    assert not found["int8"]["is_met"]
    assert row_dtypes.headline(rows[:2])["int8"]["is_met"]
    assert row_dtypes.headline(rows[:1])["int8"] is None


def test_a_model_that_predicts_otherwise_than_its_job_is_a_failure() -> None:
    row_dtypes.check_same(0.98, 0.980000001)
    with pytest.raises(RunFailed, match="the job that trained it had"):
        row_dtypes.check_same(0.22, 0.98)


@pytest.mark.parametrize("words", [("--epochs", "0"), ("--data", "nowhere")])
def test_what_would_fail_after_minutes_is_refused_at_once(
    tmp_path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    args = options("--out", str(tmp_path / "found.json"), "--data", str(tmp_path), *words)
    assert args.run(args) == 1
    assert words[0] in capsys.readouterr().err


@pytest.mark.processes
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", prefork.interpreter())
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where prepared stores are cached
    rng, data = np.random.default_rng(1), tmp_path / "data"
    data.mkdir()
    for split, n in {"train": 8192, "valid": 500, "test": 500}.items():
        with gzip.open(data / f"{split}.csv.gz", "wt", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["label", *FRAPPE_FIELDS])
            lines.writerows([int(ids[0] > 4), *ids] for ids in rng.integers(0, 10, (n, len(FRAPPE_FIELDS))).tolist())
    out = tmp_path / "found.json"
    args = options("--out", str(out), "--data", str(data), "--epochs", "1")
    assert args.run(args) == 0
    found = json.loads(out.read_text())
    assert [one["dtype"] for one in found["rows"]] == list(row_dtypes.DTYPES)
    assert all(one["samples"] == 500 and one["auc"] > 0.5 for one in found["rows"])
    assert len({one["auc"] for one in found["rows"]}) > 1, "rows of another dtype give other scores"
