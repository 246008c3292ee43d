"""A worker of `gba-hvd bench reader`: trains one epoch, and notes when each of its micro-batches came."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import gba_hvd
from gba_hvd.data import ParquetStream

from .command import MICRO_BATCH, N_MICRO, ROW_GROUP, WORKERS

WARM = 24  # micro-batches that are not measured: servers, readers and the first row groups come meanwhile


class SlowItems:
    """n samples; each batch is waited for."""

    def __init__(self, n: int, read_s: float) -> None:
        self._n, self._read_s = n, read_s

    def __len__(self) -> int:
        return self._n

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        time.sleep(self._read_s)
        numbers = torch.from_numpy(rows)
        return gba_hvd.Batch({"item": numbers % 1000}, torch.empty(len(rows), 0), (numbers % 2).float())


class SlowStream(ParquetStream):
    """Each row group is waited for, as long as for its micro-batches together."""

    def __init__(self, url: str, read_s: float) -> None:
        self._group_s = read_s * ROW_GROUP / MICRO_BATCH
        super().__init__(url, ids=["item"], label="label", window=1)

    def _decoded(self, number: int) -> Any:
        time.sleep(self._group_s)
        return super()._decoded(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--reading", type=json.loads, required=True, help="arguments of gba_hvd.batches")
    parser.add_argument("--read-s", type=float, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    tables = gba_hvd.EmbeddingTables({"item": (1000, 8)}, gba_hvd.RowAdagrad(lr=0.05))
    model = torch.nn.Linear(8, 1)
    optimizer: Any = gba_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), tables, global_batch=N_MICRO * MICRO_BATCH, micro_batch=MICRO_BATCH
    )
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    state.register_callbacks([gba_hvd.GBACallback(mode=args.mode, wait_s=120)])
    n = WORKERS * (args.micro_batches + WARM) * MICRO_BATCH
    dataset: Any = SlowItems(n, args.read_s)
    if args.data == "parquet":
        dataset = SlowStream(files(args.scratch / "items", n), args.read_s)
    times: list[float] = []

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        for batch in gba_hvd.batches(dataset, state, **args.reading):
            times.append(time.perf_counter())
            optimizer.zero_grad()
            loss = model(tables(batch.ids)["item"]).mean()
            time.sleep(args.step_s)
            loss.backward()
            optimizer.step(loss=loss)
        if state.world.rank == 0:
            measured = times[WARM:]
            seconds = (measured[-1] - measured[0]) / (len(measured) - 1)
            args.result.write_text(json.dumps({"seconds": seconds, "n_measured": len(measured)}))

    train(state)
    hvd.shutdown()


def files(folder: Path, n: int) -> str:
    """Written by the chief, if they are not there."""
    if hvd.rank() == 0 and not folder.exists():
        folder.mkdir()
        item = np.arange(n)
        table = pa.table({"item": item % 1000, "label": item % 2})
        for number, part in enumerate(np.array_split(item, 4)):
            pq.write_table(table.take(pa.array(part)), folder / f"{number}.parquet", row_group_size=ROW_GROUP)
    hvd.broadcast(torch.zeros(1), 0, name="files")
    return str(folder)


if __name__ == "__main__":
    main()
