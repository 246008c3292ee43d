"""Update rules under delay: what a server makes of gradients that were computed with old dense values.

A file for each rule; here they get their names and meet the optimizer. Rules act on the dense part. Rows are updated
by the row optimizer in every mode; Gap-Aware damps their gradients by the mean of its damping, the others leave them.

    none              the user's optimizer, as in allreduce mode
    gap_aware         each element of a gradient is divided by how far it has moved since
    dana_zero         a momentum per worker, and a look ahead             SGD with momentum
    dana_slim         the same, held by the workers                       SGD with momentum
    delayed_nesterov  a look ahead, the gradient discounted               SGD with momentum, NAdam
    staleness_lr      learning rate / mean staleness

Distributions register others as entry points in `gba_hvd.update_rules`, see docs/EXTENDING.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from gba_hvd.errors import BadInput
from gba_hvd.update_rules.dana_slim import DanaSlim
from gba_hvd.update_rules.dana_zero import DanaZero
from gba_hvd.update_rules.delayed_nesterov import DelayedNesterov
from gba_hvd.update_rules.gap_aware import GapAware
from gba_hvd.update_rules.rule import DenseStart, Plain, Rule
from gba_hvd.update_rules.staleness_lr import StalenessLr
from recovery.registry import Registry

OWN: dict[str, type[Rule]] = {
    "none": Plain,
    "gap_aware": GapAware,
    "dana_zero": DanaZero,
    "dana_slim": DanaSlim,
    "delayed_nesterov": DelayedNesterov,
    "staleness_lr": StalenessLr,
}
RULES = tuple(OWN)
_RULES: Registry[Rule] = Registry("gba_hvd.update_rules", "rule", Rule, OWN)


def rule_class(name: str) -> type[Rule]:
    """The rule of that name, ours or registered. Raises BadInput as `Registry.get` does."""
    return cast(type[Rule], _RULES.get(name))


def known_rule(name: str) -> str:
    """`name` if there is such a rule; otherwise BadInput that suggests the right one."""
    rule_class(name)
    return name


def check(name: str, optimizer: Mapping[str, Any]) -> None:
    """Raises BadInput, naming what fits, when the rule does not go with this optimizer (`torch_optimizers.spec_of`)."""
    if found := rule_class(name).why_not(optimizer):
        raise BadInput(f"rule {name!r} does not go with this optimizer: {found}; gap_aware and staleness_lr take any")


def make(name: str, optimizer: Mapping[str, Any], dense: DenseStart, workers: Sequence[int]) -> Rule:
    """A server's rule, as things stand. workers: who trains now, by id. Raises BadInput as `check` does."""
    check(name, optimizer)
    return rule_class(name).start(optimizer, dense, workers)
