"""What cannot be done in which mode: asked for together, it is refused, so that nothing is ignored in silence.

Checked when a `GBACallback` or a hook is registered, for the modes that are named, and again when a mode is entered:
operators and plans name others. A setting that is of use in other modes of the same job is not refused, but reported.
"""

from __future__ import annotations

from gba_hvd.callbacks import Event
from gba_hvd.errors import BadInput
from gba_hvd.mode_names import REPLICA_MODES
from gba_hvd.switching.callback import GBACallback
from gba_hvd.switching.requests import switching_of
from gba_hvd.training.engine import Engine
from gba_hvd.update_rules import OWN

_ONE_PUSH = ("async", "hop_bs", *REPLICA_MODES)  # modes in which a step is one push


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
        if callback.weighs_by_values and not engine.model.dense.n:
            raise BadInput(
                "staleness_of='values' goes by the age of dense values, and the optimizer has no dense parameter that "
                "wants a gradient: leave it out, which weighs by the age of the micro-batch (staleness_of='token'), or "
                "give the dense parameters to the optimizer before it goes to DistributedOptimizer"
            )
        here = {engine.mode.name} - {"allreduce"} if engine.mode is not None else set()
        for mode in sorted({*callback.modes_to_come, *here}):
            check_mode(engine, mode, callback.rule_in(mode).rule)


def row_average_idle(mode: str, row_average: str, step: int) -> Event | None:
    """The warning that `row_average` has no effect in the mode that was entered after `step`; None where it has one.

    A step of one push has one contributor for each of its rows, so every average divides by 1.
    """
    if row_average == "global" or mode not in _ONE_PUSH:
        return None
    text = (
        f"row_average={row_average!r} has no effect in mode {mode!r}: a step there is one push, so each of its rows "
        "has one contributor, and 'global' gives the same. It counts in 'gba', 'bsp', 'hop_bw' and 'allreduce'; for a "
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
