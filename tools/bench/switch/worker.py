"""A job that switches between allreduce and gba every so many steps, and notes when each step ended."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import gba_hvd

from ..harness import emulated_accelerators as emulated
from ..harness import small_ctr
from ..harness.ours_small_ctr import Drawn, Model
from .command import EVERY, SWITCHES, WARM_UP

N_STEPS = WARM_UP + EVERY * SWITCHES


class Steps(gba_hvd.Callback):
    """When each step ended, on this worker."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, float]] = []

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        self.seen.append((record.step, record.mode, time.perf_counter()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, required=True, help="about so many for weights and counters")
    parser.add_argument("--service-s", type=float, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    n_rows = max(1000, args.bytes // (len(small_ctr.FIELDS) * 4 * (small_ctr.DIM + 1)))
    tables = gba_hvd.EmbeddingTables(
        {name: (n_rows, small_ctr.DIM) for name in small_ctr.FIELDS}, optimizer=gba_hvd.SGD(lr=0.1)
    )
    model = Model(tables)
    optimizer = gba_hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-3),
        tables,
        global_batch=emulated.N_MICRO * emulated.MICRO_BATCH,
        micro_batch=emulated.MICRO_BATCH,
    )
    steps = Steps()
    plan = {WARM_UP + EVERY * i: ("gba", "allreduce")[i % 2] for i in range(SWITCHES)}
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    state.register_callbacks([gba_hvd.GBACallback(mode="allreduce", switch_at=plan, wait_s=60), steps])
    forever = emulated.Scenario("none", args.service_s, 0.0, float("inf"))
    accelerator = emulated.Accelerator(forever, hvd.rank())

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        n_samples = N_STEPS * emulated.N_MICRO * emulated.MICRO_BATCH
        clicks = Drawn(n_samples, [n_rows] * len(small_ctr.FIELDS))
        for batch in gba_hvd.batches(clicks, state, shuffle=False):
            accelerator.begin()
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(batch), batch.label).backward()
            accelerator.wait()
            optimizer.step()
        if state.world.rank == 0:
            seen = {"table_bytes": tables.layout.n_bytes, "steps": steps.seen}
            args.result.write_text(json.dumps(seen))

    train(state)
    hvd.shutdown()


if __name__ == "__main__":
    main()
