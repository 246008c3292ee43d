"""The benchmark of one GPU: batches, contestants that train the same model, conclusions, and a run on the CPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gba_hvd_tools import bench
from gba_hvd_tools.bench.gpu import clicks, command, ours, summary, torchrec, worker
from gba_hvd_tools.bench.gpu.training import NotRun, Setting
from gba_hvd_tools.bench.harness import dlrm

import gba_hvd
from tests import public_models
from tests.processes import prefork

TINY = ("--device", "cpu", "--rows", "2600", "--dim", "4", "--batch", "64", "--threads", "1")

# Put on PYTHONPATH, where every Python that is started finds it.
BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("horovod", "mlflow", "torchrec", "fbgemm_gpu"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""

# With rows that start as zeros all contestants start alike. Prints the losses of each step.
LOSSES = """
import json, sys
from pathlib import Path
import torch
from gba_hvd_tools.bench.gpu import torchrec
from gba_hvd_tools.bench.gpu.clicks import Clicks
from gba_hvd_tools.bench.gpu.training import Setting
from gba_hvd_tools.bench.gpu.worker import training_of

class Zeros(Setting):
    spread = 0.0

torch.set_num_threads(1)
folder, rule, name = sys.argv[1:]
clicks, setting = Clicks.load(Path(folder)), Zeros(100, 4, rule, 260, "cpu", 1)
if name == "torchrec_uvm":
    training = torchrec.training_at(setting, clicks, "HOST")
else:
    training = training_of(name, setting, clicks)
