"""Plain Horovod: `nn.Embedding(sparse=True)` x 26 and `hvd.DistributedOptimizer`.

Every worker holds all tables. Horovod allgathers the indices and values of each sparse gradient.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from ..harness import dlrm, peer_worker
from ..harness.dlrm import SparseDLRM


def main() -> None:
    parser = peer_worker.parser(__doc__)
    parser.add_argument("--merged", action="store_true", help="one table of 5.2 M rows")
    parser.add_argument("--sparse-as-dense", action="store_true", help="allreduce the whole tables")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    clicks = peer_worker.Clicks.load(args.clicks, hvd.rank())
    model = SparseDLRM(merged=args.merged)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=dlrm.LEARNING_RATE, eps=dlrm.EPS),
        named_parameters=model.named_parameters(),
        sparse_as_dense=args.sparse_as_dense,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def step(i: int) -> float:
        i %= len(clicks)
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(clicks.ids[i], clicks.dense[i]), clicks.label[i])
        loss.backward()
        optimizer.step()
        return loss.item()

    peer_worker.time_steps(args, hvd.rank(), step, lambda: hvd.allreduce(torch.zeros(1), name="barrier"))
    hvd.shutdown()


if __name__ == "__main__":
    main()
