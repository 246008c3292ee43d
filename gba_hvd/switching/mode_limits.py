"""What cannot be done in which mode: asked for together, it is refused, so that nothing is ignored in silence.

Checked when a `GBACallback` or a hook is registered, for the modes that are named, and again when a mode is entered:
operators and plans name others.
"""

from __future__ import annotations

from gba_hvd.errors import BadInput
from gba_hvd.mode_names import REPLICA_MODES
from gba_hvd.switching.requests import switching_of
from gba_hvd.training.engine import Engine


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
    """The same for the mode that the job is in, and those that its `GBACallback` names."""
    callback = switching_of(engine)
    if callback is not None:
        here = {engine.mode.name} - {"allreduce"} if engine.mode is not None else set()
        for mode in sorted({*callback.modes_to_come, *here}):
            check_mode(engine, mode, callback.rule)


def hooks_of(engine: Engine) -> list[str]:
    """The step hooks that somebody registered on the optimizer itself, by name."""
    optimizer = engine.model.optimizer
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return [getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks]
