"""The peers in `bench compression`: plain Horovod with and without its fp16, and DDP with and without PowerSGD.

As a user of theirs would write it. The click models have one table for all fields, its gradient dense, as in the other
benchmarks with emulated workers. The DLRM has a sparse table for each field, as in `bench allreduce`: Horovod
allgathers indices and values, and so does DDP over Gloo. Launched by horovodrun, or once on each host with the
environment that torch.distributed reads.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ..allreduce import batches, torch_tables
from ..allreduce.shape import SHAPES
from ..harness import dlrm, small_ctr
from . import workload


def main() -> None:
    parser = workload.parser(__doc__)
    parser.add_argument("--peer", required=True, choices=("horovod", "horovod_fp16", "ddp", "powersgd"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1 + args.seed)
    model, lr, eps = model_of(args.model)
    optimizer: Any = torch.optim.Adagrad(model.parameters(), lr=lr, eps=eps)
    trained: nn.Module = model
    if args.peer.startswith("horovod"):
        import horovod.torch as hvd

        hvd.init()
        compression = fp16_of_dense_gradients() if args.peer == "horovod_fp16" else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        rank, size = hvd.rank(), hvd.size()
    else:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        # One bucket: over Gloo, the hooks of several buckets may enter their collectives in different orders. The only
        # buffer there is never changes: to send it at every step would be to their disadvantage.
        replica = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1000, broadcast_buffers=False)
        if args.peer == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        trained = replica

    source, n_samples = samples_of(args, rank, size)

    def step() -> None:
        *inputs, label = next(source)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(trained(*inputs), label).backward()
        optimizer.step()

    def barrier() -> None:
        if args.peer.startswith("horovod"):
            hvd.allreduce(torch.zeros(1), name="bench.barrier")
        else:
            dist.barrier()

    if args.epochs:
        for _ in range(args.epochs * (n_samples // (size * workload.BATCH[args.model]))):
            step()
        if rank == 0:
            workload.write(args, {"auc": small_ctr.auc(model, small_ctr.Samples.held_out(args.data))})
    else:
        workload.measure(args, rank, step, barrier)
    barrier()
    if args.peer.startswith("horovod"):
        hvd.shutdown()
    else:
        dist.destroy_process_group()
        os._exit(0)  # gloo's threads do not always end


def model_of(name: str) -> tuple[nn.Module, float, float]:
    """(model, learning rate, eps): those of our contestants."""
    if name == "dlrm":
        return torch_tables.Model(SHAPES["dlrm"]), dlrm.LEARNING_RATE, dlrm.EPS
    return (
        small_ctr.OneTable(workload.HIDDEN[name]),
        small_ctr.LEARNING_RATE if name == "small" else 0.005,
        small_ctr.EPS,
    )


def samples_of(args: argparse.Namespace, rank: int, size: int) -> tuple[Iterator[tuple[Any, ...]], int]:
    """What the model takes and the label, of each step, for ever; and the samples of an epoch."""
    n_phases = size * workload.BATCH[args.model] * workload.n_steps(args.phases)
    if args.model == "dlrm":
        prepared = batches.load(args.data, SHAPES["dlrm"], rank)
        return ((one, one.label) for one in itertools.cycle(prepared)), n_phases
    n_samples = n_phases or len(small_ctr.Samples.held_out(args.data).label) - small_ctr.N_HELD_OUT
    return workload.batches(small_ctr.Samples.train(args.data, n_samples), args, rank, size), n_samples


def fp16_of_dense_gradients() -> Any:
    """Horovod's fp16 where it can be used: for a sparse gradient Horovod compresses nothing, then fails to undo it."""
    from horovod.torch.compression import FP16Compressor

    class Fp16(FP16Compressor):  # type: ignore[misc]
        @staticmethod
        def decompress(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
            return tensor if dtype is None else FP16Compressor.decompress(tensor, dtype)

    return Fp16


if __name__ == "__main__":
    main()
