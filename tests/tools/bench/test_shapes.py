"""Shapes of models in the benchmark of allreduce mode: their batches, what is concluded, and a very small run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gba_hvd_tools import bench
from gba_hvd_tools.bench.allreduce import batches, command, torch_tables
from gba_hvd_tools.bench.allreduce.shape import SHAPES

import gba_hvd
from gba_hvd import Bag
from gba_hvd.shm import reaper
from tests.processes import prefork
from tests.unit.embedding.test_tables import MakeTables, dense_gradients, weights_of


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "allreduce", *words])


def row(
    peer: str, run: int, samples_per_s: float, shape: str = "bags", batch: int = 8, **figures: float
) -> dict[str, Any]:
    usual = {"ms_per_step": 10.0, "cpu_ms_per_step": 9.0, "peak_own_bytes": 5, "load": 1.0, "loss_last": 0.5}
    key = {"shape": shape, "batch": batch, "peer": peer, "run": run}
    return {**key, "samples_per_s": samples_per_s, **usual, **figures}


def test_every_shape_of_the_command_is_there_with_its_goals() -> None:
    assert tuple(SHAPES) == command.SHAPE_NAMES
    assert all(set(goals) == set(SHAPES) for goals in command.GOALS.values())


def test_a_goal_is_judged_by_the_median_of_ratios_of_runs_side_by_side() -> None:
    speeds = {"ours": (100, 20, 300), "torchrec": (50, 10, 300), "horovod": (100, 20)}
    rows = [row(peer, run, speed) for peer, of_peer in speeds.items() for run, speed in enumerate(of_peer)]
    rows.append(row("ours", 0, 1.0, batch=16))
    by_batch = command.summary(rows, {})["bags"]
    assert by_batch["16"]["ratios"] == {}, "a batch is judged by itself"
    found = by_batch["8"]
    assert found["ratios"] == {"torchrec": 2.0, "horovod": 1.0}
    assert found["goals"] == {
        "torchrec": {"goal": 1.3, "is_met": True},
        "horovod": {"goal": 1.5, "is_met": False},
    }
    assert "step" not in found


def test_the_limit_is_the_dense_part_and_each_distinct_row_once() -> None:
    rows = [
        row("ours", 0, 400.0, ms_per_step=40.0),
        row("dense", 0, 1600.0, ms_per_step=10.0, copied_per_s=2e9, gathered_per_s=1e9),
    ]
    traffic = {"bags": {"8": {"ids_per_sample": 260.0, "distinct_rows_per_step": 5e4, "bytes_per_step": 1e7}}}
    step = command.summary(rows, traffic)["bags"]["8"]["step"]
    assert step["not_dense_share"] == 0.75
    assert step["limit_samples_per_s"] == pytest.approx(2 * 8 / 0.02)
    assert step["share_of_limit"] == pytest.approx(0.5)
    assert "75% of ours is not dense; 10 MB of distinct rows at 1.0 GB/s" in command.parts_of_step("bags", step)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_all_workers_get_their_own_batches_with_as_many_ids_as_the_shape_says(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    traffic = batches.write(tmp_path, shape, batch=16, n_batches=2, workers=2)
    of_workers = [batches.load(tmp_path, shape, rank) for rank in range(2)]
    assert [len(one) for one in of_workers] == [2, 2]
    first = next(iter(shape.fields))
    assert not torch.equal(of_workers[0][0].ids[first][:10], of_workers[1][0].ids[first][:10])
    n_ids = 0
    for one in (one for some in of_workers for one in some):
        for field, ids in one.ids.items():
            (least, most), lengths = shape.fields[field].ids, one.lengths[field]
            assert least <= int(lengths.min()) and int(lengths.max()) <= most
            assert len(ids) == int(lengths.sum())
            assert int(ids.min()) >= 0 and int(ids.max()) < shape.tables[shape.fields[field].table]
            n_ids += len(ids)
    assert traffic["ids_per_sample"] == n_ids / 64
    assert 0 < traffic["distinct_rows_per_step"] * 2 < n_ids
    both = batches.joined([of_workers[0][0], of_workers[1][0]])
    assert len(both.label) == 32
    assert both.offsets(first).tolist() == (both.lengths[first].cumsum(0) - both.lengths[first]).tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_ours_and_plain_torch_train_the_same_model(name: str, tmp_path: Path, make_tables: MakeTables) -> None:
    from gba_hvd_tools.bench.allreduce import ours

    shape = replace(SHAPES[name], tables=dict.fromkeys(SHAPES[name].tables, 200))
    batches.write(tmp_path, shape, batch=8, n_batches=1, workers=1)
    (batch,) = batches.load(tmp_path, shape, 0)
    features = ours.tables_of(shape).features
    tables = make_tables({table: (n, shape.dim) for table, n in shape.tables.items()}, features=features)
    mine, theirs = ours.Model(shape, tables), torch_tables.Model(shape)
    theirs.dense.load_state_dict(mine.dense.state_dict())
    for table in shape.tables:
        theirs.weights(table).data.copy_(weights_of(tables, table).detach())
    ids = {field: ours.ids_of(shape, batch, field) for field in shape.fields}
    assert name != "wide" or any(isinstance(one, Bag) for one in ids.values())
    losses = [
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        for logits in (mine(gba_hvd.Batch(ids, batch.dense, batch.label)), theirs(batch))
    ]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    found = dense_gradients(tables)
    for table in shape.tables:
        expected = theirs.weights(table).grad
        assert expected is not None
        torch.testing.assert_close(found[table], expected.to_dense(), rtol=1e-4, atol=1e-7)


def test_a_batch_cut_into_micro_batches_has_all_its_samples_in_their_order(tmp_path: Path) -> None:
    batches.write(tmp_path, SHAPES["wide"], batch=16, n_batches=1, workers=1)
    (whole,) = batches.load(tmp_path, SHAPES["wide"], 0)
    parts = batches.cut(whole, 8)
    assert [len(part.label) for part in parts] == [2] * 8
    again = batches.joined(parts)
    assert torch.equal(again.dense, whole.dense) and torch.equal(again.label, whole.label)
    for field, ids in whole.ids.items():
        assert torch.equal(again.ids[field], ids) and torch.equal(again.lengths[field], whole.lengths[field])
        assert all(len(part.ids[field]) == int(part.lengths[field].sum()) for part in parts)


def planned(*words: str) -> list[tuple[str, int, str]]:
    runs = command.planned_runs(options("--out", "-", "--runs", "1", *words))
    return [(one.shape, one.batch, one.peer) for one in runs]


def test_dlrm_is_what_runs_unless_shapes_are_named_and_each_batch_is_a_run_of_its_own() -> None:
    assert planned("--peers", "ours") == [("dlrm", 2048, "ours"), ("dlrm", 2048, "dense")]
    assert {shape for shape, _, _ in planned("--shapes", "--peers", "ours")} == set(SHAPES)
    some = planned("--shapes", "wide", "din", "--batch", "64", "128", "64", "--peers", "ours")
    assert [(shape, batch) for shape, batch, peer in some if peer == "ours"] == [
        ("wide", 64), ("wide", 128), ("din", 64), ("din", 128),
    ]  # fmt: skip
    assert {batch for _, batch, _ in planned("--shapes", "din", "--peers", "ours")} == {512}


@pytest.mark.parametrize("words", ["--batch 0", "--batch 8 12 --peers ours_micro", "--batch 4 --peers ours_sync"])
def test_a_batch_that_cannot_be_is_refused_before_anything_runs(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = options("--out", str(tmp_path / "found.json"), *words.split())
    assert args.run(args) == 1
    assert "for ours_micro and ours_sync a multiple of 8" in capsys.readouterr().err
    assert not (tmp_path / "found.json").exists()


def test_rows_of_an_earlier_form_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    out.write_text(json.dumps({"rows": [{"shape": "din", "peer": "ours", "run": 0}], "settings": {}}))
    args = options("--out", str(out))
    assert args.run(args) == 1
    assert "give --out another name" in capsys.readouterr().err


def test_torchrec_is_left_out_by_name_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.peer_environments, "PEERS", tmp_path)
    out = tmp_path / "found.json"
    args = options("--out", str(out), "--shapes", "din", "--peers", "torchrec", "torchrec_pipeline", "--runs", "0")
    assert args.run(args) == 0
    assert "torchrec, torchrec_pipeline: left out" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_a_small_run_is_kept_and_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reaper, "start", lambda folder, grace_s: None)
    monkeypatch.setattr(sys, "executable", prefork.interpreter())
    monkeypatch.setenv("GBA_HVD_SHARD_DIR", str(tmp_path))
    out = tmp_path / "found.json"
    words = ["--out", str(out), "--shapes", "din", "--batch", "16", "--steps", "2", "--runs", "1"]
    words += ["--peers", "ours", "ours_micro", "ours_sync", "torch"]
    args = options(*words)
    assert args.run(args) == 0
    found = json.loads(out.read_text())
    assert [one["peer"] for one in found["rows"]] == ["ours", "ours_micro", "ours_sync", "torch", "dense"]
    (of_batch,) = found["summary"]["din"].values()
    assert set(of_batch["ratios"]) == {"ours_micro", "ours_sync", "torch"}
    assert of_batch["step"]["share_of_limit"] > 0
    assert of_batch["peers"]["ours"]["startup_s"] > 0
    assert 0.99 < of_batch["peers"]["ours"]["table_copies_per_host"] < 1.5
    capsys.readouterr()
    args = options(*words)
    assert args.run(args) == 0
    assert "5 rows in" in (printed := capsys.readouterr().out) and "0 runs to do" in printed
