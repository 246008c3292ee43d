"""The benchmarks of days and of an emulated day of load, with real jobs of tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gba_hvd_tools import cli

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800), pytest.mark.variant]


def test_a_mode_inherits_the_base_and_what_has_rows_is_not_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "days.json"
    words = ["bench", "quality-days", "--out", str(out), "--modes", "gba", "--seeds", "5", "--base-days", "1"]
    words += ["--days", "1", "--samples", "8192", "--directions", "from_sync"]
    assert cli.main(words) == 0
    found = json.loads(out.read_text())
    modes = {(row["phase"], row["base"], row["then"], row["day"]): row["mode"] for row in found["rows"]}
    assert modes == {
        ("base", "sync", "", 0): "allreduce", ("after", "sync", "sync", 1): "allreduce",
        ("after", "sync", "gba", 1): "gba",
    }  # fmt: skip
    for row in found["rows"]:
        assert row["steps_of_job"] == 4, "a job continues where its base ended, and counts its own steps"
        assert row["grad_norms"]["steps"] == 4 and 0.4 < row["auc"] < row["auc_bayes"] + 0.01
    assert set(found["goal"]) == {"from_sync"}
    assert [path.name for path in tmp_path.iterdir()] == ["days.json"], "base models are removed"
    capsys.readouterr()
    assert cli.main(words) == 0
    assert "0 chains to do" in capsys.readouterr().out


def test_a_day_of_load_has_rates_by_hour_and_is_not_run_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "load.json"
    words = ["bench", "cluster-load", "--out", str(out), "--modes", "auto", "--day", "6", "--service-ms", "20"]
    words += ["--plot", str(tmp_path / "load.svg")]
    assert cli.main(words) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert len(row["by_part"]) == 24 and sum(row["by_part"]) > 0
    assert row["account"]["lost"] == 0
    assert (tmp_path / "load.svg").stat().st_size > 5000
    capsys.readouterr()
    assert cli.main(words) == 0
    assert "0 runs to do" in capsys.readouterr().out
