"""A model of `nn.Embedding` modules that is converted trains as it does in plain torch: in both modes, on any hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import public_models
from tests.public_models import EXAMPLES, PACKAGES

from . import adoptable
from .cluster import PATIENT, Cluster, cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
PLAN = {"samples": 8 * 48, "global_batch": 48, "micro_batch": 16, "seed": 3}  # eight steps of three micro-batches
SMALL = ["adoptable:HISTORY", "adoptable:BAGS", "adoptable:ONE_TABLE", "adoptable:FACTORS"]
PUBLIC = ["deepfm", "dcn", "din", "dien", "youtube_dnn", "dssm", "mmoe", "esmm", "dlrm"]
WORLDS: dict[str, Callable[[Cluster], None]] = {
    "one worker": lambda job: job.start_alone(),
    "two workers": lambda job: job.start_static(2),
    "two hosts": lambda job: job.start_static(2, ("localhost", "127.0.0.1")),
}


def train_plain(adopted: Any, spread: bool) -> dict[str, np.ndarray]:
    """One process, gradients added up over the micro-batches of a step."""
    torch.manual_seed(PLAN["seed"])
    model, samples = adopted.make_model(), adopted.make_samples(PLAN["samples"], 1)
    if spread:
        adoptable.spread_weights(model)
    tables: dict[str, nn.Parameter] = {}  # modules with one weight are one table, of the first one's path
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and all(module.weight is not w for w in tables.values()):
            tables[f"rows.{path}"] = module.weight
    dense = {f"dense.{name}": p for name, p in model.named_parameters() if all(p is not w for w in tables.values())}
    optimizers = [torch.optim.Adagrad(tables.values(), lr=0.05, eps=1e-2)]  # eps: noise is not scaled up
    optimizers += [torch.optim.SGD(dense.values(), lr=0.1)] if dense else []
    for step in range(PLAN["samples"] // PLAN["global_batch"]):
        for optimizer in optimizers:
            optimizer.zero_grad()
        micros = np.arange(PLAN["global_batch"]).reshape(-1, PLAN["micro_batch"]) + step * PLAN["global_batch"]
        for micro in micros:
            (adopted.loss_of(model, samples.take(micro)) / len(micros)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: value.detach().numpy() for name, value in (tables | dense).items()}


def written(job: Cluster, name: str, mode: str) -> dict[str, np.ndarray]:
    """What the workers ended with: the dense parameters of the first, and the rows of all hosts."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(job.out.glob(f"{name.replace(':', '.')}-{mode}-*.npz")):
        with np.load(path) as stored:
            for key, value in stored.items():
                found[key] = np.where(np.isnan(found[key]), value, found[key]) if key in found else value
    return found


def check(job: Cluster, name: str, adopted: Any) -> None:
    plain = train_plain(adopted, job.plan["spread_weights"])
    for mode in ("allreduce", "gba"):
        ours = written(job, name, mode)
        assert ours["step"] == 8
        assert ((ours["auc"] >= 0) & (ours["auc"] <= 1)).all()
        assert set(ours) - {"auc", "step"} == set(plain)
        for key in plain:
            np.testing.assert_allclose(ours[key], plain[key], rtol=1e-5, atol=1e-5, err_msg=f"{name}, {mode}: {key}")


def train(folder: Path, world: str, models: list[str], path: list[str], **more: Any) -> Cluster:
    settings = {"models": models, "path": path, "spread_weights": models == PUBLIC, **more}
    settings |= {"own_memory_per_name": world == "two hosts", "horovod": world != "one worker"}
    with cluster(folder, PATIENT, script="adopt_worker.py", **PLAN, **settings) as job:
        WORLDS[world](job)
        assert job.wait(900) == 0, job.log()
        job.assert_nothing_left()
        return job


@pytest.mark.parametrize("world", WORLDS)
def test_small_models_train_as_in_plain_torch(tmp_path: Path, world: str) -> None:
    job = train(tmp_path, world, SMALL, [str(HERE)])
    for name in SMALL:
        check(job, name, getattr(adoptable, name.partition(":")[2]))


@pytest.mark.parametrize(
    ("world", "backend", "models"),
    [
        ("two hosts", "aot_eager", SMALL[:2]),
        pytest.param("two workers", "inductor", SMALL, marks=pytest.mark.variant),
        pytest.param("two hosts", "inductor", SMALL, marks=pytest.mark.variant),
    ],
)
def test_compiled_models_train_as_in_plain_torch(tmp_path: Path, world: str, backend: str, models: list[str]) -> None:
    """Without a graph break, in allreduce and with servers. On two hosts compiled passes also record what to fetch."""
    job = train(tmp_path, world, models, [str(HERE)], compile=backend)
    for name in models:
        check(job, name, getattr(adoptable, name.partition(":")[2]))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Where the public models are."""
    before = set(sys.modules)
    path = public_models.add_to_path(monkeypatch, EXAMPLES)
    yield path
    for name in set(sys.modules) - before:  # `features`, `samples` and others are of these examples only
        if str(EXAMPLES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("world", WORLDS)
def test_public_models_train_as_in_plain_torch(tmp_path: Path, packages: list[str], world: str) -> None:
    job = train(tmp_path, world, PUBLIC, packages)
    for name in PUBLIC:
        check(job, name, public_models.load(name))


def test_a_script_trains_as_it_stands(tmp_path: Path, packages: list[str]) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("GBA_HVD", "HOROVOD", "MLFLOW"))}
    environ |= {"OMP_NUM_THREADS": "1", "GBA_HVD_SHARD_DIR": str(tmp_path), "GBA_HVD_GRACE_S": "2"}
    environ |= {"PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, str(EXAMPLES / "mmoe.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    aucs = re.findall(
        r"^epoch \d: step \d+, validation AUC: click 0\.([67])\d+, purchase 0\.\d+$", done.stdout, re.MULTILINE
    )
    assert len(aucs) == 2, done.stdout
