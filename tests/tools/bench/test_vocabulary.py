"""What the benchmark of hashed tables plans, keeps and concludes; and a very small run of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gba_hvd_tools import bench
from gba_hvd_tools.bench import vocabulary

from gba_hvd.data import SyntheticClickLog
from gba_hvd.shm import reaper


def row(task: str, variant: str, seed: int, **figures: Any) -> dict[str, Any]:
    return {
        "task": task,
        "variant": variant,
        "seed": seed,
        "n_rows": 10,
        "n_bytes": 100,
        "bytes_per_row": 10,
        **figures,
    }


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "vocabulary", *words])


def test_speed_is_a_ratio_of_medians_and_quality_a_difference_of_means() -> None:
    speeds = [("plain", 100.0), ("plain", 300.0), ("plain", 110.0), ("hash64", 99.0)]
    rows = [row("speed", name, seed, samples_per_s=value) for seed, (name, value) in enumerate(speeds)]
    aucs = {"modulo": (0.70, 0.72), "hash64": (0.71, 0.72), "full": (0.75, 0.75)}
    rows += [row("drift", name, seed, auc=auc) for name, both in aucs.items() for seed, auc in enumerate(both)]
    found = vocabulary.summary(rows)
    assert found["speed"]["ratio"] == pytest.approx(0.9) and found["speed"]["is_met"]
    assert found["drift"]["gain"] == pytest.approx(0.005) and found["drift"]["is_met"]
    assert "frappe" not in found


def test_fields_share_a_table_and_an_id_of_two_fields_is_two_ids() -> None:
    log = SyntheticClickLog(100, {"a": 50, "b": 50})
    raw, few = vocabulary.Fields(log, None), vocabulary.Fields(log, 7)
    ids, rows = raw.take(np.arange(100)).ids, few.take(np.arange(100)).ids
    assert (ids["a"] >= 0).all() and not set(ids["a"].tolist()) & set(ids["b"].tolist())
    assert (ids["a"] % 7 == rows["a"]).all()
    assert set(raw.all_ids()) == {*ids["a"].tolist(), *ids["b"].tolist()}


def test_frappe_without_its_files_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = options("--out", str(tmp_path / "found.json"))
    assert args.run(args) == 1
    assert "frappe needs --data" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_run_is_kept_and_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reaper, "start", lambda folder, grace_s: None)
    out = tmp_path / "found.json"
    words = ["--out", str(out), "--tasks", "speed", "drift", "--seeds", "1", "--rows", "500", "--micro-batches", "3",
             "--micro-batch", "50", "--samples", "300", "--days", "2", "--field-rows", "200", "--dim", "4"]  # fmt: skip
    args = options(*words)
    assert args.run(args) == 0
    found = json.loads(out.read_text())
    assert set(found["summary"]) == {"speed", "drift"} and len(found["rows"]) == 5
    (hashed,) = [row for row in found["rows"] if row["task"] == "drift" and row["variant"] == "hash64"]
    assert 0 < hashed["with_row"] < hashed["n_ids"] and len(hashed["without_row"]) == 5
    assert all(0 < share < 1 for share in hashed["without_row"].values())
    by_variant = found["summary"]["drift"]["variants"]
    assert abs(by_variant["modulo"]["n_bytes"] / by_variant["hash64"]["n_bytes"] - 1) < 0.2
    assert by_variant["hash64"]["bytes_per_row"] > by_variant["modulo"]["bytes_per_row"] >= 36
    assert args.run(args) == 0
    assert "5 rows in" in capsys.readouterr().out
