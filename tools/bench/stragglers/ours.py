"""Ours with emulated accelerators, as a user would write it; only `GBACallback`'s arguments differ between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import gba_hvd

from ..harness import emulated_accelerators as emulated
from ..harness import small_ctr
from ..harness.ours_small_ctr import Log, model_and_optimizer


class Watch(gba_hvd.Callback):
    """Notes progress and switches."""

    def __init__(self, progress: emulated.EmulatedProgress) -> None:
        self._progress = progress
        self.state: gba_hvd.elastic.TorchState | None = None
        self.switches: list[dict[str, Any]] = []
        self.rounds: list[dict[str, float]] = []  # what was reported of them, while speed was measured

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        assert self.state is not None
        self._progress.note(record.samples_applied, self.state.samples.dropped)

    def on_event(self, event: gba_hvd.Event) -> None:
        if event.kind == "switch":
            at_s = self._progress.measured_at_s
            self.switches.append({"step": event.step, "at_s": at_s, "reason": event.message, **event.data})
        if "rounds_per_s" in event.data and self._progress.is_measured:
            self.rounds.append({name: float(value) for name, value in event.data.items()})


def main() -> None:
    parser = small_ctr.parser(__doc__)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--threads", type=int, default=1, help="of each worker, with an emulated accelerator each")
    parser.add_argument("--parts", type=int, default=0, help="also samples/s in so many parts of the measured time")
    parser.add_argument("--settings", type=json.loads, default={}, help="others of GBACallback, as JSON")
    args = parser.parse_args()
    scenario = small_ctr.scenario_of(args)
    hvd.init()
    if args.scenario == "none":
        scenario = emulated.even(args.service_s, args.measured_s, hvd.size() * args.threads)
    torch.set_num_threads(1)
    model, optimizer = model_and_optimizer(emulated.N_MICRO, emulated.MICRO_BATCH)
    accelerator = emulated.Accelerator(scenario, hvd.rank(), started=None if hvd.rank() else args.started)
    progress = emulated.EmulatedProgress(accelerator)
    watch = Watch(progress)
    state = watch.state = gba_hvd.elastic.TorchState(model, optimizer, epoch=0)
    state.register_callbacks([gba_hvd.GBACallback(mode=args.mode, wait_s=60, **args.settings), watch])

    def compute(model: nn.Module, batch: gba_hvd.Batch) -> None:
        """In each of several threads."""
        accelerator.begin()
        binary_cross_entropy_with_logits(model(batch), batch.label).backward()
        accelerator.wait()

    @gba_hvd.elastic.run
    def train(state: gba_hvd.elastic.TorchState) -> None:
        log = Log(small_ctr.Samples.train(args.data, scenario.n_micro() * emulated.MICRO_BATCH))
        if args.threads > 1:
            gba_hvd.hogwild(log, state, compute, n_threads=args.threads, shuffle=False)
        else:
            for batch in gba_hvd.batches(log, state, shuffle=False):
                accelerator.begin()
                optimizer.zero_grad()
                binary_cross_entropy_with_logits(model(batch), batch.label).backward()
                accelerator.wait()
                optimizer.step()
        scores = gba_hvd.evaluate(model, Log(small_ctr.Samples.held_out(args.data)), state, batch=5000)
        if state.world.rank == 0:
            write(args.result, progress, state, watch, scores.auc, args.parts)

    train(state)
    hvd.shutdown()


def write(
    path: Path,
    progress: emulated.EmulatedProgress,
    state: gba_hvd.elastic.TorchState,
    watch: Watch,
    auc: float,
    n_parts: int = 0,
) -> None:
    """What the chief measured. Staleness is that of the whole epoch. n_parts: see `--parts`"""
    stale: Mapping[int, int] = state.engine.progress.staleness or {}
    account = {name: getattr(state.samples, name) for name in ("total", "applied", "dropped", "lost")}
    result = {
        **progress.result(emulated.MICRO_BATCH),
        **emulated.staleness(stale),
        "auc": auc,
        "switches": watch.switches,
        **{name: mean(rates[name] for rates in watch.rounds) for name in (watch.rounds or [{}])[0]},
        "account": account,
        **({"by_part": progress.samples_per_s(n_parts)} if n_parts else {}),
    }
    path.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
