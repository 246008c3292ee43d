"""Plain Horovod with emulated accelerators: one table for all fields, `hvd.DistributedOptimizer`.

Every worker computes its share of a global step, then all exchange gradients in one fused allreduce. The table's
gradient is dense: at this size that is faster than the allgathers of a sparse one, and Adagrad leaves the same rows.
"""

from __future__ import annotations

import json

import horovod.torch as hvd
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from ..harness import emulated_accelerators as emulated
from ..harness import small_ctr


def main() -> None:
    args = small_ctr.parser(__doc__).parse_args()
    scenario = small_ctr.scenario_of(args)
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank, size = hvd.rank(), hvd.size()
    samples = small_ctr.Samples.train(args.data, scenario.n_micro() * emulated.MICRO_BATCH)
    model = small_ctr.OneTable()
    share = emulated.N_MICRO // size
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=small_ctr.LEARNING_RATE, eps=small_ctr.EPS),
        named_parameters=model.named_parameters(),
        # One more than the backward passes there are: gradients then leave in step(), not while the emulated
        # accelerator is still computing them.
        backward_passes_per_step=share + 1,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    accelerator = emulated.Accelerator(scenario, rank, started=None if rank else args.started)
    progress = emulated.EmulatedProgress(accelerator)
    hvd.allreduce(torch.zeros(1), name="barrier")

    for step in range(scenario.n_micro() // emulated.N_MICRO):
        optimizer.zero_grad()
        for i in range(share):
            accelerator.begin()
            ids, dense, label = samples.micro(step * emulated.N_MICRO + rank + i * size, emulated.MICRO_BATCH)
            (binary_cross_entropy_with_logits(model(ids, dense), label) / share).backward()
            accelerator.wait()
        optimizer.step()
        progress.note((step + 1) * emulated.N_MICRO * emulated.MICRO_BATCH)

    if rank == 0:
        auc = small_ctr.auc(model, small_ctr.Samples.held_out(args.data))
        result = {**progress.result(emulated.MICRO_BATCH), **emulated.staleness({}), "auc": auc}
        args.result.write_text(json.dumps(result))
    hvd.shutdown()


if __name__ == "__main__":
    main()
