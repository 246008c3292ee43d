"""Tables as torch has them, with sparse gradients: under plain Horovod, or (`--alone N`) in one process for N workers.

Under Horovod every worker holds all tables, and the indices and values of each sparse gradient go round by allgather.
Alone, one process computes the batches of all workers as one, with a thread for each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..harness import dlrm
from . import batches, worker
from .batches import ShapeBatch
from .shape import SHAPES, Shape


class Model(nn.Module):
    """One table for all fields that share it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape, self.dense = shape, shape.dense()
        self.tables = nn.ModuleDict(
            {name: nn.EmbeddingBag(n, shape.dim, mode="sum", sparse=True) for name, n in shape.tables.items()}
        )
        for name, n_rows in shape.tables.items():
            nn.init.uniform_(self.weights(name), -(n_rows**-0.5), n_rows**-0.5)

    def weights(self, table: str) -> Tensor:
        found = self.tables[table].weight
        assert isinstance(found, Tensor)
        return found

    def forward(self, batch: ShapeBatch) -> Tensor:
        logits: Tensor = self.dense(
            batch.dense,
            torch.stack([self._rows(batch, name) for name in self._shape.pooled], dim=1),
            [self._rows(batch, name).view(len(batch.label), -1, self._shape.dim) for name in self._shape.histories],
        )
        return logits

    def _rows(self, batch: ShapeBatch, name: str) -> Tensor:
        field, ids = self._shape.fields[name], batch.ids[name]
        if field.is_history or field.ids == (1, 1):
            return nn.functional.embedding(ids, self.weights(field.table), sparse=True)
        found: Tensor = self.tables[field.table](ids, batch.offsets(name))
        return found


def main() -> None:
    parser = worker.parser(__doc__)
    parser.add_argument("--alone", type=int, metavar="N", help="one process without Horovod, for N workers")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    torch.manual_seed(1)
    if args.alone:
        torch.set_num_threads(args.alone)
        of_workers = [batches.load(args.clicks, shape, rank) for rank in range(args.alone)]
        prepared = [batches.joined(parts) for parts in zip(*of_workers, strict=True)]
        model = Model(shape)
        step = worker.training_step([(one, one.label) for one in prepared], model, adagrad(model))
        worker.time_steps(args, 0, step, lambda: None)
        return
    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    prepared = batches.load(args.clicks, shape, hvd.rank())
    model = Model(shape)
    optimizer = hvd.DistributedOptimizer(adagrad(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    step = worker.training_step([(one, one.label) for one in prepared], model, optimizer)
    worker.time_steps(args, hvd.rank(), step, lambda: hvd.allreduce(torch.zeros(1), name="barrier"))
    hvd.shutdown()


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=dlrm.LEARNING_RATE, eps=dlrm.EPS)


if __name__ == "__main__":
    main()
