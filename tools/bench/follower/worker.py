"""One elastic worker of `bench follower`: trains until a file names the last epoch, and notes when steps were applied.

Files in --notes: PID, a line "step seconds" (monotonic) for each step; `last-epoch`, from the benchmark; `digest` of
the state at the end.
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

import gba_hvd
import recovery

from . import workload


class StepNotes(gba_hvd.Callback):
    """A file of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / str(os.getpid())).open("w", buffering=1)

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        self._file.write(f"{record.step} {time.monotonic()}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, required=True, help="of all tables")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--notes", type=Path, required=True, help="a folder")
    parser.add_argument("--url", help="of checkpoints; without it none are saved")
    parser.add_argument("--every-s", type=float, help="between two checkpoints")
    parser.add_argument("--keep-last", type=int, help="checkpoints")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    model, optimizer = workload.model_and_optimizer(args.rows, args.workers)
    shape = workload.shape(args.rows)
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    state.register_callbacks([StepNotes(args.notes), *checkpoints(args)])
    n_samples = workload.EPOCH_STEPS * args.workers * workload.MICRO_BATCH

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch <= last_epoch(args.notes):
            clicks = workload.Clicks(shape, n_samples, state.epoch)
            for batch in gba_hvd.batches(clicks, state, shuffle=False):
                optimizer.zero_grad()
                binary_cross_entropy_with_logits(model(batch), batch.label).backward()
                optimizer.step()
            state.epoch += 1
        hvd.barrier()  # the rows that other workers write are complete
        if state.world.rank == 0:
            (args.notes / "digest").write_text(workload.digest_of_model(model, shape))

    train(state)
    hvd.shutdown()


def checkpoints(args: argparse.Namespace) -> list[Any]:
    if args.url is None:
        return []
    return [recovery.CheckpointCallback(args.url, every_s=args.every_s, policy="delta", keep_last=args.keep_last)]


def last_epoch(notes: Path) -> float:
    """The benchmark names one that no worker has begun, so that all read the same."""
    try:
        return int((notes / "last-epoch").read_text())
    except FileNotFoundError:
        return float("inf")


if __name__ == "__main__":
    main()
