"""Ours in `bench compression`: `--compression` and `--row-compression` are all that differs between runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import gba_hvd

from ..allreduce import batches, ours
from ..allreduce.shape import SHAPES
from ..harness import dlrm, small_ctr
from ..harness.ours_small_ctr import Log, Model, embedding_tables
from . import workload
from .compressors import COMPRESSION


def main() -> None:
    parser = workload.parser(__doc__)
    parser.add_argument("--compression", default="none", choices=COMPRESSION)
    parser.add_argument("--row-compression", default="none", choices=COMPRESSION)
    parser.add_argument("--always", action="store_true", help="no bypass")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1 + args.seed)
    batch, workers = workload.BATCH[args.model], hvd.size()
    specs = COMPRESSION[args.compression], COMPRESSION[args.row_compression]
    dense, rows = (spec.always() for spec in specs) if args.always else specs
    model, tables, lr, eps = model_of(args)
    optimizer = gba_hvd.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=lr, eps=eps), tables, global_batch=workers * batch,
        micro_batch=batch, compression=dense, row_compression=rows,
    )  # fmt: skip
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    dataset = dataset_of(args, workers * batch * workload.n_steps(args.phases))

    def step(micro: Any) -> None:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(micro), micro.label)
        loss.backward()
        optimizer.step(loss=loss)  # type: ignore[call-arg]

    @gba_hvd.elastic.run
    def train(state: gba_hvd.elastic.TorchState) -> None:
        if args.epochs:
            for state.epoch in range(args.epochs):  # type: ignore[attr-defined]
                for micro in gba_hvd.batches(dataset, state, seed=args.seed):
                    step(micro)
            scores = gba_hvd.evaluate(model, Log(small_ctr.Samples.held_out(args.data)), state, batch=5000)
            if hvd.rank() == 0:
                n_bytes = {"_".join(key): n for key, n in state.engine.traffic.so_far().items()}
                workload.write(args, {"auc": scores.auc, "bytes": n_bytes, "steps": state.step})
            return
        source: Iterator[Any] = iter(gba_hvd.batches(dataset, state))
        workload.measure(
            args, hvd.rank(), lambda: step(next(source)), lambda: hvd.allreduce(torch.zeros(1), name="bench.barrier"),
            counted=lambda: {f"{way}_{kind}": n for (way, _, kind), n in state.engine.traffic.so_far().items()},
        )  # fmt: skip
        for _ in itertools.chain(source):
            raise AssertionError("the phases use up the epoch")

    train(state)
    hvd.shutdown()


def model_of(args: Any) -> tuple[nn.Module, gba_hvd.EmbeddingTables, float, float]:
    """(model, its tables, learning rate, eps)"""
    if args.model == "dlrm":
        tables = ours.tables_of(SHAPES["dlrm"])
        return ours.Model(SHAPES["dlrm"], tables), tables, dlrm.LEARNING_RATE, dlrm.EPS
    lr = small_ctr.LEARNING_RATE if args.model == "small" else 0.005
    model = Model(embedding_tables(args.seed), workload.HIDDEN[args.model])
    return model, model.tables, lr, small_ctr.EPS


def dataset_of(args: Any, n_samples: int) -> Any:
    """n_samples: of all phases; otherwise all that there are."""
    if args.model == "dlrm":
        shape = SHAPES["dlrm"]
        return ours.Cycled(shape, batches.load(args.data, shape, hvd.rank()), n_samples)
    n = n_samples or len(small_ctr.Samples.held_out(args.data).label) - small_ctr.N_HELD_OUT
    return Log(small_ctr.Samples.train(args.data, n))


if __name__ == "__main__":
    main()
