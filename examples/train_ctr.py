"""Trains DeepFM, DLRM or DCN-v2 on a prepared log, raw files or a synthetic log; DIN, DIEN or YoutubeDNN on a synthetic
behaviour log, DIN and DIEN also on a prepared log with histories, YoutubeDNN also on Frappe. YoutubeDNN retrieves: its
test is the recall.

    python examples/train_ctr.py --config examples/configs/synthetic.yaml
    horovodrun -np 2 python examples/train_ctr.py --config examples/configs/frappe_deepfm.yaml --data FOLDER
    python examples/train_ctr.py --config FILE.yaml --dry-run train.epochs=3     # the plan; starts nothing

    python examples/train_ctr.py --settings              # all settings: defaults, meanings, how to switch them off

A job trains by allreduce unless its settings have a section `switching`: then it is in `switching.mode` (auto: the mode
that is faster just now; or one that `gba_hvd.GBACallback` knows) and changes as `switching.switch_at` says:

    horovodrun -np 3 python examples/train_ctr.py --config FILE.yaml switching.mode=auto
    horovodrun -np 3 python examples/train_ctr.py --config FILE.yaml 'switching.switch_at={500: gba, 900: allreduce}'

The other settings of the section are those of `gba_hvd.GBACallback`. `--faults FILE.json` slows, stops or kills workers
as planned (`gba_hvd.FaultSchedule`), e.g. {"faults": [{"kind": "slow", "worker": 1, "factor": 3, "from_step": 100}]}.

Gradients and rows travel as `compression` and `row_compression` say (docs/COMPRESSION.md; settings: name, keep,
refresh_every, values):

    horovodrun ... --config FILE.yaml row_compression=int8 'compression={name: dct, keep: 0.01, values: int8}'

With a section `checkpoint` the job is saved while it trains, gets the rows of a lost host back, and resumes from the
newest checkpoint when all of it was lost and the same command is given again:

    horovodrun -np 3 python examples/train_ctr.py --config FILE.yaml checkpoint.url=FOLDER checkpoint.every_steps=500

With a section `log_model` the trained model is logged with the run in MLflow, and registered under a name:

    horovodrun ... --config FILE.yaml log_model.registered_model_name=ctr log_model.alias=champion

OUT/summary.json is there from the start and renewed after each epoch: how the job ended (`status`, `error`), warnings,
metrics by epoch and those of the best one, chosen by validation, the account of samples, restarts, each switch with its
reason, how stale the micro-batches of asynchronous modes were, how many were refused (not finite) or given out again,
how many checkpoints were saved, and which rows came back from them.

The loop is `train` below; around it are settings (ctr/config.py), data (ctr/datasets.py) and models (ctr/*.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import gba_hvd
from ctr.build import build_model, build_tables, dense_optimizer, device_of, loss_of, refuse_single_sample
from ctr.config import JobConfig, load
from ctr.datasets import as_read_by, open_splits, prepared_splits
from ctr.dry_run import try_batch
from ctr.measures import evaluate_part, selects
from ctr.plan import most_steps, plan
from ctr.pulse import ProgressFiles
from ctr.served import logged_model
from ctr.settings_list import ShowSettings
from ctr.summary import JobSummary, stopped_early
from gba_hvd.callbacks import Callback
from gba_hvd.errors import GbaError
from gba_hvd.faults import FaultSchedule
from gba_hvd.tracking import MLflowCallback, ProgressLine
from recovery.callback import CheckpointCallback


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", required=True, metavar="FILE.yaml", help="settings; ready ones are in examples/configs"
    )
    parser.add_argument("--settings", action=ShowSettings, help="print all settings with their defaults, as YAML")
    parser.add_argument("--data", metavar="DIR", help="a prepared store, or a folder of raw files for data.preset")
    parser.add_argument("--out", metavar="DIR", help="results (default: runs/NAME)")
    parser.add_argument("--seed", type=int, help="short for seed=N")
    parser.add_argument("--faults", metavar="FILE.json", help="planned faults, as gba_hvd.FaultSchedule writes them")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, try one batch, and stop")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="settings that replace those in the file"
    )
    given = parser.parse_intermixed_args(arguments)
    try:
        config = load(given.config, [
            *([f"data.dir={json.dumps(given.data)}"] if given.data else []),
            *([f"seed={given.seed}"] if given.seed is not None else []),
            *given.overrides,
        ])  # fmt: skip
        faults = FaultSchedule.load(given.faults) if given.faults else FaultSchedule()
        if given.dry_run:
            splits = prepared_splits(config.data, config.reads_sequences)
            if splits is not None:
                splits = as_read_by(config.model.kind, splits)
                refuse_single_sample(config, len(splits.train))
            tried = None if splits is None else try_batch(config, splits)
            print(plan(config, splits, faults.faults, tried))
            return 0
        summary = JobSummary(Path(given.out or Path("runs") / config.name), config)
        try:
            run(config, summary, faults)
        except BaseException as error:
            summary.failed_before_training(error)
            raise
    except GbaError as error:
        print(f"train_ctr: {error}", file=sys.stderr)
        return 1
    return 0


def run(config: JobConfig, summary: JobSummary, faults: FaultSchedule) -> None:
    """Train; `summary` writes OUT/summary.json of it."""
    out = summary.file.parent
    if find_spec("horovod") is not None:  # without Horovod: a world of one worker
        import horovod.torch as hvd

        hvd.init()
    torch.manual_seed(config.seed)
    splits = as_read_by(config.model.kind, open_splits(config.data, config.reads_sequences))
    refuse_single_sample(config, len(splits.train))
    tables = build_tables(config, splits.train)
    device = device_of(config)
    model = build_model(config, tables, splits.train).to(device)
    # The same weights everywhere, but dropout of its own on every worker.
    torch.manual_seed(config.seed + int(os.environ.get("HOROVOD_RANK", "0")))
    optimizer: Any = gba_hvd.DistributedOptimizer(
        dense_optimizer(config.dense, model),
        tables,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        sync_micro_batch=config.train.sync_micro_batch,
        named_parameters=model.named_parameters(),
        row_average=config.train.row_average,
        compression=config.compression.spec(),
        row_compression=config.row_compression.spec(),
        max_norm=config.train.max_norm,
        max_row_norm=config.train.max_row_norm,
    )
    scheduler = ReduceLROnPlateau(
        optimizer, mode="max", threshold=0.0, factor=config.train.plateau_factor,
        patience=config.train.plateau_patience, min_lr=config.train.min_lr,
    )  # fmt: skip
    state = gba_hvd.elastic.TorchState(
        model, optimizer, name=config.name, epoch=0, scheduler=scheduler, best={}, by_epoch=[], last=None,
        epochs_done=0, epochs_without_gain=0, started_unix_s=time.time(), epoch_from_unix_s=time.time(), seconds=0.0,
    )  # fmt: skip
    summary.attach(state, splits)
    callbacks: list[Callback | CheckpointCallback] = [
        ProgressLine(total_steps=most_steps(config, len(splits.train))), ProgressFiles(out), summary.switch_log,
        summary.recovery_log, summary.norm_log, summary,
    ]  # fmt: skip
    if config.switching is not None:
        callbacks.append(config.switching.callback())
    if config.checkpoint is not None:
        callbacks.append(config.checkpoint.callback(config.train.epochs * len(splits.train)))
    if faults.faults:
        callbacks.append(faults)
    if config.mlflow:
        log_model = logged_model(config, splits.train)
        callbacks.append(
            MLflowCallback("ctr examples", config=config.as_dict(), data=splits.description, log_model=log_model)
        )
    state.register_callbacks(callbacks)

    by = selects(config)

    def compute(model: Any, batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch.to(device, non_blocking=True))
        loss.backward()
        return loss

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        for state.epoch in range(state.epoch, config.train.epochs):
            if 0 < config.train.early_stop <= state.epochs_without_gain:
                state.engine.emit(stopped_early(state, config))
                break
            parts = splits.of_epoch(state.epoch)
            model.train()
            if config.train.threads > 1:
                n_threads = config.train.threads
                gba_hvd.hogwild(
                    parts.train, state, compute, n_threads=n_threads, seed=config.seed, **config.data.reading
                )
            else:
                for batch in gba_hvd.batches(parts.train, state, seed=config.seed, **config.data.reading):
                    optimizer.zero_grad()
                    loss = compute(model, batch)
                    optimizer.step(loss=loss)
            valid = evaluate_part(model, parts.valid, state, device, config.data.reading)
            gain = valid.values[by] > state.best.get(f"valid_{by}", 0.0)
            is_last = state.epoch + 1 == config.train.epochs
            is_tested = gain or is_last or splits.of_day is not None  # each day has a test part of its own
            test = evaluate_part(model, parts.test, state, device, config.data.reading) if is_tested else None
            # Nothing below talks to other workers, so each survivor of a failure has done all of it or none.
            if valid.note and state.world.rank == 0:
                print(f"validation: {valid.note}", flush=True)
            if config.train.plateau_factor:
                scheduler.step(valid.values[by])
            now = time.time()
            of_valid = {f"valid_{name}": value for name, value in valid.values.items()}
            measured = dict(of_valid)
            if test is not None:
                measured |= {f"test_{name}": value for name, value in test.values.items()}
                state.last = test.values[by]
            if splits.of_day is not None and parts.auc_bayes is not None:
                measured["test_auc_bayes"] = parts.auc_bayes
            if gain and test is not None:
                state.best = {"best_epoch": state.epoch, **test.values, **of_valid}
                if test.exact is not None:
                    state.best["auc_exact"] = test.exact
            state.by_epoch = [
                *state.by_epoch,
                {
                    "epoch": state.epoch,
                    "step": state.step,
                    "seconds": round(now - state.epoch_from_unix_s, 2),
                    **measured,
                },
            ]
            state.epoch_from_unix_s = now
            state.epochs_done = state.epoch + 1
            state.epochs_without_gain = 0 if gain else state.epochs_without_gain + 1
            state.report(**measured)
            summary.write()
        state.seconds = time.time() - state.started_unix_s

    train(state)
    if state.world.rank == 0:
        print(summary.closing_line(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
