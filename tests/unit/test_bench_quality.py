"""What the quality benchmark plans, keeps and concludes. No training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from gba_hvd_tools import cli
from gba_hvd_tools.bench import quality
from gba_hvd_tools.bench.harness import measure
from gba_hvd_tools.bench.quality import Run

from gba_hvd.faults import FaultSchedule


def row(protocol: str, seed: int, auc: float | None, **more: Any) -> measure.Row:
    found = {"dataset": "frappe", "epochs": 2, "micro_batch": 512, "protocol": protocol, "seed": seed, "auc": auc}
    return {**found, "dropped_share": 0.0, "staleness_mean": None, "staleness_max": None, **more}


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    quality.add_parser(parser.add_subparsers())
    return parser.parse_args(["quality", *words])


def test_all_protocols_of_a_seed_come_before_the_next_seed():
    runs = quality.planned(["frappe", "synthetic"], ["sync", "gba"], [1, 2], None)
    assert [(r.seed, r.dataset, r.protocol) for r in runs[:5]] == [
        (1, "frappe", "sync"),
        (1, "frappe", "gba"),
        (1, "synthetic", "sync"),
        (1, "synthetic", "gba"),
        (2, "frappe", "sync"),
    ]
    assert {r.epochs for r in runs if r.dataset == "frappe"} == {quality.DATASETS["frappe"].epochs}


def test_what_has_a_row_is_not_run_again_unless_the_epochs_differ():
    rows = [row("sync", 1, 0.98)]
    assert quality.missing([Run("frappe", 2, 512, "sync", 1)], rows) == []
    others = [Run("frappe", 3, 512, "sync", 1), Run("frappe", 2, 512, "gba", 1), Run("frappe", 2, 512, "sync", 2)]
    assert quality.missing(others, rows) == others


def test_the_mean_difference_to_sync_is_over_the_seeds_that_both_have():
    rows = [row("gba", 1, 0.90), row("gba", 3, 0.5), row("sync", 1, 0.92), row("gba", 2, 0.97), row("sync", 2, 0.96)]
    found = quality.headline(rows)["frappe, 2 epochs, micro-batches of 512"]
    assert list(found) == ["sync", "gba"]
    assert found["gba"]["vs_sync"] == pytest.approx(-0.005)
    assert found["gba"]["vs_sync_worst"] == pytest.approx(-0.02)
    assert found["gba"]["auc"] == pytest.approx(0.79)
    assert found["sync"]["vs_sync"] == 0.0


def test_runs_of_other_lengths_are_never_compared():
    found = quality.headline([row("sync", 1, 0.9), row("gba", 1, 0.8, epochs=5)])
    assert found["frappe, 5 epochs, micro-batches of 512"]["gba"]["vs_sync"] is None


def test_a_run_that_diverged_is_counted_and_is_in_no_mean(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "120")
    rows = [row("sync", 1, 0.9), row("async", 1, None, staleness_mean=2.0, staleness_max=7), row("async", 2, 0.8)]
    found = quality.headline(rows)["frappe, 2 epochs, micro-batches of 512"]["async"]
    assert (found["seeds"], found["diverged"], found["auc"], found["vs_sync"]) == (2, 1, 0.8, None)
    assert (found["staleness_mean"], found["staleness_max"]) == (2.0, 7)
    quality.show(rows)
    assert "2, 1 diverged" in capsys.readouterr().out


@pytest.mark.parametrize("name", quality.PROTOCOLS)
def test_every_protocol_has_valid_faults_that_slow_a_worker_where_the_mode_is_asynchronous(name: str, tmp_path: Path):
    protocol = quality.PROTOCOLS[name]
    (tmp_path / "faults.json").write_text(json.dumps({"faults": protocol.faults(half=50)}))
    faults = FaultSchedule.load(tmp_path / "faults.json")
    slow = [faults.service(2, step, 1.0) > 0 for step in (49, 50)]
    assert slow == [protocol.mode != "allreduce", (protocol.then or protocol.mode) != "allreduce"]


def test_the_middle_is_counted_in_global_batches():
    assert quality.DATASETS["frappe"].steps(2) == 100
    assert quality.PROTOCOLS["sync_to_gba"].overrides(50, 512) == [
        "switching.mode=allreduce",
        'switching.switch_at={"50": "gba"}',
        "switching.wait_s=60",
    ]


def test_replicas_are_compared_with_steps_of_one_micro_batch_of_each_worker():
    assert quality.PROTOCOLS["sync_each"].overrides(50, 512)[-1] == "train.global_batch=1536"
    assert not any("global_batch" in word for word in quality.PROTOCOLS["sync"].overrides(50, 512))


def test_a_protocol_may_have_other_settings():
    words = quality.protocol_of("shadow_ma:mixing=difference,elasticity=1").overrides(50, 512)
    assert {"switching.sync=ma", "switching.mixing=difference", "switching.elasticity=1"} <= set(words)
    assert quality.protocol_of("gba") is not None and quality.PROTOCOLS["shadow_ma"].settings == {"sync": "ma"}


@pytest.mark.parametrize("name", ["shadow", "shadow_ma:mixing", "gbaa:lookahead=1"])
def test_a_protocol_that_is_none_is_refused_with_those_there_are(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        cli.main(["bench", "quality", "--out", str(tmp_path / "q.json"), "--protocols", name])
    assert "choose one of sync, gba" in capsys.readouterr().err


def test_rows_of_an_earlier_invocation_are_found_again(tmp_path: Path):
    path = tmp_path / "quality.json"
    assert quality.rows_of(path) == []
    quality.write(path, {}, [row("sync", 1, 0.9)], {"frappe, gba, seed 1": "no luck"})
    assert quality.rows_of(path) == [row("sync", 1, 0.9)]
    assert [p.name for p in tmp_path.iterdir()] == ["quality.json"]


@pytest.mark.parametrize("text", ["[]", "{}", "hello", '{"rows": [{"auc": 1}]}'])
def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path, text: str):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(measure.RunFailed, match="no result of this benchmark"):
        quality.rows_of(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--datasets", "frappe"], "frappe needs its files: --data DIR"),
        (["--datasets", "frappe", "--data", "nowhere"], "frappe needs its files: --data DIR"),
        (["--datasets", "synthetic", "--epochs", "0"], "--epochs must be at least 1, got 0"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(tmp_path: Path, words: list[str], message: str):
    with pytest.raises(measure.RunFailed, match=message):
        quality.check(options("--out", str(tmp_path / "out.json"), *words))


def test_a_row_keeps_what_the_summary_says():
    summary = {
        "auc": 0.9, "logloss": 0.3, "steps": 100, "samples_total": 400, "samples_dropped": 20, "switches": [],
        "staleness": {"mean": 0.5, "max": 3, "histogram": {"0": 7, "3": 1}}, "refused": 0, "reissued": 1,
    }  # fmt: skip
    kept = quality.row_of(Run("frappe", 2, 512, "gba", 1), summary, seconds=12.34)
    assert (kept["dropped_share"], kept["staleness_max"], kept["seconds"], kept["reissued"]) == (0.05, 3, 12.3, 1)
    assert quality.missing([Run("frappe", 2, 512, "gba", 1)], [kept]) == []
