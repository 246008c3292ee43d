"""Ours with emulated accelerators, as a user would write it; only `GBACallback`'s arguments differ between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import gba_hvd

from ..harness import emulated_accelerators as emulated
from ..harness import small_ctr


class Log:
    """The samples as a dataset."""

    def __init__(self, samples: small_ctr.Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        ids, dense, label = self._samples.tensors(rows)
        return gba_hvd.Batch(dict(zip(small_ctr.FIELDS, ids, strict=True)), dense, label)


class Model(nn.Module):
    def __init__(self, tables: gba_hvd.EmbeddingTables) -> None:
        super().__init__()
        self.tables = tables
        self.tower = small_ctr.Tower()

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        logits: Tensor = self.tower(batch.dense, self.tables.stacked(batch.ids))
        return logits


def model_and_optimizer(n_micro: int, micro_batch: int) -> tuple[Model, torch.optim.Optimizer]:
    """With a global batch of n_micro micro-batches."""
    torch.manual_seed(1)
    tables = gba_hvd.EmbeddingTables(
        {name: (rows, small_ctr.DIM) for name, rows in small_ctr.TABLES.items()},
        optimizer=gba_hvd.Adagrad(lr=small_ctr.LEARNING_RATE, eps=small_ctr.EPS),
        init_std=small_ctr.INIT_STD,
    )
    model = Model(tables)
    optimizer = gba_hvd.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=small_ctr.LEARNING_RATE, eps=small_ctr.EPS),
        tables,
        global_batch=n_micro * micro_batch,
        micro_batch=micro_batch,
    )
    return model, optimizer


class Watch(gba_hvd.Callback):
    """Notes progress and switches."""

    def __init__(self, progress: emulated.Progress) -> None:
        self._progress = progress
        self.state: gba_hvd.elastic.TorchState | None = None
        self.switches: list[dict[str, Any]] = []
        self.rounds: list[dict[str, float]] = []  # what was reported of them, while speed was measured

    def on_step(self, record: gba_hvd.StepRecord) -> None:
        assert self.state is not None
        self._progress.note(record.samples_applied, self.state.samples.dropped)

    def on_event(self, event: gba_hvd.Event) -> None:
        if event.kind == "switch":
            self.switches.append({"step": event.step, "reason": event.message, **event.data})
        if "rounds_per_s" in event.data and self._progress.is_measured:
            self.rounds.append({name: float(value) for name, value in event.data.items()})


def main() -> None:
    parser = small_ctr.parser(__doc__)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--threads", type=int, default=1, help="of each worker, with an emulated accelerator each")
    parser.add_argument("--settings", type=json.loads, default={}, help="others of GBACallback, as JSON")
    args = parser.parse_args()
    scenario = small_ctr.scenario_of(args)
    hvd.init()
    if args.scenario == "none":
        scenario = emulated.even(args.service_s, args.measured_s, hvd.size() * args.threads)
    torch.set_num_threads(1)
    model, optimizer = model_and_optimizer(emulated.N_MICRO, emulated.MICRO_BATCH)
    accelerator = emulated.Accelerator(scenario, hvd.rank())
    progress = emulated.Progress(accelerator)
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
            write(args.result, progress, state, watch, scores.auc)

    train(state)
    hvd.shutdown()


def write(path: Path, progress: emulated.Progress, state: gba_hvd.elastic.TorchState, watch: Watch, auc: float) -> None:
    """What the chief measured. Staleness is that of the whole epoch."""
    stale: Mapping[int, int] = state.engine.progress.staleness or {}
    account = {name: getattr(state.samples, name) for name in ("total", "applied", "dropped", "lost")}
    result = {
        **progress.result(emulated.MICRO_BATCH),
        **emulated.staleness(stale),
        "auc": auc,
        "switches": watch.switches,
        **{name: mean(told[name] for told in watch.rounds) for name in (watch.rounds or [{}])[0]},
        "account": account,
    }
    path.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
