"""Ours: tables in shard memory, rows between workers through memory, dense gradients as well."""

from __future__ import annotations

import os
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import gba_hvd

from ..harness import dlrm
from . import batches, worker
from .batches import ShapeBatch
from .shape import SHAPES, Shape


class Cycled:
    """A dataset that answers with the prepared batches in turn, for any rows."""

    def __init__(self, shape: Shape, prepared: list[ShapeBatch], n_samples: int) -> None:
        self._batches = [
            gba_hvd.Batch({name: ids_of(shape, one, name) for name in shape.fields}, one.dense, one.label)
            for one in prepared
        ]
        self._n_samples, self._given = n_samples, 0

    def __len__(self) -> int:
        return self._n_samples

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        self._given += 1
        return self._batches[(self._given - 1) % len(self._batches)]


def ids_of(shape: Shape, batch: ShapeBatch, name: str) -> Tensor | gba_hvd.Bag:
    """[B], [B, L] where all samples have L ids, or a bag."""
    (least, most), ids = shape.fields[name].ids, batch.ids[name]
    if least < most:
        return gba_hvd.Bag(ids, batch.offsets(name))
    return ids if most == 1 else ids.view(-1, most)


class Model(nn.Module):
    def __init__(self, shape: Shape, tables: gba_hvd.EmbeddingTables) -> None:
        super().__init__()
        self.tables, self.dense = tables, shape.dense()
        self._pooled, self._histories = shape.pooled, shape.histories

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        if not self._histories:
            logits: Tensor = self.dense(batch.dense, self.tables.stacked(batch.ids), [])
            return logits
        rows = self.tables(batch.ids)
        pooled = torch.stack([rows[name] for name in self._pooled], dim=1)
        logits = self.dense(batch.dense, pooled, [rows[name] for name in self._histories])
        return logits


def tables_of(shape: Shape) -> gba_hvd.EmbeddingTables:
    """The shape's tables, with the optimizer that all peers have, and the standard deviation of their initial rows."""
    return gba_hvd.EmbeddingTables(
        {name: gba_hvd.Table(n_rows, shape.dim, init=(3 * n_rows) ** -0.5) for name, n_rows in shape.tables.items()},
        optimizer=gba_hvd.Adagrad(lr=dlrm.LEARNING_RATE, eps=dlrm.EPS),
        features={
            name: gba_hvd.Feature(field.table, pooling=None if field.is_history else "sum")
            for name, field in shape.fields.items()
        },
    )


def main() -> None:
    parser = worker.parser(__doc__)
    parser.add_argument("--parts", type=int, default=1, help="micro-batches that a worker's batch consists of")
    parser.add_argument("--together", action="store_true", help="compute them at once: sync_micro_batch")
    parser.add_argument(
        "--memory", type=Path, metavar="FOLDER", help="each name of a host has a folder of its own in it"
    )
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.memory is not None:
        os.environ["GBA_HVD_SHARD_DIR"] = str(args.memory / os.environ["HOROVOD_HOSTNAME"])
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    prepared, workers = batches.load(args.clicks, shape, hvd.rank()), hvd.size()
    batch_size, calls = len(prepared[0].label), 1 if args.together else args.parts
    prepared = [part for one in prepared for part in batches.cut(one, calls)]
    dataset = Cycled(shape, prepared, workers * batch_size * (args.warmup + args.steps))
    tables = tables_of(shape)
    model = Model(shape, tables)
    optimizer = gba_hvd.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=dlrm.LEARNING_RATE, eps=dlrm.EPS),
        tables,
        global_batch=workers * batch_size,
        micro_batch=batch_size // args.parts,
        sync_micro_batch=batch_size if args.together else None,
    )
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)

    @gba_hvd.elastic.run
    def train(state: gba_hvd.elastic.TorchState) -> None:
        given = gba_hvd.batches(dataset, state)

        def step(i: int) -> float:
            for _ in range(calls):
                batch = next(given)
                optimizer.zero_grad()
                loss = binary_cross_entropy_with_logits(model(batch), batch.label)
                loss.backward()
                optimizer.step(loss=loss)  # type: ignore[call-arg]
            return loss.item()

        assert tables.memory is not None
        worker.time_steps(
            args, hvd.rank(), step, lambda: hvd.allreduce(torch.zeros(1), name="bench.barrier"),
            shared_files=str(tables.memory.folder),
        )  # fmt: skip

    train(state)
    hvd.shutdown()


if __name__ == "__main__":
    main()
