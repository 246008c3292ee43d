"""`gba-hvd bench rows`: it resumes, and runs that are equal to the bit are done once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gba_hvd_tools import cli
from gba_hvd_tools.bench import row_compression
from gba_hvd_tools.bench.row_compression import Problem, same_run, train

from gba_hvd.errors import BadInput


def small(n: int = 400, held_out: int = 80) -> Problem:
    rng = np.random.default_rng(0)
    ids = np.stack([rng.integers(0, 30, n), 30 + rng.integers(0, 20, n)])
    label = (rng.random(n) < 0.3 + 0.4 * (ids[0] % 2)).astype(np.float32)
    dense = rng.normal(size=(n, 2)).astype(np.float32)
    return Problem(ids, dense, label, held_out, 50, 8, (64,), batch=16, epochs=1, lr=0.05)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", ["dct_mp", "dct_dp"])
def test_an_interval_longer_than_the_run_changes_nothing(name: str, mode: str) -> None:
    problem = small()
    assert problem.n_steps == 10
    longer, longest, shorter = (train(problem, f"{name}:0.1:{every}:inf", mode, 0) for every in (10, 5000, 3))
    assert longer == longest
    assert longer != shorter
    assert longer["bytes_ratio"] > 1


def test_runs_that_are_equal_are_found_and_others_are_not() -> None:
    row: dict[str, Any] = {"dataset": "synthetic", "mode": "sync", "rule": "dct_mp:0.1:1000", "seed": 0, "auc": 0.7}
    assert same_run([row], "synthetic", "sync", "dct_mp:0.1:5000", 0, 800) == row
    for other in (
        ("frappe", "sync", "dct_mp:0.1:5000", 0, 800),
        ("synthetic", "async", "dct_mp:0.1:5000", 0, 800),
        ("synthetic", "sync", "dct_mp:0.1:5000", 1, 800),
        ("synthetic", "sync", "dct_mp:0.1:5000", 0, 1200),
        ("synthetic", "sync", "dct_mp:0.01:5000", 0, 800),
        ("synthetic", "sync", "dct_mp:0.1:100", 0, 800),
        ("synthetic", "sync", "none", 0, 800),
    ):
        assert same_run([row], *other) is None


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[str] = []

    def counted(problem: Problem, rule: str, mode: str, seed: int) -> dict[str, float]:
        trained.append(rule)
        if len(trained) == 3:
            raise BadInput("interrupted")
        return train(problem, rule, mode, seed)

    monkeypatch.setattr(row_compression, "_dlrm_ratios", lambda *_: None)
    monkeypatch.setattr(row_compression, "problem_of", lambda *_: small())
    monkeypatch.setattr(row_compression, "train", counted)
    rules = ["none", "dct_mp:0.1:3", "dct_mp:0.1:1000", "dct_mp:0.1:5000"]
    out = tmp_path / "rows.json"
    arguments = ["bench", "rows", "--rules", *rules, "--seeds", "1", "--out", str(out)]
    assert cli.main(arguments) == 1
    assert [row["rule"] for row in json.loads(out.read_text())["rows"]] == rules[:2]
    assert cli.main(arguments) == 0
    assert trained == ["none", "dct_mp:0.1:3", "dct_mp:0.1:1000", "dct_mp:0.1:1000"]
    rows = {row["rule"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == rules
    assert rows[rules[2]] == {**rows[rules[3]], "rule": rules[2]}
    assert "10 steps" in capsys.readouterr().out
