"""The batch-update parameter server of `rpc_server` with emulated accelerators: the last rank serves, the others train.

A worker computes its share of a global step, pushes once, and continues when the server answers with the next step's
dense parameters. The rows of a share are pulled in one call.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ..harness import emulated_accelerators as emulated
from ..harness import small_ctr, torch_rpc_server

SERVER = "server"


def main() -> None:
    args = small_ctr.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank, n_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    tower = small_ctr.Tower()  # the same on all, by the seed
    if rank == n_workers:
        rows = torch.empty(sum(small_ctr.TABLES.values()), small_ctr.DIM).normal_(std=small_ctr.INIT_STD)
        dense = parameters_to_vector(tower.parameters()).detach()
        torch_rpc_server.serve(
            torch_rpc_server.BatchUpdateServer(rows, dense, n_workers, lr=small_ctr.LEARNING_RATE, eps=small_ctr.EPS)
        )
    rpc.init_rpc(
        SERVER if rank == n_workers else f"worker{rank}",
        rank=rank,
        world_size=n_workers + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(num_worker_threads=n_workers + 2, rpc_timeout=60),
    )
    if rank < n_workers:
        train(args, tower, rank, n_workers)
    rpc.shutdown()


def train(args: argparse.Namespace, tower: small_ctr.Tower, rank: int, n_workers: int) -> None:
    scenario = small_ctr.scenario_of(args)
    samples = small_ctr.Samples.train(args.data, scenario.n_micro() * emulated.MICRO_BATCH)
    first_rows, share = small_ctr.first_rows(), emulated.N_MICRO // n_workers
    accelerator = emulated.Accelerator(scenario, rank)
    progress = emulated.EmulatedProgress(accelerator)
    for step in range(scenario.n_micro() // emulated.N_MICRO):
        accelerator.begin()
        mine = [
            samples.micro(step * emulated.N_MICRO + rank + i * n_workers, emulated.MICRO_BATCH) for i in range(share)
        ]
        ids, index = torch.unique(torch.stack([ids + first_rows for ids, _, _ in mine]), return_inverse=True)
        rows = rpc.rpc_sync(SERVER, torch_rpc_server.pull, (ids,)).requires_grad_()
        tower.zero_grad()
        for i, (_, dense, label) in enumerate(mine):
            if i:
                accelerator.begin()
            loss = binary_cross_entropy_with_logits(tower(dense, rows[index[i].T]), label)
            (loss / emulated.N_MICRO).backward()
            accelerator.wait()
        vector_to_parameters(push(ids, rows, tower), tower.parameters())
        progress.note((step + 1) * emulated.N_MICRO * emulated.MICRO_BATCH)
    if rank == 0:
        table = rpc.rpc_sync(SERVER, torch_rpc_server.pull, (torch.arange(sum(small_ctr.TABLES.values())),))
        held_out = small_ctr.Samples.held_out(args.data)
        auc = small_ctr.auc(lambda ids, dense: tower(dense, table[(ids + first_rows).T]), held_out)
        result = {**progress.result(emulated.MICRO_BATCH), **emulated.staleness({}), "auc": auc}
        args.result.write_text(json.dumps(result))


def push(ids: Tensor, rows: Tensor, tower: small_ctr.Tower) -> Tensor:
    """Send this worker's part of the step's gradient; the dense parameters after the step."""
    assert rows.grad is not None
    dense = torch.cat([p.grad.flatten() for p in tower.parameters() if p.grad is not None])
    answer: Tensor = rpc.rpc_sync(SERVER, torch_rpc_server.push_and_wait, (ids, rows.grad, dense))
    return answer


if __name__ == "__main__":
    main()
