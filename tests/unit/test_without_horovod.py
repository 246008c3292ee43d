"""The package works as a world of one where Horovod is not installed, and says so where it is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = """
import sys

class NoHorovod:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "horovod":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoHorovod())
import gba_hvd, torch
from gba_hvd.comm import collectives
"""


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKED + code],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


TRAIN = """
import numpy as np
class Data:
    def __len__(self): return 20
    def take(self, rows):
        rows = torch.from_numpy(rows)
        return gba_hvd.Batch({"t": rows % 5}, torch.empty(len(rows), 0), (rows % 2).float())

tables = gba_hvd.EmbeddingTables({"t": (5, 2)}, gba_hvd.SGD(lr=0.1))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = gba_hvd.DistributedOptimizer(optimizer, tables, global_batch=8, micro_batch=4)
state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)

@gba_hvd.elastic.run
def train(state):
    for batch in gba_hvd.batches(Data(), state):
        optimizer.zero_grad()
        out = model(tables(batch.ids)["t"]).squeeze(1)
        torch.nn.functional.binary_cross_entropy_with_logits(out, batch.label).backward()
        optimizer.step()

train(state)
print("steps", state.step)
"""


@pytest.mark.processes
def test_a_world_of_one_trains_without_horovod(tmp_path: Path) -> None:
    done = run(TRAIN, GBA_HVD_SHARD_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "steps 3\n")
    assert re.fullmatch(r"\S+ \S+ INFO \[started\] step 0: 1 worker on 1 host, job .*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_under_horovodrun_an_uninitialised_horovod_is_an_error(tmp_path: Path) -> None:
    done = run(TRAIN, GBA_HVD_SHARD_DIR=str(tmp_path), HOROVOD_RANK="0")
    assert done.returncode == 1
    assert (
        "HorovodMissing: this worker was started by horovodrun, but Horovod is not initialised: call hvd.init() first"
        in done.stderr
    )


@pytest.mark.processes
def test_what_needs_horovod_says_how_to_get_it() -> None:
    done = run("collectives.HorovodWorld()")
    assert done.returncode == 1
    assert (
        "HorovodMissing: Horovod is not installed for this Python: run `make setup`, or `gba-hvd doctor`" in done.stderr
    )
    assert "No module named 'horovod'" in done.stderr
