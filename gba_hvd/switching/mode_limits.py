"""What cannot be done in which mode: asked for together, it is refused, so that nothing is ignored in silence.

Checked when a `GBACallback` or a hook is registered, for the modes that are named, and again when a mode is entered:
operators and plans name others. A setting that is of use in other modes of the same job is not refused, but reported.
"""

from __future__ import annotations

import contextlib

from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.errors import BadInput
from gba_hvd.mode_names import BY_NAME, RECORDS, REPLICA_MODES
from gba_hvd.switching.callback import GBACallback
from gba_hvd.switching.requests import switching_of
from gba_hvd.torch_optimizers import spec_of
from gba_hvd.training.engine import Engine
from gba_hvd.update_rules import OWN


def check_mode(engine: Engine, mode: str, rule: str) -> None:
    """Raises BadInput when this asynchronous mode, with this update rule, would ignore something that was asked for."""
    if not engine.model.clip.is_none and mode in REPLICA_MODES:
        raise BadInput(
            f"mode {mode!r} cannot clip gradients ({engine.model.clip}): each worker steps a replica of its own, so "
            "there is no global step to measure. Leave max_norm and max_row_norm out, or use mode 'gba' or 'allreduce'"
        )
    if not engine.model.clip.is_none and rule == "dana_slim":
        raise BadInput(
            f"rule 'dana_slim' cannot clip gradients ({engine.model.clip}): its workers push momentum, so servers "
            "never see the step's gradient. Leave max_norm and max_row_norm out, or use rule 'dana_zero'"
        )
    if rule in OWN and rule != "none" and mode not in REPLICA_MODES and not engine.model.dense.n:
        raise BadInput(
            f"rule {rule!r} would correct nothing in mode {mode!r}: it goes by dense values, and the optimizer has no "
            "dense parameter that wants a gradient. Leave `rule` out (staleness='gap_aware' is one too; "
            "staleness='inverse' weighs row gradients by their age in steps), or give the dense parameters to the "
            "optimizer before it goes to DistributedOptimizer"
        )
    if hooks := hooks_of(engine):
        where = (
            "at every micro-batch of this worker" if mode in REPLICA_MODES else "nowhere: servers step the optimizer"
        )
        raise BadInput(
            f"mode {mode!r} cannot run the optimizer's step hooks at global steps ({', '.join(hooks)}): they would run "
            f"{where}. Remove them, or stay in allreduce mode. For clipping there are max_norm and max_row_norm of "
            "DistributedOptimizer, for what is to be done after a step Callback.on_step"
        )


def check_optimizer(engine: Engine, callback: GBACallback) -> None:
    """Take note of the optimizer. Raises BadInput where the rule that was asked for does not go with it.

    Without a rule, an optimizer that no server can step is refused when a mode is entered.
    """
    with contextlib.nullcontext() if callback.has_rule else contextlib.suppress(BadInput):
        callback.check_fits(spec_of(engine.model.optimizer), bool(engine.model.dense.n))


def check_modes(engine: Engine) -> None:
    """The same for the mode that the job is in, and those that its `GBACallback` names.

    And for a size of batches in allreduce mode where that is never asked for.
    """
    callback = switching_of(engine)
    if callback is not None:
        if engine.model.together > 1 and not callback.asks_for_allreduce:
            raise BadInput(
                f"sync_micro_batch={engine.model.sync_micro_batch} is for steps in allreduce mode, and this job asks "
                f"for {', '.join(map(repr, callback.modes_to_come))} only: leave it out, or choose mode 'auto', or "
                "name 'allreduce' in switch_at"
            )
        only_replicas = not callback.asks_for_allreduce and {*callback.modes_to_come} <= {*REPLICA_MODES}
        if engine.model.compression is not None and only_replicas:
            raise BadInput(
                f"compression={engine.model.compression.spec.exactly} is for dense gradients that are sent, and this "
                f"job asks for {', '.join(map(repr, callback.modes_to_come))} only, where each worker steps a replica: "
                "leave it out, or choose a mode such as 'gba'"
            )
        if callback.weighs_by_values and not engine.model.dense.n:
            raise BadInput(
                "staleness_of='values' goes by the age of dense values, and the optimizer has no dense parameter that "
                "wants a gradient: leave it out, which weighs by the age of the micro-batch (staleness_of='token'), or "
                "give the dense parameters to the optimizer before it goes to DistributedOptimizer"
            )
        here = {engine.mode.name} - {"allreduce"} if engine.mode is not None else set()
        for mode in sorted({*callback.modes_to_come, *here}):
            check_mode(engine, mode, callback.rule_in(mode).rule)


