"""Ours, as a user would write it: tables in shard memory, rows by alltoall, one dense allreduce per step."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import gba_hvd

from ..harness import dlrm, peer_worker

FIELDS = [f"c{i}" for i in range(dlrm.N_TABLES)]


class Cycled:
    """A dataset that answers with the prepared batches in turn, for any rows. parts: each batch comes in so many."""

    def __init__(self, clicks: peer_worker.Clicks, n_samples: int, parts: int = 1) -> None:
        size = clicks.label.shape[1] // parts
        cuts = [(i, slice(at, at + size)) for i in range(len(clicks)) for at in range(0, size * parts, size)]
        self._batches = [
            gba_hvd.Batch(
                dict(zip(FIELDS, clicks.ids[i][:, cut].contiguous(), strict=True)),
                clicks.dense[i][cut],
                clicks.label[i][cut],
            )
            for i, cut in cuts
        ]
        self._n_samples, self._given = n_samples, 0

    def __len__(self) -> int:
        return self._n_samples

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        self._given += 1
        return self._batches[(self._given - 1) % len(self._batches)]


class DLRM(nn.Module):
    def __init__(self, tables: gba_hvd.EmbeddingTables) -> None:
        super().__init__()
        self.tables = tables
        self.dense = dlrm.DenseDLRM()

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        logits: Tensor = self.dense(batch.dense, self.tables.stacked(batch.ids))
        return logits


def main() -> None:
    parser = peer_worker.parser(__doc__)
    parser.add_argument("--profile", action="store_true", help="print a profile of rank 0's timed steps")
    parser.add_argument("--parts", type=int, default=1, help="micro-batches that a worker's batch consists of")
    parser.add_argument("--together", action="store_true", help="compute them at once: sync_micro_batch")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    clicks = peer_worker.Clicks.load(args.clicks, hvd.rank())
    batch_size, workers = clicks.label.shape[1], hvd.size()
    n_samples = workers * batch_size * (args.warmup + args.steps)
    dataset = Cycled(clicks, n_samples, 1 if args.together else args.parts)
    tables = gba_hvd.EmbeddingTables(
        {field: (dlrm.N_ROWS, dlrm.DIM) for field in FIELDS},
        optimizer=gba_hvd.Adagrad(lr=dlrm.LEARNING_RATE, eps=dlrm.EPS),
    )
    model = DLRM(tables)
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
        batches = gba_hvd.batches(dataset, state)

        def step(i: int) -> float:
            for _ in range(1 if args.together else args.parts):
                batch = next(batches)
                optimizer.zero_grad()
                loss = binary_cross_entropy_with_logits(model(batch), batch.label)
                loss.backward()
                optimizer.step(loss=loss)  # type: ignore[call-arg]
            return loss.item()

        assert tables.memory is not None
        peer_worker.time_steps(
            args,
            hvd.rank(),
            step,
            barrier=lambda: hvd.allreduce(torch.zeros(1), name="bench.barrier"),
            shared_files=str(tables.memory.folder),
            around=profiled if args.profile and hvd.rank() == 0 else peer_worker.plainly,
        )

    train(state)
    hvd.shutdown()


def profiled(steps: Callable[[], None]) -> None:
    """Print the 25 dearest functions, and how the time divides between Python and compiled code."""
    profiler = cProfile.Profile()
    profiler.runcall(steps)
    stats = pstats.Stats(profiler).sort_stats("tottime")
    stats.print_stats(25)
    own: dict[str, float] = {}
    for (file, _, _), (_, _, seconds, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        kind = origin(file)
        own[kind] = own.get(kind, 0.0) + seconds
    print("seconds, profiler's cost included: " + ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in own.items()))


def origin(file: str) -> str:
    """Whose code the profiler means by this file name; numba shows its compiled functions as if they were Python."""
    if file == "~":
        return "torch, Horovod and built-ins"
    if file.endswith("gba_hvd/kernels.py"):
        return "our compiled kernels"
    return "our Python" if "/gba_hvd/" in file else "other Python"


if __name__ == "__main__":
    main()
