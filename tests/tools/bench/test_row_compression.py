"""`gba-hvd bench rows`: it resumes, and runs that are equal to the bit are done once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gba_hvd_tools import cli
from gba_hvd_tools.bench import row_compression
from gba_hvd_tools.bench.row_compression import Problem, Way, same_run, specs_of, train

from gba_hvd.errors import BadInput


def small(n: int = 400, held_out: int = 80) -> Problem:
    rng = np.random.default_rng(0)
    ids = np.stack([rng.integers(0, 30, n), 30 + rng.integers(0, 20, n)])
    label = (rng.random(n) < 0.3 + 0.4 * (ids[0] % 2)).astype(np.float32)
    dense = rng.normal(size=(n, 2)).astype(np.float32)
    return Problem(ids, dense, label, held_out, (30, 20), 8, (64,), batch=16, epochs=1, lr=0.05)


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


def test_options_of_a_rule() -> None:
    _, rows = specs_of("dct_mp:0.05:100:float32:per_table")
    assert (rows.keep, rows.refresh_every, rows.values, rows.per_table) == (0.05, 100, "none", True)
    dense, _ = specs_of("dct_dp:0.01:100:inf:float32")
    assert (dense.drift, dense.values) == (math.inf, "none")
    _, plain = specs_of("dct_mp:0.05:100")
    assert (plain.values, plain.per_table) == ("int8", False)
    with pytest.raises(BadInput, match=r"'per_tabel' is not known: did you mean 'per_table'"):
        specs_of("dct_mp:0.05:100:per_tabel")
    with pytest.raises(BadInput, match="no setting 'per_table'"):
        specs_of("ternary_ef:0.02:1000:per_table")


def test_per_table_each_table_sends_its_share() -> None:
    keys = np.arange(50)
    rows = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    rows[30:] *= 0.001
    rules = "dct_mp:0.1:9:float32", "dct_mp:0.1:9:float32:per_table"
    seen = [Way(specs_of(rule)[1], (30, 20), 8).pull(keys, rows) for rule in rules]
    sent = [(np.count_nonzero(of[:30]), np.count_nonzero(of[30:])) for of in seen]
    assert sent == [(40, 0), (24, 16)]


@pytest.mark.parametrize(("option", "is_exact"), [("", False), (":float32", True)])
def test_values_are_rounded_unless_they_travel_as_float32(option: str, is_exact: bool) -> None:
    rows = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    seen = Way(specs_of(f"dct_mp:0.1:9{option}")[1], (50,), 8).pull(np.arange(50), rows)
    assert np.count_nonzero(seen) == 40
    assert np.array_equal(seen[seen != 0], rows[seen != 0]) == is_exact


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
