"""Plain Horovod: `nn.Embedding(sparse=True)` x 26 and `hvd.DistributedOptimizer`.

Every worker holds all tables. Horovod allgathers the indices and values of each sparse gradient.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from . import dlrm, worker


class DLRM(nn.Module):
    """One sparse table per field; `merged`: one table for all fields, so that two allgathers do for 52."""

    def __init__(self, *, merged: bool) -> None:
        super().__init__()
        n = dlrm.N_TABLES
        sizes = [n * dlrm.N_ROWS] if merged else [dlrm.N_ROWS] * n
        self.tables = nn.ModuleList(nn.Embedding(size, dlrm.DIM, sparse=True) for size in sizes)
        for weight in self.tables.parameters():
            nn.init.uniform_(weight, -(dlrm.N_ROWS**-0.5), dlrm.N_ROWS**-0.5)
        self.first_row = (torch.arange(n) * dlrm.N_ROWS).unsqueeze(1) if merged else None
        self.dense = dlrm.DenseDLRM()

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        if self.first_row is not None:
            rows = self.tables[0]((ids + self.first_row).T)
        else:
            rows = torch.stack([table(column) for table, column in zip(self.tables, ids, strict=True)], dim=1)
        logits: Tensor = self.dense(dense, rows)
        return logits


def main() -> None:
    parser = worker.parser(__doc__)
    parser.add_argument("--merged", action="store_true", help="one table of 5.2 M rows")
    parser.add_argument("--sparse-as-dense", action="store_true", help="allreduce the whole tables")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    clicks = worker.Clicks.load(args.clicks, hvd.rank())
    model = DLRM(merged=args.merged)
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

    worker.time_steps(args, hvd.rank(), step, lambda: hvd.allreduce(torch.zeros(1), name="barrier"))
    hvd.shutdown()


if __name__ == "__main__":
    main()
