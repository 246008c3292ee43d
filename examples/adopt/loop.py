"""The training loop of all scripts of this folder: that of a plain script, with the lines that gba-hvd adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import gba_hvd

Batch = tuple[Any, Tensor]
CLICKS = {"click": gba_hvd.Task(label=lambda batch: batch[1])}
# Of models that also score purchases: outputs and labels are [B, 2].
CLICKS_AND_PURCHASES = {
    "click": gba_hvd.Task(label=lambda batch: batch[1][:, 0]),
    "purchase": gba_hvd.Task(label=lambda batch: batch[1][:, 1]),
}


def train(
    make_model: Callable[[], nn.Module],
    make_samples: Callable[[int, int], Any],
    loss_of: Callable[[nn.Module, Batch], Tensor],
    outputs: Callable[[nn.Module, Batch], Tensor],
    tasks: Mapping[str, gba_hvd.Task] = CLICKS,
) -> None:
    """Two epochs, and the AUC of each task.

    make_samples: a dataset of as many samples, from a seed. loss_of: mean loss of a batch. outputs: of a batch,
    probabilities float [B], or [B, T] of T tasks
    """
    hvd.init()
    torch.manual_seed(1)  # the same rows on all hosts
    model = make_model()
    tables = gba_hvd.convert(model, gba_hvd.Adagrad(lr=0.05))
    optimizer: Any = gba_hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-3), tables, global_batch=512, micro_batch=128
    )
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    state.register_callbacks([gba_hvd.GBACallback(mode="auto")])
    training, validation = make_samples(20_000, 1), make_samples(5_000, 2)

    @gba_hvd.elastic.run
    def train_epochs(state: Any) -> None:
        for state.epoch in range(state.epoch, 2):
            for batch in gba_hvd.batches(training, state, forward=lambda batch: outputs(model, batch)):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step(loss=loss)
            scores = gba_hvd.evaluate(
                model, validation, state, batch=512, forward=lambda batch: outputs(model, batch), tasks=tasks,
                activation="none",
            )  # fmt: skip
            if hvd.rank() == 0:
                aucs = ", ".join(f"{task} {found['auc']:.4f}" for task, found in scores.items())
                print(f"epoch {state.epoch}: step {state.step}, validation AUC: {aucs}")

    train_epochs(state)
