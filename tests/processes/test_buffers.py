"""Buffers of the model, such as batch norm's statistics, in the checkpoints of an asynchronous mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gba_hvd
from recovery.callback import CheckpointCallback
from recovery.restore.open_checkpoint import open_checkpoint

from .alone import alone_in
from .cluster import PATIENCE_S

pytestmark = [pytest.mark.processes]
N_EPOCHS, N_SAMPLES, MICRO = 2, 40, 4


class Clicks:
    def __len__(self) -> int:
        return N_SAMPLES

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        ids = torch.from_numpy(rows)
        return gba_hvd.Batch({"t": ids % 5}, torch.empty(len(rows), 0), (ids % 2).float())


def test_the_last_checkpoint_of_an_asynchronous_mode_has_the_buffers_of_the_end(tmp_path: Path) -> None:
    url = str(tmp_path / "checkpoints")
    with alone_in(tmp_path):
        tables = gba_hvd.EmbeddingTables({"t": (5, 2)}, gba_hvd.SGD(lr=0.1))
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = gba_hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), tables, global_batch=2 * MICRO, micro_batch=MICRO
        )
        state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
        state.register_callbacks(
            [gba_hvd.GBACallback(mode="gba", wait_s=PATIENCE_S), CheckpointCallback(url=url, every_steps=1000)]
        )

        @gba_hvd.elastic.run
        def train(state: gba_hvd.elastic.TorchState) -> None:
            for state.epoch in range(N_EPOCHS):
                for batch in gba_hvd.batches(Clicks(), state):
                    optimizer.zero_grad()
                    logits = model(tables(batch.ids)["t"]).squeeze(1)
                    nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
                    optimizer.step()

        train(state)
    saved = open_checkpoint(url).dense()
    assert saved["0.num_batches_tracked"] == N_EPOCHS * N_SAMPLES // MICRO
    for name, value in model.state_dict().items():
        torch.testing.assert_close(torch.as_tensor(saved[name]), value, rtol=0, atol=0)
