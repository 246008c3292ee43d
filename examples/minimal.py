"""The smallest complete job: what a Horovod script becomes with shared embedding tables.

    python examples/minimal.py                            # one worker
    horovodrun -np 2 python examples/minimal.py           # two: the same result from the same table memory

The loop is the one a Horovod script has already.
"""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as loss_fn

import gba_hvd
from ctr.deepfm import DeepFM
from gba_hvd.data import SyntheticClickLog

hvd.init()
rows = {"user": 10_000, "item": 2_000}
dataset = SyntheticClickLog(200_000, rows, seed=1)
valid = SyntheticClickLog(50_000, rows, seed=1, start=200_000)

tables = gba_hvd.EmbeddingTables({name: (n, 9) for name, n in rows.items()}, optimizer=gba_hvd.RowAdagrad(lr=0.05))
model = DeepFM(tables, n_dense=dataset.n_dense, hidden=(64, 32))
optimizer = gba_hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=1e-3), tables, global_batch=2048, micro_batch=512
)
state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)


@gba_hvd.elastic.run  # Horovod's, and callbacks get how the job ended
def train(state: Any) -> None:
    for state.epoch in range(state.epoch, 2):
        for batch in gba_hvd.batches(dataset, state):  # micro-batches, each handed out once
            optimizer.zero_grad()
            loss = loss_fn(model(batch), batch.label)
            loss.backward()
            optimizer.step()
        scores = gba_hvd.evaluate(model, valid, state, activation="sigmoid")
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: step {state.step}, validation AUC {scores.auc:.4f}")


train(state)
