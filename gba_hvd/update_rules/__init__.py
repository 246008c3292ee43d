"""Update rules under delay: what a server makes of gradients that were computed with old dense values.

A file for each rule; here they get their names and meet the optimizer. Rules act on the dense part. Rows are updated
by the row optimizer in every mode; Gap-Aware damps their gradients by the mean of its damping over the dense elements
of all servers, the others leave them.

    none              the user's optimizer, as in allreduce mode
    gap_aware         each element of a gradient is divided by how far it has moved since
    dc                a gradient is corrected to the newest values, by its first-order Taylor term
    dana_zero         a momentum per worker, and a look ahead             SGD with momentum
    dana_slim         the same, held by the workers                       SGD with momentum
    dana_dc           dana_zero with the corrected gradients of dc        SGD with momentum
    delayed_nesterov  a look ahead, the gradient discounted               SGD with momentum, NAdam
    look_ahead        the user's optimizer, and a look ahead by its last step
    staleness_lr      learning rate / mean staleness

Distributions register others as entry points in `gba_hvd.update_rules`, see docs/EXTENDING.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from gba_hvd.errors import BadInput
from gba_hvd.update_rules.dana_dc import DanaDc
from gba_hvd.update_rules.dana_slim import DanaSlim
from gba_hvd.update_rules.dana_zero import DanaZero
from gba_hvd.update_rules.delay_compensation import DelayCompensated
from gba_hvd.update_rules.delayed_nesterov import DelayedNesterov
from gba_hvd.update_rules.gap_aware import GapAware
from gba_hvd.update_rules.look_ahead import LookAhead
from gba_hvd.update_rules.rule import DenseStart, Plain, Rule, Setting
from gba_hvd.update_rules.staleness_lr import StalenessLr
from recovery.registry import Registry

OWN: dict[str, type[Rule]] = {
    "none": Plain,
    "gap_aware": GapAware,
    "dc": DelayCompensated,
    "dana_zero": DanaZero,
    "dana_slim": DanaSlim,
    "dana_dc": DanaDc,
    "delayed_nesterov": DelayedNesterov,
    "look_ahead": LookAhead,
    "staleness_lr": StalenessLr,
}
RULES = tuple(OWN)
WITH_SETTINGS = tuple(name for name, rule in OWN.items() if rule.defaults)
_RULES: Registry[Rule] = Registry(
    "gba_hvd.update_rules", "rule", Rule, OWN, arguments=("optimizer", "dense", "workers"), construct="start"
)


def rule_class(name: str) -> type[Rule]:
    """The rule of that name, ours or registered. Raises BadInput as `Registry.get` does."""
    return cast(type[Rule], _RULES.get(name))


def known_rule(name: str) -> str:
    """`name` if there is such a rule; otherwise BadInput that suggests the right one."""
    rule_class(name)
    return name


def known_settings(name: str, settings: Mapping[str, Any]) -> dict[str, Setting]:
    """`settings` if the rule of that name has them all and can use them; otherwise BadInput that says what it takes."""
    rule = rule_class(name)
    for key, value in settings.items():
        if key not in rule.defaults:
            takes = f"it takes {', '.join(rule.defaults)}" if rule.defaults else f"only {', '.join(WITH_SETTINGS)} do"
            raise BadInput(f"rule {name!r} has no setting {key!r}: {takes}")
        is_bool = isinstance(rule.defaults[key], bool)
        if isinstance(value, bool) != is_bool or not isinstance(value, int | float):
            raise BadInput(f"rule {name!r}: {key} is a {'bool' if is_bool else 'number'}, got {value!r}")
    if why := rule.refused(settings):
        raise BadInput(f"rule {name!r}: {why}")
    return dict(settings)


def check(name: str, optimizer: Mapping[str, Any]) -> None:
    """Raises BadInput, naming what fits, when the rule does not go with this optimizer (`torch_optimizers.spec_of`)."""
    if found := rule_class(name).why_not(optimizer):
        fits = "" if LookAhead.why_not(optimizer) else "look_ahead, the default of mode gba, takes this one; "
        raise BadInput(
            f"rule {name!r} does not go with this optimizer: {found}; {fits}gap_aware, dc and staleness_lr take any"
        )


def damps(name: str) -> bool:
    """Whether the rule of that name damps gradients: a step's row gradients then wait for what all servers say."""
    return rule_class(name).damping is not Plain.damping


def takes_over(name: str, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the rule of that name steps in the optimizer's place, with its settings as they were at the start."""
    is_nadam = isinstance(optimizer, torch.optim.NAdam)  # `delayed_nesterov` leaves it the step
    return getattr(rule_class(name), "owns_momentum", False) and not is_nadam


def make(name: str, optimizer: Mapping[str, Any], dense: DenseStart, workers: Sequence[int]) -> Rule:
    """A server's rule, as things stand. workers: who trains now, by id.

    Raises BadInput as `check` does, and as `known_settings` for those in `dense`.
    """
    check(name, optimizer)
    known_settings(name, dense.settings)
    return rule_class(name).start(optimizer, dense, workers)
