"""The plan of a dry run says what the job will really take, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctr.build import refuse_single_sample, row_optimizer, table_shapes
from ctr.config import JobConfig, load
from ctr.datasets import open_splits
from ctr.plan import plan
from gba_hvd.data import Categorical, Recipe, SplitShares, prepare
from gba_hvd.errors import BadInput
from gba_hvd.faults import FaultSchedule
from gba_hvd.shm.layout import Layout
from train_ctr import main

JOB = """
data: {synthetic: {train: 100000, valid: 1000, test: 2000, tables: {user: 1000000, item: 50000}, n_dense: 2}}
train: {global_batch: 4096, micro_batch: 512, epochs: 3}
"""


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GBA_HVD_SHARD_DIR", str(tmp_path))
    monkeypatch.setenv("GBA_HVD_N_SHARDS", "4")


def config(tmp_path: Path, *overrides: str) -> JobConfig:
    (tmp_path / "job.yaml").write_text(JOB)
    return load(tmp_path / "job.yaml", overrides)


def test_the_bytes_are_those_the_shard_memory_will_have(tmp_path: Path) -> None:
    job = config(tmp_path, "embedding.optimizer=adam", "embedding.dim=15")
    splits = open_splits(job.data)
    layout = Layout.of(table_shapes(job, splits.train.tables), row_optimizer(job.embedding).slots, 4, job.seed, 0.01)
    text = plan(job, splits)
    assert f"{layout.n_bytes / 2**20:,.1f} MiB in S = 4 shards" in text
    assert f"1: {layout.n_bytes / 2**20:,.1f} MiB  2: {layout.n_bytes / 2**21:,.1f} MiB" in text
    assert "exp_avg per weight, exp_avg_sq per weight); the rest: adam" in text


def test_the_optimizer_of_the_dense_part_is_the_one_that_is_set(tmp_path: Path) -> None:
    job = config(tmp_path, "dense.optimizer=sgd")
    assert "; the rest: sgd" in plan(job, open_splits(job.data))


def test_deepfm_has_one_more_column_for_its_linear_weights(tmp_path: Path) -> None:
    rows = {"user": 10, "item": 5}
    assert table_shapes(config(tmp_path, "embedding.dim=15"), rows) == {"user": (10, 16), "item": (5, 16)}
    assert table_shapes(config(tmp_path, "embedding.dim=15", "model.kind=dcn"), rows)["user"] == (10, 15)


def test_steps_and_shares_are_those_of_the_run(tmp_path: Path) -> None:
    job = config(tmp_path)
    lines = plan(job, open_splits(job.data)).splitlines()
    assert any("G = 4,096 samples = M 8 micro-batches x B 512" in line for line in lines)
    shares = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.split()[0] in "12348"}
    assert shares == {"1": "8 each", "2": "4 each", "3": "2 x 3 + 1 x 2", "4": "2 each", "8": "1 each"}
    assert any("more than 8: the extra workers idle" in line for line in lines)
    assert any("25 steps; at most 3 epochs = 75 steps" in line for line in lines)


def test_too_small_a_folder_is_said_before_anything_starts(tmp_path: Path) -> None:
    job = config(tmp_path, "data.synthetic.tables.user=10000000000000")
    assert "NOT enough" in plan(job, open_splits(job.data))


def test_a_dry_run_prints_the_plan_and_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert (
        main(["--config", str(tmp_path / "job.yaml"), "--out", str(tmp_path / "out"), "--dry-run", "--seed", "5"]) == 0
    )
    assert capsys.readouterr().out.startswith("job       job: deepfm, seed 5\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_on_raw_files_does_not_prepare_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(tmp_path)
    settings = ["data.preset=criteo-kaggle", f"data.cache={tmp_path / 'cache'}"]
    assert main(["--config", str(tmp_path / "job.yaml"), "--data", str(tmp_path), "--dry-run", *settings]) == 0
    assert "is not prepared yet" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


def test_a_wrong_setting_ends_with_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(tmp_path)
    assert main(["--config", str(tmp_path / "job.yaml"), "--dry-run", "train.epoch=3"]) == 1
    assert capsys.readouterr().err == "train_ctr: train.epoch: no such setting; did you mean train.epochs?\n"


def test_batch_norm_on_a_last_micro_batch_of_one_sample_is_refused_at_the_start(tmp_path: Path) -> None:
    refuse_single_sample(config(tmp_path, "model.batch_norm=true"), 512 * 7)
    with pytest.raises(BadInput, match=r"the last micro-batch of 513 samples would have 1 sample"):
        refuse_single_sample(config(tmp_path, "model.batch_norm=true"), 513)


def modes_of(text: str) -> list[str]:
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("mode "))
    return [line[10:] for line in lines[first:]]


def test_the_plan_says_which_modes_the_job_will_be_in(tmp_path: Path) -> None:
    assert modes_of(plan(config(tmp_path), None)) == ["allreduce throughout"]
    switching = ["switching.switch_at={500: gba, 900: hop_bs}", "switching.tolerance=2", "switching.lookahead=3"]
    assert modes_of(plan(config(tmp_path, *switching), None)) == [
        "allreduce",
        "gba from step 500",
        "hop_bs from step 900",
        "gba: staleness weighting threshold, tolerance 2 steps",
        "gradients that come late in gba: rule look_ahead (the default of mode gba for an optimizer with momentum, "
        "here Adam)",
        "micro-batches are handed out 3 steps ahead at most",
        "hop_bs: at most 2 micro-batches ahead of the slowest worker",
    ]


def test_the_plan_of_an_automatic_job_says_when_it_would_change(tmp_path: Path) -> None:
    text = plan(config(tmp_path, "switching.mode=auto", "switching.enter_gain=1.5", "switching.patience=7"), None)
    assert "auto: gba when predicted 1.5x as fast as allreduce" in text
    assert "each for 7 steps" in text
    assert "the other mode is tried where it may be faster, for 2.0% of the work at most" in text
    assert "is tried" not in plan(config(tmp_path, "switching.mode=auto", "switching.trial_budget=0"), None)


def test_the_plan_says_how_gradients_and_rows_travel_and_which_rule_they_meet(tmp_path: Path) -> None:
    assert "compress" not in plan(config(tmp_path), None)
    settings = ["switching={mode: async, rule: gap_aware}", "row_compression=int8"]
    assert modes_of(plan(config(tmp_path, *settings), None)) == [
        "async",
        "gradients that come late: rule gap_aware",
        "rows between hosts: int8",
    ]
    both = plan(config(tmp_path, *settings, "compression={name: topk, keep: 0.1}"), None)
    assert both.splitlines()[-2:] == [
        "compress  dense gradients: topk(keep=0.1)",
        "          rows between hosts: int8",
    ]


def test_planned_faults_are_part_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(tmp_path)
    faults = tmp_path / "faults.json"
    FaultSchedule().slow(2, 3.0, from_step=50).kill(1, at_step=80).dump(faults)
    assert main(["--config", str(tmp_path / "job.yaml"), "--faults", str(faults), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "faults    slow, worker 2, factor 3.0, from_step 50",
        "          kill, worker 1, at_step 80",
    ]
    faults.write_text('{"faults": [{"kind": "sloow"}]}')
    assert main(["--config", str(tmp_path / "job.yaml"), "--faults", str(faults), "--dry-run"]) == 1
    assert "did you mean 'slow'?" in capsys.readouterr().err


def test_the_plan_says_where_and_how_often_the_job_is_saved(tmp_path: Path) -> None:
    assert "save " not in plan(config(tmp_path), None)
    settings = ["checkpoint.url=s3://bucket/job", "checkpoint.every_steps=500", "checkpoint.policy=mfu"]
    lines = plan(config(tmp_path, *settings), None).splitlines()
    assert lines[-2:] == [
        "save      to s3://bucket/job every 500 steps",
        "          rows chosen by mfu on top of a full save; keeps 3; resumes from the newest one there",
    ]
    lines = plan(config(tmp_path, *settings, "checkpoint.keep_epochs=7"), None).splitlines()
    assert "; keeps 3 and the last of each of 7 epochs; " in lines[-1]
    lines = plan(config(tmp_path, "checkpoint.url=s3://bucket/job"), None).splitlines()
    assert lines[-2] == "save      to s3://bucket/job as often as planned from what is measured"


@pytest.mark.parametrize("kind", ["deepfm", "dlrm", "dcn"])
def test_a_dry_run_takes_one_batch_of_multi_valued_fields_through_the_model(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"{i % 2},u{i % 7},{'|'.join(['a', 'b', 'c'][: i % 4])}\n" for i in range(80))
    (tmp_path / "clicks.csv").write_text("label,user,tags\n" + rows)
    fields = (Categorical("user"), Categorical("tags", separator="|"))
    shares = {"train": 0.5, "valid": 0.25, "test": 0.25}
    prepare(Recipe("csv", "label", fields), SplitShares([tmp_path / "clicks.csv"], shares), tmp_path / "store")
    (tmp_path / "job.yaml").write_text("train: {global_batch: 16, micro_batch: 16}\n")
    words = ["--config", str(tmp_path / "job.yaml"), "--data", str(tmp_path / "store"), "--dry-run"]
    assert main([*words, f"model.kind={kind}"]) == 0
    shown = capsys.readouterr().out
    assert "2 categorical and 0 numeric fields; multi-valued, pooled by mean: tags" in shown
    assert "batch     16 samples, forward and backward in" in shown


def test_a_dry_run_of_a_batch_that_cannot_be_trained_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(tmp_path)
    words = ["--config", str(tmp_path / "job.yaml"), "--dry-run", "data.synthetic.train=4097"]
    assert main([*words, "model.batch_norm=true"]) == 1
    assert "the last micro-batch of 4,097 samples would have 1 sample" in capsys.readouterr().err