print(json.dumps([float(training.step()) for _ in range(len(clicks))]))
"""


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "gpu", *words])


def row(peer: str, run: int = 0, speed: float = 100.0, gpu: str = "A", **figures: Any) -> dict[str, Any]:
    usual = dict.fromkeys(summary.FIGURES, 1.0)
    about = {"rows": 2600, "dim": 4, "batch": 64, "peer": peer, "run": run, "gpu": gpu, "state": summary.MEASURED}
    return {**about, **usual, "samples_per_s": speed, **figures}


def not_measured(peer: str, state: str, run: int = 0) -> dict[str, Any]:
    return {name: row(peer, run)[name] for name in (*command.KEY, "gpu")} | {"state": state, "why": "so\nand so"}


def test_names_that_the_command_has_of_its_own_are_those_of_what_needs_torch() -> None:
    assert set(command.PEERS) == set(worker.CONTESTANTS)
    assert tuple(ours.RULES) == command.RULES and command.N_TABLES == dlrm.N_TABLES


def test_batches_are_those_of_the_seed_and_each_is_another(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        clicks.write(tmp_path / name, n_rows=50, batch=32, bag=3, n_batches=4, seed=seed)
    one, same, other = (clicks.Clicks.load(tmp_path / name) for name in ("one", "same", "other"))
    assert one.ids.shape == (4, 26, 96) and one.dense.shape == (4, 32, 13) and one.label.shape == (4, 32)
    assert (one.ids.dtype, one.dense.dtype, one.label.dtype) == (torch.int64, torch.float32, torch.float32)
    assert (len(one), one.batch, one.bag) == (4, 32, 3)
    assert int(one.ids.min()) >= 0 and int(one.ids.max()) < 50
    for mine, again, others in zip(
        (one.ids, one.dense, one.label), (same.ids, same.dense, same.label), (other.ids, other.dense, other.label),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(mine, again) and not torch.equal(mine, others)
        assert not any(torch.equal(mine[i], mine[j]) for i in range(4) for j in range(i))


def test_ids_follow_zipfs_law_with_other_hot_ids_in_each_table(tmp_path: Path) -> None:
    clicks.write(tmp_path, n_rows=200, batch=5000, bag=1, n_batches=4, seed=1)
    ids = clicks.Clicks.load(tmp_path).ids
    shares = torch.arange(1, 201).double() ** -clicks.ID_ZIPF
    shares /= shares.sum()
    hottest = []
    for table in range(dlrm.N_TABLES):
        counts = torch.bincount(ids[:, table].flatten(), minlength=200) / 20_000
        found = counts.sort(descending=True)
        assert found.values[:5] == pytest.approx(shares[:5].tolist(), rel=0.15)
        assert float(counts.min()) < float(shares[100])
        hottest.append(int(found.indices[0]))
    assert len(set(hottest)) > 15


def test_labels_can_be_learned_from_a_dense_feature_and_from_ids(tmp_path: Path) -> None:
    clicks.write(tmp_path, n_rows=200, batch=4000, bag=2, n_batches=2, seed=1)
    found = clicks.Clicks.load(tmp_path)
    odd = (found.ids[:, 0, ::2] % 2).bool()
    assert float(found.label[odd].mean()) > float(found.label[~odd].mean()) + 0.2
    positive = found.dense[:, :, 0] > 0
    assert float(found.label[positive].mean()) > float(found.label[~positive].mean()) + 0.2


def losses(folder: Path, rule: str, name: str) -> list[float]:
    path = os.pathsep.join([str(public_models.PACKAGES), os.environ.get("PYTHONPATH", "")])
    by_device = "on" if name == "ours_all" else "off"
    environ = os.environ | {"GBA_HVD_SHARD_DIR": str(folder), "PYTHONPATH": path, "GBA_HVD_DEVICE_ROWS": by_device}
    done = subprocess.run(
        [*prefork.python(), "-W", "ignore", "-c", LOSSES, str(folder), rule, name],
        env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("rule", "bag", "names"),
    [
        ("adagrad", 2, ("hbm", "hbm_merged", "ours_host", "ours_all", "torchrec_uvm")),
        ("row_adagrad", 1, ("ours_host", "torchrec_uvm")),
    ],
)
def test_contestants_that_start_alike_have_the_same_losses(
    rule: str, bag: int, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public_models.add_to_path(monkeypatch)
    clicks.write(tmp_path, n_rows=100, batch=64, bag=bag, n_batches=8, seed=1)
    first, *others = (losses(tmp_path, rule, name) for name in names)
    assert len(first) == 8 and len(set(first)) == 8
    for other in others:
        assert other == pytest.approx(first, rel=1e-3)


def test_fbgemm_is_not_run_without_a_gpu_or_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    with pytest.raises(NotRun, match="--device is cpu"):
        torchrec.training(Setting(100, 4, "adagrad", 260, "cpu", 1), nothing)
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    with pytest.raises(NotRun, match="fbgemm_gpu cannot be imported: ModuleNotFoundError: "):
        torchrec.training(Setting(100, 4, "adagrad", 260, "cuda", 1), nothing)


def test_what_counts_as_out_of_gpu_memory() -> None:
    assert worker.is_out_of_gpu_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"))
    assert worker.is_out_of_gpu_memory(RuntimeError("CUDA error: out of memory"))
    assert not worker.is_out_of_gpu_memory(RuntimeError("CUDA error: an illegal memory access"))
    assert not worker.is_out_of_gpu_memory(MemoryError("out of memory"))
    wrapped = ValueError("no room for hot rows")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert worker.is_out_of_gpu_memory(wrapped)


def test_a_ratio_is_the_median_over_runs_side_by_side_on_one_gpu() -> None:
    speeds = {"hbm": (100.0, 10.0, 400.0), "ours_host": (50.0, 10.0, 100.0), "ours": (200.0, 30.0)}
    rows = [row(peer, run, speed) for peer, of_peer in speeds.items() for run, speed in enumerate(of_peer)]
    rows.append(row("ours", 2, 4000.0, gpu="B"))
    (found,) = summary.of(rows)
    assert (found["rows"], found["dim"], found["batch"], found["gpus"]) == (2600, 4, 64, ["A", "B"])
    peers = found["peers"]
    assert (peers["ours"]["samples_per_s"], peers["ours"]["runs"]) == (200.0, 3)
    assert peers["ours"]["vs_hbm"] == 2.5 and peers["ours"]["vs_ours_host"] == 3.5
    assert peers["ours_host"]["vs_hbm"] == 0.5 and peers["hbm"]["vs_hbm"] == 1.0


def test_a_contestant_that_has_no_figures_is_in_the_table_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("ours"), not_measured("hbm", worker.OUT_OF_MEMORY), not_measured("torchrec_uvm", summary.NOT_RUN)]
    found = summary.of(rows)
    assert found[0]["peers"]["ours"]["vs_hbm"] is None
    summary.show(found)
    shown = capsys.readouterr().out
    assert "hbm: out of GPU memory: so\n" in shown and "torchrec_uvm: not run: so\n" in shown
    assert summary.is_settled(rows, (2600, 4, 64, "hbm")) and not summary.is_settled(rows, (2600, 4, 64, "ours"))


def test_who_reads_the_rows_is_in_the_row_and_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    from gba_hvd_tools.bench.gpu.ours import Watch

    watch = Watch()
    watch.on_event(gba_hvd.Event("started", 0, "1 worker"))
    watch.on_event(gba_hvd.Event("device_rows", 0, "the CPU looks rows up"))
    watch.on_metrics(8, {"hot_rows_hit_share": 0.75})
    watch.on_metrics(8, {"bytes_dense": 1.0})
    found = row("ours_hot", said=watch.said, hit_share=watch.hit_share)
    assert "75% of rows found among the hot ones; the CPU looks rows up" in summary.in_words(found)
    summary.show(summary.of([found, row("hbm")]))
    assert "ours_hot: the CPU looks rows up\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "cuda:99"), "finds no GPU here"),
        (("--device", "tpu"), "--device tpu: "),
        (("--device", "meta"), "expected cuda or cpu"),
        (("--device", "cpu", "--rows", "2600", "25"), "--rows must be at least 26, got 25"),
        (("--device", "cpu", "--warm-up", "0"), "--warm-up must be at least 1, got 0"),
        (("--device", "cpu", "--hot-rows", "2601", "--rows", "2600"), "there are not so many"),
        (("--device", "cpu", "--limit-minutes", "0"), "--limit-minutes must be positive"),
    ],
)
def test_impossible_options_are_refused_before_anything_runs(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = options("--out", str(tmp_path / "found.json"), *words)
    assert args.run(args) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "found.json").exists()


class Answers:
    """In place of processes: what each contestant's run gives, and which were launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
        self.launched: list[str] = []

        def result_of(variant: command.Variant, more: Any, folder: Path, timeout_s: float) -> Any:
            self.launched.append(variant.name)
            answer = answers.get(variant.name, summary.MEASURED)
            if isinstance(answer, Exception):
                raise answer
            found = row(variant.name) if answer == summary.MEASURED else not_measured(variant.name, answer)
            return {name: value for name, value in found.items() if name not in command.KEY}

        monkeypatch.setattr(command.measure, "result_of", result_of)


