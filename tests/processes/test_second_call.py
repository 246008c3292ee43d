"""A script or notebook without a launcher calls its training function again: the process continues its own job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gba_hvd

from .alone import Outcome, job_alone, outcome_of, train_alone
from .cluster import assert_identical

SCRIPT = """
import hashlib, sys
import numpy as np, torch, gba_hvd

class Data:
    def __len__(self): return 200
    def take(self, rows):
        if stops and state.step == stops[0]:
            stops.clear()
            raise KeyboardInterrupt
        rows = torch.from_numpy(rows)
        return gba_hvd.Batch({"t": rows % 50}, torch.empty(len(rows), 0), (rows % 2).float())

torch.manual_seed(0)
tables = gba_hvd.EmbeddingTables({"t": (50, 4)}, gba_hvd.Adagrad(lr=0.1), seed=1)
model = torch.nn.Linear(4, 1)
optimizer = gba_hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.1), tables, global_batch=20, micro_batch=10)
state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)

@gba_hvd.elastic.run
def train(state, epochs):
    for state.epoch in range(state.epoch, epochs):
        for batch in gba_hvd.batches(Data(), state, seed=3, prefetch=0):
            optimizer.zero_grad()
            out = model(tables(batch.ids)["t"]).squeeze(1)
            torch.nn.functional.binary_cross_entropy_with_logits(out, batch.label).backward()
            optimizer.step()

*calls, stop = map(int, sys.argv[1:])
stops = [stop] if stop else []
for epochs in calls:
    try:
        train(state, epochs)
    except KeyboardInterrupt:
        print("stopped at", state.step, file=sys.stderr)
values = [tables.rows("t", np.arange(50)), *(p.detach().numpy() for p in model.parameters())]
print(state.step, state.samples.applied, hashlib.sha256(b"".join(v.tobytes() for v in values)).hexdigest())
"""


def trained(folder: Path, *arguments: int) -> tuple[str, str]:
    environ = {**os.environ, "GBA_HVD_SHARD_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        env=environ, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert list(folder.iterdir()) == []
    return done.stdout, done.stderr


@pytest.mark.processes
def test_calls_one_after_the_other_are_one_training(tmp_path: Path) -> None:
    whole, _ = trained(tmp_path, 5, 0)
    in_parts, log = trained(tmp_path, 3, 4, 5, 0)
    assert in_parts == whole and whole.startswith("50 1000 ")
    assert "[continued] step 30" in log and "[continued] step 40" in log and "WARNING" not in log
    stopped, log = trained(tmp_path, 3, 5, 17)
    assert stopped == whole
    assert "stopped at 17" in log and "[continued] step 17" in log and "WARNING" not in log


@pytest.mark.processes
def test_a_mode_with_servers_is_entered_again_where_it_was_left(tmp_path: Path) -> None:
    with job_alone(tmp_path / "job", {}, mode="gba") as (training, watch):

        @gba_hvd.elastic.run
        def train(state: gba_hvd.elastic.TorchState, stop: int) -> None:
            for state.epoch in range(state.epoch, 2):
                for batch in gba_hvd.batches(training.dataset, state, seed=1):
                    if state.step == stop:
                        raise KeyboardInterrupt
                    training.optimizer.zero_grad()
                    loss = training.loss(batch)
                    loss.backward()
                    training.step(loss)

        with pytest.raises(KeyboardInterrupt):
            train(training.state, 3)
        account = training.state.samples
        assert account.total == account.applied > 0
        train(training.state, -1)
        account = training.state.samples
        assert account.total == account.applied == 2 * len(training.dataset)
        assert watch.modes == {"gba"} and len(watch.switches) == 2


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_step_that_is_being_applied_when_a_signal_comes_is_completed(tmp_path: Path, number: signal.Signals) -> None:
    """The dense part has made the step, the rows have not."""
    reference = train_alone(tmp_path / "whole", {})
    with job_alone(tmp_path / "job", {}) as (training, watch):
        model, stopped = training.state.engine.model, list[int]()
        step_dense = model.step_dense

        def step_dense_and_signal() -> None:
            step_dense()
            if training.state.step == 4 and not stopped:
                stopped.append(training.state.step)
                signal.raise_signal(number)

        model.step_dense = step_dense_and_signal

        @gba_hvd.elastic.run
        def train(state: gba_hvd.elastic.TorchState) -> Outcome:
            for state.epoch in range(state.epoch, 2):
                for batch in gba_hvd.batches(training.dataset, state, seed=1):
                    training.optimizer.zero_grad()
                    loss = training.loss(batch)
                    training.backward(loss)
                    training.step(loss)
            return outcome_of(training, watch)

        with pytest.raises(KeyboardInterrupt):
            train(training.state)
        assert training.state.step == 5 and stopped == [4]
        result = train(training.state)
    assert result.samples == reference.samples
    assert_identical(result.arrays, reference.arrays)
    assert_identical(result.optimizer_arrays, reference.optimizer_arrays)