def compression_idle(engine: Engine, mode: str, n_hosts: int) -> Event | None:
    """The warning that `compression` has no effect in the mode that is entered; None where it has one, or is none.

    In modes with servers it is of what goes to servers of other hosts.
    """
    model = engine.model
    if model.compression is None or (n_hosts > 1 and mode not in REPLICA_MODES):
        return None
    why, what = (
        "each worker steps a replica, and no dense gradient is sent",
        "Leave it out, or use 'gba' or 'allreduce'",
    )
    if mode not in REPLICA_MODES:
        why = "gradients go to the servers of this host, through its memory"
        what = "It takes effect when a second host joins, and in 'allreduce'; else leave it out"
    where = f"in mode {mode!r} on {_hosts(n_hosts)}"
    text = f"compression={model.compression.spec.exactly} has no effect {where}: {why}. {what}"
    return Event("compression_idle", engine.progress.step, text, {"mode": mode, "hosts": n_hosts}, level="warning")


def strict_idle(engine: Engine, mode: str) -> Event | None:
    """The warning that the checkpoints' `strict` has no effect in the mode that is entered; None where it is not on."""
    checkpoints = checkpoints_of(engine)
    if checkpoints is None or not checkpoints.is_strict:
        return None
    text = (
        f"CheckpointCallback(strict=True) has no effect in mode {mode!r}: rows are read while servers make steps, so "
        "those read last may be some steps ahead, and get these steps twice after a restart. Leave strict out, or use "
        "mode 'allreduce', where workers wait until all rows are read"
    )
    return Event("strict_idle", engine.progress.step, text, {"mode": mode}, level="warning")


def _hosts(n: int) -> str:
    return "one host" if n == 1 else f"{n} hosts"


def row_average_idle(mode: str, row_average: str, step: int) -> Event | None:
    """The warning that `row_average` has no effect in the mode that was entered after `step`; None where it has one.

    A step of one push has one contributor for each of its rows, so every average divides by 1.
    """
    if row_average == "global" or BY_NAME[mode].step_of != "push":
        return None
    used = [repr(other.name) for other in RECORDS if other.step_of != "push"]
    text = (
        f"row_average={row_average!r} has no effect in mode {mode!r}: a step there is one push, so each of its rows "
        f"has one contributor, and 'global' gives the same. It counts in {', '.join(used[1:])} and {used[0]}; for a "
        "job that is to be in this mode only, leave row_average out"
    )
    return Event("row_average_idle", step, text, {"row_average": row_average, "mode": mode}, level="warning")


def options_idle(callback: GBACallback, mode: str, step: int) -> Event | None:
    """The warning that options have no effect in a mode that an operator requested; None where all of them have.

    In a mode that the job itself names there is none: what this one does not use is of another one that it names.
    """
    idle = {} if callback.names(mode) else callback.idle_options([mode])
    if not idle:
        return None
    text = f"options of GBACallback without effect in mode {mode!r}, which an operator requested: " + "; ".join(
        f"{name} ({why})" for name, why in idle.items()
    )
    return Event("options_idle", step, text, {"mode": mode, "options": list(idle)}, level="warning")


def hooks_of(engine: Engine) -> list[str]:
    """The step hooks that were registered on the optimizer itself, by name."""
    optimizer = engine.model.optimizer
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return [getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks]
