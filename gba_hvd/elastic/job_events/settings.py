"""What describes a run, and does not change while it runs."""

from __future__ import annotations

from typing import Any

import torch

from gba_hvd.callbacks import KEEP_BEST
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.elastic import learning_rates
from gba_hvd.switching.requests import switching_of
from gba_hvd.training.engine import Engine
from recovery.callback import CheckpointCallback


def settings_of(engine: Engine) -> dict[str, Any]:
    """What describes the run. Nothing that changes while it runs: MLflow stores the first value of a parameter."""
    switching, checkpoints = switching_of(engine), checkpoints_of(engine)
    tables = engine.model.tables
    row_optimizer, owns = learning_rates.row_optimizers(engine.model)
    own = {t.name: repr(owns[t.optimizer - 1]) for t in tables.layout.tables if t.optimizer}
    hashed = tables.layout.hashed_settings()
    of_the_mode = {"mode": "allreduce"} if switching is None else switching.describe()
    return {
        "tables": {t.name: [t.n_rows, t.dim] for t in engine.model.tables.layout.tables},
        **({"hashed_tables": hashed} if hashed else {}),
        "n_shards": engine.model.tables.layout.n_shards,
        "global_batch": engine.model.global_batch,
        "micro_batch": engine.model.micro_batch,
        **({} if engine.model.sync_micro_batch is None else {"sync_micro_batch": engine.model.sync_micro_batch}),
        "optimizer": type(engine.model.optimizer).__name__,
        **_dense_settings(engine.model.optimizer),
        "row_optimizer": repr(row_optimizer),
        **({"own_row_optimizers": own} if own else {}),
        "row_average": engine.model.row_average,
        "compression": "none" if engine.model.compression is None else engine.model.compression.spec.exactly,
        "row_compression": engine.model.row_compression.exactly,
        **({} if checkpoints is None else _checkpoint_settings(checkpoints.callback)),
        **{name: value for name, value in of_the_mode.items() if value is not None},
        **({} if switching is None else {"rule_reason": switching.rule_reason}),
    }


def _checkpoint_settings(callback: CheckpointCallback) -> dict[str, Any]:
    """Of the plan, what it goes by; of an interval that was given, that. What is not set is left out."""
    given = callback.given
    found = {"recovery": callback.recovery, "policy": given.policy, "target_pls": given.target_pls}
    found |= {"row_fraction": given.r, "total_samples": callback.total_samples}
    found |= {"checkpoint_every_s": callback.every_s, "checkpoint_every_steps": callback.every_steps}
    found |= {KEEP_BEST: callback.keep_best}
    if callback.is_planned:
        found |= {"mtbf_h": given.mtbf_h, "longest_s": given.longest_s}
    return {name: value for name, value in found.items() if value is not None}


def _dense_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Largest of the groups: the learning rate before schedules, and momentum of SGD, where a schedule moves it the
    largest of the schedule; of other optimizers the `betas`, of each group where groups differ. Of groups that have
    parameters.
    """
    groups = [group for group in optimizer.param_groups if group.get("gba_hvd") != "tables" and group["params"]]
    if not groups:
        return {}
    found: dict[str, Any] = {"dense_lr": max(float(group.get("initial_lr", group["lr"])) for group in groups)}
    if isinstance(optimizer, torch.optim.SGD):
        found["dense_momentum"] = max(float(group.get("max_momentum", group["momentum"])) for group in groups)
        if dampening := max(float(group["dampening"]) for group in groups):
            found["dense_dampening"] = dampening
    betas = [[float(beta) for beta in group["betas"]] for group in groups if "betas" in group]
    if betas:
        found["dense_betas"] = betas[0] if all(one == betas[0] for one in betas) else betas
    return found
