"""Which update rule an asynchronous mode runs: the one that was asked for, or the default, with the reason.

The default of mode "gba" is `look_ahead` where the optimizer has momentum, so that the next step is like the last one;
else, and in the other modes, "none". Decided here; who asks for what is in `switching.callback`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gba_hvd.mode_names import REPLICA_MODES
from gba_hvd.update_rules.delayed_nesterov import NADAM
from gba_hvd.update_rules.look_ahead import LookAhead


@dataclass(frozen=True)
class RuleChoice:
    """rule: its name. reason: why this one, in words."""

    rule: str
    reason: str

    def __str__(self) -> str:
        return f"rule {self.rule} ({self.reason})"


def choose(
    asked: str | None, mode: str, optimizer: Mapping[str, Any] | None, lookahead: int | None, has_dense: bool = True
) -> RuleChoice:
    """The rule of an asynchronous mode.

    asked: a rule's name, or None for the default. optimizer: as of `torch_optimizers.spec_of`; None: it is not known,
    or no server can step it. lookahead: as of `ps.coordinator.discipline.Discipline`; 0 is lock-step
    has_dense: the optimizer has dense parameters, by which every rule goes
    """
    if mode in REPLICA_MODES:
        return RuleChoice(
            "none",
            f"in mode {mode} each worker steps a replica at once, so no dense gradient comes late; those of rows do",
        )
    if asked is not None:
        return RuleChoice(asked, "requested")
    if mode != "gba":
        return RuleChoice("none", f"the default of mode {mode}")
    if lookahead == 0:
        return RuleChoice("none", "the default in lock-step, where no gradient comes late")
    if not has_dense:
        return RuleChoice("none", "the default for an optimizer without dense parameters")
    if optimizer is None:
        return RuleChoice("none", "the default for an optimizer that no server can step")
    name = str(optimizer["class"]).rpartition(":")[2]
    if optimizer["class"] == NADAM or any(group.get("nesterov") for group in optimizer["groups"]):
        return RuleChoice("none", f"the default for {name} here, which has a look-ahead of its own")
    if LookAhead.why_not(optimizer):
        return RuleChoice("none", f"the default for {name} here: look_ahead needs momentum in every group")
    return RuleChoice("look_ahead", f"the default of mode gba for an optimizer with momentum, here {name}")
