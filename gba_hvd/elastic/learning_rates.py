"""Learning rates of a job that resumes: the saved ones are used, also where the script has others.

Decided here: where they differ, in words. A scheduler keeps the rate that its schedule starts from (`initial_lr`)
beside the present one: where both sides have it, that is compared, so the place in a schedule is no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch

from gba_hvd.callbacks import Event
from gba_hvd.training.model import TrainedModel

_TOLERANCE = 1e-9  # relative: the same rate after a way through float32 or JSON


@dataclass(frozen=True)
class Rate:
    """Of one group: now, and before its schedule, where it has one."""

    now: float
    initial: float | None

    @property
    def base(self) -> float:
        return self.now if self.initial is None else self.initial

    def compared(self, other: Rate) -> tuple[float, float]:
        both = self.initial is not None and other.initial is not None
        return (self.base, other.base) if both else (self.now, other.now)

    def differs(self, other: Rate) -> bool:
        mine, theirs = self.compared(other)
        return abs(mine - theirs) > _TOLERANCE * max(abs(mine), abs(theirs))


Rates = Mapping[str, Rate]  # by "dense", or "dense group 1", and "rows"


@dataclass(frozen=True)
class ReplacedRates:
    """script: as the script has them; saved: as they were saved, which are in force until the script sets others.
    script_before: as the script had them in the job that saved; None: of a checkpoint of an earlier version.
    """

    script: Rates
    saved: Rates
    script_before: Rates | None = None


def rates_of(optimizer: torch.optim.Optimizer) -> Rates:
    groups = optimizer.param_groups
    n_dense = sum(group.get("gba_hvd") != "tables" for group in groups)
    found, number = {}, 0
    for group in groups:
        initial = group.get("initial_lr")
        rate = Rate(float(group["lr"]), None if initial is None else float(initial))
        if group.get("gba_hvd") == "tables":
            found["rows"] = rate
        else:
            found[f"dense group {number}" if n_dense > 1 else "dense"] = rate
            number += 1
    return found


def to_wire(rates: Rates) -> dict[str, list[float | None]]:
    return {name: [rate.now, rate.initial] for name, rate in rates.items()}


def of_wire(rates: Mapping[str, Sequence[float | None]]) -> Rates:
    return {name: Rate(float(now or 0.0), initial) for name, (now, initial) in rates.items()}


def differing(one: Rates, other: Rates) -> list[str]:
    return [name for name, rate in one.items() if name in other and rate.differs(other[name])]


def in_words(rates: Rates) -> str:
    """`dense 0.005, rows 0.05`"""
    return ", ".join(f"{name} {rate.now:g}" for name, rate in rates.items())


def row_optimizers(model: TrainedModel) -> tuple[Any, list[Any]]:
    """That of tables that name none, and the others', each with the rate that it has, before a schedule."""
    rate, optimizers = rates_of(model.optimizer).get("rows"), model.tables.optimizers
    if rate is None:
        return optimizers.default, list(optimizers.own)
    own = [_with_lr(one, optimizers.rate(number, rate.base)) for number, one in enumerate(optimizers.own, 1)]
    return _with_lr(optimizers.default, rate.base), own


def _with_lr(optimizer: Any, lr: float) -> Any:
    if not is_dataclass(optimizer) or isinstance(optimizer, type) or getattr(optimizer, "lr", lr) == lr:
        return optimizer  # (one of the user's may be of any class)
    return replace(optimizer, **{"lr": lr})


def events_of(
    replaced: ReplacedRates, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], step: int
) -> Iterator[Event]:
    """As training begins. settings: those of `Job.settings` that have a rate, as they are now."""
    now = rates_of(optimizer)
    data = {"rates": {name: rate.base for name, rate in now.items()}}
    kept = [name for name in differing(replaced.script, now) if name not in differing(replaced.saved, now)]
    before = replaced.script_before
    if before is not None:  # a rate that only changed while the job trained is no difference of the scripts
        kept = [name for name in kept if name not in before or replaced.script[name].differs(before[name])]
    if kept:
        pairs = _pairs(now, replaced.script, "script", kept)
        text = (
            f"learning rates are those that were saved: {pairs}. To train with others, set group['lr'] of "
            'optimizer.param_groups where the training function begins; docs/RECOVERY.md, "Another learning rate"'
        )
        scripts = {name: rate.base for name, rate in replaced.script.items()}
        yield Event(
            "learning_rates_kept",
            step,
            text,
            {**data, "script": scripts},
            level="info" if before is None else "warning",
        )
    if new := differing(replaced.saved, now):
        text = f"the script has set {_pairs(now, replaced.saved, 'saved', new)}"
        yield Event("learning_rates_set", step, text, {**data, "settings": dict(settings)})


def _pairs(now: Rates, other: Rates, whose: str, names: list[str]) -> str:
    """`dense 0.005 (script: 0.0005), rows 0.05 (script: 0.005)`, as they were compared."""
    compared = [(name, *now[name].compared(other[name])) for name in names]
    return ", ".join(f"{name} {mine:g} ({whose}: {theirs:g})" for name, mine, theirs in compared)
