"""What the quality benchmark plans, keeps and concludes. No training."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gba_hvd_tools import cli
from gba_hvd_tools.bench import quality
from gba_hvd_tools.bench.harness import measure, resumable
from gba_hvd_tools.bench.quality import Run

from gba_hvd.faults import FaultSchedule
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.update_rules import RULES, check


def row(protocol: str, seed: int, auc: float | None, **more: Any) -> measure.Row:
    found = {**vars(Run("frappe", 2, 512, protocol, seed)), "metric": "auc", "auc": auc}
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
    assert resumable.missing([Run("frappe", 2, 512, "sync", 1)], rows, quality.KEY) == []
    others = [Run("frappe", 3, 512, "sync", 1), Run("frappe", 2, 512, "gba", 1), Run("frappe", 2, 512, "sync", 2)]
    assert resumable.missing(others, rows, quality.KEY) == others


def test_the_mean_difference_to_sync_is_over_the_seeds_that_both_have():
    rows = [row("gba", 1, 0.90), row("gba", 3, 0.5), row("sync", 1, 0.92), row("gba", 2, 0.97), row("sync", 2, 0.96)]
    found = quality.headline(rows)["frappe, 2 epochs, micro-batches of 512, 3 workers"]
    assert list(found) == ["sync", "gba"]
    assert found["gba"]["vs_sync"] == pytest.approx(-0.005)
    assert found["gba"]["vs_sync_worst"] == pytest.approx(-0.02)
    assert found["gba"]["auc"] == pytest.approx(0.79)
    assert found["sync"]["vs_sync"] == 0.0


def test_runs_of_other_lengths_are_never_compared():
    found = quality.headline([row("sync", 1, 0.9), row("gba", 1, 0.8, epochs=5)])
    assert found["frappe, 5 epochs, micro-batches of 512, 3 workers"]["gba"]["vs_sync"] is None


def test_a_run_that_diverged_is_counted_and_is_in_no_mean(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "120")
    rows = [row("sync", 1, 0.9), row("async", 1, None, staleness_mean=2.0, staleness_max=7), row("async", 2, 0.8)]
    found = quality.headline(rows)["frappe, 2 epochs, micro-batches of 512, 3 workers"]["async"]
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


def test_who_asks_for_the_protocol_of_days_is_told_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["bench", "quality", "--out", str(tmp_path / "q.json"), "--protocols", "days"])
    assert "gba-hvd bench quality-days" in capsys.readouterr().err


def test_a_change_of_mode_may_come_at_another_step():
    protocol = quality.protocol_of("sync_to_gba:at=100,staleness=inverse")
    assert {'switching.switch_at={"100": "gba"}', "switching.staleness=inverse"} <= set(protocol.overrides(400, 512))
    assert protocol.faults(400) == [{"kind": "slow", "worker": 2, "factor": 3.0, "from_step": 100}]
    for wrong in ("gba:at=100", "sync_to_gba:at=0", "sync_to_gba:at=x"):
        with pytest.raises(argparse.ArgumentTypeError, match="at= is a step"):
            quality.protocol_of(wrong)
    with pytest.raises(argparse.ArgumentTypeError, match="--rules dc"):
        quality.protocol_of("async:rule=dc")


def test_what_has_no_effect_on_a_protocol_is_run_once_without_it():
    runs = quality.planned(
        ["synthetic"], ["sync", "async", "shadow_ma"], [1], None,
        workers=[4], threads=[1, 2], rules=["none", "dc"], sgd_lrs=[0.1],
    )  # fmt: skip
    assert [(r.protocol, r.threads, r.rule) for r in runs] == [
        ("sync", 1, "none"),
        ("async", 1, "none"),
        ("async", 1, "dc"),
        ("shadow_ma", 1, "none"),
        ("shadow_ma", 2, "none"),
    ]
    assert {(r.workers, r.sgd_lr) for r in runs} == {(4, 0.1)}


def test_the_last_of_several_workers_is_slow():
    (slow,) = quality.PROTOCOLS["async"].faults(half=50, workers=8)
    assert (slow["worker"], slow["factor"]) == (7, 3.0)
    assert quality.PROTOCOLS["async"].faults(half=50, workers=1) == []
    assert "train.global_batch=4096" in quality.PROTOCOLS["sync_each"].overrides(50, 512, workers=8)
    assert "8" in quality.variant(quality.DATASETS["synthetic"], 8).command


def test_every_rule_has_the_same_pace():
    usual = Run("frappe", 2, 512, "async", 1, sgd_lr=0.03)
    assert usual.dense_overrides == ["dense.optimizer=sgd", "dense.momentum=0.9", "dense.lr=0.03"]
    (lr,) = [word for word in replace(usual, rule="delayed_nesterov").dense_overrides if "lr" in word]
    assert float(lr.split("=")[1]) == pytest.approx(0.3)
    assert Run("frappe", 2, 512, "async", 1).dense_overrides == []


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "none"])
def test_every_rule_goes_with_the_optimizer_of_the_comparison(rule: str):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=quality.MOMENTUM)
    check(rule, spec_of(optimizer))


def test_rules_and_rates_are_ranked_over_the_seeds_that_all_of_them_have():
    rows = [
        row("async", seed, auc, auc_last=auc, rule=rule, sgd_lr=0.1, workers=4)
        for rule, by_seed in {"none": {1: 0.6, 2: 0.9}, "dc": {1: 0.7}, "dana_zero": {1: None}}.items()
        for seed, auc in by_seed.items()
    ]
    (line,) = quality.best_rules(rows)
    assert line.endswith("best rule, AUC after the last epoch, 1 seed: dc 0.70000, none 0.60000, dana_zero diverged")
    assert "4 workers, async" in line
    assert list(quality.best_rates(rows)) == []
    grid = [row("sync_each", 1, None, auc_last=lr, sgd_lr=lr, workers=1) for lr in (0.1, 0.3)]
    (line,) = quality.best_rates([*grid, row("sync_each", 1, None, auc_last=None, sgd_lr=1.0, workers=1)])
    assert line.endswith("1 seed: 0.3 0.30000, 0.1 0.10000, 1 diverged")


def test_example_level_parallelism_is_the_samples_computed_on_at_once(capsys: pytest.CaptureFixture[str]):
    rows = [row("shadow_ma", 1, 0.9, workers=4, threads=2, samples_per_s=10.0)]
    (found,) = quality.headline(rows).values()
    assert found["shadow_ma, 2 threads"]["elp"] == 512 * 4 * 2
    assert found["shadow_ma, 2 threads"]["samples_per_s"] == 10.0
    quality.show([*rows, row("shadow_ma", 1, 0.8, workers=1, threads=1)])
    out = capsys.readouterr().out
    table = out[out.index("by example-level parallelism") :]
    assert table.index(" 512 ") < table.index(" 4096 ") and "10" in table


@pytest.mark.parametrize(
    ("error", "is_one"),
    [("GbaError: 100 gradients in a row were not finite, the last of worker 1", True), ("WorkerLost: x", False)],
)
def test_a_job_that_failed_of_values_that_are_not_finite_diverged(error: str, is_one: bool):
    assert quality.diverged({"error": error, "samples_total": 0}) == is_one
    assert not quality.diverged({})


def test_rows_of_an_earlier_invocation_are_found_again(tmp_path: Path):
    path = tmp_path / "quality.json"
    results = resumable.Results(path, quality.KEY, None, quality.more_of)
    results.rows.append(row("sync", 1, 0.9))
    results.write()
    assert resumable.earlier(path, quality.KEY)["rows"] == [row("sync", 1, 0.9)]
    assert [p.name for p in tmp_path.iterdir()] == ["quality.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--datasets", "frappe"], "frappe needs its files: --data DIR"),
        (["--datasets", "frappe", "--data", "nowhere"], "frappe needs its files: --data DIR"),
        (["--datasets", "synthetic", "--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--datasets", "synthetic", "--workers", "0"], "--workers must be positive, got 0"),
        (["--datasets", "synthetic", "--protocols", "sync", "--rules", "dc"], "no gradient is late with sync"),
        (["--datasets", "synthetic", "--protocols", "async", "--threads", "2"], "none of async has replicas"),
        (["--datasets", "synthetic", "--rules", "delayed_nesterov"], "a learning rate of its own"),
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
    assert resumable.missing([Run("frappe", 2, 512, "gba", 1)], [kept], quality.KEY) == []


def test_a_retrieval_is_compared_by_recall(capsys: pytest.CaptureFixture[str]):
    of = {"dataset": "youtube_dnn", "metric": "recall_at_50"}
    rows = [
        row("sync", 1, 0.9), row("gba", 1, 0.8),
        row("sync", 1, None, recall_at_50=0.40, recall_at_50_last=0.39, **of),
        row("gba", 1, None, recall_at_50=0.41, recall_at_50_last=0.41, **of),
        row("async", 1, None, recall_at_50=None, recall_at_50_last=None, **of),
    ]  # fmt: skip
    found = quality.headline(rows)["youtube_dnn, 2 epochs, micro-batches of 512, 3 workers"]
    assert found["gba"]["recall_at_50"] == 0.41
    assert found["gba"]["vs_sync"] == pytest.approx(0.01)
    assert found["gba"]["vs_sync_last"] == pytest.approx(0.02)
    assert found["async"]["diverged"] == 1
    quality.show(rows)
    shown = capsys.readouterr().out
    assert "test AUC on frappe" in shown and "test recall@50 on youtube_dnn" in shown


def test_workloads_of_sequences_are_run_when_they_are_named():
    assert options("--out", "x").datasets == ["frappe", "synthetic"]
    runs = quality.planned(
        options("--out", "x", "--datasets", "din", "dien", "youtube_dnn").datasets, ["gba"], [1], None
    )
    assert [(r.dataset, r.micro_batch) for r in runs] == [("din", 128), ("dien", 128), ("youtube_dnn", 128)]


@pytest.mark.parametrize("name", quality.DATASETS)
def test_a_data_set_is_what_its_configuration_says(name: str):
    """The benchmark sets epochs, micro-batch and seed; the middle of training is counted from the rest."""
    of = quality.DATASETS[name]
    settings = yaml.safe_load((quality.EXAMPLES / "configs" / f"{of.config}.yaml").read_text())
    assert settings["train"]["global_batch"] == of.global_batch
    if not of.needs_data:
        assert settings["data"][settings["data"]["preset"]]["train"] == of.n_train
    assert (settings["model"]["kind"] == "youtube_dnn") == (of.metric == "recall_at_50")


def test_hop_bw_has_the_local_batches_of_synchronous_training() -> None:
    """N of them are a global batch."""
    (run,) = quality.planned(["frappe"], ["hop_bw"], [1], None)
    assert (run.micro_batch, run.local_batch) == (512, 4096 // 3)
    words = quality.PROTOCOLS["hop_bw"].overrides(50, run.local_batch, workers=3)
    assert f"train.global_batch={3 * (4096 // 3)}" in words
    assert [one.local_batch for one in quality.planned(["frappe"], ["gba", "sync", "shadow_ma"], [1], None)] == [
        None
    ] * 3
    (of_8,) = quality.planned(["frappe"], ["hop_bw"], [1], None, workers=[8])
    assert of_8.local_batch == 512
    (found,) = quality.headline([row("hop_bw", 1, 0.8, local_batch=run.local_batch)]).values()
    assert found["hop_bw"]["elp"] == 3 * 1365


def test_a_run_of_hop_bw_is_started_with_its_local_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def launch(variant: measure.Variant, words: list[str], **more: Any) -> None:
        started.append(words)
        raise measure.RunFailed("enough")

    monkeypatch.setattr(measure, "launch", launch)
    (run,) = quality.planned(["synthetic"], ["hop_bw"], [1], None)
    with pytest.raises(measure.RunFailed, match="enough"):
        quality.train(run, None, 1.0)
    assert [word for word in started[0] if "_batch=" in word] == ["train.micro_batch=682", "train.global_batch=2046"]
