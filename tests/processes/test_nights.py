"""A job that is launched once for each night, in a mode with servers: what a night has done is not done again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gba_hvd
from recovery.callback import CheckpointCallback

from .alone import alone_in
from .cluster import PATIENCE_S
from .test_buffers import MICRO, N_SAMPLES, Clicks

pytestmark = [pytest.mark.processes]
STEPS, DECAY = N_SAMPLES // (2 * MICRO), 0.9  # of a night


def launch(folder: Path, night: int) -> tuple[list[str], gba_hvd.elastic.TorchState]:
    """What this launch did, in order, and its state at the end."""
    did: list[str] = []
    with alone_in(folder):
        tables = gba_hvd.EmbeddingTables({"t": (5, 2)}, gba_hvd.SGD(lr=0.1))
        model = nn.Linear(2, 1)
        optimizer = gba_hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), tables, global_batch=2 * MICRO, micro_batch=MICRO
        )
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
        state = gba_hvd.elastic.TorchState(
            model, optimizer, epoch=0, by_step=by_step, evaluated=-1, tested=-1, best={"night": -1}
        )
        state.on_step(by_step.step)
        state.register_callbacks(
            [
                gba_hvd.GBACallback(mode="gba", wait_s=PATIENCE_S),
                CheckpointCallback(url=str(folder / "checkpoints"), every_steps=1000),
            ]
        )

        @gba_hvd.elastic.run
        def train(state: gba_hvd.elastic.TorchState) -> None:
            for state.epoch in range(max(state.epoch, night), night + 1):
                if state.evaluated < state.epoch:
                    did.append(f"evaluate {state.epoch}")
                    state.evaluated = state.epoch
                for batch in gba_hvd.batches(Clicks(), state):
                    optimizer.zero_grad()
                    logits = model(tables(batch.ids)["t"]).squeeze(1)
                    nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
                    optimizer.step()
                if state.tested < state.epoch:
                    did.append(f"publish {state.epoch}")
                    state.best = {"night": state.epoch}
                    state.tested = state.epoch

        train(state)
        did.append(state.engine.mode.name)
    return did, state


def test_a_night_that_is_started_again_in_gba_publishes_nothing_again(tmp_path: Path) -> None:
    for night in range(2):
        did, state = launch(tmp_path, night)
        assert did == [f"evaluate {night}", f"publish {night}", "gba"]
        did, state = launch(tmp_path, night)
        assert len(did) == 1, "neither evaluates nor publishes"
        assert (state.evaluated, state.tested, state.best) == (night, night, {"night": night})
        n_steps = STEPS * (night + 1)
        assert (state.step, state.by_step.last_epoch) == (n_steps, n_steps)
        assert state.optimizer.param_groups[0]["lr"] == pytest.approx(DECAY**n_steps)
