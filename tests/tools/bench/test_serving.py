"""What the benchmark of saved models concludes; a very small run of it, in which all systems give the same logits."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools import bench
from gba_hvd_tools.bench.harness import peer_environments
from gba_hvd_tools.bench.serving import command as serving

from tests.processes import prefork


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "serving", *words])


def row(model: str, system: str, run: int, rate: float, p99_ms: float = 1.5, load_s: float = 0.5) -> dict[str, Any]:
    sizes = {n: {"p50_ms": 1.0, "p99_ms": p99_ms, "samples_per_s": rate} for n in ("1", "1024")}
    about = {"model": model, "system": system, "run": run, "load_s": load_s, "n_bytes": 10, "logits": [1.0]}
    return {**about, "sizes": {} if model == "large" else sizes}


def test_goals_are_ratios_of_medians() -> None:
    rows = [row("dlrm", "ours", i, rate, p99_ms=3.0) for i, rate in enumerate((100.0, 160.0, 900.0))]
    rows += [row("dlrm", "torch", i, 100.0) for i in range(3)] + [row("large", "ours_mmap", 0, 0.0)]
    goals = serving.summary(rows)["goals"]
    assert goals["dlrm, ours / torch, samples/s at 1,024"] == {"value": 1.6, "goal": 1.5, "is_met": True}
    limited = serving.summary([*rows, row("dlrm", "dense", 0, 120.0)])["goals"]
    assert limited["dlrm, ours / torch, samples/s at 1,024"]["without_lookups"] == 1.2
    assert goals["dlrm, ours, p99 / p50 at 1"] == {"value": 3.0, "goal": 2.0, "is_met": False}
    assert goals["large, ours_mmap, seconds to load"]["is_met"]


def test_a_system_with_other_logits_is_a_failure() -> None:
    rows = [row("dlrm", "torch", 0, 1.0), row("dlrm", "ours", 0, 1.0) | {"logits": [1.1]}]
    assert list(serving.different(rows)) == ["dlrm, ours, 0"]


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peer_environments, "PEERS", tmp_path / "no-peers")
    monkeypatch.setattr(sys, "executable", prefork.interpreter())
    out = tmp_path / "found.json"
    how = ("--rows", "2600", "--samples", "1", "8", "--seconds", "0.01", "--runs", "1", "--models", "din")
    args = options("--out", str(out), *how)
    assert args.run(args) == 0
    found = json.loads(out.read_text())
    assert [one["system"] for one in found["rows"]] == ["ours", "ours_mmap", "ours_remote", "torch", "mlflow", "dense"]
    assert found["not_run"] == {"torchrec": "not installed"} and not found["failures"]
    assert all(set(one["sizes"]) == {"1", "8"} and one["n_bytes"] > 0 for one in found["rows"])
    (remote,) = [one for one in found["rows"] if one["system"] == "ours_remote"]
    assert all(remote["cold"][n]["p50_ms"] > 20 for n in ("1", "8")), (
        "a request with an empty cache waits for the store"
    )
    assert "not installed" in capsys.readouterr().out
    assert args.run(args) == 0 and json.loads(out.read_text())["rows"] == found["rows"], "rows are kept"
