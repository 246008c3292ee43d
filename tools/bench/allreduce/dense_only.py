"""The dense modules alone, on ready-made rows, in all workers at once; and how fast these copy and gather memory.

Nothing goes between the workers, so what a step of ours takes longer is what tables, exchange and waiting take.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import horovod.torch as hvd
import torch
from torch import Tensor

from ..harness import dlrm
from . import batches, worker
from .batches import ShapeBatch
from .shape import SHAPES, Shape

_BYTES = 256 << 20  # of what is copied: more than any cache
_REPEATS = 3


def main() -> None:
    args = worker.parser(__doc__).parse_args()
    shape = SHAPES[args.shape]
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    prepared = [ready_rows(shape, one) for one in batches.load(args.clicks, shape, hvd.rank())]
    model = shape.dense()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=dlrm.LEARNING_RATE, eps=dlrm.EPS)
    step = worker.training_step(prepared, lambda inputs: model(*inputs), optimizer)
    worker.time_steps(args, hvd.rank(), step, barrier)
    path = args.result / f"rank{hvd.rank()}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | bandwidth(shape.dim)))
    hvd.shutdown()


def ready_rows(shape: Shape, batch: ShapeBatch) -> tuple[tuple[Tensor, Tensor, list[Tensor]], Tensor]:
    """What the dense modules take, rows among it that ask for a gradient; and the labels."""
    n = len(batch.label)
    rows = torch.randn(n, len(shape.pooled), shape.dim).mul_(0.01).requires_grad_()
    histories = [
        torch.randn(n, shape.fields[name].ids[1], shape.dim).mul_(0.01).requires_grad_() for name in shape.histories
    ]
    return (batch.dense, rows, histories), batch.label


def bandwidth(dim: int) -> dict[str, float]:
    """Bytes/s that this worker reads and writes while the others do the same: of one long copy, and of random rows."""
    rows = torch.ones(_BYTES // (4 * dim), dim)
    out, order = torch.empty_like(rows), torch.randperm(len(rows))
    return {
        "copied_per_s": _rate(lambda: out.copy_(rows)),
        "gathered_per_s": _rate(lambda: torch.index_select(rows, 0, order, out=out)),
    }


def _rate(move: Callable[[], object]) -> float:
    """The best of some; the first one touches the memory."""
    seconds = []
    for _ in range(1 + _REPEATS):
        barrier()
        start = time.perf_counter()
        move()
        seconds.append(time.perf_counter() - start)
    return 2 * _BYTES / min(seconds[1:])


def barrier() -> None:
    hvd.allreduce(torch.zeros(1), name="barrier")


if __name__ == "__main__":
    main()
