"""The real system under the speeds that a simulation draws: one worker, as `horovodrun` starts it.

An emulated accelerator (`emulated_accelerators`) makes every micro-batch take the same time as the simulation's; all
else is a job as a user would write it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import gba_hvd

from ..bench.harness import emulated_accelerators as emulated
from ..bench.harness import small_ctr
from ..bench.harness.ours_small_ctr import Log, model_and_optimizer
from .agreement import JobSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--job", required=True, help="settings, JSON")
    args = parser.parse_args()
    job = JobSettings(**json.loads(args.job))
    hvd.init()
    torch.set_num_threads(1)
    model, optimizer = model_and_optimizer(job.n_micro, job.micro_batch)
    accelerator = emulated.Accelerator(job.scenario(), hvd.rank(), seed=job.seed)
    state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    switching = gba_hvd.GBACallback(mode=job.mode, rule=job.rule, tolerance=job.tolerance, wait_s=60)
    state.register_callbacks([switching])

    @gba_hvd.elastic.run
    def train(state: gba_hvd.elastic.TorchState) -> None:
        log = Log(small_ctr.Samples.train(args.data, job.micro_batches * job.micro_batch))
        late = 0
        for batch in gba_hvd.batches(log, state, shuffle=False):
            accelerator.begin()
            began_s = accelerator.at_s
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(batch), batch.label).backward()
            late += accelerator.at_s - began_s > job.service_s / 2  # this machine was too slow to emulate well
            accelerator.wait()
            optimizer.step()
        seconds = accelerator.at_s
        scores = gba_hvd.evaluate(model, Log(small_ctr.Samples.held_out(args.data)), state, batch=5000)
        if state.world.rank == 0:
            progress = state.engine.progress
            result = {
                "staleness": progress.staleness, "lags": progress.dense_ages, "auc": scores.auc,
                "log_loss": scores.logloss, "time": seconds / job.service_s, "steps": state.step,
                "dropped": state.samples.dropped, "late": late,
            }  # fmt: skip
            args.result.write_text(json.dumps(result))

    train(state)
    hvd.shutdown()


if __name__ == "__main__":
    main()
