"""Update rules under delay: what a server makes of gradients that were computed with old dense values.

A file for each rule; here they get their names and meet the optimizer. Rules act on the dense part. Rows are updated
by the row optimizer in every mode; Gap-Aware damps their gradients by the mean of its damping, the others leave them.

    none              the user's optimizer, as in allreduce mode
    gap_aware         each element of a gradient is divided by how far it has moved since
    dana_zero         a momentum per worker, and a look ahead             SGD with momentum
    dana_slim         the same, kept by the workers                       SGD with momentum
    delayed_nesterov  a look ahead, the gradient discounted               SGD with momentum, NAdam
    staleness_lr      learning rate / mean staleness
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gba_hvd.errors import BadInput, refuse_unknown
from gba_hvd.update_rules import delayed_nesterov, sgd_momentum
from gba_hvd.update_rules.dana_slim import DanaSlim
from gba_hvd.update_rules.dana_zero import DanaZero
from gba_hvd.update_rules.delayed_nesterov import DelayedNesterov
from gba_hvd.update_rules.gap_aware import GapAware, Measures
from gba_hvd.update_rules.rule import Plain, Rule
from gba_hvd.update_rules.sgd_momentum import SGD, Sgd, buffer_of
from gba_hvd.update_rules.staleness_lr import StalenessLr

RULES = ("none", "gap_aware", "dana_zero", "dana_slim", "delayed_nesterov", "staleness_lr")
KNOWS_WORKERS = ("dana_zero",)  # rules that want to be told who lives
LOOKS_AHEAD = ("dana_zero", "delayed_nesterov")  # rules that show workers other values than the model's


@dataclass(frozen=True)
class DenseStart:
    """The dense part of one server, as a rule finds it.

    values: float32 [n]. sizes, groups: of each tensor, numbers in it and its optimizer group.
    state:  the optimizer's, of each tensor, as in `optimizer.state[p]`
    """

    values: np.ndarray
    step: int
    sizes: Sequence[int]
    groups: Sequence[int]
    state: Sequence[Mapping[str, Any]]


def known_rule(name: str) -> str:
    """`name` if there is such a rule; otherwise BadInput that suggests the right one."""
    refuse_unknown("rule", name, RULES)
    return name


def check(name: str, optimizer: Mapping[str, Any]) -> None:
    """Raises BadInput, naming what fits, when the rule does not go with this optimizer (`torch_optimizers.spec_of`)."""
    known_rule(name)
    found = ""
    if name in ("dana_zero", "dana_slim"):
        found = sgd_momentum.why_not(name, optimizer, takes_weight_decay=name == "dana_zero")
    elif name == "delayed_nesterov":
        found = delayed_nesterov.why_not(optimizer)
    if found:
        raise BadInput(f"rule {name!r} does not go with this optimizer: {found}; gap_aware and staleness_lr take any")


def make(name: str, optimizer: Mapping[str, Any], dense: DenseStart, workers: Sequence[int]) -> Rule:
    """A server's rule, as things stand. workers: who trains now, by id. Raises BadInput as `check` does."""
    check(name, optimizer)
    groups = np.repeat(dense.groups, dense.sizes).astype(np.int32)
    if name == "gap_aware":
        has_momentum = any(group.get("momentum") for group in optimizer["groups"])
        measures: Measures = "step" if optimizer["class"] != SGD else "buffer" if has_momentum else "gradient"
        return GapAware(dense.values, dense.step, groups, measures=measures)
    if name == "staleness_lr":
        return StalenessLr()
    if name == "none" or optimizer["class"] != SGD:
        return Plain()
    sgd, buffer = Sgd.of(optimizer, groups), buffer_of(dense.state, dense.sizes)
    if name == "dana_zero":
        return DanaZero(sgd, buffer, workers)
    return DanaSlim(sgd, buffer) if name == "dana_slim" else DelayedNesterov(sgd, buffer)
