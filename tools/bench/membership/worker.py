"""One elastic worker that trains until it is ended, and notes when each of its micro-batches was done.

The same click model and accelerator for all: ours in one mode, or plain Horovod elastic with a commit every step.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from ..harness import emulated_accelerators as emulated
from ..harness import small_ctr
from .command import N_MICRO

SAMPLES = 1 << 40  # an epoch that never ends


class WorkerMarks:
    """A file of this process: its rank when it began, then the time of each micro-batch's end (monotonic, s)."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / str(os.getpid())).open("w", buffering=1)
        self._rank = rank

    def note(self) -> None:
        if self._rank >= 0:
            self._file.write(f"{self._rank}\n")
            self._rank = -1
        self._file.write(f"{time.monotonic()}\n")


def accelerator(service_s: float) -> emulated.Accelerator:
    return emulated.Accelerator(emulated.Scenario("none", service_s, 0.0, float("inf")), 0)


def train_ours(mode: str, marks: Path, service_s: float) -> None:
    import gba_hvd

    from ..harness.ours_small_ctr import Drawn, model_and_optimizer

    model, optimizer = model_and_optimizer(N_MICRO, emulated.MICRO_BATCH)
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    state.register_callbacks([gba_hvd.GBACallback(mode=mode, wait_s=60)])
    device, noted = accelerator(service_s), WorkerMarks(marks, hvd.rank())

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        for batch in gba_hvd.batches(Drawn(SAMPLES, list(small_ctr.TABLES.values())), state, shuffle=False):
            device.begin()
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(batch), batch.label).backward()
            device.wait()
            optimizer.step()
            noted.note()

    train(state)


def train_plain(marks: Path, service_s: float) -> None:
    model = small_ctr.OneTable()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=small_ctr.LEARNING_RATE, eps=small_ctr.EPS),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=N_MICRO + 1,  # more than there are: gradients leave in step()
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    device, noted = accelerator(service_s), WorkerMarks(marks, hvd.rank())

    def train(state: Any) -> None:
        while True:
            share = range(hvd.rank(), N_MICRO, hvd.size())
            optimizer.zero_grad()
            for i in share:
                device.begin()
                ids, dense, label = small_ctr.drawn(state.step * N_MICRO + i, emulated.MICRO_BATCH)
                (binary_cross_entropy_with_logits(model(ids, dense), label) / len(share)).backward()
                device.wait()
                if i != share[-1]:
                    noted.note()
            optimizer.step()
            state.step += 1
            state.commit()
            noted.note()

    hvd.elastic.run(train)(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contestant", required=True, help="horovod, or the mode of ours")
    parser.add_argument("--marks", type=Path, required=True, help="folder for the times")
    parser.add_argument("--service-s", type=float, required=True)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if args.contestant == "horovod":
        train_plain(args.marks, args.service_s)
    else:
        train_ours(args.contestant, args.marks, args.service_s)


if __name__ == "__main__":
    main()
