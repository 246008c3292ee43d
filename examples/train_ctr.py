"""Trains a click-through-rate model: DeepFM, DLRM or DCN-v2, on a prepared log, raw files or a synthetic log.

    python examples/train_ctr.py --config examples/configs/synthetic.yaml
    horovodrun -np 2 python examples/train_ctr.py --config examples/configs/frappe_deepfm.yaml --data FOLDER
    python examples/train_ctr.py --config FILE.yaml --dry-run train.epochs=3     # the plan; starts nothing

A job trains by allreduce unless its settings have a section `switching`: then it is in `switching.mode` (auto: whatever
is faster just now; or one that `gba_hvd.GBACallback` knows) and changes as `switching.switch_at` says:

    horovodrun -np 3 python examples/train_ctr.py --config FILE.yaml switching.mode=auto
    horovodrun -np 3 python examples/train_ctr.py --config FILE.yaml 'switching.switch_at={500: gba, 900: allreduce}'

The other settings of the section are those of `gba_hvd.GBACallback`. `--faults FILE.json` slows, stops or kills workers
as planned (`gba_hvd.FaultSchedule`), e.g. {"faults": [{"kind": "slow", "worker": 1, "factor": 3, "from_step": 100}]}.

Gradients and rows travel as `compression` and `row_compression` say (docs/COMPRESSION.md; settings: name, keep,
refresh_every, values):

    horovodrun ... --config FILE.yaml row_compression=int8 'compression={name: dct, keep: 0.01, values: int8}'

With a section `checkpoint` the job is saved while it trains, gets the rows of a lost host back, and goes on from the
newest checkpoint when all of it was lost and the same command is given again:

    horovodrun -np 3 python examples/train_ctr.py --config FILE.yaml checkpoint.url=FOLDER checkpoint.every_steps=500

OUT/summary.json says how it ended: test AUC and log loss, the account of samples, restarts, each switch with its
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
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.lr_scheduler import ReduceLROnPlateau

import gba_hvd
from ctr.build import build_model, build_tables, refuse_single_sample
from ctr.config import JobConfig, load
from ctr.datasets import open_splits, prepared_splits
from ctr.plan import most_steps, plan
from ctr.pulse import Pulse
from ctr.recovery_log import RecoveryLog, recovery_summary
from ctr.switch_log import SwitchLog, staleness_summary
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
    parser.add_argument("--data", metavar="DIR", help="a prepared store, or a folder of raw files for data.preset")
    parser.add_argument("--out", metavar="DIR", help="results (default: runs/NAME)")
    parser.add_argument("--seed", type=int, help="short for seed=N")
    parser.add_argument("--faults", metavar="FILE.json", help="planned faults, as gba_hvd.FaultSchedule writes them")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
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
            print(plan(config, prepared_splits(config.data), faults.faults))
            return 0
        run(config, Path(given.out or Path("runs") / config.name), faults)
    except GbaError as error:
        print(f"train_ctr: {error}", file=sys.stderr)
        return 1
    return 0


def run(config: JobConfig, out: Path, faults: FaultSchedule) -> None:
    """Train, and write OUT/summary.json on the chief."""
    if find_spec("horovod") is not None:  # without Horovod: a world of one worker
        import horovod.torch as hvd

        hvd.init()
    torch.manual_seed(config.seed)
    splits = open_splits(config.data)
    refuse_single_sample(config, len(splits.train))
    tables = build_tables(config, splits.train.tables)
    model = build_model(config, tables, splits.train.n_dense)
    # The same weights everywhere, but dropout of its own on every worker.
    torch.manual_seed(config.seed + int(os.environ.get("HOROVOD_RANK", "0")))
    optimizer: Any = gba_hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=config.dense.lr, weight_decay=config.dense.weight_decay),
        tables,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        named_parameters=model.named_parameters(),
        row_average=config.train.row_average,
        compression=config.compression.spec(),
        row_compression=config.row_compression.spec(),
    )
    scheduler = ReduceLROnPlateau(
        optimizer, mode="max", threshold=0.0, factor=config.train.plateau_factor,
        patience=config.train.plateau_patience, min_lr=config.train.min_lr,
    )  # fmt: skip
    state = gba_hvd.elastic.TorchState(
        model, optimizer, epoch=0, scheduler=scheduler, best={}, auc_last=None, epochs_done=0, epochs_without_gain=0,
        started_unix_s=time.time(), seconds=0.0,
    )  # fmt: skip
    switch_log, recovery_log = SwitchLog(), RecoveryLog(out)
    callbacks: list[Callback | CheckpointCallback] = [
        ProgressLine(total_steps=most_steps(config, len(splits.train))), Pulse(out), switch_log, recovery_log,
    ]  # fmt: skip
    if config.switching is not None:
        callbacks.append(config.switching.callback())
    if config.checkpoint is not None:
        callbacks.append(config.checkpoint.callback())
    if faults.faults:
        callbacks.append(faults)
    if config.mlflow:
        callbacks.append(MLflowCallback(experiment="ctr examples", config=config.as_dict(), data=splits.description))
    state.register_callbacks(callbacks)

    @gba_hvd.elastic.run
    def train(state: Any) -> None:
        for state.epoch in range(state.epoch, config.train.epochs):
            if 0 < config.train.early_stop <= state.epochs_without_gain:
                break
            model.train()
            for batch in gba_hvd.batches(splits.train, state, seed=config.seed):
                optimizer.zero_grad()
                loss = binary_cross_entropy_with_logits(model(batch), batch.label)
                loss.backward()
                optimizer.step(loss=loss)
            valid = gba_hvd.evaluate(model, splits.valid, state)
            gain = valid.auc > state.best.get("valid_auc", 0.0)
            is_last = state.epoch + 1 == config.train.epochs
            test = gba_hvd.evaluate(model, splits.test, state) if gain or is_last else None
            # Nothing below talks to other workers, so each survivor of a failure has done all of it or none.
            state.report(valid_auc=valid.auc, valid_logloss=valid.logloss)
            if valid.note and state.world.rank == 0:
                print(f"validation: {valid.note}", flush=True)
            scheduler.step(valid.auc)
            state.epochs_done = state.epoch + 1
            state.epochs_without_gain = 0 if gain else state.epochs_without_gain + 1
            if test is not None:
                state.report(test_auc=test.auc, test_logloss=test.logloss)
                state.auc_last = test.auc
            if gain and test is not None:
                state.best = {
                    "best_epoch": state.epoch, "auc": test.auc, "logloss": test.logloss, "auc_exact": test.exact,
                    "valid_auc": valid.auc, "valid_logloss": valid.logloss,
                }  # fmt: skip
        state.seconds = time.time() - state.started_unix_s

    train(state)
    if state.world.rank == 0:
        told = {"switches": switch_log.switches, **recovery_summary(recovery_log.events())}
        write_summary(out, config, state, splits.auc_bayes, told)


def write_summary(out: Path, config: JobConfig, state: Any, auc_bayes: float | None, told: Mapping[str, Any]) -> None:
    """The test figures are those of the epoch with the best validation AUC, measured on that epoch's weights.

    told: switches, checkpoints, recoveries. auc_last: test AUC after the last epoch; None if training stopped early.
    """
    summary = {
        "name": config.name,
        "seed": config.seed,
        "auc": None,
        "logloss": None,
        **state.best,
        "auc_last": state.auc_last if state.epochs_done == config.train.epochs else None,
        "auc_bayes": auc_bayes,
        "samples_total": state.samples.total,
        "samples_applied": state.samples.applied,
        "samples_dropped": state.samples.dropped,
        "samples_lost": state.samples.lost,
        "refused": state.engine.refused,
        "reissued": state.engine.reissued,
        "staleness": staleness_summary(state.engine.staleness),
        **told,
        "restarts": state.engine.restarts,
        "workers": state.world.size,
        "steps": state.step,
        "epochs": state.epochs_done,
        "seconds": round(state.seconds, 2),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if summary["auc"] is None:
        print(f"no test AUC, as validation AUC was never defined; {out / 'summary.json'}")
    else:
        print(f"test AUC {summary['auc']:.5f}, log loss {summary['logloss']:.5f}; {out / 'summary.json'}")


if __name__ == "__main__":
    sys.exit(main())