def test_what_ran_is_kept_and_what_could_not_be_measured_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, failed = tmp_path / "found.json", command.RunFailed("killed")
    answers = Answers(monkeypatch, hbm=worker.OUT_OF_MEMORY, torchrec_uvm=summary.NOT_RUN, ours=failed)
    args = options("--out", str(out), *TINY, "--runs", "2", "--steps", "1", "--warm-up", "1")
    assert args.run(args) == 1, "one failed"
    assert answers.launched == [*command.USUAL, "ours_host", "ours_hot", "ours_all"]
    found = json.loads(out.read_text())
    assert list(found["failures"].values()) == ["killed"]
    assert {row["peer"]: row["state"] for row in found["rows"]} == {
        "hbm": "out of GPU memory", "ours_host": "measured", "ours_hot": "measured", "ours_all": "measured",
        "torchrec_uvm": "not run",
    }  # fmt: skip
    assert "killed" in capsys.readouterr().err

    answers = Answers(monkeypatch)
    assert args.run(args) == 0
    assert answers.launched == ["ours", "torchrec_uvm", "ours", "torchrec_uvm"], "what was installed since is found"

    args = options("--out", str(out), *TINY, "--runs", "2", "--steps", "2", "--warm-up", "1")
    assert args.run(args) == 1
    assert "measured with other settings (steps: 1 in the file, 2 now)" in capsys.readouterr().err


def test_no_run_starts_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = Answers(monkeypatch)
    args = options("--out", str(tmp_path / "found.json"), *TINY, "--limit-minutes", "1e-9")
    assert args.run(args) == 0
    assert not answers.launched and "no time left for 18 runs" in capsys.readouterr().out


def test_who_reads_rows_and_which_profile_is_said_to_the_worker(tmp_path: Path) -> None:
    assert [command.variant(name, "cuda").env["GBA_HVD_DEVICE_ROWS"] for name in ("ours_host", "ours", "ours_hot")] == [
        "off", "auto", "auto",
    ]  # fmt: skip
    assert command.variant("ours", "cpu").env["GBA_HVD_DEVICE_ROWS"] == "on"
    one = command.Run(2600, 4, 64, "ours", 0)
    assert command.profile_of(tmp_path / "found.json", one) == tmp_path / "found_2600x4_64_ours.profile.txt"


@pytest.mark.processes
def test_a_small_run_needs_neither_horovod_nor_mlflow(tmp_path: Path) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCK)
    path = os.pathsep.join([str(tmp_path / "blocked"), os.environ.get("PYTHONPATH", "")])
    memory, out = tmp_path / "memory", tmp_path / "found.json"
    memory.mkdir()
    environ = os.environ | {"PYTHONPATH": path, "GBA_HVD_SHARD_DIR": str(memory)}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "gba_hvd_tools.bench.gpu.command", "--out", str(out), *TINY, *words],
            env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    how = ("--runs", "1", "--steps", "3", "--warm-up", "2", "--optimizer", "row_adagrad", "--profile")
    shown = run("--peers", "hbm", "ours_host", "torchrec_uvm", *how)
    assert "plain torch has no row-wise one" in shown
    assert "torchrec_uvm: not run: UVM_CACHING needs a GPU, and --device is cpu" in shown
    found = json.loads(out.read_text())
    plain, ours, fbgemm = found["rows"]
    assert (plain["peer"], ours["peer"], fbgemm["state"]) == ("hbm", "ours_host", "not run")
    assert plain["gpu"] == ours["gpu"] == "no GPU" and plain["host_bytes"] == 0
    assert ours["host_bytes"] >= 2600 * 4 * (4 + 1 + 1), "weights, a sum and a counter for each row"
    assert ours["loss"] == pytest.approx(plain["loss"], abs=0.1)
    assert all(one["samples_per_s"] > 0 and one["first_step_s"] > 0 for one in (plain, ours))
    assert set(found["summary"][0]["peers"]["ours_host"]) >= {"vs_hbm", "vs_ours_host", *summary.FIGURES}
    profile = command.profile_of(out, command.Run(2600, 4, 64, "ours_host", 0)).read_text()
    assert "by self_cpu_time_total, 10 steps" in profile and "aten::bmm" in profile
    assert "2 rows in" in run("--peers", "hbm", "ours_host", *how)
    assert json.loads(out.read_text())["rows"] == [plain, ours]
    assert not list(memory.iterdir())
